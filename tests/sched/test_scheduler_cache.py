"""The scheduler with the prefix cache and forks: what is shared, copied, loaded and computed. Pages
hold four tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from martlet.cache.disk_slots import DiskSlots
from martlet.cache.pages import PagePool
from martlet.cache.radix import RadixCache
from martlet.engine.assemble import assemble
from martlet.sampling_params import SamplingParams
from martlet.sched.scheduler import Scheduler, SchedulerLimits
from martlet.toy import Script, ScriptedExecutor
from martlet.types import Event, Load, MissReason, Request, Scheduling, Started

PAGE = 4


@dataclass
class Bench:
    """An engine of integers, with what its plans were."""

    n_pages: int = 32
    seqs: int = 4
    tokens: int = 64
    cached: bool = True
    n_slots: int = 0
    script: Script = lambda seq, number: 100 + number
    failing: set[int] = field(default_factory=set)  # numbers of loads that fail

    def __post_init__(self) -> None:
        self.pool = PagePool(self.n_pages, PAGE)
        tier = DiskSlots(self.n_slots) if self.n_slots else None
        self.cache = RadixCache(self.pool, tier=tier) if self.cached else None
        self.scheduler = Scheduler(self.pool, SchedulerLimits(64, self.tokens, self.seqs, 8), cache=self.cache)
        self.executor = ScriptedExecutor(self.script, PAGE, self._fails)
        self.engine = assemble(self.scheduler, self.executor, self.pool)
        self._loads = 0

    def _fails(self, load: Load) -> bool:
        self._loads += 1
        return self._loads - 1 in self.failing

    def add(self, name: str, ids: list[int], salt: str = "", **params: object) -> None:
        self.engine.add(Request(name, tuple(ids), SamplingParams(**params), scheduling=Scheduling(cache_salt=salt)))  # type: ignore[arg-type]

    def drain(self) -> list[Event]:
        events: list[Event] = []
        while self.engine.has_work:
            events += self.engine.step()
            self.scheduler.check()
            assert len(self.executor.plans) < 1000
        return events

    def run(self, name: str, ids: list[int], salt: str = "", **params: object) -> list[tuple[int, int]]:
        """Run a request alone; the (start, count) of its spans."""
        self.executor.plans.clear()
        self.add(name, ids, salt, **params)
        self.drain()
        return [(span.start, span.count) for plan in self.executor.plans for span in plan.spans]

    def prompts(self) -> dict[int, tuple[int, int]]:
        """The first span of each sequence."""
        found: dict[int, tuple[int, int]] = {}
        for plan in self.executor.plans:
            for span in plan.spans:
                found.setdefault(span.seq, (span.start, span.count))
        return found


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_a_prompt_again_computes_its_last_token_only(length: int) -> None:
    """fault KVC-01, ask 11"""
    bench = Bench()
    ids = list(range(length))
    assert bench.run("a", ids, max_tokens=1) == [(0, length)]
    assert bench.run("b", ids, max_tokens=1) == [(length - 1, 1)]
    assert bench.run("c", [*ids, 50, 51], max_tokens=1) == [(length, 2)]
    plan = bench.executor.plans[0]
    assert len(plan.copies) == (length % PAGE != 0)
    n_shared = length // PAGE
    assert len(plan.spans[0].new_pages) == -(-(length + 2) // PAGE)  # the whole table is handed out
    assert bench.pool.refs(plan.spans[0].new_pages[0]) == 1
    assert n_shared == 0 or bench.executor.plans[0].spans[0].first_page == 0


def test_a_chat_computes_its_new_text_only() -> None:
    bench = Bench()
    bench.run("first", list(range(9)), max_tokens=6)
    turn = [*range(9), 100, 101, 102, 103, 104, 105]
    # the last token was sampled, never computed
    assert bench.run("second", [*turn, 7, 8], max_tokens=1) == [(14, 3)]


def test_salts_do_not_share() -> None:
    """fault KVC-05"""
    bench = Bench()
    ids = list(range(10))
    assert bench.run("1", ids, "a", max_tokens=1) == [(0, 10)]
    assert bench.run("2", ids, "b", max_tokens=1) == [(0, 10)]
    assert bench.run("3", ids, "a", max_tokens=1) == [(9, 1)]


def test_what_a_request_got_is_noted() -> None:
    bench = Bench()
    bench.run("a", [1, 2, 3, 4, 5, 6], max_tokens=1)
    bench.add("b", [1, 2, 3, 4, 9, 6], max_tokens=1)
    [seq] = bench.scheduler._requests["b"]
    bench.drain()
    assert (seq.cache_use.n_tokens, seq.cache_use.reason, seq.cache_use.cached_id) == (4, MissReason.DIFFERS, 5)
    bench = Bench(cached=False)
    bench.run("a", [1, 2, 3, 4, 5, 6], max_tokens=1)
    bench.add("b", [1, 2, 3, 4, 9, 6], max_tokens=1)
    [seq] = bench.scheduler._requests["b"]
    bench.drain()
    assert (seq.cache_use.n_tokens, seq.cache_use.reason) == (0, MissReason.OFF)


def test_scored_prompts_are_computed() -> None:
    """fault KVC-07, ask 13: the log-probabilities of a cached prompt are those of the first time,
    all of them.
    """
    bench = Bench()
    ids = list(range(12))
    for name in "ab":
        bench.executor.plans.clear()
        bench.add(name, ids, max_tokens=1, prompt_logprobs=0)
        [seq] = bench.scheduler._requests[name]
        events = bench.drain()
        assert [p.token_id for event in events for p in event.prompt_logprobs] == ids[1:]
        assert bench.prompts()[seq.seq_id][0] == 0
    assert seq.cache_use.reason is MissReason.SCORED


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    bench = Bench(tokens=16, seqs=4)
    for name in "abcd":
        bench.add(name, [*range(20), ord(name)], max_tokens=2)
    bench.drain()
    assert bench.prompts() == {0: (0, 16), 1: (20, 1), 2: (20, 1), 3: (20, 1)}


@pytest.mark.parametrize("cached", [True, False])
def test_n_sequences_share_their_prompt(cached: bool) -> None:
    """Full pages are shared, the last one in part is copied, and only the last position is computed
    again.
    """
    bench = Bench(cached=cached, script=lambda seq, number: 100 * (seq.index + 1) + number)
    bench.add("a", list(range(10)), max_tokens=3, n=3)
    events = bench.drain()
    assert bench.prompts() == {0: (0, 10), 1: (9, 1), 2: (9, 1)}
    first, second = bench.executor.plans[:2]
    assert [span.seq for span in first.spans] == [0]
    tables = {span.seq: span.new_pages for plan in (first, second) for span in plan.spans if span.new_pages}
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert [(copy.source, copy.target) for copy in second.copies] == [(tables[0][2], tables[s][2]) for s in (1, 2)]
    tokens = [[e.token_id for e in events if e.index == index] for index in range(3)]
    assert tokens == [[100, 101, 102], [200, 201, 202], [300, 301, 302]]
    assert bench.scheduler.n_free == bench.pool.n_pages


def test_a_prompt_of_whole_pages_is_forked_before_its_last_page() -> None:
    """The last position is computed again, so that its page must be one's own."""
    bench = Bench(cached=False)
    bench.add("a", list(range(8)), max_tokens=2, n=2)
    bench.drain()
    assert bench.prompts()[1] == (7, 1)
    tables = {
        span.seq: span.new_pages
        for plan in bench.executor.plans
        for span in plan.spans
        if span.first_page == 0 and span.new_pages
    }
    assert tables[0][0] == tables[1][0]
    assert tables[0][1] != tables[1][1]


