"""The engine's measurements, in seconds of a monotonic clock.

Every request has `RequestMetrics`. A `StepRecord` is made only for an `Observer` that reads it,
such as the trace (`observe/trace.py`) and the capsule (`observe/capsule.py`). Read
`observe/recorder.py` next, which fills them in.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import zip_longest

from martlet.types import CacheUse, Event, Request, Sequence, StepPlan, StepResult


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed (nearest rank).

    None if there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class StartPhase:
    """A phase of the engine's start."""

    name: str  # read, plan, map, compile, warm
    seconds: float


@dataclass(slots=True)
class RequestMetrics:
    """Times and counts of one request; a time is None until the event."""

    arrival_s: float
    n_prompt: int
    scheduled_s: float | None = None  # its first span was planned
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    n_generated: int = 0  # over all n sequences
    n_first: int = 0  # tokens of the step of the first token: one per sequence that was ready
    cache: CacheUse | None = None  # its use of the prefix cache, once it was scheduled
    saved_s: float | None = None  # time to compute n_cached tokens at the measured speed
    n_prefilled: int = 0  # prompt tokens that are cached, computed, or in the running step
    n_chunks: int = 0  # spans of prompt tokens, or of tokens lost to a preemption
    n_preempted: int = 0  # preemptions of its sequences
    n_drafted: int = 0  # draft tokens that were verified
    n_accepted: int = 0  # draft tokens that were accepted
    gaps_s: array[float] = field(default_factory=lambda: array("d"))  # times between tokens, in order

    @property
    def n_cached(self) -> int:
        """Prompt tokens from the prefix cache."""
        return 0 if self.cache is None else self.cache.n_tokens

    @property
    def n_loaded(self) -> int:
        """Prompt tokens that were loaded from disk; `n_cached` includes them."""
        return 0 if self.cache is None else self.cache.n_loaded

    @property
    def queue_s(self) -> float | None:
        """From arrival to the first span."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def prefill_s(self) -> float | None:
        """From the first span to the first token."""
        return _between(self.scheduled_s, self.first_token_s)

    @property
    def decode_s(self) -> float | None:
        """From the first token to the latest."""
        return _between(self.first_token_s, self.last_token_s)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Computed prompt tokens per second of `prefill_s`."""
        return (self.n_prompt - self.n_cached) / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Generated tokens after the first per second of `decode_s`."""
        return (self.n_generated - self.n_first) / self.decode_s if self.decode_s else None

    def disown_token(self) -> None:
        """Uncount an accepted draft token after a stop string of the same step."""
        self.n_generated -= 1
        self.n_first -= self.first_token_s == self.last_token_s
        if 0.0 in self.gaps_s:
            self.gaps_s.remove(0.0)

    def gap_s(self, share: float) -> float | None:
        """A percentile of the times between tokens: 0.5 is the median, 1 the maximum."""
        return percentile(self.gaps_s, share)

    def as_dict(self) -> dict[str, object]:
        """The metrics for people and clients; times in milliseconds."""
        cache = self.cache
        return {
            "queue_ms": _ms(self.queue_s),
            "prefill_ms": _ms(self.prefill_s),
            "decode_ms": _ms(self.decode_s),
            "ttft_ms": _ms(self.ttft_s),
            "itl_p50_ms": _ms(self.gap_s(0.5)),
            "itl_p99_ms": _ms(self.gap_s(0.99)),
            "itl_max_ms": _ms(self.gap_s(1.0)),
            "prompt_tokens": self.n_prompt,
            "cached_tokens": self.n_cached,
            "loaded_tokens": self.n_loaded,
            "cache_miss": None if cache is None else str(cache.reason),
            "cache_saved_ms": _ms(self.saved_s),
            "generated_tokens": self.n_generated,
            "chunks": self.n_chunks,
            "preemptions": self.n_preempted,
            "drafted_tokens": self.n_drafted,
            "accepted_tokens": self.n_accepted,
        }


@dataclass(slots=True)
class SpeculationTotals:
    """Counts of speculative decoding. Position i is that of the draft token after i others."""

    n_spans: int = 0  # drafts verified
    n_steps: int = 0  # steps with drafts and without prompts
    drafted: list[int] = field(default_factory=list)  # draft tokens by position
    accepted: list[int] = field(default_factory=list)
    gain_s: float = 0.0  # time saved in those steps, against measured steps without drafts

    @property
    def n_drafted(self) -> int:
        """Draft tokens verified."""
        return sum(self.drafted)

    @property
    def n_accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(self.accepted)

    def count(self, n_drafted: int, n_accepted: int) -> int:
        """Add a span's draft tokens; return `n_accepted`."""
        missing = n_drafted - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        self.n_spans += 1
        for position in range(n_drafted):
            self.drafted[position] += 1
        for position in range(n_accepted):
            self.accepted[position] += 1
        return n_accepted

    def plus(self, other: SpeculationTotals) -> SpeculationTotals:
        drafted, accepted = (
            [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)]
            for mine, theirs in ((self.drafted, other.drafted), (self.accepted, other.accepted))
        )
        n_spans, n_steps = self.n_spans + other.n_spans, self.n_steps + other.n_steps
        return SpeculationTotals(n_spans, n_steps, drafted, accepted, self.gain_s + other.gain_s)


