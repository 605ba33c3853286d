"""When guesses pay: judged on a machine whose costs are known (read `test_drafts.py` first)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from martlet.metrics import SpeculationTotals
from martlet.sampling_params import SamplingParams
from martlet.sched.cost import CostModel, RowTimes, Work
from martlet.speculate.drafter import Chain, Draft, DraftRequest
from martlet.speculate.judge import MOST_JUDGED, Speculator
from martlet.types import Request, SeqId
from martlet.types import Sequence as Running

SIZE, CONTEXT, END = 4, 64, 99


def machine(n_rows: int) -> float:
    """Seconds of a step: four rows take 1.4 times as long as one, eight 2.5."""
    return 0.025 if n_rows == 1 else 0.025 * (0.3 + 1.1 * -(-n_rows // 4))


class Judged:
    """Runs a speculator on a machine whose time is known, against sequences whose guesses are right
    as `right` says.
    """

    def __init__(self, right: float, n: int, noise: float = 0.0) -> None:
        self.rng, self.n = random.Random(4), n
        self.right, self.noise = right, noise
        self.cost = CostModel()
        self.speculator = Speculator(self, self.cost, lambda: 0.0)
        request = Request("0", (1,), SamplingParams(max_tokens=None))
        self.seqs = [Running(SeqId(i), request, ids=[1, 2], limit=1 << 30, n_cached=1) for i in range(n)]
        self.seconds, self.tokens = 0.0, 0

    costless, priors = True, (0.5,)

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        return 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [Draft((7,) * request.most, (0,) * request.most) for request in requests]

    def forget(self, seqs: Any) -> None: ...

    def run(self, steps: int) -> float:
        """Tokens a second ÷ those without guesses."""
        for _ in range(steps):
            drafts = self.speculator.propose(self.seqs, 0, {})
            n_draft = sum(len(draft) for draft in drafts.values())
            seconds = machine(self.n + n_draft) * (1 + self.noise * self.rng.uniform(-1, 1))
            self.cost.observe(Work(n_decode=self.n, n_draft=n_draft), seconds)
            self.seconds += seconds
            for seq in self.seqs:
                for _ in (*drafts.get(seq.seq_id, ()), 0):
                    right = self.rng.random() < self.right
                    seq.ids.append(7 if right else 8)
                    seq.n_cached += 1
                    self.tokens += 1
                    if not right:
                        break
        return self.tokens / self.seconds / (self.n / machine(self.n))


@pytest.mark.parametrize(
    ("right", "least"), [(0.0, 0.98), (0.1, 0.98), (0.2, 0.98), (0.3, 0.98), (0.9, 1.9), (1.0, 2.4)]
)
def test_guessing_never_costs_and_pays_where_it_can(right: float, least: float) -> None:
    """Row 27 of what users ask for: guesses that are wrong are given up; those that are right are
    made.
    """
    assert Judged(right, 1).run(400) >= least
    assert Judged(right, 1, noise=0.2).run(400) >= least - 0.02


@pytest.mark.parametrize("right", [0.0, 0.3, 0.6, 0.9])
def test_with_many_sequences_guessing_ends_by_itself(right: float) -> None:
    assert Judged(right, 16).run(100) >= 0.98


def test_beyond_many_sequences_nobody_is_asked() -> None:
    assert Judged(1.0, MOST_JUDGED + 1).speculator.propose(Judged(1.0, MOST_JUDGED + 1).seqs, 0, {}) == {}


def test_a_text_that_changes_is_noticed() -> None:
    """Ten times verbatim after nothing: guesses that nobody verified have said so."""
    judged = Judged(0.0, 1)
    judged.run(200)
    judged.right, judged.tokens, judged.seconds = 1.0, 0, 0.0
    assert judged.run(200) > 1.9


def test_times_of_steps_that_were_never_measured() -> None:
    times = RowTimes(4)
    times.update(1, 0.01)
    assert [times.predict(n) for n in (2, 3, 4, 8)] == pytest.approx([0.0112, 0.0124, 0.0136, 0.0236])
    times.update(4, 0.02)
    assert times.predict(3) == pytest.approx(0.02 * 1.24 / 1.36)
    assert times.predict(8) == pytest.approx(0.02 * 2.36 / 1.36)
    assert times.predict(9) == times.predict(12) > times.predict(8)
    for _ in range(100):
        times.update(1, 0.01)
    assert times.predict(1) == pytest.approx(0.01)
    assert 0.0136 < times.predict(4) < 0.02, "an old measurement is slowly forgotten"


def test_guesses_are_counted_by_their_position() -> None:
    totals = SpeculationTotals()
    assert totals.count(3, 1) == 1
    assert totals.count(1, 1) == 1
    assert (totals.drafted, totals.accepted) == ([2, 1, 1], [2, 0, 0])
    assert (totals.n_spans, totals.n_drafted, totals.n_accepted) == (2, 4, 2)


class Costly:
    """A drafter that takes a tenth of a step for each guess, all of which are right with one
    probability.
    """

    costless, priors = False, (0.5,)

    def __init__(self, right: float, script: Sequence[int]) -> None:
        self.rng, self.right, self.script = random.Random(5), right, script
        self.seconds, self.n_asked = 0.0, 0

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        return 0

    def forget(self, seqs: Any) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.n_asked += 1
        [request] = requests
        chain = Chain(request)
        for place in itertools.count(len(request.ids)):
            self.seconds += 0.0025
            right = self.rng.random() < self.right
            if not chain.add(self.script[place] if right else -1, 0):
                break
        return [chain.draft()]


def beside_the_text(right: float, script: Sequence[int], steps: int = 150) -> tuple[float, Costly]:
    """Tokens a second ÷ those without guesses, for a text that goes on as the script says."""
    cost, drafter = CostModel(), Costly(right, script)
    speculator = Speculator(drafter, cost, lambda: drafter.seconds)
    request = Request("0", (1,), SamplingParams(max_tokens=None))
    seq = Running(SeqId(0), request, ids=list(script[:2]), limit=1 << 30, n_cached=1)
    seconds = 0.0
    for _ in range(steps):
        before = drafter.seconds
        guesses = speculator.propose([seq], 0, {}).get(seq.seq_id, ())
        taken = machine(1 + len(guesses))
        cost.observe(Work(n_decode=1, n_draft=len(guesses)), taken)
        seconds += taken + drafter.seconds - before
        for place in range(len(guesses) + 1):
            seq.ids.append(script[len(seq.ids)])
            seq.n_cached += 1
            if place < len(guesses) and guesses[place] != seq.ids[-1]:
                break
    return (len(seq.ids) - 2) / seconds * machine(1), drafter


def test_a_text_that_repeats_itself_needs_no_other_drafter() -> None:
    """Of 150 steps the drafter is asked in the first only, until the text has been copied for a
    while.
    """
    rng = random.Random(3)
    rate, drafter = beside_the_text(0.6, [rng.randrange(1000) for _ in range(40)] * 100)
    assert rate > 2.4
    assert drafter.n_asked < 60


@pytest.mark.parametrize(("right", "least"), [(0.0, 0.95), (0.2, 0.95), (0.9, 1.5)])
def test_in_a_text_that_is_new_the_other_drafter_is_asked(right: float, least: float) -> None:
    rng = random.Random(3)
    rate, drafter = beside_the_text(right, [rng.randrange(100_000) for _ in range(5000)])
    assert rate > least
    assert drafter.n_asked > (100 if right > 0.5 else 5)


class Vain(Judged):
    """A drafter that takes a hundredth of a step, and is wrong seven times of ten."""

    costless, n_asked, asking_s = False, 0, 0.0

    def __init__(self, n: int) -> None:
        super().__init__(0.3, n)
        self.speculator = Speculator(self, self.cost, lambda: self.asking_s)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.n_asked += 1
        self.asking_s += 0.01 * machine(self.n)
        return super().propose(requests)


def test_many_sequences_are_seldom_asked_for_the_few_guesses_that_fill_a_tile() -> None:
    """Fourteen of them leave room for two: 0.6 tokens in fourteen, for asking all."""
    vain = Vain(14)
    vain.run(300)
    assert vain.n_asked < 15  # 33 when all guesses were taken for right
