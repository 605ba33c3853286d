"""/v1/completions: prompts as text, lists, token ids and batches; echo, log-probabilities, best_of (read `chat_api.py` first).

Format: https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from martlet.engine.outputs import Logprobs, Piece, RequestOutput
from martlet.engine.prompts import tokens_of
from martlet.errors import RequestError
from martlet.server.body import Parsed
from martlet.server.bridge import Ticket
from martlet.server.error_replies import ApiError, openai_error
from martlet.server.protocol import CompletionRequest, prompts_of, refuse_unsupported
from martlet.server.replies import FINGERPRINT, finite, json_reply, progress_of, shown_logprobs, timings_of, usage_of
from martlet.server.response_format import asked_structure
from martlet.server.service import Service, new_id, service_of
from martlet.server.sse import EventStream, Mould, event

__all__ = ["completions"]


async def completions(request: Request) -> Response:
    """Complete prompts."""
    service = service_of(request)
    parsed = await service.parse(request, CompletionRequest)
    body, reply_id = parsed.body, new_id(request, "cmpl")
    service.check_model(body.model)
    params, wishes = _params(parsed), service.wishes(request, body)
    given, tokenizer = prompts_of(body.prompt, "prompt"), service.built.tokenizer
    prompts = await service.text(lambda: [tokens_of(entry, tokenizer) for entry in given])
    if len(given) > 1 and len(given) * (params.get("n") or 1) > service.settings.max_n:
        raise RequestError(
            f"{len(given):,} prompts and n make more than {service.settings.max_n} answers; send fewer at a time.",
            param="prompt",
        )
    params = {"max_tokens": 16} | params  # OpenAI's default here
    held, field = asked_structure(body, params)
    if held is not None:
        params["structured"] = await service.hold(held, field)
    asked = [service.ask(f"{reply_id}-{i}", prompt, params, wishes) for i, prompt in enumerate(prompts)]
    n = asked[0].request.params.n
    if body.stream and (asked[0].request.params.best_of or 1) > n:
        raise RequestError("A stream cannot have best_of > n: the best are known at the end.", param="best_of")
    ticket = await service.submit(request, reply_id, asked, streams=body.stream, timeout_s=body.timeout)
    warnings = [*parsed.warnings, *dict.fromkeys(warning for one in asked for warning in one.warnings)]
    writer = _Writer(service, body, ticket, n, params.get("logprobs"), warnings)
    if body.stream:
        return EventStream(request, ticket, writer, service.settings, writer.progress if body.return_progress else None)
    return json_reply(writer.whole(await service.whole(request, ticket)))


def _params(parsed: Parsed[CompletionRequest]) -> dict[str, Any]:
    body, params = parsed.body, dict(parsed.params)
    refuse_unsupported(body)
    if not isinstance(params.get("n") or 1, int):
        raise RequestError(f"n is {params['n']!r:.60}; expected a whole number.", param="n")
    if body.echo and params.get("logprobs") is not None:
        params.setdefault("prompt_logprobs", params["logprobs"])
    return params


class _Writer:
    """Writes the choices of a ticket, whole or as they come: choice n * prompt + answer."""

    def __init__(
        self, service: Service, body: CompletionRequest, ticket: Ticket, n: int, logprobs: Any, warnings: Sequence[str]
    ) -> None:
        self._service, self._body, self._ticket, self._n = service, body, ticket, n
        self._top = logprobs
        self._warnings = list(warnings)
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._each_usage = self._usage and bool(options and options.continuous_usage_stats)
        self._offsets: dict[int, int] = {}  # characters of each choice that are out
        self._moulds: dict[int, Mould] = {}  # of choices whose chunks differ in their text only
        self._n_open = n * len(ticket.asked)
        self._head = {
            "id": ticket.ticket_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model,
            "system_fingerprint": FINGERPRINT,
        }

    # -- whole -----------------------------------------------------------------------------------------------------
    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole reply."""
        choices = []
        for number, output in enumerate(outputs):
            text, before = self._echo(output)
            for completion in output.outputs:
                entries = [*before, *shown_logprobs(completion)]
                choice: dict[str, Any] = {
                    "index": number * self._n + completion.index,
                    "text": text + completion.text,
                    "logprobs": None if self._top is None else self._logprobs(entries, number),
                    "finish_reason": completion.finish_reason,
                    "stop_reason": completion.stop_reason,
                }
                if output.prompt_logprobs is not None and not self._body.echo:
                    choice["prompt_logprobs"] = self._logprobs(output.prompt_logprobs, number)
                choices.append(choice)
        reply = {**self._head, "choices": choices, "usage": usage_of(outputs)}
        return {**reply, **self._more(outputs)}

    def _echo(self, output: RequestOutput) -> tuple[str, list[Logprobs | None]]:
        """The prompt's text, and its entries, where they are part of the answer."""
        if not self._body.echo:
            return "", []
        tokenizer = self._service.built.tokenizer
        text = output.prompt if output.prompt is not None else tokenizer.decode(output.prompt_token_ids)
        return text, list(output.prompt_logprobs or []) if self._top is not None else []

    def _more(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self._body.return_timings and outputs[0].metrics is not None and len(outputs) == 1:
            more["timings"] = timings_of(outputs[0])
        if self._warnings:
            more["warnings"] = self._warnings
        return more

    def _logprobs(self, entries: Sequence[Logprobs | None], number: int, offset: int = 0) -> dict[str, Any]:
        tokens: list[str] = []
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets = []
        for entry in entries:
            if entry is None:  # a prompt's first token has nothing before it
                first = self._ticket.outputs[number].prompt_token_ids[:1]
                tokens.append(self._service.built.tokenizer.decode(first, skip_special=False))
                chosen.append(None)
                top.append(None)
            else:
                token = next(iter(entry.values()))
                tokens.append(token.decoded_token)
                chosen.append(finite(token.logprob))
                top.append({found.decoded_token: finite(found.logprob) for found in entry.values()})
            offsets.append(offset)
            offset += len(tokens[-1])
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}

    # -- as it comes -----------------------------------------------------------------------------------------------
    def begin(self) -> bytes:
        """Nothing: the first chunk comes with the first token."""
        return b""

    def piece(self, number: int, piece: Piece) -> bytes:
        """The chunk of a piece."""
        index = number * self._n + piece.index
        if piece.finish_reason is None and (mould := self._moulds.get(index)) is not None:
            return mould.cast(piece.text)
        text, entries = piece.text, list[Logprobs | None](piece.logprobs)
        if index not in self._offsets:
            self._offsets[index] = 0
            before, its = self._echo(self._ticket.outputs[number])
            text, entries = before + text, [*its, *entries]
        if piece.finish_reason == "error":
            return b""
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(entries, number, self._offsets[index])
            if self._top is not None and entries
            else None,
            "finish_reason": piece.finish_reason,
        }
        if piece.stop_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        self._offsets[index] += len(text)
        chunk = {**self._head, "choices": [choice]}
        if self._usage:
            chunk["usage"] = usage_of(self._ticket.outputs) if self._each_usage else None
        if self._top is None and not self._each_usage and piece.finish_reason is None:
            self._moulds[index] = Mould(event({**chunk, "choices": [{**choice, "text": ""}]}), "text")
        self._n_open -= piece.finish_reason is not None
        return event({**chunk, **self._more(self._ticket.outputs)} if self._n_open == 0 else chunk)

    def end(self) -> bytes:
        """The usage, if it was asked for, and the mark of the end."""
        if not self._usage:
            return b"data: [DONE]\n\n"
        return event({**self._head, "choices": [], "usage": usage_of(self._ticket.outputs)}) + b"data: [DONE]\n\n"

    def progress(self) -> bytes:
        """How much of the prompts has been read."""
        found = progress_of(self._ticket.outputs)
        return b"" if found is None else event({**self._head, "choices": [], "prompt_progress": found})

    def error(self, error: ApiError) -> bytes:
        """The error; no mark follows it."""
        return event(openai_error(error))
