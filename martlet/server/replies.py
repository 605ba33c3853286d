"""Parts that several replies share: usage, log-probabilities, the JSON itself (read `chat_api.py` for their use)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.responses import Response

from martlet.engine.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput
from martlet.server.service import Service
from martlet.types import MissReason

__all__ = [
    "FINGERPRINT",
    "finite",
    "json_reply",
    "progress_of",
    "shown_logprobs",
    "timings_of",
    "token_entry",
    "usage_of",
]

FINGERPRINT = "martlet"
_FLOOR = -9999.0  # what OpenAI's API gives for a probability of nothing; JSON has no -inf


def json_reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(content), status, headers=headers, media_type="application/json")


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if logprob > _FLOOR else _FLOOR


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Token counts of all prompts and answers so far."""
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    prompt, generated = sum(m.n_prompt for m in metrics), sum(m.n_generated for m in metrics)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(m.n_cached for m in metrics)},
    }


def timings_of(output: RequestOutput) -> dict[str, object]:
    """Times and counts of a request, and where it left what is cached: in its own words.

    What stands there in the cache is another request's, and that another salt has the prompt is what salts are to hide.
    """
    assert output.metrics is not None
    found, report = output.metrics.as_dict(), output.cache
    if found["cache_miss"] == MissReason.SALT:
        found["cache_miss"] = str(MissReason.EMPTY)
    if report is not None and report.prompt_id is not None:
        found |= {"cache_miss_position": report.position, "cache_miss_text": report.before + report.prompt_text}
    return found


def progress_of(outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
    """How much of the prompts has been read (llama.cpp's `prompt_progress`); None when every answer has begun.

    `eta_ms` is when the first token is to be expected, by the speed so far; None while they wait.
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
    """The entries of the tokens whose text is in the answer: not the end token's, nor a stop string's."""
    return (completion.logprobs or [])[: completion.n_shown]


def token_entry(service: Service, token_id: int, entry: Logprob) -> dict[str, Any]:
    """One token with its log-probability, as in chat replies; `bytes` is exact where a token is part of a character."""
    return {
        "token": entry.decoded_token,
        "logprob": finite(entry.logprob),
        "bytes": list(service.built.tokenizer.token_bytes(token_id)),
    }
