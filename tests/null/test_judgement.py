"""When guesses pay: judged on a machine whose costs are known (read `test_drafts.py` first)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from martlet.drafts import Draft
from martlet.metrics import SpeculationTotals
from martlet.sampling_params import SamplingParams
from martlet.sched.cost import CostModel, RowTimes, Work
from martlet.speculate.judge import MOST_JUDGED, Speculator
from martlet.speculate.ngram import DraftRequest, Proposal
from martlet.speculate.tree import GuessTree
from martlet.types import Request, SeqId
from martlet.types import Sequence as Running

SIZE, CONTEXT, END = 4, 64, 99


def machine(n_rows: int) -> float:
    """Seconds of a step: four rows take 1.4 times as long as one, eight 2.5."""
    return 0.025 if n_rows == 1 else 0.025 * (0.3 + 1.1 * -(-n_rows // 4))


class Judged:
    """Runs a speculator on a machine whose time is known, against sequences whose guesses are right as `right` says."""

    def __init__(self, right: float, n: int, noise: float = 0.0) -> None:
        self.rng, self.n = random.Random(4), n
        self.right, self.noise = right, noise
        self.cost = CostModel()
        self.speculator = Speculator(self, self.cost, lambda: 0.0)
        request = Request("0", (1,), SamplingParams(max_tokens=None))
        self.seqs = [Running(SeqId(i), request, ids=[1, 2], limit=1 << 30, n_cached=1) for i in range(n)]
        self.seconds, self.tokens = 0.0, 0

    free, priors = True, (0.5,)

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        return 0

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Proposal | None]:
        return [Proposal((7,) * wish.most, (0,) * wish.most) for wish in wishes]

    def forget(self, seqs: Any) -> None: ...

    def run(self, steps: int) -> float:
        """Tokens a second ÷ those without guesses."""
        for _ in range(steps):
            drafts = self.speculator.propose(self.seqs, 0, {})
            n_draft = sum(len(draft.ids) for draft in drafts.values())
            seconds = machine(self.n + n_draft) * (1 + self.noise * self.rng.uniform(-1, 1))
            self.cost.observe(Work(n_decode=self.n, n_draft=n_draft), seconds)
            self.seconds += seconds
            for seq in self.seqs:
                for _ in (*drafts.get(seq.seq_id, Draft(())).ids, 0):
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
    """Row 27 of what users ask for: guesses that are wrong are given up; those that are right are made."""
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
    times = RowTimes()
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
    assert totals.count([0, 1, 2], 1) == 1
    assert totals.count([0], 1) == 1
    assert (totals.drafted, totals.accepted) == ([2, 1, 1], [2, 0, 0])
    assert (totals.n_spans, totals.n_drafted, totals.n_accepted) == (2, 4, 2)


class Costly:
    """A drafter that takes a tenth of a step for each guess, all of which are right with one probability."""

    free, priors = False, (0.5,)

    def __init__(self, right: float, script: Sequence[int]) -> None:
        self.rng, self.right, self.script = random.Random(5), right, script
        self.seconds, self.n_asked = 0.0, 0

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        return 0

    def forget(self, seqs: Any) -> None: ...

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Proposal | None]:
        self.n_asked += 1
        [wish] = wishes
        tree, place = GuessTree(wish), -1
        while True:
            self.seconds += 0.0025
            right = self.rng.random() < self.right
            tree.add(place, [(self.script[len(wish.ids) + len(tree)] if right else -1, 0)])
            if not tree.next():
                return [tree.proposal()]
            place += 1


def beside_the_text(right: float, script: Sequence[int], steps: int = 150) -> tuple[float, Costly]:
    """Tokens a second ÷ those without guesses, for a text that goes on as the script says."""
    cost, drafter = CostModel(), Costly(right, script)
    speculator = Speculator(drafter, cost, lambda: drafter.seconds)
    request = Request("0", (1,), SamplingParams(max_tokens=None))
    seq = Running(SeqId(0), request, ids=list(script[:2]), limit=1 << 30, n_cached=1)
    seconds = 0.0
    for _ in range(steps):
        before = drafter.seconds
        guesses = speculator.propose([seq], 0, {}).get(seq.seq_id, Draft(())).ids
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
    """Of 150 steps the drafter is asked in the first only, until the text has been copied for a while."""
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


class Unsure:
    """Two guesses of each place: the first is right 4 times of 10, the second 3 of 10, and some of each are gone on from."""

    free, priors = False, (0.4, 0.3)

    def __init__(self, rng: random.Random, tree_s: float) -> None:
        self.rng, self.made, self.tree_s, self.seconds, self.n_trees, self.n_chains = rng, Draft(()), tree_s, 0.0, 0, 0

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        return 0

    def forget(self, seqs: Any) -> None: ...

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Proposal | None]:
        [wish] = wishes
        self.n_trees, self.n_chains = self.n_trees + (wish.width > 1), self.n_chains + (wish.width == 1)
        self.seconds += self.tree_s if wish.width > 1 else 0.0
        tree, places = GuessTree(wish), [-1]
        while places:
            for place in places:
                tree.add(place, [(self.rng.randrange(10_000), 0), (self.rng.randrange(10_000), 1)][: wish.width])
            places = tree.next(3)
        found = tree.proposal()
        assert found is not None
        self.made = Draft(found.ids, found.parents)
        return [found]


def path_of(draft: Draft, place: int) -> list[int]:
    """The ids of a guess and of those before it."""
    before = draft.parents[place] if draft.parents else place - 1
    return [*([] if before < 0 else path_of(draft, before)), draft.ids[place]]


def judged_trees(branch_s: float, width: int, tree_s: float = 0.0) -> tuple[float, int, int, Unsure]:
    """Tokens a second ÷ those without guesses, of the last half of the steps those with guesses and with branches, the drafter."""
    rng, cost, steps = random.Random(4), CostModel(), 400
    drafter = Unsure(rng, tree_s)
    speculator = Speculator(drafter, cost, lambda: drafter.seconds, width)
    request = Request("0", (1,), SamplingParams(max_tokens=None))
    seq = Running(SeqId(0), request, ids=[1, 2], limit=1 << 30, n_cached=1)
    seconds, n_guessed, n_branched = 0.0, 0, 0
    for step in range(steps):
        drafter.made = Draft(())
        draft = speculator.propose([seq], 0, {}).get(seq.seq_id, Draft(()))
        n = sum(parent != i - 1 for i, parent in enumerate(draft.parents))
        taken = machine(1 + len(draft.ids)) + n * branch_s
        cost.observe(Work(n_decode=1, n_draft=len(draft.ids), n_branches=n), taken)
        seconds += taken
        n_guessed += step >= steps // 2 and bool(draft.ids)
        n_branched += step >= steps // 2 and n > 0
        made, path = drafter.made, [-1]
        verified = {(tuple(path_of(draft, i))) for i in range(len(draft.ids))}
        while path:  # what comes is one of all guesses, whether it is verified or not
            after = [i for i, parent in enumerate(made.parents or range(-1, len(made.ids) - 1)) if parent == path[-1]]
            draw = rng.random()
            place = next((i for i, chance in zip(after, (0.4, 0.7), strict=False) if draw < chance), None)
            seq.ids.append(rng.randrange(1 << 20, 1 << 30) if place is None else made.ids[place])
            seq.n_cached += 1
            path = [] if place is None else [*path, place]
            if tuple(made.ids[i] for i in path[1:]) not in verified:
                break
    return (len(seq.ids) - 2) / (seconds + drafter.seconds) * machine(1), n_guessed, n_branched, drafter


def test_trees_are_verified_where_a_branch_costs_little() -> None:
    rate, n_guessed, n_branched, _ = judged_trees(0.0, 3)
    assert n_branched > 0.8 * n_guessed > 100
    assert rate > judged_trees(0.0, 1)[0] * 1.05


def test_chains_are_verified_where_it_costs_much() -> None:
    """What a branch takes is measured; it is tried again now and then."""
    rate, n_guessed, n_branched, _ = judged_trees(0.01, 3)
    assert n_guessed > 100
    assert n_branched < 0.3 * n_guessed
    assert rate > judged_trees(0.01, 1)[0] * 0.95


def test_no_trees_are_made_where_making_them_takes_long() -> None:
    """A fifth of a step for what gives a tenth of a token: one is made now and then, to see whether that is still so."""
    rate, _, _, drafter = judged_trees(0.0, 3, tree_s=0.005)
    assert 1 <= drafter.n_trees < 0.1 * drafter.n_chains
    assert rate > judged_trees(0.0, 1)[0] * 0.95
    assert judged_trees(0.0, 3, tree_s=0.001)[3].n_chains < 0.1 * judged_trees(0.0, 3, tree_s=0.001)[3].n_trees


class Vain(Judged):
    """A drafter that takes a hundredth of a step, and is wrong seven times of ten."""

    free, n_asked, asking_s = False, 0, 0.0

    def __init__(self, n: int) -> None:
        super().__init__(0.3, n)
        self.speculator = Speculator(self, self.cost, lambda: self.asking_s)

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Proposal | None]:
        self.n_asked += 1
        self.asking_s += 0.01 * machine(self.n)
        return super().propose(wishes)


def test_many_sequences_are_seldom_asked_for_the_few_guesses_that_fill_a_tile() -> None:
    """Fourteen of them leave room for two: 0.6 tokens in fourteen, for asking all."""
    vain = Vain(14)
    vain.run(300)
    assert vain.n_asked < 15  # 33 when all guesses were taken for right
