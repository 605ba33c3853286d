"""The scheduler, with integers only: order, budgets, chunks, pages, ends."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.cache.pages import PagePool
from martlet.engine.assemble import assemble
from martlet.engine.engine import Engine
from martlet.errors import CapacityError, RequestError
from martlet.sampling_params import SamplingParams
from martlet.sched.scheduler import Scheduler, SchedulerLimits
from martlet.toy import Script, ScriptedExecutor
from martlet.types import Event, FinishReason, Request, Sequence, Started

EOS = 2
PAGE = 4


def count_up(seq: Sequence, number: int) -> int:
    return 100 + number


def engine_of(
    script: Script = count_up, *, n_pages: int = 64, context: int = 64, tokens: int = 16, seqs: int = 4, logits: int = 8
) -> tuple[Engine, Scheduler, PagePool, ScriptedExecutor]:
    pool = PagePool(n_pages, PAGE)
    scheduler = Scheduler(pool, SchedulerLimits(context, tokens, seqs, logits), frozenset({EOS}))
    # all steps take equally long
    executor, ticks = ScriptedExecutor(script, PAGE), itertools.count()
    return assemble(scheduler, executor, pool, clock=lambda: next(ticks) / 1000), scheduler, pool, executor


def request(name: str, n_prompt: int, **params: object) -> Request:
    return Request(name, tuple(range(10, 10 + n_prompt)), SamplingParams(**params))  # type: ignore[arg-type]


def drain(engine: Engine, scheduler: Scheduler, most: int = 500) -> list[Event]:
    events: list[Event] = []
    for _ in range(most):
        if not engine.has_work:
            return events
        events += engine.step()
        scheduler.check()
    raise AssertionError(f"still at work after {most} steps")


def tokens_of(events: list[Event], name: str, index: int = 0) -> list[int]:
    return [e.token_id for e in events if (e.request_id, e.index) == (name, index) and e.token_id is not None]


def finishes(events: list[Event]) -> dict[tuple[str, int], FinishReason]:
    ends = [((e.request_id, e.index), e.finish) for e in events if e.finish is not None]
    assert len(dict(ends)) == len(ends), "a sequence ended twice"
    return dict(ends)


def test_one_request_from_prompt_to_length() -> None:
    engine, scheduler, pool, executor = engine_of()
    engine.add(request("a", 5, max_tokens=3))
    events = drain(engine, scheduler)
    assert tokens_of(events, "a") == [100, 101, 102]
    assert finishes(events) == {("a", 0): FinishReason.LENGTH}
    assert [(s.start, s.count, s.n_logits) for p in executor.plans for s in p.spans] == [
        (0, 5, 1),
        (5, 1, 1),
        (6, 1, 1),
    ]
    assert pool.n_free == 64


def test_a_prompt_is_computed_in_chunks() -> None:
    engine, scheduler, _, executor = engine_of(tokens=4)
    engine.add(request("a", 10, max_tokens=1))
    drain(engine, scheduler)
    spans = [span for plan in executor.plans for span in plan.spans]
    assert [(span.start, span.count, span.n_logits) for span in spans] == [(0, 4, 0), (4, 4, 0), (8, 2, 1)]


def test_a_long_prompt_never_stops_a_running_answer() -> None:
    """fault SCH-07: a decoding sequence advances in every step."""
    engine, scheduler, _, executor = engine_of(tokens=4, context=256)
    engine.add(request("short", 2, max_tokens=40))
    engine.step()
    engine.add(request("long", 90, max_tokens=1))
    drain(engine, scheduler)
    with_long = [plan for plan in executor.plans if any(span.seq == 1 for span in plan.spans)]
    assert len(with_long) == 30  # 3 tokens a step are left beside the one that decodes
    assert all(any(span.seq == 0 for span in plan.spans) for plan in with_long)


def test_the_budget_holds_in_every_step() -> None:
    engine, scheduler, _, executor = engine_of(tokens=8)
    for number in range(6):
        engine.add(request(str(number), 3 + 5 * number, max_tokens=7))
    drain(engine, scheduler)
    assert max(plan.n_tokens for plan in executor.plans) == 8


def test_first_come_first_served() -> None:
    engine, scheduler, _, _ = engine_of(seqs=2)
    for name in "abcde":
        engine.add(request(name, 4, max_tokens=4))
    events = drain(engine, scheduler)
    assert [e.request_id for e in events if e.finish] == list("abcde")


def test_end_of_sequence_ends_with_stop_and_no_reason() -> None:
    engine, scheduler, _, _ = engine_of(lambda seq, number: EOS if number == 2 else 50)
    engine.add(request("a", 3, max_tokens=9))
    events = drain(engine, scheduler)
    assert tokens_of(events, "a") == [50, 50, EOS]
    assert (events[-1].finish, events[-1].stop_reason) == (FinishReason.STOP, None)


def test_stop_token_is_the_reason() -> None:
    engine, scheduler, _, _ = engine_of()
    engine.add(request("a", 3, max_tokens=9, stop_token_ids=(102,)))
    events = drain(engine, scheduler)
    assert tokens_of(events, "a") == [100, 101, 102]
    assert (events[-1].finish, events[-1].stop_reason) == (FinishReason.STOP, 102)


def test_ignore_eos_goes_on_to_length() -> None:
    engine, scheduler, _, _ = engine_of(lambda seq, number: EOS)
    engine.add(request("a", 3, max_tokens=4, ignore_eos=True))
    assert finishes(drain(engine, scheduler)) == {("a", 0): FinishReason.LENGTH}


def test_no_stop_before_min_tokens() -> None:
    engine, scheduler, _, _ = engine_of(lambda seq, number: EOS)
    engine.add(request("a", 3, max_tokens=9, min_tokens=4))
    assert tokens_of(drain(engine, scheduler), "a") == [EOS] * 4


def test_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    """fault CTX-01"""
    engine, scheduler, _, _ = engine_of(context=64)
    with pytest.raises(RequestError, match=r"100 tokens.*context holds 64.*by 37 tokens") as caught:
        engine.add(request("a", 100))
    assert caught.value.code == "context_length_exceeded"
    engine.add(request("b", 4, max_tokens=2))
    assert finishes(drain(engine, scheduler)) == {("b", 0): FinishReason.LENGTH}


def test_prompt_as_long_as_the_context_leaves_no_room_for_a_token() -> None:
    engine, _, _, _ = engine_of(context=64)
    with pytest.raises(RequestError, match="shorten the prompt by 1 tokens"):
        engine.add(request("a", 64))
    engine.add(request("a", 64, max_tokens=0, prompt_logprobs=1))


def test_a_full_context_ends_with_length() -> None:
    """fault CTX-05: no max_tokens, no end of sequence: it ends at 64 positions and the pages are
    free.
    """
    engine, scheduler, pool, _ = engine_of(context=64)
    engine.add(request("a", 60, max_tokens=None))
    events = drain(engine, scheduler)
    assert len(tokens_of(events, "a")) == 4
    assert finishes(events) == {("a", 0): FinishReason.LENGTH}
    assert pool.n_free == pool.n_pages


def test_a_request_that_never_fits_is_refused_at_once() -> None:
    """fault SCH-01: the pool has 10 pages, the request needs 11; the small one behind it is
    served.
    """
    engine, scheduler, _, _ = engine_of(n_pages=10, context=64)
    with pytest.raises(RequestError, match=r"needs 11 pages.*there are 10") as caught:
        engine.add(request("big", 30, max_tokens=11))
    assert caught.value.code == "kv_memory_exceeded"
    engine.add(request("small", 4, max_tokens=2))
    assert finishes(drain(engine, scheduler)) == {("small", 0): FinishReason.LENGTH}


def test_pages_at_exact_multiples() -> None:
    """fault KVC-11: a prompt that fills its pages needs a new one with the next token, and not
    before.
    """
    for n_prompt in (PAGE, 2 * PAGE, 3 * PAGE):
        engine, scheduler, pool, executor = engine_of()
        engine.add(request("a", n_prompt, max_tokens=3))
        engine.step()
        assert pool.n_pages - pool.n_free == n_prompt // PAGE
        engine.step()
        assert pool.n_pages - pool.n_free == n_prompt // PAGE + 1
        assert [len(span.new_pages) for plan in executor.plans for span in plan.spans] == [n_prompt // PAGE, 1]
        drain(engine, scheduler)
        assert pool.n_free == pool.n_pages


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokens"):
        engine_of()[0].add(request("a", 0))


def test_an_id_that_is_in_use_is_refused() -> None:
    """fault SCH-12"""
    engine, scheduler, _, _ = engine_of()
    engine.add(request("a", 4, max_tokens=3))
    with pytest.raises(RequestError, match="'a' is still running"):
        engine.add(request("a", 4, max_tokens=3))
    assert len(tokens_of(drain(engine, scheduler), "a")) == 3
    engine.add(request("a", 4, max_tokens=3))
    assert len(tokens_of(drain(engine, scheduler), "a")) == 3


def test_abort_in_the_middle_of_a_chunked_prompt() -> None:
    """fault SCH-05: ten chunks, abort after the third: pages are free at once, the neighbour is not
    affected.
    """
    engine, scheduler, pool, executor = engine_of(tokens=5, context=64)
    engine.add(request("a", 2, max_tokens=20))
    engine.step()
    engine.add(request("b", 40, max_tokens=5))
    for _ in range(3):
        engine.step()
    used = pool.n_pages - pool.n_free
    events = engine.abort("b")
    scheduler.check()
    assert [(e.request_id, e.finish) for e in events] == [("b", FinishReason.ABORT)]
    assert used - (pool.n_pages - pool.n_free) == 10
    events = drain(engine, scheduler)
    assert finishes(events) == {("a", 0): FinishReason.LENGTH}
    assert [plan.dropped for plan in executor.plans if plan.dropped] == [(1,)]


def test_abort_of_waiting_unknown_and_ended_requests() -> None:
    engine, scheduler, _, executor = engine_of(seqs=1)
    engine.add(request("a", 4, max_tokens=2))
    engine.step()
    engine.add(request("b", 4, max_tokens=2))
    assert [e.finish for e in engine.abort("b")] == [FinishReason.ABORT]
    assert engine.abort("b") == engine.abort("never") == []
    drain(engine, scheduler)
    assert engine.abort("a") == []
    assert all(span.seq == 0 for plan in executor.plans for span in plan.spans)


def test_stop_ends_one_sequence_of_several() -> None:
    engine, scheduler, _, _ = engine_of()
    engine.add(request("a", 4, max_tokens=5, n=2))
    engine.step()
    events = engine.stop("a", 1, "END")
    assert [(e.index, e.finish, e.stop_reason) for e in events] == [(1, FinishReason.STOP, "END")]
    assert finishes(drain(engine, scheduler)) == {("a", 0): FinishReason.LENGTH}


def test_n_sequences_are_independent() -> None:
    engine, scheduler, _, _ = engine_of(lambda seq, number: 100 * (seq.index + 1) + number)
    engine.add(request("a", 4, max_tokens=3, n=3))
    events = drain(engine, scheduler)
    assert [tokens_of(events, "a", index) for index in range(3)] == [[100, 101, 102], [200, 201, 202], [300, 301, 302]]
    assert len(finishes(events)) == 3


def test_an_error_ends_its_own_sequence_only() -> None:
    """fault SMP-17"""
    engine, scheduler, pool, _ = engine_of(lambda seq, number: "NaN" if seq.seq == 0 and number == 2 else 100 + number)
    engine.add(request("bad", 4, max_tokens=5))
    engine.add(request("good", 4, max_tokens=5))
    events = drain(engine, scheduler)
    assert finishes(events) == {("bad", 0): FinishReason.ERROR, ("good", 0): FinishReason.LENGTH}
    assert next(e.error for e in events if e.finish is FinishReason.ERROR) == "NaN"
    assert tokens_of(events, "good") == [100, 101, 102, 103, 104]
    assert pool.n_free == pool.n_pages


def test_preempted_sequences_neither_miss_nor_repeat_a_token() -> None:
    """fault SCH-03: a small pool preempts, and every request has the tokens that it has with a
    large one.
    """
    answers = []
    for n_pages in (8, 64):
        engine, scheduler, _, _ = engine_of(
            lambda seq, number: (seq.seq + number) * 7 % 89 + 3, n_pages=n_pages, context=32
        )
        for name in "abcd":
            engine.add(request(name, 4 + ord(name) % 3, max_tokens=20))
        events = drain(engine, scheduler)
        assert set(finishes(events).values()) == {FinishReason.LENGTH}
        answers.append([tokens_of(events, name) for name in "abcd"])
        assert (scheduler.n_preempted > 0) == (n_pages == 8)
    assert answers[0] == answers[1]


def test_the_newest_is_the_victim() -> None:
    """fault SCH-09: five equal requests in a pool that is too small end in their order of
    arrival.
    """
    engine, scheduler, _, _ = engine_of(n_pages=9, context=32, seqs=5)
    for name in "abcde":
        engine.add(request(name, 4, max_tokens=16))
    events = drain(engine, scheduler)
    assert scheduler.n_preempted > 0
    assert [e.request_id for e in events if e.finish] == list("abcde")


@pytest.mark.parametrize(("tokens", "logits"), [(16, 8), (16, 4), (5, 8), (3, 3), (64, 64)])
def test_prompt_logprobs_cover_the_prompt_once_in_bounded_rows(tokens: int, logits: int) -> None:
    engine, scheduler, _, executor = engine_of(tokens=tokens, logits=logits, seqs=3)
    engine.add(request("a", 21, max_tokens=2, prompt_logprobs=0, n=2))
    engine.add(request("b", 9, max_tokens=0, prompt_logprobs=0))
    events = drain(engine, scheduler)
    for name, index, n_prompt in (("a", 0, 21), ("b", 0, 9)):
        scored = [p.token_id for e in events if (e.request_id, e.index) == (name, index) for p in e.prompt_logprobs]
        assert scored == list(range(11, 10 + n_prompt))
    assert not any(e.prompt_logprobs for e in events if e.index == 1)
    assert all(sum(span.n_logits for span in plan.spans) <= logits for plan in executor.plans)
    assert tokens_of(events, "b") == []
    assert finishes(events)["b", 0] is FinishReason.LENGTH


def test_max_tokens_zero_computes_the_prompt_and_ends() -> None:
    """fault CTX-03"""
    engine, scheduler, pool, _ = engine_of()
    engine.add(request("a", 9, max_tokens=0))
    events = drain(engine, scheduler)
    assert (tokens_of(events, "a"), finishes(events)) == ([], {("a", 0): FinishReason.LENGTH})
    assert pool.n_free == pool.n_pages


def test_embedding_borrows_pages_and_gives_them_back() -> None:
    engine, scheduler, pool, _ = engine_of(n_pages=4)
    assert engine.embed(range(16)).tolist() == [16.0, 0.0]
    assert pool.n_free == 4
    with pytest.raises(CapacityError, match="17 tokens needs 5 pages"):
        engine.embed(range(17))
    scheduler.check()


OPERATION = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(1, 30),
        st.integers(0, 25),
        st.integers(1, 3),
        st.sampled_from([None, 0]),
        st.booleans(),
    ),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("abort in flight"), st.integers(0, 30)),
    st.tuples(st.just("stop"), st.integers(0, 30), st.integers(0, 2)),
    st.tuples(st.just("step")),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(OPERATION, min_size=1, max_size=40),
    st.integers(2, 14),
    st.integers(3, 12),
    st.integers(1, 3),
    st.integers(3, 9),
)
def test_any_order_of_arrivals_aborts_and_stops(
    operations: list[tuple[object, ...]], n_pages: int, tokens: int, seqs: int, logits: int
) -> None:
    """Invariants after every step, budgets kept, one terminal event each, nobody starves, no page
    is lost.
    """
    engine, scheduler, pool, executor = engine_of(
        lambda seq, number: EOS if (seq.seq + number) % 11 == 10 else 100 + number,
        n_pages=n_pages,
        context=40,
        tokens=tokens,
        seqs=seqs,
        logits=logits,
    )
    accepted: dict[str, int] = {}
    refused: set[str | None] = set()
    events: list[Event] = []
    for number, operation in enumerate(operations):
        match operation:
            case ("add", int(n_prompt), int(max_tokens), int(n), scored, bool(ignore_eos)):
                try:
                    engine.add(
                        request(
                            str(number),
                            n_prompt,
                            max_tokens=max_tokens,
                            n=n,
                            prompt_logprobs=scored,
                            ignore_eos=ignore_eos,
                        )
                    )
                    accepted[str(number)] = n
                except RequestError as error:
                    refused.add(error.code)
            case ("abort", target):
                events += engine.abort(str(target))
            case ("abort in flight", target):
                plan, started = scheduler.plan(), [Started.of(seq) for seq in scheduler.started]
                events += scheduler.abort(str(target))
                events += scheduler.commit(plan, executor.run(plan, started))
            case ("stop", target, int(index)):
                events += engine.stop(str(target), index, "x")
            case _:
                events += engine.step()
        scheduler.check()
    events += drain(engine, scheduler)
    ends = Counter((e.request_id, e.index) for e in events if e.finish is not None)
    assert ends == Counter({(name, index): 1 for name, n in accepted.items() for index in range(n)})
    assert pool.n_free == pool.n_pages
    assert refused <= {"kv_memory_exceeded"}
    for plan in executor.plans:
        assert plan.n_tokens <= tokens
        assert len(plan.spans) <= seqs
        assert sum(span.n_logits for span in plan.spans) <= logits
