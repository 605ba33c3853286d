"""Pieces of replies that several APIs share: usage, timings, log-probabilities, stream chunks.

Read `chat_api.py` next, which uses them.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.responses import Response

from martlet.engine.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput
from martlet.server.bridge import Ticket
from martlet.server.error_replies import ApiError, openai_error
from martlet.server.protocol import GenerationRequest
from martlet.server.service import Service
from martlet.server.sse import EventTemplate, event
from martlet.types import MissReason

FINGERPRINT = "martlet"
_FLOOR = -9999.0  # OpenAI's API writes it for a probability of 0; JSON has no -inf


def json_reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers=headers, media_type="application/json")


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if logprob > _FLOOR else _FLOOR


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Token counts over all prompts and answers so far, under OpenAI's names."""
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    prompt, generated = sum(m.n_prompt for m in metrics), sum(m.n_generated for m in metrics)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(m.n_cached for m in metrics)},
    }


def timings_of(output: RequestOutput) -> dict[str, object]:
    """Times and counts of a request, and the position where its prompt left the cached prefix.

    The text there is the prompt's own. The cached text belongs to another request, and a cache salt
    hides that another tenant has sent this prompt, so neither is shown.
    """
    assert output.metrics is not None
    timings, report = output.metrics.as_dict(), output.cache
    if timings["cache_miss"] == MissReason.SALT:
        timings["cache_miss"] = str(MissReason.EMPTY)
    if report is not None and report.prompt_id is not None:
        timings |= {"cache_miss_position": report.position, "cache_miss_text": report.before + report.prompt_text}
    return timings


def progress_of(outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
    """How much of the prompts is processed (llama.cpp's `prompt_progress`); None in decoding.

    `eta_ms` is the expected time to the first token at the speed so far; None in the queue.
    """
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    started = [m for m in metrics if m.scheduled_s is not None]
    if metrics and all(m.first_token_s is not None for m in metrics):
        return None
    total, cached = sum(m.n_prompt for m in metrics), sum(m.n_cached for m in started)
    processed = sum(max(m.n_cached, m.n_prefilled) for m in started)
    spent_s = time.monotonic() - min((m.scheduled_s for m in started if m.scheduled_s is not None), default=math.inf)
    computed = processed - cached
    return {
        "total": total,
        "cache": cached,
        "processed": processed,
        "time_ms": round(1000 * max(0.0, spent_s)),
        "eta_ms": round(1000 * spent_s * (total - processed) / computed) if computed > 0 else None,
        "queued": not started,
    }


def shown_logprobs(completion: CompletionOutput) -> list[Logprobs]:
    """The entries of the tokens in the answer's text: without an end token or a stop string."""
    return (completion.logprobs or [])[: completion.n_shown]


def token_entry(service: Service, token_id: int, entry: Logprob) -> dict[str, Any]:
    """A token with its log-probability, as in chat replies.

    `bytes` is exact also if the token is only part of a character.
    """
    return {
        "token": entry.decoded_token,
        "logprob": finite(entry.logprob),
        "bytes": list(service.built.tokenizer.token_bytes(token_id)),
    }


class ChunkEncoder:
    """The chunks that chat completions and completions share; each API adds `piece`.

    Format: https://platform.openai.com/docs/api-reference/chat/streaming
    """

    def __init__(self, service: Service, body: GenerationRequest, ticket: Ticket, object_name: str) -> None:
        """`object_name` is the chunks' "object"."""
        self._ticket = ticket
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._each_usage = self._usage and bool(options and options.continuous_usage_stats)
        self._templates: dict[int, EventTemplate] = {}  # of answers whose chunks differ only in text
        self._head = {
            "id": ticket.ticket_id,
            "object": object_name,
            "created": int(time.time()),
            "model": service.model,
            "system_fingerprint": FINGERPRINT,
        }

    def begin(self) -> bytes:
        """Nothing: the first chunk comes with the first token."""
        return b""

    def end(self) -> bytes:
        """The usage, if the request asked for it, and the end mark."""
        if not self._usage:
            return b"data: [DONE]\n\n"
        return event({**self._head, "choices": [], "usage": usage_of(self._ticket.outputs)}) + b"data: [DONE]\n\n"

    def progress(self) -> bytes:
        """A chunk with the prompt's progress; b"" once every answer has begun."""
        progress = progress_of(self._ticket.outputs)
        return b"" if progress is None else event({**self._head, "choices": [], "prompt_progress": progress})

    def error(self, error: ApiError) -> bytes:
        """The error; no end mark follows it."""
        return event(openai_error(error))

    def _chunk_of(self, choice: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._head, "choices": [choice]}
        if self._usage:
            chunk["usage"] = usage_of(self._ticket.outputs) if self._each_usage else None
        return event({**chunk, **(more or {})})
