"""One model behind HTTP: what every route does with a request (read `chat_api.py` next).

It parses the body, prepares engine requests, submits them and waits for answers, and counts.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from martlet.engine.build import Built
from martlet.engine.driver import Prepared
from martlet.engine.outputs import RequestOutput
from martlet.engine.prompts import PromptTokens
from martlet.engine.requests import RequestMaker
from martlet.errors import ADAPTER_GONE, NOTHING_LEFT, RequestError
from martlet.sched.queue import QUEUE_TIMEOUT
from martlet.server import tracing
from martlet.server.body import Body, Parsed, parse_body, parse_json, read_body
from martlet.server.bridge import Bridge, Ticket
from martlet.server.error_replies import ApiError
from martlet.server.live_view import EngineView
from martlet.server.prometheus import ServerMetrics
from martlet.server.rates import Account
from martlet.server.settings import ServerSettings
from martlet.server.tools.call_formats import reasoning_format, tool_format
from martlet.server.tools.harmony import HarmonyParser
from martlet.server.tools.parts import Parser
from martlet.server.tools.reply import ReplyParser
from martlet.structured import Structured
from martlet.types import Scheduling

if TYPE_CHECKING:
    from martlet.server.protocol import GenerationRequest
    from martlet.server.tracing import Tracing

MAX_COMPILE_S = 15.0  # for a grammar, including its wait for other grammars
B = TypeVar("B", bound=Body)
T = TypeVar("T")


class Service:
    """One model behind HTTP."""

    def __init__(self, built: Built, settings: ServerSettings, metrics: ServerMetrics | None = None) -> None:
        """`metrics` continue those of an earlier load of this model."""
        self.built = built
        self.settings = settings
        self.request_maker = RequestMaker(built)
        self.model = settings.model_name or Path(built.config.model).name.removesuffix(".gguf")
        self.tools = tool_format(settings.tool_parser, built.template.source)
        self.reasoning = reasoning_format(settings.reasoning_parser, built.template.source)
        self.marks_are_special = self.reasoning is not None and self.reasoning.special
        self.started = int(time.time())
        self.adapter = ""  # digest of the adapter that `named` chose
        self.draining = False
        self.metrics = metrics or ServerMetrics(self.model)
        built.engine.watch(self.metrics)
        self.tracing: Tracing | None = None
        if settings.otlp_endpoint is not None:
            self.tracing = tracing.Tracing(self.model, tracing.otlp_exporter(settings.otlp_endpoint))
        self.bridge = Bridge(built.engine, built.tokenizer, on_end=self._ended)
        self.view = EngineView(built, self.bridge, self.metrics, with_text=settings.view_text)
        self._refunds: dict[str, Callable[[int], None]] = {}  # by ticket; called with the tokens used
        # Templates and tokenizers run Python code: in a thread they do not block the event loop.
        self._text = ThreadPoolExecutor(1, thread_name_prefix="martlet-text")
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="martlet-grammar")

    # -- parsing and preparing ---------------------------------------------------------------------
    async def read(self, request: Request) -> dict[str, Any]:
        """The request's body as a JSON object; `for_model` may have read it before.

        Raises ApiError 413 for a large body and RequestError for invalid JSON.
        """
        if (body := request.scope.get("martlet.body")) is not None:
            return dict(body)
        return parse_json(await read_body(request, self.settings.max_body_bytes, self.settings.send_timeout_s))

    def check(self, request: Request, body: dict[str, Any], model: type[B], *, sampling: bool = True) -> Parsed[B]:
        """The body's fields; RequestError names the first wrong field."""
        parsed = parse_body(body, model, strict=self.settings.strict, sampling=sampling)
        request.scope["martlet.ignored"] = parsed.ignored
        return parsed

    async def parse(self, request: Request, model: type[B], *, sampling: bool = True) -> Parsed[B]:
        """Read the body and check its fields."""
        return self.check(request, await self.read(request), model, sampling=sampling)

    def left_out(self, fields: list[str]) -> list[str]:
        """A warning for each nested field without effect; RequestError with --strict."""
        if fields and self.settings.strict:
            raise RequestError(f"{fields[0]:.80} is not supported.", param=fields[0], code="unsupported_parameter")
        return [f"{field:.80} is not supported and was left out." for field in fields]

    async def text(self, work: Callable[[], T]) -> T:
        """Run tokenizer or template work in the text thread."""
        return await asyncio.get_running_loop().run_in_executor(self._text, work)

    async def compile_structure(self, structured: Structured, param: str) -> Structured:
        """Compile the grammar of an answer in a thread of its own, and return its argument.

        Raises RequestError, naming `param`, if that fails or takes longer than MAX_COMPILE_S.
        """
        grammars = self.built.grammars
        if grammars is None:
            raise RequestError(f"{param}: this engine has no grammars.", param=param, code="unsupported_parameter")
        work = asyncio.get_running_loop().run_in_executor(self._grammars, grammars.compile, structured)
        try:
            await asyncio.wait_for(work, MAX_COMPILE_S)
        except TimeoutError:
            raise RequestError(
                f"{param}: compiling it takes longer than {MAX_COMPILE_S:g} s; make it simpler.",
                param=param,
                code="grammar_too_large",
            ) from None
        except RequestError as error:
            raise RequestError(f"{param}: {error}", param=param, code=error.code) from None
        return structured

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a name that is not this model's; None means this model."""
        if name is not None and name not in (
            self.model,
            self.built.config.model,
            self.settings.model_given or self.model,
        ):
            raise ApiError(
                404,
                f"There is no model {name!r:.200} here; it is {self.model!r}.",
                param="model",
                code="model_not_found",
            )

    def prepare(
        self, request_id: str, prompt: PromptTokens, params: dict[str, Any], scheduling: Scheduling
    ) -> Prepared:
        """A request for the engine; without max_tokens it runs to the end of the context.

        Raises RequestError for parameters that are wrong or exceed the server's limits.
        """
        if self.tracing is not None:
            self.tracing.prepared(request_id)
        for name in ("n", "best_of"):
            value = params.get(name)
            if isinstance(value, int) and value > self.settings.max_n:
                raise RequestError(f"{name} is {value:,}; this server gives at most {self.settings.max_n}.", param=name)
        truncated, wanted = params.get("truncate_prompt_tokens"), params.get("max_tokens")
        n_prompt = len(prompt.ids)
        if isinstance(truncated, int) and truncated > 0:
            n_prompt = min(truncated, n_prompt)
        room = self.built.plan.context - n_prompt
        if wanted is None:
            params = params | {"max_tokens": max(1, room)}
        elif isinstance(wanted, int) and wanted > room > 0:
            warning = (
                f"max_tokens is {wanted:,} and the prompt has {n_prompt:,} tokens: {wanted - room:,} more than the"
                f" context of {self.built.plan.context:,} holds. The answer ends there."
            )
            if self.settings.strict:
                raise RequestError(warning, param="max_tokens", code="context_length_exceeded")
            prompt = replace(prompt, warnings=(*prompt.warnings, warning))
        return self.request_maker.asked(request_id, prompt, params, scheduling, self.adapter)

    def scheduling(self, request: Request, body: GenerationRequest) -> Scheduling:
        """Priority, tenant and targets of a request.

        Requests share cached prefixes only within one API key and one `cache_salt` or `user`.
        """
        caller = request.scope.get("martlet.caller", "")
        salt = body.cache_salt or body.user or ""
        if caller and len(self.settings.api_keys) > 1:
            salt = hashlib.sha256(f"{caller}\0{salt}".encode("utf-8", "surrogatepass")).hexdigest()
        return Scheduling(
            priority=body.priority or 0,
            tenant=caller or body.user or "",
            cache_salt=salt,
            ttft_target_s=body.ttft_target,
            itl_target_s=body.itl_target,
            queue_timeout_s=body.queue_timeout,
        )

    def reply_parser(self, prompt: PromptTokens, tools: Sequence[Mapping[str, Any]]) -> Parser:
        """A parser that separates reasoning and calls of `tools` from the text of one answer."""
        tail = (prompt.text or "")[-100:]
        if self.reasoning is not None and self.reasoning.name == "harmony":
            return HarmonyParser(tail)
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        return ReplyParser(self.reasoning, self.tools if tools else None, prompt=tail, schemas=schemas)

    # -- answers -----------------------------------------------------------------------------------
    async def submit(
        self, request: Request, ticket_id: str, prepared: Sequence[Prepared], *, streams: bool, timeout_s: float | None
    ) -> Ticket:
        """Submit requests to the engine and charge their tokens to the caller's account.

        After `timeout_s` seconds they are cancelled. Raises ApiError 429 for too many tokens and
        503 in shutdown, RequestError for what can never run, CapacityError for a full queue.
        """
        if self.draining:
            raise ApiError(503, "The server shuts down.", code="shutting_down", headers={"Retry-After": "5"})
        account: Account | None = request.scope.get("martlet.account")
        if account is None or self.bridge.find(ticket_id) is not None:  # the bridge refuses an id in use
            ticket = await self._accepted(ticket_id, prepared, streams)
        else:
            self._refunds[ticket_id] = account.take_tokens(sum(map(self._most_tokens, prepared)))
            try:
                ticket = await self._accepted(ticket_id, prepared, streams)
            except BaseException:
                if (refund := self._refunds.pop(ticket_id, None)) is not None:
                    refund(0)
                raise
        limits = [limit for limit in (timeout_s, self.settings.request_timeout_s) if limit is not None]
        if limits:
            late = ApiError(408, f"The request took longer than {min(limits):g} s.", code="timeout")
            asyncio.get_running_loop().call_later(min(limits), ticket.cancel, late)
        return ticket

    def _most_tokens(self, prepared: Prepared) -> int:
        """Tokens of the prompt and of the longest answers; RequestError if it can never run."""
        request, params = prepared.request, prepared.request.params
        n_prompt = len(request.prompt_ids)
        most_generated = self.built.engine.scheduler.limit_of(request) - n_prompt
        return n_prompt + max(params.n, params.best_of or 1) * most_generated

    async def _accepted(self, ticket_id: str, prepared: Sequence[Prepared], streams: bool) -> Ticket:
        try:
            return await self.bridge.submit(ticket_id, prepared, streams=streams)
        except RequestError as error:
            if error.code != ADAPTER_GONE:
                raise
            return await self.bridge.submit(ticket_id, self._with_new_adapter(prepared), streams=streams)

    def _with_new_adapter(self, prepared: Sequence[Prepared]) -> list[Prepared]:
        """The same requests, with the adapter that replaced theirs while they were parsed."""
        adapter = self.built.adapters.get(self.model)
        if adapter is None:
            raise ApiError(
                404, f"The adapter {self.model!r} has just been unloaded.", param="model", code="model_not_found"
            )
        return [replace(entry, request=replace(entry.request, adapter=adapter.digest)) for entry in prepared]

    async def whole(self, request: Request, ticket: Ticket) -> list[RequestOutput]:
        """Wait for the complete answers; abort them if the client leaves.

        Raises ApiError if the request fails or its client leaves.
        """
        waiting = asyncio.ensure_future(ticket.result())
        leaving = asyncio.ensure_future(left(request))
        try:
            await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise client_left()
        finally:
            leaving.cancel()
            ticket.cancel()
            if not waiting.done():
                waiting.cancel()
        raise_failure(ticket)
        return waiting.result()

    def _ended(self, ticket: Ticket, number: int) -> None:
        output = ticket.outputs[number]
        if ticket.finished and (refund := self._refunds.pop(ticket.ticket_id, None)) is not None:
            refund(sum(map(_used_tokens, ticket.outputs)))
        self.metrics.ended_request(output)
        if self.tracing is not None:
            self.tracing.ended(output)

    def named(self, adapter: str, digest: str) -> Service:
        """A copy of this service that answers with an adapter, on the same engine."""
        service = copy.copy(self)
        service.model, service.adapter = adapter, digest
        return service

    def drain(self) -> None:
        """Refuse new requests and end the live views, which would never end themselves."""
        self.draining = True
        self.view.close()

    def cancel_all(self) -> None:
        """Cancel every open request: the server shuts down."""
        for ticket in self.bridge.open_tickets:
            ticket.cancel(ApiError(503, "The server shuts down.", code="shutting_down"))

    def close(self) -> None:
        """End the engine's thread and free the model. Idempotent."""
        self._text.shutdown(wait=False, cancel_futures=True)
        self._grammars.shutdown(wait=False, cancel_futures=True)
        self.bridge.close()
        if self.tracing is not None:
            self.tracing.close()
        self.built.close()


