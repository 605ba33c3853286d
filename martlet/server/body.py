"""A request's body: read within bounds, parsed strictly, nothing in it ignored in silence (read `protocol.py` next).

bytes (at most so many) → JSON (at most so deep) → nulls dropped → model, fields at fault named → fields not known
"""

from __future__ import annotations

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

__all__ = ["SAMPLING_FIELDS", "Body", "Parsed", "parse_body", "parse_json", "read_body"]

MAX_DEPTH = 64  # of nested lists and objects; a JSON schema of a tool stays below 20
SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams)) - {"detokenize"}
B = TypeVar("B", bound="Body")


class Body(BaseModel):
    """A request's body. Values keep their types: "true" is no boolean and "5" no number."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


@dataclass(frozen=True, slots=True)
class Parsed(Generic[B]):
    """A body, the sampling parameters in it, and what the reply must say of it."""

    body: B
    params: dict[str, Any]
    ignored: tuple[str, ...] = ()  # fields that nothing here knows

    @property
    def warnings(self) -> list[str]:
        """A line for each field that was ignored."""
        known = {*type(self.body).model_fields, *SAMPLING_FIELDS}
        return [f"The field {name!r} is not known and was ignored.{nearest(name, known)}" for name in self.ignored]


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The body's bytes; ApiError 413 for more than `limit`, before they are read where their number is announced."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, limit)
    except TimeoutError:
        raise ApiError(408, f"The body took longer than {timeout_s:g} s to arrive.", code="timeout") from None


async def _read(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"The body is too large; at most {limit:,} bytes are taken.", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(499, "The client left.") from None
    return b"".join(parts)


def parse_body(found: dict[str, Any], kind: type[B], *, strict: bool, sampling: bool = True) -> Parsed[B]:
    """Check a body; RequestError names the field at fault. With `strict` a field that is not known is one."""
    given = {name: value for name, value in found.items() if value is not None}
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from None
    extra = body.model_extra or {}
    params = {name: value for name, value in extra.items() if sampling and name in SAMPLING_FIELDS}
    ignored = tuple(name for name in extra if name not in params)
    if ignored and strict:
        known = _known(kind, sampling)
        raise RequestError(
            f"There is no field {ignored[0]!r:.80}.{nearest(ignored[0], known)}", param=ignored[0], code="unknown_field"
        )
    return Parsed(body, params, ignored)


def _known(kind: type[Body], sampling: bool) -> Collection[str]:
    return {*kind.model_fields, *(SAMPLING_FIELDS if sampling else ())}


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object; RequestError for anything else."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error!s:.200}.", code="invalid_json") from None
    if not isinstance(found, dict):
        raise RequestError(f"The body is {_kind_of(found)}; expected a JSON object.", code="invalid_json")
    # Brackets in strings count as well here: they only make the exact count necessary.
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deeper(found, MAX_DEPTH):
        raise RequestError(f"The body nests deeper than {MAX_DEPTH} levels.", code="invalid_json")
    return found


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
    """The first fault only: a body with ten thousand of them is answered in one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ""
    for part in first["loc"]:
        if part == "str" or (isinstance(part, str) and "[" in part):
            continue  # which type of several, which tells a client nothing
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    more = f" ({error.error_count() - 1:,} more faults)" if error.error_count() > 1 else ""
    if first["type"] == "missing":
        return RequestError(f"{param} is missing.{more}", param=param, code="missing_field")
    said = first["msg"][0].lower() + first["msg"][1:]
    return RequestError(f"{param} is {_kind_of(first['input'])}: {said:.300}.{more}", param=param, code="invalid_type")


def _kind_of(value: Any) -> str:
    """A JSON value in a few words."""
    if isinstance(value, str):
        return f"the string {value!r}" if len(value) <= 40 else "a string"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"the number {value}"
