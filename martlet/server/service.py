"""The model as the routes see it: what is parsed, asked, awaited and counted for every endpoint (read `chat_api.py` next)."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
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
from martlet.server.prometheus import Measures
from martlet.server.rates import Account
from martlet.server.settings import ServerSettings
from martlet.server.tools.call_formats import reasoning_format, tool_format
from martlet.server.tools.reply import ReplyParser
from martlet.structured import Structured
from martlet.types import Scheduling

if TYPE_CHECKING:
    from martlet.server.protocol import GenerationRequest
    from martlet.server.tracing import Tracing

__all__ = ["Service", "client_left", "left", "new_id", "raise_failure", "service_of"]

MOST_COMPILE_S = 15.0  # of a grammar, the time that it waits for others included
B = TypeVar("B", bound=Body)
T = TypeVar("T")


class Service:
    """One model behind HTTP."""

    def __init__(self, built: Built, settings: ServerSettings, measures: Measures | None = None) -> None:
        """`measures` are those of the model's time before, if it was loaded already."""
        self.built = built
        self.settings = settings
        self.asker = RequestMaker(built)
        self.model = settings.model_name or Path(built.config.model).name.removesuffix(".gguf")
        self.tools = tool_format(settings.tool_parser, built.template.source)
        self.reasoning = reasoning_format(settings.reasoning_parser, built.template.source)
        self.marks_are_special = self.reasoning is not None and self.reasoning.special
        self.started = int(time.time())
        self.adapter = ""  # the digest of the one that this service answers with: `named`
        self.draining = False
        self.measures = measures or Measures(self.model)
        built.engine.watch(self.measures)
        self.tracing: Tracing | None = None
        if settings.otlp_endpoint is not None:
            self.tracing = tracing.Tracing(self.model, tracing.otlp_exporter(settings.otlp_endpoint))
        self.bridge = Bridge(built.engine, built.tokenizer, on_end=self._ended)
        self.view = EngineView(built, self.bridge, self.measures, with_text=settings.view_text)
        self._bills: dict[str, Callable[[int], None]] = {}  # by ticket: to be told how many tokens it took
        # Templates and tokenizers are Python: one thread for them, so that the event loop goes on meanwhile.
        self._text = ThreadPoolExecutor(1, thread_name_prefix="martlet-text")
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="martlet-grammar")

    # -- parsing and asking ----------------------------------------------------------------------------------------
    async def read(self, request: Request) -> dict[str, Any]:
        """The body of a request, as JSON; it may have been read to learn which model it is for."""
        if (found := request.scope.get("martlet.body")) is not None:
            return dict(found)
        return parse_json(await read_body(request, self.settings.max_body_bytes, self.settings.send_timeout_s))

    def check(self, request: Request, found: dict[str, Any], kind: type[B], *, sampling: bool = True) -> Parsed[B]:
        """The body's fields."""
        parsed = parse_body(found, kind, strict=self.settings.strict, sampling=sampling)
        request.scope["martlet.ignored"] = parsed.ignored
        return parsed

    async def parse(self, request: Request, kind: type[B], *, sampling: bool = True) -> Parsed[B]:
        """Both."""
        return self.check(request, await self.read(request), kind, sampling=sampling)

    async def text(self, work: Callable[[], T]) -> T:
        """Run work on text outside of the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._text, work)

    async def hold(self, structured: Structured, param: str) -> Structured:
        """Compile what an answer is held to, outside of the event loop and of the engine's thread, within a time."""
        grammars = self.built.grammars
        if grammars is None:
            raise RequestError(f"{param}: this engine has no grammars.", param=param, code="unsupported_parameter")
        work = asyncio.get_running_loop().run_in_executor(self._grammars, grammars.compile, structured)
        try:
            await asyncio.wait_for(work, MOST_COMPILE_S)
        except TimeoutError:
            raise RequestError(
                f"{param}: compiling it takes longer than {MOST_COMPILE_S:g} s; make it simpler.",
                param=param,
                code="grammar_too_large",
            ) from None
        except RequestError as error:
            raise RequestError(f"{param}: {error}", param=param, code=error.code) from None
        return structured

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a model that is not here; none given means the one that is."""
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

    def ask(self, request_id: str, prompt: PromptTokens, params: dict[str, Any], wishes: Scheduling) -> Prepared:
        """A request for the engine; where no length is asked for, to the end of the context."""
        if self.tracing is not None:
            self.tracing.asked(request_id)
        for name in ("n", "best_of"):
            value = params.get(name)
            if isinstance(value, int) and value > self.settings.max_n:
                raise RequestError(f"{name} is {value:,}; this server gives at most {self.settings.max_n}.", param=name)
        kept, wanted = params.get("truncate_prompt_tokens"), params.get("max_tokens")
        n_prompt = len(prompt.ids) if not isinstance(kept, int) or kept <= 0 else min(kept, len(prompt.ids))
        left = self.built.plan.context - n_prompt
        if wanted is None:
            params = params | {"max_tokens": max(1, left)}
        elif isinstance(wanted, int) and wanted > left > 0:
            said = (
                f"max_tokens is {wanted:,} and the prompt has {n_prompt:,} tokens: {wanted - left:,} more than the"
                f" context of {self.built.plan.context:,} holds. The answer ends there."
            )
            if self.settings.strict:
                raise RequestError(said, param="max_tokens", code="context_length_exceeded")
            prompt = replace(prompt, warnings=(*prompt.warnings, said))
        return self.asker.asked(request_id, prompt, params, wishes, self.adapter)

    def wishes(self, request: Request, body: GenerationRequest) -> Scheduling:
        """Priority and tenant; prefixes are shared between requests of one API key and one `cache_salt` or `user`."""
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

    def reply_parser(self, prompt: PromptTokens, with_tools: bool) -> ReplyParser:
        """What separates reasoning and calls from the text, by the template or as the settings say."""
        tools = self.tools if with_tools else None
        return ReplyParser(self.reasoning, tools, prompt=(prompt.text or "")[-100:])

    # -- answers ---------------------------------------------------------------------------------------------------
    async def submit(
        self, request: Request, ticket_id: str, asked: Sequence[Prepared], *, streams: bool, timeout_s: float | None
    ) -> Ticket:
        """Hand requests to the engine, on their caller's account; `timeout_s` seconds later they are cancelled."""
        if self.draining:
            raise ApiError(503, "The server shuts down.", code="shutting_down", headers={"Retry-After": "5"})
        account: Account | None = request.scope.get("martlet.account")
        if account is None or self.bridge.find(ticket_id) is not None:  # in use: the bridge refuses it
            ticket = await self._accepted(ticket_id, asked, streams)
        else:
            self._bills[ticket_id] = account.take_tokens(sum(map(self._most_tokens, asked)))
            try:
                ticket = await self._accepted(ticket_id, asked, streams)
            except BaseException:
                if (bill := self._bills.pop(ticket_id, None)) is not None:
                    bill(0)
                raise
        limits = [limit for limit in (timeout_s, self.settings.request_timeout_s) if limit is not None]
        if limits:
            late = ApiError(408, f"The request took longer than {min(limits):g} s.", code="timeout")
            asyncio.get_running_loop().call_later(min(limits), ticket.cancel, late)
        return ticket

    def _most_tokens(self, asked: Prepared) -> int:
        """The prompt, and the most that may come of it within the context; RequestError where nothing ever can."""
        n_prompt, params = len(asked.request.prompt_ids), asked.request.params
        return n_prompt + max(params.n, params.best_of or 1) * (
            self.built.engine.scheduler.limit_of(asked.request) - n_prompt
        )

    async def _accepted(self, ticket_id: str, asked: Sequence[Prepared], streams: bool) -> Ticket:
        try:
            return await self.bridge.submit(ticket_id, asked, streams=streams)
        except RequestError as error:
            if error.code != ADAPTER_GONE:
                raise
            return await self.bridge.submit(ticket_id, self._with_new_adapter(asked), streams=streams)

    def _with_new_adapter(self, asked: Sequence[Prepared]) -> list[Prepared]:
        """Requests whose adapter was replaced while they were read, with the one that has its name now."""
        found = self.built.adapters.get(self.model)
        if found is None:
            raise ApiError(
                404, f"The adapter {self.model!r} has just been unloaded.", param="model", code="model_not_found"
            )
        return [replace(one, request=replace(one.request, adapter=found.digest)) for one in asked]

    async def whole(self, request: Request, ticket: Ticket) -> list[RequestOutput]:
        """Wait for the answers as a whole; if the client leaves meanwhile they are aborted."""
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
        if ticket.finished and (bill := self._bills.pop(ticket.ticket_id, None)) is not None:
            bill(sum(map(_used_tokens, ticket.outputs)))
        self.measures.ended_request(output)
        if self.tracing is not None:
            self.tracing.ended(output)

    def named(self, adapter: str, digest: str) -> Service:
        """This service as its clients see it under an adapter's name: the same engine, another model."""
        seen = copy.copy(self)
        seen.model, seen.adapter = adapter, digest
        return seen

    def drain(self) -> None:
        """Take no more requests, and end the views, which never end by themselves."""
        self.draining = True
        self.view.close()

    def cancel_all(self) -> None:
        """End whatever is open: the server shuts down."""
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
    if metrics is None or metrics.scheduled_s is None:  # it has only waited
        return 0
    return metrics.n_prompt + metrics.n_generated


