"""A prompt's chunk that goes through the layers in several steps: who plans it, what is counted,
how it ends early.

Pages hold four tokens; a chunk has eight rows and the model six layers, each of which takes 0.5 ms
for such a chunk.
"""

from __future__ import annotations

import pytest

from martlet.sched.budget import StepBudget
from martlet.sched.cost import CostModel, Work
from martlet.types import StepPlan
from tests.sched.test_policies import World

ROWS, LAYERS = 8, 6  # of a chunk; of the model


def world(stall_s: float | None = None, tokens: int = 64, **options: object) -> World:
    """Two sequences that decode, in a world whose cost model has settled."""
    made = World(
        seqs=4, tokens=tokens, stall_s=stall_s, row_s=0.003 / ROWS, layered_rows=ROWS, n_layers=LAYERS, **options
    )  # type: ignore[arg-type]
    for name in "ab":
        made.add(name, 8, 200)
    for _ in range(20):
        made.step()
    return made


def parts(plan: StepPlan) -> list[tuple[int, int, int, int | None]]:
    """Start, count and layers of the spans that have some of the layers only."""
    return [(s.start, s.count, s.first_layer, s.stop_layer) for s in plan.spans if s.is_layered]


def test_a_chunk_goes_through_the_layers_in_order_and_counts_at_the_end() -> None:
    made = world(stall_s=0.003)  # 1.75 ms of which two sequences that decode take
    made.add("long", 60, 1)
    seen, cached = [], []
    while "long" not in made.order:
        plan = made.step()
        assert {0, 1} <= {span.seq for span in plan.spans}, "a stream stood still"
        found = parts(plan)
        assert len(found) <= 1
        seen += found
        cached.append(next((seq.n_cached for seq in made.scheduler.running if seq.request.request_id == "long"), -1))
    starts = [start for start, _, first, _ in seen if first == 0]
    assert starts == sorted(set(starts))
    assert len(starts) >= 5
    place = dict.fromkeys(starts, 0)
    for start, count, first, stop in seen:
        assert count == ROWS
        assert first == place[start], "a layer is left out or comes twice"
        place[start] = LAYERS if stop is None else stop
    assert set(place.values()) == {LAYERS}
    for (start, _, _, stop), n_cached in zip(seen, cached, strict=False):
        assert n_cached in (-1, start + ROWS if stop is None else start)


def test_layers_are_shared_evenly_among_the_steps_that_a_chunk_takes() -> None:
    cost = CostModel()
    for _ in range(200):  # 1 ms a row, whatever lies before it
        for count in (4, 8, 16):
            cost.observe(Work(0, count, 0, 0, 0), 0.001 * count)
    whole = cost.prefill_s(0, 8)

    def layers(share: float, first: int = 0) -> int:
        return StepBudget(cost, 4, 100, 8, share * whole).layers(0, 8, 12, first)

    assert layers(0.99) == 6  # eleven fit, so two steps: of six each, not of eleven and one
    assert layers(0.5001) == 6
    assert layers(0.34) == 4
    assert layers(0.30) == 3  # three fit: four steps
    assert layers(0.0) == layers(-1.0) == 1
    assert layers(1.01) == 12
    assert layers(0.30, first=9) == 3
    assert layers(0.30, first=8) == 2  # of four that are left
    assert StepBudget(cost, 4, 100, 8, None).layers(0, 8, 12, 5) == 7  # nobody waits


def test_a_share_of_the_layers_is_a_share_of_the_work() -> None:
    work = Work()
    work.add_chunk(100, 8)
    assert (work.n_prefill, work.prefill_reads, work.prefill_behind) == (8, 8 * 100 + 36, 108)
    work.add_chunk(100, 8, 0.25)
    assert (work.n_prefill, work.prefill_reads, work.prefill_behind) == (10, 1.25 * 836, 135)


@pytest.mark.parametrize("how", ["abort", "clear"])
def test_what_is_begun_can_be_given_up(how: str) -> None:
    """The pages come back, and the next chunk, of somebody else, begins at the first layer
    (`scripted.py` looks).
    """
    made = world(stall_s=0.002)
    made.add("long", 60, 1)
    while not any(seq.n_layers for seq in made.scheduler.running):
        made.step()
    if how == "clear":
        made.events += made.scheduler.clear("the step failed")
        assert made.pool.n_free == made.pool.n_pages
    else:
        made.events += made.scheduler.abort("long")
    made.scheduler.check()
    made.add("next", 60, 1, first=7000)
    made.drain()
    assert [name for name in made.order if name in ("long", "next")] == ["long", "next"]


def test_guesses_leave_room_for_what_is_begun() -> None:
    """A chunk between two layers goes on whatever is guessed: rows of both together stay below
    max_step_tokens.
    """
    made = world(stall_s=0.003, tokens=ROWS + 6, logits=40)
    made.add("long", 60, 1)
    n_beside = 0
    while made.scheduler.n_waiting or any(seq.request.request_id == "long" for seq in made.scheduler.running):
        begun = any(seq.n_between_layers for seq in made.scheduler.running)
        guessed = [seq.seq_id for seq in made.scheduler.running if begun and seq.n_generated]
        plan = made.step(dict.fromkeys(guessed, (1, 2, 3, 4, 5, 6)))
        assert sum(span.count for span in plan.spans) <= ROWS + 6
        n_beside += bool(parts(plan)) and any(span.draft for span in plan.spans)
    assert n_beside > 3


def test_a_short_prompt_overtakes_between_two_chunks() -> None:
    """What is begun is finished, and then the policy counts: the first who came does not hold up a
    short one for all its prompt.
    """
    made = world(stall_s=0.003, policy="shortest")
    made.add("long", 120, 1)
    while not any(seq.n_layers for seq in made.scheduler.running):
        made.step()
    made.add("short", 6, 1, first=7000)
    made.drain()
    assert made.order.index("short") < made.order.index("long")


def test_nobody_is_layered_where_nobody_waits() -> None:
    made = World(seqs=4, tokens=64, layered_rows=ROWS, n_layers=LAYERS)
    made.add("long", 200, 1)
    made.drain()
    assert not [part for plan in made.executor.plans for part in parts(plan)]
