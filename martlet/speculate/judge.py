"""When drafting pays: how many tokens are drafted, for which sequences, in each step.

Read `drafter.py` next.

A step of n sequences and r guesses takes T(n + r) seconds (`sched/cost.py` measures T as the engine
runs). It gives n tokens and one more for each guess that is right. A guess is right only if all
before it are, so with probabilities p₁, p₂ … the i-th is worth p₁ p₂ … pᵢ. Of all sequences'
guesses the most valuable are taken, as many as give the most tokens per second:

    (n + sum of their values) / (T(n + r) + time of drafting)     against     n / T(n) without

With many sequences a further row costs what it gives, so speculation ends by itself. Acceptance is
counted by class of guess, in all requests and in each (`acceptance.py`). A costless drafter always
drafts, and each guess is compared with the actual token, verified or not. So a text whose guesses
are wrong costs nothing, and a text whose guesses become right is noticed at once. Beside a costly
drafter the text drafts too; where it is right as often, the costly drafter is not asked.
"""

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
from martlet.speculate.acceptance import AcceptanceRates, DraftTimes
from martlet.speculate.drafter import Draft, Drafter, DraftRequest
from martlet.speculate.ngram import NgramDrafter
from martlet.types import SeqId, Sequence, StepPlan, StepResult

# Tuned on SmolLM2-135M and Qwen2.5-Coder-1.5B, two threads, AVX-512 VNNI (docs/LOG.md).
# guesses of a sequence in a step: up to 16 rows a step costs hardly more than one
MOST_DRAFTED = 15
MOST_JUDGED = 16  # decoding sequences beyond which only explicit draft_tokens are honoured
LEAST_GAIN = 1.08  # expected tokens per second, ÷ the rate without drafts
LEAST_VALUE = 0.02  # least probability of a guess that is considered
MOST_USUAL = 0.95  # highest first acceptance that a drafter is credited with
READ_SHARE, READ_S = 0.01, 3e-6  # share of a step in which drafters read; seconds per token read
PROMPT_READ = 1024  # tokens of prompts that drafters read in a step that computes prompts
FORGET = 0.99  # factor on drafting times, for each step in which they were too long
NET_WEIGHT = 0.15  # of the newest step in a sequence's mean net gain
RETRY = 64  # tokens after which a costly drafter that did not pay is asked again, at the latest
FIRST_PRIOR, FIRST_WEIGHT = 0.6, 0.1  # acceptance of a draft's first guess: prior, newest's weight
TEXT_SHARE = 0.85  # of that acceptance, from which the text's costless draft is preferred


@dataclass(slots=True)
class _Case:
    """What is known of a sequence: its rates, and the drafts made when it had `n_ids` ids."""

    own: AcceptanceRates
    draft: Draft | None = None
    text: Draft | None = None  # the text's own draft, beside a costly drafter's
    n_ids: int = 0
    first: float = FIRST_PRIOR
    worth: float = 0.3  # mean net gain of its recent drafts, in tokens per step
    n_vain: int = 0  # how often in a row the gain was negative
    retry_at: int = 0  # number of ids before which no costly draft is requested


@dataclass(slots=True)
class _Step:
    """The step in the making."""

    work: Work = field(default_factory=Work)
    decoding: list[Sequence] = field(default_factory=list)
    mixed: bool = False  # it computes prompts too
    drafted: bool = False
    net: float = 0.0  # tokens expected of its drafts, less what their time would have given


class _Guess(NamedTuple):
    """A guess that may be verified."""

    value: float  # probability that it and all before it are right
    seq: SeqId


