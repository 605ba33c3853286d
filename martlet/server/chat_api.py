"""/v1/chat/completions: answers a conversation, whole or as a stream (read `conversation.py` next).

Format: https://platform.openai.com/docs/api-reference/chat
"""

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from martlet.engine.outputs import Logprobs, Piece, RequestOutput
from martlet.server.conversation import OpenChat, open_chat
from martlet.server.protocol import ChatRequest
from martlet.server.replies import (
    FINGERPRINT,
    ChunkEncoder,
    json_reply,
    shown_logprobs,
    timings_of,
    token_entry,
    usage_of,
)
from martlet.server.service import Service, new_id, service_of
from martlet.server.sse import EventStream, EventTemplate
from martlet.server.tools.parts import Content
from martlet.server.tools.reply import Parts, delta_of


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
        best = sorted(
            (logprob.rank, i, logprob) for i, logprob in entry.items() if logprob.rank and logprob.rank <= n_best
        )
        top = [token_entry(service, i, logprob) for _, i, logprob in best]
        content.append({**token_entry(service, token_id, chosen), "top_logprobs": top})
    return {"content": content}


class _Encoder(ChunkEncoder):
    """The chunks of a streamed chat."""

    def __init__(self, service: Service, body: ChatRequest, chat: OpenChat) -> None:
        super().__init__(service, body, chat.ticket, "chat.completion.chunk")
        self._service, self._body, self._chat, self._parsers = service, body, chat, chat.parsers
        self._begun: set[int] = set()
        self._called: set[int] = set()
        self._n_open = len(chat.parsers)

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
        elif len(parts) == 1 and isinstance(parts[0], Content) and index in self._templates:
            return self._templates[index].fill(parts[0].text)
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
        if not (self._body.logprobs or self._each_usage or index in self._templates):
            self._templates[index] = EventTemplate(self._chunk(index, {"content": ""}), "content")
        if piece.finish_reason is not None and piece.finish_reason != "error":
            chunks.append(self._last(index, piece))
        return b"".join(chunks)

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
        return self._chunk_of(choice, more)
