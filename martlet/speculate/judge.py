"""When guessing pays: how many tokens are drafted, for whom, in each step (read `speculate/ngram.py` first: who guesses).

A step of n sequences and r guesses takes T(n + r) seconds (`sched/cost.py` measures it as the engine runs) and gives n
tokens and one for each guess that is right. A guess is right if those before it are, so with probabilities p₁, p₂ … the
i-th is worth p₁ p₂ … pᵢ. The most valuable guesses of all sequences are taken, as many as make the most tokens a second:

    (n + sum of their values) / (T(n + r) + what making them takes)     against n / T(n) without

With many sequences one more row costs what it gives, and speculation ends by itself. How often guesses are right is
counted for each kind of guess, in all requests and in this one (`acceptance.py`). A free drafter (`Drafter.free`) always guesses, and each
guess is compared with what came, whether it was verified or not: so a text in which guesses are wrong costs nothing, and
one in which they become right is noticed at once. Beside a drafter that is not free the text itself guesses too, and where
it is right as often as that drafter, that one is not asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from martlet.metrics import SpeculationTotals
from martlet.sched.cost import CostModel, Work
from martlet.sched.planner import Drafts
from martlet.speculate.acceptance import AcceptanceRates
from martlet.speculate.draft_cost import DraftTimes
from martlet.speculate.ngram import Drafter, DraftRequest, NgramDrafter, Proposal
from martlet.types import SeqId, Sequence, StepPlan, StepResult

__all__ = ["MOST_DRAFTED", "Speculator"]

MOST_DRAFTED = 15  # in a step, of a sequence: 16 rows are the most that cost hardly more than one
MOST_JUDGED = 16  # sequences that decode, beyond which nothing is guessed unless asked for
LEAST_GAIN = 1.08  # times as many tokens a second, by the estimate
LEAST_VALUE = 0.02  # of a guess that is worth a thought
MOST_USUAL = 0.95  # no drafter is taken to be right more often
READ_SHARE, READ_S = 0.01, 3e-6  # of a step's time, for drafters to read; seconds that a token takes them
PROMPT_READ = 1024  # tokens of prompts in a step that computes them
FORGET = 0.99  # of what guesses take, for each step in which it was too long
NET_WEIGHT = 0.15  # of the newest step in the mean of what guesses of a drafter that is not free are worth
RETRY = 64  # tokens after which it is asked again at the latest, if that was nothing
FIRST_PRIOR, FIRST_WEIGHT = (
    0.6,
    0.1,
)  # how often its first guess of several is right: before any, and the newest's weight
TEXT_SHARE = 0.85  # of that, from which on the text's guess, which costs nothing, is taken


@dataclass(slots=True)
class _Case:
    """What is known of a sequence: its counts, and the guesses that were made when it had `n_ids` ids."""

    own: AcceptanceRates
    guesses: Proposal | None = None
    text: Proposal | None = None  # what the text itself guessed, beside a drafter that is not free
    n_ids: int = 0
    first: float = FIRST_PRIOR
    worth: float = 0.3  # tokens that a step with guesses gave more than it cost, of late
    n_vain: int = 0  # how often in a row that was found too little
    retry_at: int = 0  # nothing is asked before it has so many ids


@dataclass(slots=True)
class _Step:
    """The step that is being drafted for."""

    work: Work = field(default_factory=Work)
    decoding: list[Sequence] = field(default_factory=list)
    mixed: bool = False  # prompts are computed as well
    drafted: bool = False
    net: float = 0.0  # tokens that its guesses are expected to give, less those that their time would have given


class _Guess(NamedTuple):
    """A guess that may be verified: of a proposal for a sequence."""

    value: float  # the chance that it and all before it are right
    seq: SeqId


class Speculator:
    """Asks the drafter and judges what it says. `clock` measures what a drafter that is not free takes."""

    def __init__(self, drafter: Drafter, cost: CostModel, clock: Callable[[], float]) -> None:
        self.totals = SpeculationTotals()
        self._drafter = drafter
        self._cost = cost
        self._clock = clock
        self._text = None if drafter.free else NgramDrafter()
        self._text_kinds = len(drafter.priors)  # the text's come after the drafter's
        self._trust = AcceptanceRates(drafter.priors if self._text is None else (*drafter.priors, *self._text.priors))
        self._cases: dict[SeqId, _Case] = {}
        self._step = _Step()
        self._asking_s = 0.0  # of the step that runs
        self._times = DraftTimes()  # of a drafter that is not free

    def propose(self, running: Seq[Sequence], n_waiting: int, forced: Mapping[SeqId, tuple[int, ...]]) -> Drafts:
        """Guesses for sequences that decode; `forced` are ids that are next to certain."""
        self._asking_s = 0.0
        step = self._step = self._look(running, n_waiting)
        found = self._forced(step, forced) if forced else {}
        judged = self._is_worth_asking(step)
        asked = [
            seq
            for seq in step.decoding
            if (most := seq.request.params.draft_tokens) != 0 and (judged or most) and seq.seq_id not in found
        ]
        if step.mixed:
            self._read_prompts(running)
        if not asked:
            return self._chosen(found)
        if self._drafter.free:
            found |= self._from_free(asked, step, judged)
        else:
            found |= self._from_costly(asked, step, judged)
        return self._chosen(found)

    def committed(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Count what came of the guesses; `seconds` is what the step took, with making them."""
        if plan.dropped:
            self._drafter.forget(plan.dropped)
            if self._text is not None:
                self._text.forget(plan.dropped)
            for seq in plan.dropped:
                self._cases.pop(seq, None)
        if self._step.drafted:
            self._count(plan, result, seconds)

    @staticmethod
    def _forced(step: _Step, forced: Mapping[SeqId, tuple[int, ...]]) -> dict[SeqId, tuple[int, ...]]:
        """What a grammar forces, for those that want any guesses."""
        return {
            seq.seq_id: forced[seq.seq_id][:MOST_DRAFTED]
            for seq in step.decoding
            if seq.seq_id in forced and seq.request.params.draft_tokens != 0
        }

    # -- parts ----------------------------------------------------------------------------------------------------
    @property
    def _free(self) -> Drafter:
        """The one that always guesses."""
        return self._text or self._drafter

    @staticmethod
    def _look(running: Iterable[Sequence], n_waiting: int) -> _Step:
        step, reads = _Step(mixed=n_waiting > 0), 0
        for seq in running:
            if len(seq.ids) - seq.n_cached == 1:
                step.decoding.append(seq)
                reads += seq.n_cached
            else:
                step.mixed = True
        step.work.n_decode = len(step.decoding)
        step.work.decode_reads = reads + len(step.decoding)
        return step

    def _is_worth_asking(self, step: _Step, costly: bool = False) -> bool:
        """Whether guesses can pay in this step at all, making them included if it is costly: if all that fill a tile are right.

        Of a tile or more of sequences all are asked for the few guesses that there is room for, so as many of those as usual count.
        """
        n = step.work.n_decode
        if step.mixed or not 0 < n <= MOST_JUDGED:
            return False
        room = self._cost.row_tile - n % self._cost.row_tile
        taken_s = self._cost.rows_s(n + room) + (self._times.of(room) if costly else 0.0)
        right = float(room)
        if costly and n >= self._cost.row_tile:
            right *= sum(self._cases[seq.seq_id].first for seq in step.decoding if seq.seq_id in self._cases) / n
        return (n + right) / taken_s > LEAST_GAIN * n / self._cost.rows_s(n)

    def _is_worth_its_time(self, step: _Step) -> bool:
        """The same of a drafter that is not free."""
        pays = self._is_worth_asking(step, costly=True)
        if not pays:
            self._times.forget(FORGET)
        return pays

    def _read_prompts(self, running: Seq[Sequence]) -> None:
        """Let it read prompts while they are computed, which takes far longer."""
        left = PROMPT_READ
        for seq in running[:MOST_JUDGED]:
            if left > 0 and len(seq.ids) - seq.n_cached > 1 and seq.request.params.draft_tokens != 0:
                left -= self._free.read(seq.seq_id, seq.ids, left)

    def _chosen(self, found: dict[SeqId, tuple[int, ...]]) -> Drafts:
        found = {seq: draft for seq, draft in found.items() if draft}
        self._step.drafted = bool(found)
        return found

    def _from_free(self, asked: list[Sequence], step: _Step, judged: bool) -> dict[SeqId, tuple[int, ...]]:
        """Let it guess, and take what pays."""
        proposals = self._free_guesses(asked, step)
        for seq, proposal in zip(asked, proposals, strict=True):
            self._cases[seq.seq_id].guesses = proposal
        return self._paying(asked, proposals, step) if judged else self._exact(asked, proposals)

    def _free_guesses(self, asked: list[Sequence], step: _Step) -> list[Proposal | None]:
        """Let the free drafter read and guess, after learning from the last guesses."""
        left = max(16, int(READ_SHARE * self._cost.rows_s(step.work.n_decode) / READ_S))
        wishes = []
        for seq in asked:
            exact = seq.request.params.draft_tokens
            left -= self._free.read(seq.seq_id, seq.ids, len(seq.ids) if exact else max(0, left))
            self._learn(seq).n_ids = len(seq.ids)
            wishes.append(DraftRequest(seq.seq_id, seq.ids, exact or MOST_DRAFTED))
        return self._free.propose(wishes)

    @staticmethod
    def _exact(asked: list[Sequence], proposals: list[Proposal | None]) -> dict[SeqId, tuple[int, ...]]:
        return {
            seq.seq_id: proposal.ids
            for seq, proposal in zip(asked, proposals, strict=True)
            if proposal is not None and seq.request.params.draft_tokens
        }

    def _learn(self, seq: Sequence) -> _Case:
        """Compare the last guesses with what came since."""
        case = self._cases.get(seq.seq_id)
        if case is None:
            case = self._cases[seq.seq_id] = _Case(self._trust.own())
        if case.guesses is not None and not self._drafter.free and len(seq.ids) > case.n_ids:
            case.first += FIRST_WEIGHT * ((case.guesses.ids[0] == seq.ids[case.n_ids]) - case.first)
        for made in (case.guesses, case.text):
            if made is not None:
                for kind, right in made.compared(seq.ids[case.n_ids : case.n_ids + len(made.ids)]):
                    self._trust.learn(case.own, kind, right)
        case.guesses = case.text = None
        return case

    def _paying(
        self, asked: list[Sequence], proposals: list[Proposal | None], step: _Step
    ) -> dict[SeqId, tuple[int, ...]]:
        """Of all proposals the guesses that pay; what a request asks for exactly is taken as it is."""
        found = self._exact(asked, proposals)
        guesses: list[_Guess] = []
        for seq, proposal in zip(asked, proposals, strict=True):
            if proposal is not None and seq.seq_id not in found:
                guesses += self._valued(seq.seq_id, proposal)
        guesses.sort(
            key=attrgetter("value"), reverse=True
        )  # what one comes after is never worth less, and stays before it
        taken = Counter(guess.seq for guess in self._best_of(step.work.n_decode, guesses))
        for seq, proposal in zip(asked, proposals, strict=True):
            if proposal is not None and seq.seq_id in taken:
                found[seq.seq_id] = proposal.ids[: taken[seq.seq_id]]
        return found

    def _valued(self, seq: SeqId, proposal: Proposal) -> Iterator[_Guess]:
        """The guesses of a proposal that are worth a thought."""
        own = self._cases[seq].own
        for value in proposal.values(self._trust.share(own, kind) for kind in proposal.kinds):
            if value < LEAST_VALUE:
                return
            yield _Guess(value, seq)

    def _best_of(self, n: int, guesses: list[_Guess]) -> list[_Guess]:
        """Those that make the most tokens a second, of the most valuable first.

        None are taken unless they make LEAST_GAIN times as many as without.
        """
        rows_s, plain_s, gain, right, count = self._cost.rows_s, self._cost.rows_s(n), 0.0, 0.0, 0
        best = LEAST_GAIN * n / (plain_s + self._asking_s)
        for number, guess in enumerate(guesses, 1):
            gain += guess.value
            rate = (n + gain) / (rows_s(n + number) + self._asking_s)
            if rate > best:
                best, count, right = rate, number, gain
        lost_s = (n + right) / best - plain_s if count else self._asking_s
        self._step.net = right - lost_s * n / plain_s
        return guesses[:count]

    def _from_costly(self, asked: list[Sequence], step: _Step, judged: bool) -> dict[SeqId, tuple[int, ...]]:
        """Have guesses made where the text has none as good, each as long as it is likely enough to be worth its time."""
        proposals = self._texts_own(asked, step)
        wishes, places, worth = [], [], judged and self._is_worth_its_time(step)
        for place, seq in enumerate(asked):
            case, exact, text = self._cases[seq.seq_id], seq.request.params.draft_tokens, proposals[place]
            most = min(exact or MOST_DRAFTED, seq.limit - len(seq.ids) - 1)
            if exact is None:
                good = text is not None and self._trust.share(case.own, text.kinds[0]) >= TEXT_SHARE * case.first
                if good or not worth or len(seq.ids) < case.retry_at:
                    continue
            proposals[place] = None
            if most >= 1:
                self._drafter.read(seq.seq_id, seq.ids, len(seq.ids))
                share = partial(self._trust.share, case.own)
                paying, least = (most, 0.0) if exact else self._plan(step.work.n_decode, case.first)
                wishes.append(DraftRequest(seq.seq_id, seq.ids, min(most, paying), share, least))
                places.append(place)
        if wishes:
            for place, proposal in zip(places, self._ask(wishes), strict=True):
                proposals[place] = self._cases[asked[place].seq_id].guesses = proposal
        found = self._paying(asked, proposals, step) if judged else self._exact(asked, proposals)
        self._consider(wishes, step.net)
        return found

    def _texts_own(self, asked: list[Sequence], step: _Step) -> list[Proposal | None]:
        """What the text itself guesses."""
        found = self._free_guesses(asked, step)
        for place, (seq, proposal) in enumerate(zip(asked, found, strict=True)):
            if proposal is not None:
                kinds = tuple(kind + self._text_kinds for kind in proposal.kinds)
                found[place] = self._cases[seq.seq_id].text = Proposal(proposal.ids, kinds)
        return found

    def _ask(self, wishes: list[DraftRequest]) -> list[Proposal | None]:
        """Have the drafter guess, and learn how long a guess takes."""
        start = self._clock()
        proposals = self._drafter.propose(wishes)
        self._asking_s = self._clock() - start
        self._times.learn(self._asking_s, max(1 if made is None else len(made.ids) for made in proposals))
        return proposals

    def _consider(self, wishes: list[DraftRequest], net: float) -> None:
        """Ask no more for a while where the drafter's time was not worth it of late."""
        for wish in wishes:
            case = self._cases[wish.seq]
            case.worth += NET_WEIGHT * (net - case.worth)
            if case.worth >= 0.0:
                case.n_vain = 0
            else:
                case.retry_at = len(wish.ids) + min(RETRY, 8 << case.n_vain)
                case.n_vain, case.worth = case.n_vain + 1, 0.0

    def _plan(self, n: int, usual: float) -> tuple[int, float]:
        """How many guesses to make at most, and the chance from which on one is worth going on from, if guesses are right as usual.

        One more takes its own time and a row's; what it gives has to be as much as is made in that time otherwise: by as
        many guesses of each sequence as make the most tokens a second.
        """
        rows_s, usual = self._cost.rows_s, min(max(usual, LEAST_VALUE), MOST_USUAL)
        plain_s, right, value = rows_s(n), 1.0, 1.0
        best, row_s, most = n / plain_s, rows_s(n + 1) - plain_s, self._cost.row_tile - 1
        for count in range(1, MOST_DRAFTED + 1):
            value *= usual
            right += value
            taken_s = rows_s(n + n * count)
            rate = n * right / (taken_s + self._times.of(count))
            if rate > best:
                best, row_s, most = rate, (taken_s - plain_s) / (n * count), max(most, count)
            elif count >= self._cost.row_tile:
                break
        return most, min(1.0, (self._times.more_s / n + row_s) * best / usual)

    def _count(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        totals, right, n_drafted = self.totals, 0, 0
        came = {sampled.seq: len(sampled.more) for sampled in result.sampled}
        for span in plan.spans:
            if span.draft:
                n_drafted += len(span.draft)
                right += totals.count(len(span.draft), came.get(span.seq, 0))
        work = self._step.work
        if n_drafted and not self._step.mixed:
            plain_s = self._cost.rows_s(work.n_decode)
            totals.n_steps += 1
            totals.gain_s += right * plain_s / work.n_decode - (seconds - plain_s)