class Speculator:
    """Requests drafts and judges them; `clock` gives seconds, to time a costly drafter."""

    def __init__(self, drafter: Drafter, cost: CostModel, clock: Callable[[], float]) -> None:
        self.totals = SpeculationTotals()
        self._drafter = drafter
        self._cost = cost
        self._clock = clock
        self._text = None if drafter.costless else NgramDrafter()
        self._n_classes = len(drafter.priors)  # the text's classes come after the drafter's
        self._rates = AcceptanceRates(drafter.priors if self._text is None else (*drafter.priors, *self._text.priors))
        self._cases: dict[SeqId, _Case] = {}
        self._step = _Step()
        self._drafting_s = 0.0  # of this step
        self._times = DraftTimes()  # of a costly drafter

    def propose(self, running: Seq[Sequence], n_waiting: int, forced: Mapping[SeqId, tuple[int, ...]]) -> Drafts:
        """Drafts for decoding sequences; `forced` are ids that a grammar makes next to certain."""
        self._drafting_s = 0.0
        step = self._step = self._look(running, n_waiting)
        drafts = self._forced(step, forced) if forced else {}
        judged = self._is_worth_asking(step)
        asked = [
            seq
            for seq in step.decoding
            if (most := seq.request.params.draft_tokens) != 0 and (judged or most) and seq.seq_id not in drafts
        ]
        if step.mixed:
            self._read_prompts(running)
        if not asked:
            return self._chosen(drafts)
        draft = self._from_costless if self._drafter.costless else self._from_costly
        return self._chosen(drafts | draft(asked, step, judged))

    def committed(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Count accepted guesses; `seconds` is the step's time, drafting included."""
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
        """Drafts of forced ids, for sequences that accept drafts."""
        return {
            seq.seq_id: forced[seq.seq_id][:MOST_DRAFTED]
            for seq in step.decoding
            if seq.seq_id in forced and seq.request.params.draft_tokens != 0
        }

    # -- parts -------------------------------------------------------------------------------------
    @property
    def _costless(self) -> Drafter:
        """The drafter that always drafts."""
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
        """Best case: would filling the kernel's row tile with correct guesses gain LEAST_GAIN?

        Counts drafting time for a costly drafter. With a full tile of sequences, expects the usual
        acceptance instead of 1.
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
        """The same for a costly drafter, whose times fade while they are too long."""
        pays = self._is_worth_asking(step, costly=True)
        if not pays:
            self._times.forget(FORGET)
        return pays

    def _read_prompts(self, running: Seq[Sequence]) -> None:
        """Let the costless drafter read prompts while they are computed, which takes far longer."""
        left = PROMPT_READ
        for seq in running[:MOST_JUDGED]:
            if left > 0 and len(seq.ids) - seq.n_cached > 1 and seq.request.params.draft_tokens != 0:
                left -= self._costless.read(seq.seq_id, seq.ids, left)

    def _chosen(self, drafts: dict[SeqId, tuple[int, ...]]) -> Drafts:
        drafts = {seq: draft for seq, draft in drafts.items() if draft}
        self._step.drafted = bool(drafts)
        return drafts

    def _from_costless(self, asked: list[Sequence], step: _Step, judged: bool) -> dict[SeqId, tuple[int, ...]]:
        """Draft for all, and take the guesses that pay."""
        drafts = self._costless_drafts(asked, step)
        for seq, draft in zip(asked, drafts, strict=True):
            self._cases[seq.seq_id].draft = draft
        return self._paying(asked, drafts, step) if judged else self._exact(asked, drafts)

    def _costless_drafts(self, asked: list[Sequence], step: _Step) -> list[Draft | None]:
        """Learn from the last drafts, then let the costless drafter read and draft."""
        left = max(16, int(READ_SHARE * self._cost.rows_s(step.work.n_decode) / READ_S))
        requests = []
        for seq in asked:
            exact = seq.request.params.draft_tokens
            left -= self._costless.read(seq.seq_id, seq.ids, len(seq.ids) if exact else max(0, left))
            self._learn(seq).n_ids = len(seq.ids)
            requests.append(DraftRequest(seq.seq_id, seq.ids, exact or MOST_DRAFTED))
        return self._costless.propose(requests)

    @staticmethod
    def _exact(asked: list[Sequence], drafts: list[Draft | None]) -> dict[SeqId, tuple[int, ...]]:
        """The drafts of requests that set draft_tokens: they are not judged."""
        return {
            seq.seq_id: draft.ids
            for seq, draft in zip(asked, drafts, strict=True)
            if draft is not None and seq.request.params.draft_tokens
        }

    def _learn(self, seq: Sequence) -> _Case:
        """Compare the last drafts with the tokens since."""
        case = self._cases.get(seq.seq_id)
        if case is None:
            case = self._cases[seq.seq_id] = _Case(self._rates.own())
        if case.draft is not None and not self._drafter.costless and len(seq.ids) > case.n_ids:
            case.first += FIRST_WEIGHT * ((case.draft.ids[0] == seq.ids[case.n_ids]) - case.first)
        for draft in (case.draft, case.text):
            if draft is not None:
                for class_, right in draft.compared(seq.ids[case.n_ids : case.n_ids + len(draft.ids)]):
                    self._rates.learn(case.own, class_, right)
        case.draft = case.text = None
        return case

    def _paying(self, asked: list[Sequence], drafts: list[Draft | None], step: _Step) -> dict[SeqId, tuple[int, ...]]:
        """The guesses of all drafts that pay, and all of a request that sets draft_tokens."""
        chosen = self._exact(asked, drafts)
        guesses: list[_Guess] = []
        for seq, draft in zip(asked, drafts, strict=True):
            if draft is not None and seq.seq_id not in chosen:
                guesses += self._valued(seq.seq_id, draft)
        # stable: a draft's guesses have falling values, so each stays behind those before it
        guesses.sort(key=attrgetter("value"), reverse=True)
        taken = Counter(guess.seq for guess in self._best_of(step.work.n_decode, guesses))
        for seq, draft in zip(asked, drafts, strict=True):
            if draft is not None and seq.seq_id in taken:
                chosen[seq.seq_id] = draft.ids[: taken[seq.seq_id]]
        return chosen

    def _valued(self, seq: SeqId, draft: Draft) -> Iterator[_Guess]:
        """The guesses of a draft whose value is at least LEAST_VALUE."""
        own = self._cases[seq].own
        for value in draft.values(self._rates.rate(own, class_) for class_ in draft.classes):
            if value < LEAST_VALUE:
                return
            yield _Guess(value, seq)

    def _best_of(self, n: int, guesses: list[_Guess]) -> list[_Guess]:
        """The first of `guesses`, sorted by value, that give the most tokens per second.

        None are taken unless they give LEAST_GAIN times the rate without.
        """
        rows_s, plain_s, gain, right, count = self._cost.rows_s, self._cost.rows_s(n), 0.0, 0.0, 0
        best = LEAST_GAIN * n / (plain_s + self._drafting_s)
        for number, guess in enumerate(guesses, 1):
            gain += guess.value
            rate = (n + gain) / (rows_s(n + number) + self._drafting_s)
            if rate > best:
                best, count, right = rate, number, gain
        lost_s = (n + right) / best - plain_s if count else self._drafting_s
        self._step.net = right - lost_s * n / plain_s
        return guesses[:count]

    def _from_costly(self, asked: list[Sequence], step: _Step, judged: bool) -> dict[SeqId, tuple[int, ...]]:
        """Draft where the text has no draft as good, while a guess is likely worth its time."""
        drafts = self._text_drafts(asked, step)
        requests, indices, worth = [], [], judged and self._is_worth_its_time(step)
        for index, seq in enumerate(asked):
            case, exact, text = self._cases[seq.seq_id], seq.request.params.draft_tokens, drafts[index]
            most = min(exact or MOST_DRAFTED, seq.limit - len(seq.ids) - 1)
            if exact is None:
                good = text is not None and self._rates.rate(case.own, text.classes[0]) >= TEXT_SHARE * case.first
                if good or not worth or len(seq.ids) < case.retry_at:
                    continue
            drafts[index] = None
            if most >= 1:
                self._drafter.read(seq.seq_id, seq.ids, len(seq.ids))
                rate = partial(self._rates.rate, case.own)
                paying, least = (most, 0.0) if exact else self._plan(step.work.n_decode, case.first)
                requests.append(DraftRequest(seq.seq_id, seq.ids, min(most, paying), rate, least))
                indices.append(index)
        if requests:
            for index, draft in zip(indices, self._request(requests), strict=True):
                drafts[index] = self._cases[asked[index].seq_id].draft = draft
        chosen = self._paying(asked, drafts, step) if judged else self._exact(asked, drafts)
        self._consider(requests, step.net)
        return chosen

    def _text_drafts(self, asked: list[Sequence], step: _Step) -> list[Draft | None]:
        """The text's own drafts, their classes after the costly drafter's."""
        drafts = self._costless_drafts(asked, step)
        for index, (seq, draft) in enumerate(zip(asked, drafts, strict=True)):
            if draft is not None:
                classes = tuple(class_ + self._n_classes for class_ in draft.classes)
                drafts[index] = self._cases[seq.seq_id].text = Draft(draft.ids, classes)
        return drafts

    def _request(self, requests: list[DraftRequest]) -> list[Draft | None]:
        """Request drafts, and learn how long drafting takes."""
        start = self._clock()
        drafts = self._drafter.propose(requests)
        self._drafting_s = self._clock() - start
        self._times.learn(self._drafting_s, max(1 if draft is None else len(draft.ids) for draft in drafts))
        return drafts

    def _consider(self, requests: list[DraftRequest], net: float) -> None:
        """Pause costly drafts for sequences whose recent drafts did not pay, ever longer."""
        for request in requests:
            case = self._cases[request.seq]
            case.worth += NET_WEIGHT * (net - case.worth)
            if case.worth >= 0.0:
                case.n_vain = 0
            else:
                case.retry_at = len(request.ids) + min(RETRY, 8 << case.n_vain)
                case.n_vain, case.worth = case.n_vain + 1, 0.0

    def _plan(self, n: int, usual: float) -> tuple[int, float]:
        """The longest draft that pays at the `usual` acceptance, and the least probability to
        extend it.

        A further guess takes its own time and a row's. It must give as much as that time gives
        otherwise: with the draft length that makes the most tokens per second.
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
        n_accepted = {sampled.seq: len(sampled.more) for sampled in result.sampled}
        for span in plan.spans:
            if span.n_draft:
                n_drafted += span.n_draft
                right += totals.count(span.n_draft, n_accepted.get(span.seq, 0))
        work = self._step.work
        if n_drafted and not self._step.mixed:
            plain_s = self._cost.rows_s(work.n_decode)
            totals.n_steps += 1
            totals.gain_s += right * plain_s / work.n_decode - (seconds - plain_s)