def test_the_first_of_n_may_end_before_the_others_start() -> None:
    bench = Bench()
    bench.add("a", list(range(10)), max_tokens=3, n=2)
    bench.engine.stop("a", 0, "x")
    assert [e.token_id for e in bench.drain()] == [100, 101, 102]


@pytest.mark.parametrize("cached", [True, False])
def test_a_fork_goes_on_from_where_its_parent_is(cached: bool) -> None:
    """As beam search does: children of a running sequence, each with a token of its own."""
    bench = Bench(cached=cached)
    bench.add("parent", list(range(6)), max_tokens=30)
    for _ in range(4):
        bench.engine.step()  # 6 + 4 ids, of which 9 are computed
    for token in (7, 8):
        ids = (*range(6), 100, 101, 102, token)
        bench.engine.fork(Request(f"child {token}", ids, SamplingParams(max_tokens=2)), ("parent", 0))
    bench.executor.plans.clear()
    bench.engine.step()
    assert bench.prompts() == {0: (9, 1), 1: (9, 1), 2: (9, 1)}
    assert len(bench.executor.plans[0].copies) == 2
    bench.drain()


def test_an_abort_while_pages_are_copied() -> None:
    bench = Bench()
    bench.run("a", list(range(10)), max_tokens=1)
    bench.add("b", [*range(10), 11], max_tokens=5)
    plan = bench.scheduler.plan(0.0)
    assert len(plan.copies) == 1
    started = [Started.of(seq) for seq in bench.scheduler.started]
    bench.engine.abort("b")
    bench.scheduler.commit(plan, bench.executor.run(plan, started), 0.0)
    bench.scheduler.check()
    assert bench.run("c", [*range(10), 11], max_tokens=1)[0] == (10, 1)


