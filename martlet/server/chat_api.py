"""/v1/chat/completions: a conversation in, an answer out, whole or as a stream (read `conversation.py` next).

Format: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from martlet.engine.outputs import Logprobs, Piece, RequestOutput
from martlet.server.conversation import OpenChat, open_chat
from martlet.server.error_replies import ApiError, openai_error
from martlet.server.protocol import ChatRequest
from martlet.server.replies import (
    FINGERPRINT,
    json_reply,
    progress_of,
    shown_logprobs,
    timings_of,
    token_entry,
    usage_of,
)
from martlet.server.service import Service, new_id, service_of
from martlet.server.sse import EventStream, Mould, event
from martlet.server.tools.calls import Content
from martlet.server.tools.reply import Parts, delta_of

__all__ = ["chat_completions"]


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    parsed = await service.parse(request, ChatRequest)
    chat = await open_chat(request, parsed, new_id(request, "chatcmpl"), parsed.warnings)
    body, ticket = parsed.body, chat.ticket
    if body.stream:
        encoder = _Encoder(service, body, chat)
        progress = encoder.progress if body.return_progress else None
        return EventStream(request, ticket, encoder, service.settings, progress)
    [output] = await service.whole(request, ticket)
    return json_reply(_whole(service, body, output, chat))


def _whole(service: Service, body: ChatRequest, output: RequestOutput, chat: OpenChat) -> dict[str, Any]:
    choices = []
    for completion, parser in zip(output.outputs, chat.parsers, strict=True):
        parts = Parts.of([*parser.feed(completion.text), *parser.finish()])
        message = parts.message(body.include_reasoning)
        finish = "tool_calls" if parts.calls and completion.finish_reason == "stop" else completion.finish_reason
        choices.append(
            {
                "index": completion.index,
                "message": message,
                "logprobs": _logprobs(service, shown_logprobs(completion), body.top_logprobs or 0)
                if body.logprobs
                else None,
                "finish_reason": finish,
                "stop_reason": completion.stop_reason,
            }
        )
    assert output.metrics is not None
    reply = {
        "id": output.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": service.model,
        "system_fingerprint": FINGERPRINT,
        "choices": choices,
        "usage": usage_of([output]),
    }
    if output.prompt_logprobs is not None:
        reply["prompt_logprobs"] = [
            entry and [token_entry(service, i, e) for i, e in entry.items()] for entry in output.prompt_logprobs
        ]
    if body.return_timings:
        reply["timings"] = timings_of(output)
    if warnings := chat.warnings:
        reply["warnings"] = warnings
    return reply


def _logprobs(service: Service, entries: Sequence[Logprobs], n_best: int) -> dict[str, Any]:
    content = []
    for entry in entries:
        token_id, chosen = next(iter(entry.items()))
        best = sorted((found.rank, i, found) for i, found in entry.items() if found.rank and found.rank <= n_best)
        top = [token_entry(service, i, found) for _, i, found in best]
        content.append({**token_entry(service, token_id, chosen), "top_logprobs": top})
    return {"content": content}


class _Encoder:
    """The chunks of a streamed chat."""

    def __init__(self, service: Service, body: ChatRequest, chat: OpenChat) -> None:
        self._service, self._body, self._chat = service, body, chat
        self._ticket, self._parsers = chat.ticket, chat.parsers
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._each_usage = self._usage and bool(options and options.continuous_usage_stats)
        self._head = {
            "id": chat.ticket.ticket_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": service.model,
            "system_fingerprint": FINGERPRINT,
        }
        self._begun: set[int] = set()
        self._moulds: dict[int, Mould] = {}  # of answers whose chunks differ in their text only
        self._called: set[int] = set()
        self._n_open = len(chat.parsers)

    def begin(self) -> bytes:
        """Nothing: the first chunk comes with the first token."""
        return b""

    def piece(self, number: int, piece: Piece) -> bytes:
        """The chunks of a piece."""
        index, parser = piece.index, self._parsers[piece.index]
        chunks = []
        if index not in self._begun:
            self._begun.add(index)
            chunks.append(self._chunk(index, {"role": "assistant", "content": ""}))
        parts = parser.feed(piece.text)
        if piece.finish_reason is not None:
            parts += parser.finish()
        elif len(parts) == 1 and isinstance(parts[0], Content) and index in self._moulds:
            return self._moulds[index].cast(parts[0].text)
        deltas = [delta for part in parts if (delta := delta_of(part, self._body.include_reasoning)) is not None]
        if any("tool_calls" in delta for delta in deltas):
            self._called.add(index)
        logprobs = None
        if self._body.logprobs and piece.logprobs:
            logprobs = _logprobs(self._service, piece.logprobs, self._body.top_logprobs or 0)
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            chunks.append(self._chunk(index, delta, logprobs))
            logprobs = None
        if not (self._body.logprobs or self._each_usage or index in self._moulds):
            self._moulds[index] = Mould(self._chunk(index, {"content": ""}), "content")
        if piece.finish_reason is not None and piece.finish_reason != "error":
            chunks.append(self._last(index, piece))
        return b"".join(chunks)

    def end(self) -> bytes:
        """The usage, if it was asked for, and the mark of the end."""
        if not self._usage:
            return b"data: [DONE]\n\n"
        return event({**self._head, "choices": [], "usage": usage_of(self._ticket.outputs)}) + b"data: [DONE]\n\n"

    def progress(self) -> bytes:
        """How much of the prompt has been read."""
        found = progress_of(self._ticket.outputs)
        return b"" if found is None else event({**self._head, "choices": [], "prompt_progress": found})

    def error(self, error: ApiError) -> bytes:
        """The error; no mark follows it."""
        return event(openai_error(error))

    def _last(self, index: int, piece: Piece) -> bytes:
        finish = "tool_calls" if index in self._called and piece.finish_reason == "stop" else piece.finish_reason
        self._n_open -= 1
        more: dict[str, Any] = {}
        if self._n_open == 0:
            output = self._ticket.outputs[0]
            if self._body.return_timings and output.metrics is not None:
                more["timings"] = timings_of(output)
            if warnings := self._chat.warnings:
                more["warnings"] = warnings
        return self._chunk(index, {}, None, finish, piece.stop_reason, more)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
        stop_reason: int | str | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        chunk = {**self._head, "choices": [choice], **(more or {})}
        if self._usage:
            chunk["usage"] = usage_of(self._ticket.outputs) if self._each_usage else None
        return event(chunk)