@dataclass(slots=True)
class EngineTotals:
    """Counts since the engine's start."""

    n_steps: int = 0
    n_requests: int = 0
    n_prompt: int = 0  # prompt tokens of scheduled requests
    n_cached: int = 0  # prompt tokens from the prefix cache
    n_prefilled: int = 0
    n_generated: int = 0
    n_preempted: int = 0
    n_finished: int = 0  # sequences that stopped or reached their length
    n_aborted: int = 0  # sequences that the caller aborted
    n_failed: int = 0  # sequences that failed
    speculation: SpeculationTotals = field(default_factory=SpeculationTotals)

    def plus(self, other: EngineTotals) -> EngineTotals:
        counts = {
            f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "speculation"
        }
        return EngineTotals(**counts, speculation=self.speculation.plus(other.speculation))


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """What a step computed for one sequence, under the request's id."""

    request_id: str
    index: int  # of the request's n completions
    start: int
    count: int
    decode: bool  # one new token, no prompt
    place: str  # start and count, and the layers if not all


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step as it was planned, run and committed; the counts are those after it."""

    step: int
    start_s: float
    plan_s: float
    run_s: float
    commit_s: float
    spans: tuple[SpanRecord, ...]
    preempted: tuple[tuple[str, int], ...]  # (request id, index)
    n_running: int
    n_waiting: int
    n_free_pages: int
    n_cached: int  # prompt tokens from the prefix cache since the engine's start
    plan: StepPlan
    result: StepResult
    started: tuple[Sequence, ...]  # of `plan.added`
    events: tuple[Event, ...]

    @property
    def end_s(self) -> float:
        """The time of the commit."""
        return self.start_s + self.plan_s + self.run_s + self.commit_s


class Observer:
    """Base class of observers: override the events to see. The engine's thread calls them."""

    def accepted(self, request: Request, now: float) -> None:
        """A request was accepted."""

    def ran(self, plan: StepPlan, seconds: float) -> None:
        """A step was committed after `seconds`."""

    def stepped(self, record: StepRecord) -> None:
        """A step was committed. The record is made only if an observer overrides this method."""

    def broke(self, plan: StepPlan) -> None:
        """A step raised and was not committed; `ended` names the sequences that it ended."""

    def ended(self, events: Iterable[Event], now: float) -> None:
        """Sequences ended outside of a step: aborted, stopped by their text, or failed."""

    def close(self) -> None:
        """The engine closes. Idempotent."""


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
