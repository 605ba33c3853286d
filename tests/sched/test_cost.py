"""The cost model and the budget made from it: what is fitted, and what a prompt may take of a
step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from martlet.cache.pages import PagePool
from martlet.engine.assemble import assemble
from martlet.sampling_params import SamplingParams
from martlet.sched.budget import MORE, MOST, ROWS, StepBudget, stall_limit
from martlet.sched.cost import CostModel, Work
from martlet.sched.scheduler import Scheduler, SchedulerLimits
from martlet.toy import ScriptedExecutor
from martlet.types import Request, Started, StepPlan, StepResult


def machine(work: Work, slow: float = 1.0) -> float:
    """A machine that takes 2 ms a step, 0.4 ms a row that decodes, 0.3 ms a prompt row, and for
    reading.
    """
    seconds = 2e-3 + 4e-4 * work.n_decode + 1e-7 * work.decode_reads
    return slow * (seconds + 3e-4 * work.n_prefill + 4e-7 * work.prefill_reads)


def prefill(count: int, start: int, n_decode: int = 0) -> Work:
    return Work(n_decode, count, 100 * n_decode, count * start + count * (count + 1) // 2)


def fitted(noise: float = 0.0, slow: float = 1.0, steps: int = 300) -> CostModel:
    rnd, cost = random.Random(3), CostModel()
    for _ in range(steps):
        n_decode = rnd.randint(1, 16)
        work = Work(n_decode, 0, n_decode * rnd.randint(10, 2000))
        if rnd.random() < 0.5:
            work = prefill(rnd.randint(8, 256), rnd.randint(0, 4000), rnd.randint(0, 8))
        cost.observe(work, machine(work, slow) * (1 + noise * rnd.uniform(-1, 1)))
    return cost


@pytest.mark.parametrize("slow", [0.1, 1.0, 30.0])
def test_it_learns_what_a_step_takes(slow: float) -> None:
    cost = fitted(slow=slow)
    for work in (Work(4, 0, 400), Work(16, 0, 8000)):
        assert cost.decode_s(work) == pytest.approx(machine(work, slow), rel=0.1)
    base = machine(Work(), slow)
    for start, count in ((0, 64), (1000, 128), (3000, 32)):
        assert cost.prefill_s(start, count) == pytest.approx(machine(prefill(count, start), slow) - base, rel=0.1)


def test_noise_and_hiccups_are_not_believed() -> None:
    cost = fitted(noise=0.2)
    before = cost.decode_s(Work(4, 0, 400))
    cost.observe(Work(4, 0, 400), 5.0)  # something else ran
    assert cost.decode_s(Work(4, 0, 400)) < 1.5 * before
    for _ in range(20):
        cost.observe(Work(4, 0, 400), before)
    assert cost.decode_s(Work(4, 0, 400)) == pytest.approx(before, rel=0.05)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    cost = fitted()
    for _ in range(60):
        cost.observe(Work(4, 0, 400), machine(Work(4, 0, 400), 3.0))
    assert cost.decode_s(Work(4, 0, 400)) == pytest.approx(machine(Work(4, 0, 400), 3.0), rel=0.05)


def test_what_prompts_take_is_not_taken_for_decoding() -> None:
    cost = fitted()
    before = cost.decode_s(Work(4, 0, 400))
    for _ in range(100):
        cost.observe(prefill(32, 1000, 4), 0.1)
    assert cost.decode_s(Work(4, 0, 400)) == before


def test_how_much_of_a_prompt_fits_a_time() -> None:
    cost = fitted()
    for start in (0, 500, 4000):
        count = cost.prefill_within(0.05, start, 4096)
        assert cost.prefill_s(start, count) <= 0.05 < cost.prefill_s(start, count + 1)
    assert cost.prefill_within(0.05, 0, 20) == 20
    assert cost.prefill_within(0.0, 0, 20) == 0


def budget(seconds: float | None, tokens: int = 512) -> StepBudget:
    return StepBudget(fitted(), 32, tokens, 8, seconds)


def test_chunks_are_pages_or_at_least_tiles() -> None:
    assert budget(None).chunk(0, 4000) == 512  # nobody waits
    assert budget(1.0, tokens=100).chunk(0, 4000) == 100
    roomy = budget(0.03).chunk(40, 4000)  # about 90 rows fit
    assert 60 < roomy < 90
    assert (40 + roomy) % 32 == 0
    tight = budget(0.004).chunk(40, 4000)  # about 12
    assert 4 <= tight <= 12
    assert tight % ROWS == 0
    assert budget(0.0).chunk(40, 4000) == 0
    assert budget(0.0).least(4000) == ROWS
    assert budget(0.0).least(2) == 2


def test_the_limit_of_a_step() -> None:
    assert stall_limit(0.004, 0.0, None, None, None) == pytest.approx((MORE - 1) * 0.004)
    assert stall_limit(0.004, 0.0, 0.05, None, None) == pytest.approx(0.046)
    assert stall_limit(0.004, 0.0, None, 0.01, None) == pytest.approx(0.009 - 0.004)
    assert stall_limit(0.004, 0.0, 0.05, 0.01, None) == pytest.approx(0.009 - 0.004)
    # A prompt that needs 80 % of all time until its deadline: decoding keeps 20 %.
    assert stall_limit(0.004, 0.0, None, None, (0.8, 1.0)) == pytest.approx(5 * 0.004 - 0.004)
    assert stall_limit(0.004, 0.0, None, None, (0.1, 1.0)) == pytest.approx((MORE - 1) * 0.004)
    assert stall_limit(0.004, 0.0, None, None, (2.0, -1.0)) == pytest.approx((MOST - 1) * 0.004)
    assert stall_limit(0.004, 0.0, None, 0.01, (2.0, -1.0)) == pytest.approx(0.005)


def test_a_crowd_that_waits_counts_by_the_head() -> None:
    # a few: as one
    assert stall_limit(0.004, 0.7, None, None, None) == pytest.approx((2.25 - 1) * 0.004)
    assert stall_limit(0.004, 1.0, None, None, None) == pytest.approx((3 - 1) * 0.004)
    assert stall_limit(0.004, 2.0, None, None, None) == pytest.approx((6 - 1) * 0.004)
    assert stall_limit(0.004, 100.0, None, None, None) == pytest.approx((MOST - 1) * 0.004)
    # who names a limit gets it
    assert stall_limit(0.004, 100.0, 0.05, None, None) == pytest.approx(0.046)
    assert stall_limit(0.004, 100.0, None, 0.01, None) == pytest.approx(0.005)


def test_a_slow_first_step_does_not_starve_prompts() -> None:
    """16 prompts of 128 tokens at once, 8 ms a decoding step and 0.5 ms a prompt row; the first
    step is ten times slower.

    Nothing is known at first, and never does a step without prompts come by itself. The 1,536 rows
    that the first step of 512 leaves take 48 steps at twice the decoding time each; more than 60
    would be prompts that wait for no reason.
    """
    now, slow = [0.0], [10.0]

    class Timed(ScriptedExecutor):
        def run(self, plan: StepPlan, started: Sequence[Started] = ()) -> StepResult:
            rows = sum(span.count for span in plan.spans if span.count > 1)
            now[0] += slow[0] * (0.008 + 0.0005 * rows)
            slow[0] = 1.0
            return super().run(plan, started)

    pool = PagePool(256, 32)
    limits = SchedulerLimits(context=512, max_step_tokens=512, max_seqs=16, max_logits=32)
    engine = assemble(Scheduler(pool, limits), Timed(lambda seq, number: 7, 32), pool, clock=lambda: now[0])
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for number in range(16):
        engine.add(Request(str(number), tuple(range(1000 * number, 1000 * number + 128)), params))
    first: set[str] = set()
    steps = 0
    while len(first) < 16:
        first |= {event.request_id for event in engine.step() if event.token_id is not None}
        steps += 1
    assert steps <= 60


def test_loads() -> None:
    cost = CostModel()
    assert cost.load_s(10) == 0.0  # tried
    cost.observe_load(2, 0.004)
    assert cost.load_s(10) == pytest.approx(0.02)
    cost.observe_load(0, 1.0)
    assert cost.load_s(10) == pytest.approx(0.02)
