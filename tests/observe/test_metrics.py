"""What is measured of a request, by hand-made clocks: every number was worked out before the engine
ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from martlet.cache.pages import PagePool
from martlet.cache.radix import RadixCache
from martlet.engine.assemble import assemble
from martlet.engine.engine import Engine
from martlet.metrics import Observer, StepRecord, percentile
from martlet.sampling_params import SamplingParams
from martlet.sched.scheduler import Scheduler, SchedulerLimits
from martlet.toy import ScriptedExecutor
from martlet.types import CacheUse, FinishReason, MissReason, Request, Started, StepPlan, StepResult

PAGE = 4


class Clock:
    """Seconds that pass only where the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowExecutor(ScriptedExecutor):
    """A step takes 1 s and 0.25 s a row."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(lambda seq, number: number, PAGE)
        self.clock = clock

    def run(self, plan: StepPlan, started: Sequence[Started] = ()) -> StepResult:
        self.clock.now += 1 + plan.n_tokens / 4
        return super().run(plan, started)


class Watcher(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.said: list[str] = []

    def accepted(self, request: Request, now: float) -> None:
        self.said.append(f"accepted {request.request_id}")

    def stepped(self, record: StepRecord) -> None:
        self.records.append(record)

    def ended(self, events: object, now: float) -> None:
        self.said += [f"{event.finish} {event.request_id}" for event in events]  # type: ignore[attr-defined]

    def close(self) -> None:
        self.said.append("closed")


def make(clock: Clock, *, n_pages: int = 64, max_seqs: int = 4, watcher: Observer | None = None) -> Engine:
    pool = PagePool(n_pages, PAGE)
    scheduler = Scheduler(pool, SchedulerLimits(32, 4, max_seqs, 8), frozenset())
    observers = () if watcher is None else (watcher,)
    return assemble(scheduler, SlowExecutor(clock), pool, clock=clock, observers=observers)


def request(name: str, n_prompt: int, max_tokens: int, **params: object) -> Request:
    return Request(name, tuple(range(n_prompt)), SamplingParams(max_tokens=max_tokens, temperature=0.0, **params))  # type: ignore[arg-type]


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_a_request_alone() -> None:
    """Six prompt tokens in steps of at most four, then two more tokens: 2 + 1.5 + 1.25 + 1.25
    seconds.
    """
    clock = Clock()
    engine = make(clock)
    metrics = engine.add(request("a", 6, 3))
    clock.now += 3  # it waits for the first step
    drain(engine)
    assert metrics.arrival_s == 100
    assert (metrics.queue_s, metrics.prefill_s, metrics.ttft_s, metrics.decode_s) == (3, 3.5, 6.5, 2.5)
    assert metrics.finished_s == 109
    assert (metrics.n_prompt, metrics.n_generated, metrics.n_chunks, metrics.n_preempted) == (6, 3, 2, 0)
    assert list(metrics.gaps_s) == [1.25, 1.25]
    assert metrics.prefill_tokens_per_s == pytest.approx(6 / 3.5)
    assert metrics.decode_tokens_per_s == pytest.approx(2 / 2.5)


def test_gaps_are_those_of_each_sequence() -> None:
    """Two completions of one request: their tokens come in the same steps and are not each other's
    predecessors.
    """
    clock = Clock()
    engine = make(clock)
    metrics = engine.add(request("a", 1, 3, n=2))
    drain(engine)
    assert metrics.n_generated == 6
    # steps of two rows; the second one is a step later
    assert list(metrics.gaps_s) == [1.5, 1.5, 1.5, 1.25]


def test_a_prompt_that_arrives_makes_the_gap_longer() -> None:
    """fault: a long prompt beside a decode. The longest gap is reported, so that it can be seen."""
    clock = Clock()
    engine = make(clock)
    metrics = engine.add(request("a", 1, 4))
    engine.step()
    engine.step()
    engine.add(request("b", 3, 1))
    drain(engine)
    assert list(metrics.gaps_s) == [1.25, 2.0, 1.25]
    assert (metrics.gap_s(0.5), metrics.gap_s(1.0)) == (1.25, 2.0)


def test_as_dict_is_in_milliseconds() -> None:
    clock = Clock()
    engine = make(clock)
    metrics = engine.add(request("a", 6, 3))
    assert metrics.as_dict()["ttft_ms"] is None
    drain(engine)
    found = metrics.as_dict()
    assert (found["queue_ms"], found["prefill_ms"], found["decode_ms"], found["ttft_ms"]) == (0, 3500, 2500, 3500)
    assert (found["itl_p50_ms"], found["itl_p99_ms"], found["itl_max_ms"]) == (1250, 1250, 1250)
    assert (found["prompt_tokens"], found["cached_tokens"], found["generated_tokens"]) == (6, 0, 3)
    assert (found["chunks"], found["preemptions"]) == (2, 0)


def test_step_records() -> None:
    clock, watcher = Clock(), Watcher()
    engine = make(clock, watcher=watcher)
    engine.add(request("a", 6, 2))
    drain(engine)
    first, second, third = watcher.records
    assert [(s.request_id, s.index, s.start, s.count, s.decode) for s in first.spans] == [("a", 0, 0, 4, False)]
    assert [(s.start, s.count, s.decode) for s in second.spans] == [(4, 2, False)]
    assert [(s.start, s.count, s.decode) for s in third.spans] == [(6, 1, True)]
    assert (first.start_s, first.plan_s, first.run_s, first.commit_s, first.end_s) == (100, 0, 2, 0, 102)
    assert (second.start_s, third.start_s, third.end_s) == (102, 103.5, 104.75)
    assert (first.n_running, first.n_waiting) == (1, 0)
    assert (third.n_running, third.n_waiting) == (0, 0)
    assert third.events[-1].finish is FinishReason.LENGTH
    assert engine.totals.n_steps == 3
    assert (engine.totals.n_prefilled, engine.totals.n_generated) == (6, 2)


def test_an_observer_sees_what_happens_between_steps() -> None:
    watcher = Watcher()
    engine = make(Clock(), watcher=watcher)
    engine.add(request("a", 2, 8))
    engine.add(request("b", 2, 8))
    engine.step()
    engine.abort("a")
    engine.abort("never there")
    engine.stop("b", 0, "stop")
    engine.close()
    assert watcher.said == ["accepted a", "accepted b", "abort a", "stop b", "closed"]
    totals = engine.totals  # fault OPS-07: who was aborted is counted as well
    assert (totals.n_requests, totals.n_finished, totals.n_aborted, totals.n_failed) == (2, 1, 1, 0)


def test_everything_that_a_failed_step_ends_is_seen() -> None:
    watcher = Watcher()
    engine = make(Clock(), watcher=watcher)
    metrics = engine.add(request("a", 2, 8))
    engine.step()
    engine.clear("broken")
    assert watcher.said == ["accepted a", "error a"]
    assert metrics.finished_s is not None
    assert engine.totals.n_failed == 1
    engine.add(request("a", 2, 1))  # the name is free again
    drain(engine)


def test_preemption_is_counted() -> None:
    """Two sequences grow over what eight pages of four positions hold: the newer gives way, and is
    computed again.
    """
    clock, watcher = Clock(), Watcher()
    engine = make(clock, n_pages=8, watcher=watcher)
    first, second = engine.add(request("a", 2, 20)), engine.add(request("b", 2, 20))
    drain(engine)
    preempted = [key for record in watcher.records for key in record.preempted]
    assert preempted
    assert set(preempted) == {("b", 0)}
    assert (first.n_preempted, second.n_preempted) == (0, len(preempted))
    assert second.n_chunks > 1
    assert engine.totals.n_preempted == len(preempted)
    assert second.gap_s(1.0) > 10 * second.gap_s(0.5)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 5.0), (0.9, 9.0), (0.91, 10.0), (0.99, 10.0), (1.0, 10.0), (0.0, 1.0)]
)
def test_percentile_is_the_nearest_rank(share: float, expected: float) -> None:
    assert percentile([float(n) for n in (7, 1, 3, 10, 5, 9, 2, 8, 6, 4)], share) == expected


def test_percentile_of_nothing() -> None:
    assert percentile([], 0.5) is None


def test_cached_tokens_and_the_time_that_they_saved() -> None:
    """A prompt of 41 tokens took 1 + 41 / 4 seconds; asked again, 40 tokens are there: at that
    speed 40 / 41 of it saved.
    """
    clock = Clock()
    pool = PagePool(64, PAGE)
    scheduler = Scheduler(pool, SchedulerLimits(64, 64, 4, 8), frozenset(), cache=RadixCache(pool))
    engine = assemble(scheduler, SlowExecutor(clock), pool, clock=clock)
    first = engine.add(request("a", 41, 1))
    drain(engine)
    assert (first.n_cached, first.cache) == (0, CacheUse(0, 0, MissReason.EMPTY))
    assert first.saved_s == 0
    again = engine.add(request("b", 41, 1))
    drain(engine)
    assert (again.n_cached, again.n_loaded) == (40, 0)
    assert again.cache is not None
    assert again.cache.reason is MissReason.END
    assert again.saved_s == pytest.approx(11.25 * 40 / 41)
    assert again.prefill_s == 1.25
    assert again.prefill_tokens_per_s == 1 / 1.25  # of what was computed
    assert (engine.totals.n_prompt, engine.totals.n_cached, engine.totals.n_prefilled) == (82, 40, 42)
