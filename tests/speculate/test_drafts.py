"""Guesses in the scheduler: no arrays, no model (`test_judgement.py`: when they pay)."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from martlet.cache.pages import PagePool
from martlet.cache.radix import RadixCache
from martlet.engine.assemble import assemble
from martlet.engine.engine import Engine
from martlet.sampling_params import SamplingParams
from martlet.sched.scheduler import Scheduler, SchedulerLimits
from martlet.speculate.drafter import Draft, DraftRequest
from martlet.toy import ScriptedExecutor
from martlet.types import Request, SeqId
from martlet.types import Sequence as Running

SIZE, CONTEXT, END = 4, 64, 99


def token(seq: Running, number: int) -> int:
    """What the model says: it depends on the request and the place only, and repeats itself."""
    return (int(seq.request.request_id) * 7 + seq.index * 3 + number % 9 + number // 23) % 50


class Guesser:
    """Knows the script; a share of its guesses is right."""

    costless = True
    priors = (0.5,)

    def __init__(self, right: float, rng: random.Random) -> None:
        self.right, self.rng = right, rng
        self.seqs: dict[SeqId, Running] = {}

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        return 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._guess(request) for request in requests]

    def forget(self, seqs: Any) -> None: ...

    def _guess(self, request: DraftRequest) -> Draft | None:
        seq = self.seqs[request.seq]
        ids = []
        for number in range(seq.n_generated, seq.n_generated + request.most):
            ids.append(token(seq, number) if self.rng.random() < self.right else 77)
        return Draft(tuple(ids), (0,) * len(ids)) if ids else None


def make(n_pages: int, guesser: Guesser | None, **limits: int) -> tuple[Engine, ScriptedExecutor]:
    pool = PagePool(n_pages, SIZE)
    bounds = {"context": CONTEXT, "max_step_tokens": 24, "max_seqs": 6, "max_logits": 20, **limits}
    scheduler = Scheduler(pool, SchedulerLimits(**bounds), frozenset({END}), cache=RadixCache(pool))
    executor = ScriptedExecutor(token, SIZE)
    if guesser is not None:
        guesser.seqs = scheduler._live
    # what pays is judged by time: here every look at the clock takes as long
    ticks = itertools.count()
    return assemble(scheduler, executor, pool, drafter=guesser, clock=lambda: next(ticks) / 1000), executor


def answers(engine: Engine, requests: Sequence[Request], rng: random.Random) -> dict[tuple[str, int], list[Any]]:
    found: dict[tuple[str, int], list[Any]] = defaultdict(list)
    waiting = list(requests)
    while waiting or engine.has_work:
        for _ in range(rng.randrange(3)):
            if waiting:
                engine.add(waiting.pop())
        for event in engine.step() if engine.has_work else ():
            found[event.request_id, event.index] += [event.token_id] if event.token_id is not None else []
            if event.finish is not None:
                found[event.request_id, event.index].append((str(event.finish), event.stop_reason))
        engine.scheduler.check()
    return found


def load(rng: random.Random) -> list[Request]:
    made = []
    for name in range(24):
        ids = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 30)))
        params = SamplingParams(
            max_tokens=rng.choice([1, 3, 17, 30]),
            n=rng.choice([1, 1, 2]),
            draft_tokens=rng.choice([None, 0, 1, 4, 9]),
            stop_token_ids=rng.choice([(), (11, 20)]),
            min_tokens=1,
        )
        made.append(Request(str(name), ids, params))
    return made


@pytest.mark.parametrize("seed", range(12))
def test_guesses_change_no_answer_and_every_page_holds_its_sequence(seed: int) -> None:
    """The executor checks that pages hold the sequence's own prefix: so no wrong guess is ever
    read, shared or kept.
    """
    requests = load(random.Random(seed))
    plain = answers(
        make(200, None)[0], [Request(r.request_id, r.prompt_ids, without(r.params)) for r in requests], random.Random(1)
    )
    guesser = Guesser(0.7, random.Random(seed))
    engine, executor = make(random.Random(seed).choice([16, 20, 40]), guesser)
    assert answers(engine, requests, random.Random(2)) == plain
    totals = engine.totals.speculation
    assert 0 < totals.n_accepted < totals.n_drafted
    for plan in executor.plans:
        assert plan.n_tokens <= 24
        assert sum(span.n_logits for span in plan.spans) <= 20


def without(params: SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens, n=params.n, stop_token_ids=params.stop_token_ids, min_tokens=params.min_tokens
    )


def test_guesses_take_no_page_from_anybody() -> None:
    """Two sequences that fill all pages: what is guessed is cut to the pages that are there, and
    nobody is preempted.
    """
    guesser = Guesser(0.0, random.Random(0))
    engine, executor = make(8, guesser, context=16)
    for name in ("1", "2"):
        engine.add(Request(name, (1, 2, 3), SamplingParams(max_tokens=12, draft_tokens=12)))
    while engine.has_work:
        engine.step()
    assert engine.scheduler.n_preempted == 0
    assert max(len(span.draft) for plan in executor.plans for span in plan.spans) > 0


def test_the_last_token_is_not_guessed_beyond() -> None:
    guesser = Guesser(1.0, random.Random(0))
    engine, executor = make(40, guesser)
    engine.add(Request("1", (1, 2), SamplingParams(max_tokens=7, draft_tokens=9)))
    n_steps = 0
    while engine.has_work:
        engine.step()
        n_steps += 1
    # the prompt gives one token, the guesses five, and the row after them the seventh
    assert n_steps == 2
    assert [len(span.draft) for plan in executor.plans for span in plan.spans] == [0, 5]
    assert engine.totals.speculation.drafted == [1] * 5
