"""Plans as plain data: they come back as they were, and one that a rank cannot run is refused, not
run.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from martlet.cache.pages import PagePool
from martlet.engine.assemble import assemble
from martlet.errors import RequestError
from martlet.observe.capsule_replay import Schedule
from martlet.ops.interface import StepLimits
from martlet.runtime.plan_codec import PlanLimits, PlanReader, plan_row
from martlet.sched.scheduler import Scheduler, SchedulerLimits
from martlet.toy import ScriptedExecutor
from tests.observe.test_capsule import CONTEXT, HEADER, LIMITS, N_PAGES, PAGE, STEP, VOCAB, play, request
from tests.speculate.test_drafts import Guesser, token


def span(start: int, count: int, n_logits: int, *pages: int, seq: int = 0, first: int = 0, **more: Any) -> list[Any]:
    """A span's row."""
    ids, n_draft = more.get("ids", []), more.get("n_draft", 0)
    return [seq, start, count, n_logits, ids, n_draft, first, list(pages), *more.get("layers", (0, None))]


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a page out of range": ({"spans": [span(0, 1, 1, N_PAGES)]}, "a page 10"),
    "a negative page": ({"spans": [span(0, 1, 1, -1)]}, "a page -1"),
    "no page": ({"spans": [[0, 0, 1, 1]]}, "positions below 0"),
    "positions without pages": ({"spans": [span(0, 5, 1, 1, ids=[1] * 5)]}, "positions below 4"),
    "positions without ids": ({"spans": [span(0, 4, 1, 1)]}, "positions below 3"),
    "more ids than rows": ({"spans": [span(0, 2, 1, 1, ids=[1] * 3)]}, "3 ids in the span 0+2"),
    "an id out of range": ({"spans": [span(0, 1, 1, 1, ids=[VOCAB])]}, "a token id 64"),
    "guesses in a prompt": ({"spans": [span(0, 2, 2, 1, ids=[5], n_draft=1)]}, "positions below 3"),
    "guesses without ids": ({"spans": [span(2, 2, 2, 1, n_draft=1)]}, "0 ids in the span 2+2"),
    "guesses without logits": ({"spans": [span(2, 2, 1, 1, ids=[5], n_draft=1)]}, "1 guesses in a span of 2"),
    "nothing but guesses": ({"spans": [span(2, 2, 2, 1, ids=[5, 6], n_draft=2)]}, "a number of guesses 2"),
    "a hole in the table": ({"spans": [span(0, 1, 1, 1, first=1)]}, "a first page 1"),
    "more pages than a context": ({"spans": [span(0, 1, 1, *range(1, 10))]}, "9 pages of a sequence"),
    "an unknown sequence": ({"spans": [span(0, 1, 1, 1, seq=9)]}, "a span of sequence 9"),
    "a span of nothing": ({"spans": [span(0, 0, 0, 1)]}, "the span 0"),
    "more logits than rows": ({"spans": [span(0, 1, 2, 1)]}, "positions below"),
    "layers that there are not": ({"spans": [span(0, 2, 0, 1, layers=(0, 2))]}, "a layer 2"),
    "a layer in the middle first": ({"spans": [span(0, 2, 0, 1, layers=(1, None))]}, "0+2, layers 1 to the last"),
    "more rows than go by layers": ({"spans": [span(0, 3, 0, 1, layers=(0, 1))]}, "3 rows for some layers"),
    "logits before the last layer": ({"spans": [span(0, 2, 1, 1, layers=(0, 1))]}, "1 logits of the span 0+2"),
    "a sequence twice": ({"spans": [span(0, 1, 0, 1), [0, 0, 1, 0]]}, "two spans"),
    "a truth value": ({"spans": [[0, 0, True, 1]]}, "True"),
    "a fraction": ({"spans": [[0, 0, 1.5, 1]]}, "1.5"),
    "a span of many entries": ({"spans": [[*span(0, 1, 1, 1), 7]]}, "four numbers"),
    "ids that are none": ({"spans": [span(0, 1, 1, 1, ids=7)]}, "ids of a span 7"),
    "a copy out of range": ({"copies": [[0, 99]]}, "a page 99"),
    "an unknown part": ({"eval": "x"}, "eval"),
    "a sequence again": ({"added": [[0, "0", 0, ""]]}, "sequence 0 twice"),
    "an adapter that is not loaded": ({"added": [[1, "0", 0, "abc"]]}, "the adapter 'abc'"),
    "an adapter that is none": ({"added": [[1, "0", 0, []]]}, "the adapter []"),
    "a request that is not here": ({"added": [[1, "1", 0, ""]]}, "request '1'"),
    "a completion that is not here": ({"added": [[1, "0", 1, ""]]}, "index 1"),
    "a name that is none": ({"added": [[1, 0, 0, ""]]}, "the request 0"),
    "a page from an earlier disk": ({"loads": [[0, 1, "00" * 32]]}, "empty kv_disk"),
    "a short key": ({"loads": [[0, 1, "00"]]}, "hexadecimal"),
    "a page that is saved in part": ({"saves": [[0, 1, "00" * 32, "00" * 32, [1]]]}, "a saved page of 1 tokens"),
    "a key that is none": ({"loads": [[0, 1, "zz"]]}, "hexadecimal"),
}


