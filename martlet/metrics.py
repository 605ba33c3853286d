"""What is measured, in seconds of a monotonic clock (read `observe/recorder.py` next, which fills it in).

`RequestMetrics` is kept for every request. A `StepRecord` is made only when somebody watches: an `Observer`, such as the
trace (`observe/trace.py`) and the capsule (`observe/capsule.py`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest

from martlet.types import CacheUse, Event, Request, StepPlan, StepResult

__all__ = [
    "EngineTotals",
    "Observer",
    "RequestMetrics",
    "SpanRecord",
    "SpeculationTotals",
    "StartPhase",
    "StepRecord",
    "percentile",
]


def percentile(values: Iterable[float], share: float) -> float | None:
    """The least value that at least `share` of the values do not exceed (nearest rank); None of no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class StartPhase:
    """One part of an engine's start and how long it took."""

    name: str  # read, plan, guard (if KV types are), map, compile, warm
    seconds: float


@dataclass(slots=True)
class RequestMetrics:
    """Times and counts of one request; a time is None until it has happened."""

    arrival_s: float
    n_prompt: int
    scheduled_s: float | None = None  # its first span was planned
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    n_generated: int = 0  # over all n sequences
    n_first: int = 0  # tokens that came with the first one: one a sequence that was ready then
    cache: CacheUse | None = None  # what the prefix cache gave it, once it was scheduled
    saved_s: float | None = None  # what computing n_cached tokens would have taken, at the engine's measured speed
    n_prefilled: int = 0  # prompt tokens that are cached or computed, or are in the step that runs
    n_chunks: int = 0  # spans that computed prompt tokens, or tokens lost to a preemption
    n_preempted: int = 0  # times that a sequence of it lost its pages
    n_drafted: int = 0  # tokens that were guessed and verified
    n_accepted: int = 0  # of them, those that were right
    gaps_s: array[float] = field(default_factory=lambda: array("d"))  # between tokens of a sequence, in order

    @property
    def n_cached(self) -> int:
        """Prompt tokens that the prefix cache had."""
        return 0 if self.cache is None else self.cache.n_tokens

    @property
    def n_loaded(self) -> int:
        """Of them, those that came back from the second tier."""
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
        """From the first token to the last so far."""
        return _between(self.first_token_s, self.last_token_s)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens that were computed, by the time from the first span to the first token."""
        return (self.n_prompt - self.n_cached) / self.prefill_s if self.prefill_s else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first ones by the time that they took."""
        return (self.n_generated - self.n_first) / self.decode_s if self.decode_s else None

    def disown_token(self) -> None:
        """Count one token of the last step less: a guess that was right, after a stop string that the same step completed."""
        self.n_generated -= 1
        self.n_first -= self.first_token_s == self.last_token_s
        if 0.0 in self.gaps_s:
            self.gaps_s.remove(0.0)

    def gap_s(self, share: float) -> float | None:
        """The time between tokens that `share` of them do not exceed: 0.5 is the median, 1 the longest."""
        return percentile(self.gaps_s, share)

    def as_dict(self) -> dict[str, object]:
        """What a person or a client reads; times in milliseconds."""
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
    """What came of guesses. Position i is that of a guess that comes after i others, which in a tree have siblings."""

    n_spans: int = 0  # times that tokens were guessed for a sequence
    n_steps: int = 0  # with guesses, and without prompts
    drafted: list[int] = field(default_factory=list)  # by position
    accepted: list[int] = field(default_factory=list)
    gain_s: float = 0.0  # time that those steps would have taken more, by what steps without guesses take

    @property
    def n_drafted(self) -> int:
        """Guesses that were verified."""
        return sum(self.drafted)

    @property
    def n_accepted(self) -> int:
        """Of them, those that were right."""
        return sum(self.accepted)

    def count(self, positions: Sequence[int], n_accepted: int) -> int:
        """Add a span's guesses, at these positions; return how many were right."""
        missing = max(positions) + 1 - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        self.n_spans += 1
        for position in positions:
            self.drafted[position] += 1
        for position in range(n_accepted):
            self.accepted[position] += 1
        return n_accepted

    def plus(self, other: SpeculationTotals) -> SpeculationTotals:
        """Both together."""
        drafted, accepted = (
            [a + b for a, b in zip_longest(one, two, fillvalue=0)]
            for one, two in ((self.drafted, other.drafted), (self.accepted, other.accepted))
        )
        n_spans, n_steps = self.n_spans + other.n_spans, self.n_steps + other.n_steps
        return SpeculationTotals(n_spans, n_steps, drafted, accepted, self.gain_s + other.gain_s)


@dataclass(slots=True)
class EngineTotals:
    """Counts since the engine's start."""

    n_steps: int = 0
    n_requests: int = 0
    n_prompt: int = 0  # tokens of requests that were scheduled
    n_cached: int = 0  # of them, those that the prefix cache had
    n_prefilled: int = 0
    n_generated: int = 0
    n_preempted: int = 0
    n_finished: int = 0  # sequences that ended by themselves,
    n_aborted: int = 0  # that their caller gave up,
    n_failed: int = 0  # and that failed
    speculation: SpeculationTotals = field(default_factory=SpeculationTotals)

    def plus(self, other: EngineTotals) -> EngineTotals:
        """Both together."""
        counts = {
            f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "speculation"
        }
        return EngineTotals(**counts, speculation=self.speculation.plus(other.speculation))


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """What a step computed of one sequence, in names that a caller knows."""

    request_id: str
    index: int  # which of the request's n completions
    start: int
    count: int
    decode: bool  # one new token, and no prompt
    place: str  # start and count, and which layers if they are not all


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it was planned, run and committed; the counts are those after it."""

    step: int
    start_s: float
    plan_s: float
    run_s: float
    commit_s: float
    spans: tuple[SpanRecord, ...]
    preempted: tuple[tuple[str, int], ...]  # (request id, index) that lost their pages
    n_running: int
    n_waiting: int
    n_free_pages: int
    n_cached: int  # prompt tokens found in the prefix cache since the engine's start
    plan: StepPlan
    result: StepResult
    events: tuple[Event, ...]

    @property
    def end_s(self) -> float:
        """When it was committed."""
        return self.start_s + self.plan_s + self.run_s + self.commit_s


class Observer:
    """Whoever watches an engine inherits from this and overrides what it wants to see."""

    def accepted(self, request: Request, now: float) -> None:
        """A request was accepted."""

    def ran(self, plan: StepPlan, seconds: float) -> None:
        """A step was committed; it took so long."""

    def stepped(self, record: StepRecord) -> None:
        """A step was committed; its events are in the record, which is only made if somebody overrides this."""

    def broke(self, plan: StepPlan) -> None:
        """A step raised: nothing of it was committed, and `ended` says what that ended."""

    def ended(self, events: Iterable[Event], now: float) -> None:
        """These sequences ended outside of a step: aborted, stopped by their text, or failed together."""

    def close(self) -> None:
        """The engine ends. Idempotent."""


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