def evicted(bench: Bench) -> list[int]:
    """A prompt of three pages that is in the second tier only."""
    ids = list(range(12))
    bench.run("a", [*ids, 12], max_tokens=1)
    bench.run("b", list(range(200, 223)), max_tokens=1)
    assert bench.cache is not None
    assert bench.cache.match("", ids, 12).pages == ()
    return ids


def test_pages_come_back_from_the_second_tier() -> None:
    """They are loaded in the step before the first span."""
    bench = Bench(n_pages=6, n_slots=20)
    ids = evicted(bench)
    spans = bench.run("c", [*ids, 13], max_tokens=1)
    assert spans == [(12, 1)]
    assert [len(plan.loads) for plan in bench.executor.plans] == [3, 0]
    assert bench.executor.plans[0].spans == ()


@pytest.mark.parametrize(("failing", "start"), [({0}, 0), ({1}, 4), ({2}, 8)])
def test_a_load_that_fails_is_computed(failing: set[int], start: int) -> None:
    bench = Bench(n_pages=6, n_slots=20, failing=failing)
    ids = evicted(bench)
    bench.add("c", [*ids, 13], max_tokens=1)
    [seq] = bench.scheduler._requests["c"]
    bench.executor.plans.clear()
    bench.drain()
    assert bench.prompts()[seq.seq_id] == (start, 13 - start)
    assert (seq.cache_use.n_tokens, seq.cache_use.n_loaded) == (start, start)


def test_computing_is_chosen_where_loading_takes_longer() -> None:
    """idea 8: by what was measured."""
    bench = Bench(n_pages=6, n_slots=20)
    ids = evicted(bench)
    bench.scheduler.cost.observe_load(1, 1000.0)
    assert bench.run("c", [*ids, 13], max_tokens=1) == [(0, 13)]


def test_a_preempted_sequence_comes_back_through_the_cache() -> None:
    bench = Bench(n_pages=5, seqs=2)
    bench.add("a", list(range(6)), max_tokens=12)
    bench.add("b", list(range(30, 33)), max_tokens=8)
    events = bench.drain()
    assert bench.scheduler.n_preempted > 0
    assert [e.token_id for e in events if e.request_id == "b"] == list(range(100, 108))


def test_embedding_takes_cached_pages() -> None:
    bench = Bench(n_pages=4)
    bench.run("a", list(range(12)), max_tokens=1)
    assert bench.pool.n_free < 4
    bench.engine.embed(range(16))
    bench.scheduler.check()
    assert bench.run("b", list(range(12)), max_tokens=1) == [(0, 12)]