def _used_tokens(output: RequestOutput) -> int:
    metrics = output.metrics
    if metrics is None or metrics.scheduled_s is None:  # it never left the queue
        return 0
    return metrics.n_prompt + metrics.n_generated


def service_of(request: Request) -> Service:
    """The service of the model that the request names, else of the first model."""
    service: Service = request.scope.get("martlet.service") or request.app.state.registry.default_service
    return service


def new_id(request: Request, prefix: str) -> str:
    """The id of a reply: `prefix` with the client's X-Request-Id, or with a random id."""
    client_id = request.headers.get("x-request-id", "")
    if client_id and len(client_id) <= 64 and all(c.isalnum() or c in "-_.:" for c in client_id):
        return f"{prefix}-{client_id}"
    return f"{prefix}-{uuid.uuid4().hex}"


async def left(request: Request) -> None:
    """Return when the client has closed its connection, or only its sending side.

    The body must have been read. A half-closed connection nearly always means that the client is
    gone. Only a write could tell, and by then a long answer would have been computed in vain.
    """
    connection = request.scope.get("martlet.connection")
    while connection is None or not connection.sends_no_more:
        if (await request.receive())["type"] == "http.disconnect":
            return


def client_left() -> ApiError:
    """The error that ends the request; a client that can still read gets it."""
    return ApiError(
        499, "The client left: it has closed its connection, or shut down its side before the answer was whole."
    )


def raise_failure(ticket: Ticket) -> None:
    """Raise ApiError if the ticket failed."""
    if ticket.cause is not None:
        raise ticket.cause
    for output in ticket.outputs:
        if output.error is not None and any(answer.stop_reason == QUEUE_TIMEOUT for answer in output.outputs):
            raise ApiError(408, output.error, param="queue_timeout", code="queue_timeout")
        if output.error is not None and NOTHING_LEFT in output.error:
            raise ApiError(400, f"The request failed: {output.error}", code="no_token_left")
        if output.error is not None:
            raise ApiError(500, f"The request failed: {output.error}", code="engine_error")