def service_of(request: Request) -> Service:
    """The service that a request is for: of the model that its body names, else the first."""
    service: Service = request.scope.get("martlet.service") or request.app.state.registry.default_service
    return service


def new_id(request: Request, prefix: str) -> str:
    """The id of a reply: the client's own X-Request-Id, or a random one."""
    given = request.headers.get("x-request-id", "")
    if given and len(given) <= 64 and all(c.isalnum() or c in "-_.:" for c in given):
        return f"{prefix}-{given}"
    return f"{prefix}-{uuid.uuid4().hex}"


async def left(request: Request) -> None:
    """Return when the client has closed its connection, or its side of it. The body must have been read.

    Half a connection is nearly always a whole one that is gone, which would show only when something is written: by then a
    long answer would have been computed for nobody.
    """
    wire = request.scope.get("martlet.wire")
    while wire is None or not wire.sends_no_more:
        if (await request.receive())["type"] == "http.disconnect":
            return


def client_left() -> ApiError:
    """What ends its request; a client that can still read is told."""
    return ApiError(
        499, "The client left: it has closed its connection, or shut down its side before the answer was whole."
    )


def raise_failure(ticket: Ticket) -> None:
    """Raise what made a ticket fail, if anything did."""
    if ticket.cause is not None:
        raise ticket.cause
    for output in ticket.outputs:
        if output.error is not None and any(answer.stop_reason == QUEUE_TIMEOUT for answer in output.outputs):
            raise ApiError(408, output.error, param="queue_timeout", code="queue_timeout")
        if output.error is not None and NOTHING_LEFT in output.error:
            raise ApiError(400, f"The request failed: {output.error}", code="no_token_left")
        if output.error is not None:
            raise ApiError(500, f"The request failed: {output.error}", code="engine_error")