def small(step: Any) -> dict[str, Any]:
    """A sequence of three ids, and the step."""
    asked = {"id": "0", "prompt_ids": [1, 2, 3], "params": {"max_tokens": 2}, "outputs": [[]]}
    return {**HEADER, "requests": [asked], "steps": [{"step": 1, "added": [[0, "0", 0, ""]]}, step]}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_plan_is_refused(case: str) -> None:
    step, message = HOSTILE[case]
    with pytest.raises(RequestError, match=r"The plan of step 2 has .*expected") as caught:
        play(small({"step": 2, **step}))
    assert message in str(caught.value)


@pytest.mark.parametrize("step", [{"spans": []}, {"step": "2"}, {"step": 1 << 50}, "x", None, 1.5, [], 1 << 60, True])
def test_a_step_that_is_none(step: Any) -> None:
    with pytest.raises(RequestError, match=r"The plan of step .* expected"):
        play(small(step))


@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_a_start_within_a_group_of_4_bit_pages(start: int, preempted: bool) -> None:
    """After two ids, in groups of two: at 2 a group begins, at 1 one is gone on with while it is
    held, at 3 there is none.
    """
    asked = {"id": "0", "prompt_ids": [1] * 6, "params": {"max_tokens": 2}, "outputs": [[]]}
    first = {"step": 1, "spans": [span(0, 2, 0, 1, 2)], "added": [[0, "0", 0, ""]]}
    second = {"step": 2, "spans": [span(start, 1, 0, 1, 2)], "preempted": [0] if preempted else []}
    capsule = {**HEADER, "requests": [asked], "steps": [first, second]}
    schedule = Schedule(capsule, replace(LIMITS, group=2))
    if start == 3 or (start == 1 and preempted):
        with pytest.raises(RequestError, match=r"step 2 .* expected a start at a multiple of 2"):
            list(schedule.plans())
    else:
        assert len(list(schedule.plans())) == 2


def test_more_sequences_than_run_beside_4_bit_pages() -> None:
    asked = {"id": "0", "prompt_ids": [1] * 6, "params": {"max_tokens": 2}, "outputs": [[]]}
    added = [{"spans": [span(0, 2, 0, 1, 2, seq=n)], "added": [[n, "0", 0, ""]]} for n in range(STEP.max_seqs + 1)]
    steps = [{"step": number, **row} for number, row in enumerate(added, 1)]
    schedule = Schedule({**HEADER, "requests": [asked], "steps": steps}, replace(LIMITS, group=2))
    with pytest.raises(RequestError, match="The plan of step 5 has 5 sequences that run; expected at most 4"):
        list(schedule.plans())


@pytest.mark.parametrize("seed", range(3))
def test_plans_come_back_as_they_were(seed: int) -> None:
    """With all ids, for a rank that has no texts: guesses, chunks and pages; as JSON, too."""
    pool, guesser = PagePool(10, PAGE), Guesser(0.8, random.Random(seed))
    scheduler, executor = Scheduler(pool, SchedulerLimits(CONTEXT, 16, 4, 20)), ScriptedExecutor(token, PAGE)
    engine = assemble(scheduler, executor, pool, drafter=guesser)
    guesser.seqs = scheduler._live
    for name in range(5):
        engine.add(request(str(name), 3 + 4 * name, 13, draft_tokens=3, n=2))
    while engine.has_work:
        engine.step()
    assert any(plan.preempted for plan in executor.plans)
    limits = PlanLimits(StepLimits(16, 4, 20, CONTEXT // PAGE), 99, CONTEXT, 10, PAGE, 2)
    reader = PlanReader(limits)
    for plan in executor.plans:
        again = reader.read(json.loads(json.dumps(plan_row(plan))))
        spans = tuple(span if span.new_pages else replace(span, first_page=0) for span in plan.spans)
        assert again == replace(plan, spans=spans)
