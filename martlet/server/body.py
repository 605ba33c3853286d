"""Reads and checks a request's body; unknown fields are never ignored in silence.

    bytes (bounded) → JSON (bounded depth) → drop nulls → pydantic model → unknown fields

Read `protocol.py` next, which has the models.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from martlet.errors import RequestError, nearest
from martlet.sampling_params import SamplingParams
from martlet.server.error_replies import ApiError

MAX_DEPTH = 64  # nested lists and objects; a tool's JSON schema needs fewer than 20
SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams)) - {"detokenize"}
# How clients of llama.cpp and LM Studio write "not given".
NOT_GIVEN: tuple[tuple[str, object], ...] = (("seed", -1), ("max_tokens", -1), ("logit_bias", []))
B = TypeVar("B", bound="Body")


class Body(BaseModel):
    """A request's body. Types are strict: "true" is no boolean and "5" no number."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


@dataclass(frozen=True, slots=True)
class Parsed(Generic[B]):
    """A checked body."""

    body: B
    params: dict[str, Any]  # its sampling parameters
    ignored: tuple[str, ...] = ()  # unknown fields

    @property
    def warnings(self) -> list[str]:
        """A warning for each unknown field."""
        known = {*type(self.body).model_fields, *SAMPLING_FIELDS}
        return [f"The field {name!r} is not known and was ignored.{nearest(name, known)}" for name in self.ignored]


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The body's bytes.

    Raises ApiError: 413 for more than `limit` bytes, without reading them if Content-Length says
    so; 408 if they take longer than `timeout_s`; 499 if the client leaves.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, limit)
    except TimeoutError:
        raise ApiError(408, f"The body took longer than {timeout_s:g} s to arrive.", code="timeout") from None


async def _read(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"The body is too large; the limit is {limit:,} bytes.", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise too_large
            chunks.append(chunk)
    except ClientDisconnect:
        raise ApiError(499, "The client left.") from None
    return b"".join(chunks)


def parse_body(fields: dict[str, Any], model: type[B], *, strict: bool, sampling: bool = True) -> Parsed[B]:
    """Check a body; RequestError names a wrong field, with `strict` also an unknown one."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        body = model.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from None
    extra = body.model_extra or {}
    params = {
        name: None if (name, value) in NOT_GIVEN else value
        for name, value in extra.items()
        if sampling and name in SAMPLING_FIELDS
    }
    ignored = tuple(name for name in extra if name not in params)
    if ignored and strict:
        known = _known(model, sampling)
        raise RequestError(
            f"There is no field {ignored[0]!r:.80}.{nearest(ignored[0], known)}", param=ignored[0], code="unknown_field"
        )
    return Parsed(body, params, ignored)


def _known(model: type[Body], sampling: bool) -> Collection[str]:
    return {*model.model_fields, *(SAMPLING_FIELDS if sampling else ())}


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object; RequestError for anything else."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error!s:.200}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"The body is {_described(value)}; expected a JSON object.", code="invalid_json")
    # The count of brackets includes those in strings; the exact check follows only above the limit.
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise RequestError(f"The body nests deeper than {MAX_DEPTH} levels.", code="invalid_json")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _refusal(error: ValidationError) -> RequestError:
    """The first fault only: one line answers a body with ten thousand faults."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ""
    for step in first["loc"]:
        if step == "str" or (isinstance(step, str) and "[" in step):
            continue  # pydantic's choice in a union of types means nothing to a client
        param += f"[{step}]" if isinstance(step, int) else f".{step}" if param else str(step)
    more = f" ({error.error_count() - 1:,} more faults)" if error.error_count() > 1 else ""
    if first["type"] == "missing":
        return RequestError(f"{param} is missing.{more}", param=param, code="missing_field")
    reason = first["msg"][0].lower() + first["msg"][1:]
    return RequestError(
        f"{param} is {_described(first['input'])}: {reason:.300}.{more}", param=param, code="invalid_type"
    )


def _described(value: Any) -> str:
    """A JSON value in a few words."""
    if isinstance(value, str):
        return f"the string {value!r}" if len(value) <= 40 else "a string"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"the number {value}"
