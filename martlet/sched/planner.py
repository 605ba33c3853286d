"""Who runs, and what of it in the next step (read `sched/admission.py` next).

A step is planned in three parts. Decoding sequences come first, a token each. The rest of the
step, in tokens and in time (`budget.py`), goes to prompts, in chunks. What is left admits waiting
sequences in the policy's order (`policy.py`), none overtaking another.

A sequence takes a page when it needs one. When none can be made free, the running sequence that
the policy puts last gives all its pages back and waits; the cache keeps them while there is room,
so that little is computed again. Three rules prevent thrashing. A sequence is admitted only if a
share of the expected growth of running ones is free (`page_reserve.py`). After a preemption none
is admitted until one has ended. A sequence that was preempted MAX_PREEMPTED times is not again:
it is admitted only when all pages that it can ever need fit beside others of its class.
"""

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from martlet.sched.admission import PageKeeper, common_ids
from martlet.sched.budget import StepBudget, stall_limit
from martlet.sched.cost import CostModel, Work
from martlet.sched.limits import SchedulerLimits
from martlet.sched.page_reserve import MAX_PREEMPTED, PageReserve
from martlet.sched.policy import Policy, SchedulerView
from martlet.sched.queue import WaitingQueue, rank
from martlet.types import Copy, Load, SeqId, Sequence, Span, StepPlan, StepResult

Drafts = Mapping[SeqId, tuple[int, ...]]  # guesses of the ids that come next
NO_DRAFTS: Drafts = MappingProxyType({})


@dataclass(slots=True)
class Sketch:
    """A plan that is being made."""

    spans: list[Span] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)  # that have their first span
    preempted: list[SeqId] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    work: Work = field(default_factory=Work)


class Planner:
    """The waiting and the running sequences. `live`, the scheduler's: all that have not ended."""

    def __init__(
        self,
        limits: SchedulerLimits,
        keeper: PageKeeper,
        policy: Policy,
        cost: CostModel,
        view: SchedulerView,
        live: Mapping[SeqId, Sequence],
    ) -> None:
        self._limits = limits
        self._keeper = keeper
        self._policy = policy
        self._cost = cost
        self._view = view
        self._live = live
        self._growth = PageReserve(keeper.pool)
        self._page_size = keeper.pool.page_size
        self._loading: dict[SeqId, tuple[Load, ...]] = {}  # of the plan that runs
        # held: waits until the other has computed so many ids
        self._until: dict[SeqId, tuple[SeqId, int]] = {}
        self._backing_off = False  # somebody was preempted and nobody has ended since
        self.waiting = WaitingQueue(policy, view, limits)
        self.running: list[Sequence] = []  # in the policy's order
        self.known: set[SeqId] = set()  # sequences that a plan has added and none has dropped
        self.n_preempted = 0

    def plan(self, now: float, drafts: Drafts) -> Sketch:
        """Choose the spans of the next step and allocate their pages."""
        sketch = Sketch()
        self._make_room(sketch)
        prompts = self._decodes(sketch, drafts)
        if prompts or self.waiting:
            budget = self._budget(sketch.work, prompts, now)
            # what is begun comes first
            for seq in sorted(prompts, key=lambda seq: seq.n_between_layers == 0):
                self._add_chunk(seq, budget, sketch)
            if self.waiting and not sketch.preempted:
                self._admit(budget, sketch)
            self._keeper.unpin()
        return sketch

    def leave(self, seq: Sequence) -> None:
        """Remove a sequence that ends, and take its pages."""
        if seq.pages:
            self.running.remove(seq)
            self._keeper.give_back(seq)
            self._growth.ended(seq)
            self._backing_off = False
        else:
            self.waiting.remove(seq)
            self._until.pop(seq.seq_id, None)

    def take_moves(self, plan: StepPlan, result: StepResult) -> None:
        """Take in what the second tier did: a sequence goes on after its last loaded page."""
        if not (plan.saves or plan.loads):
            return
        failed = set(result.failed_loads)
        self._keeper.failed(result.failed_loads, result.failed_saves)
        self._cost.observe_load(len(plan.loads) - len(failed), result.load_s)
        for seq_id, loads in self._loading.items():
            seq = self._live.get(seq_id)
            if seq is None:  # aborted meanwhile
                continue
            good = next((i for i, load in enumerate(loads) if load.slot in failed), len(loads))
            seq.n_cached += good * self._page_size
            if seq.n_preempted == 0:
                lost = (len(loads) - good) * self._page_size
                use = seq.cache_use
                seq.cache_use = replace(use, n_tokens=use.n_tokens - lost, n_loaded=use.n_loaded - lost)
            self._keeper.publish(seq)
        self._loading.clear()

    def clear(self) -> None:
        """Forget every sequence and all pages."""
        for places in (self.waiting, self.running, self.known, self._loading, self._until):
            places.clear()
        self._backing_off = False
        self._keeper.clear()

    # -- running sequences -------------------------------------------------------------------------
    def _make_room(self, sketch: Sketch) -> None:
        """Give each sequence its next position's page, taking from the last if need be."""
        size = self._page_size
        for seq in [seq for seq in self.running if seq.n_cached == len(seq.pages) * size]:
            while seq.pages:  # none: preempted meanwhile, perhaps for its own sake
                pages = self._keeper.take(1)
                if pages is not None:
                    seq.pages += pages
                    break
                self._preempt(self._victim(), sketch)

    def _victim(self) -> Sequence:
        """The last sequence by the policy that was not preempted too often."""
        if not self._policy.serves:
            return max(self.running, key=lambda seq: (seq.n_preempted < MAX_PREEMPTED, rank(seq)))
        key = self._policy.key
        return max(self.running, key=lambda seq: (seq.n_preempted < MAX_PREEMPTED, key(seq, self._view), seq.seq_id))

    def _preempt(self, seq: Sequence, sketch: Sketch) -> None:
        """Take the pages; the ids stay, and evicted positions are computed again later."""
        self.running.remove(seq)
        self._keeper.give_back(seq)
        seq.n_preempted += 1
        seq.n_between_layers = seq.n_layers = 0
        self.waiting.add(seq)
        self._growth.preempted()
        self._backing_off = True
        self.n_preempted += 1
        sketch.preempted.append(seq.seq_id)

    def _decodes(self, sketch: Sketch, drafts: Drafts) -> list[Sequence]:
        """Add spans of one token and its draft; return running sequences with more to compute."""
        prompts: list[Sequence] = []
        spans, reads = sketch.spans, 0
        for seq in self.running:
            start = seq.n_cached
            if len(seq.ids) - start != 1:
                prompts.append(seq)
            elif drafts and seq.seq_id in drafts and seq.seq_id in self.known:
                self._add_draft(seq, drafts[seq.seq_id], sketch)
                reads += start
            elif seq.n_sent == len(seq.pages):
                spans.append(Span(seq.seq_id, start, 1, (seq.ids[start],), (), 1))
                reads += start
            else:
                self._add_span(seq, 1, 1, sketch)
                reads += start
        sketch.work.n_decode = len(spans)
        sketch.work.decode_reads = reads + len(spans)
        return prompts

    def _add_draft(self, seq: Sequence, draft: tuple[int, ...], sketch: Sketch) -> None:
        """Add a span that verifies a draft, or as much of it as fits on pages that are free."""
        limits, size, end = self._limits, self._page_size, seq.n_cached + 1
        most = min(
            len(draft),
            seq.limit - len(seq.ids) - 1,  # a token is sampled after the last guess too
            limits.max_logits - limits.max_seqs - sketch.work.n_draft,
            limits.max_step_tokens - len(self.running) - sketch.work.n_draft - self._rows_between_layers(),
        )
        most = max(0, most)
        missing = self._keeper.pool.pages_for(end + most) - len(seq.pages)
        if missing > 0:
            seq.pages += self._keeper.take(missing) or ()
        count = max(0, min(most, len(seq.pages) * size - end))
        sketch.work.n_draft += count
        self._add_span(seq, 1 + count, 1 + count, sketch, draft[:count])

    def _rows_between_layers(self) -> int:
        """Rows of chunks that wait between two layers, and go on whatever else is in the step."""
        return max((seq.n_between_layers for seq in self.running), default=0)

    # -- prompts -----------------------------------------------------------------------------------
    def _budget(self, work: Work, prompts: list[Sequence], now: float) -> StepBudget:
        """What prompts may take of this step."""
        limits = self._limits
        budget = StepBudget(
            self._cost,
            self._page_size,
            limits.max_step_tokens - work.n_decode - work.n_draft,
            limits.max_logits - limits.max_seqs - work.n_draft,
        )
        if work.n_decode == 0:
            return budget
        if self._cost.wants_decode:
            budget.closed = True
            return budget
        targets = (seq.request.scheduling.itl_target_s for seq in self.running if len(seq.ids) - seq.n_cached == 1)
        itl = min((target for target in targets if target is not None), default=None)
        urgent = None
        for seq in prompts[:1]:
            target = seq.request.scheduling.ttft_target_s
            if target is not None and seq.n_generated == 0:
                left = self._cost.prefill_s(seq.n_cached, len(seq.ids) - seq.n_cached)
                urgent = left, seq.arrival_s + target - now
        crowd = (len(prompts) + len(self.waiting)) / work.n_decode
        budget.seconds = stall_limit(self._cost.decode_s(work), crowd, limits.stall_s, itl, urgent)
        return budget

    def _add_chunk(self, seq: Sequence, budget: StepBudget, sketch: Sketch) -> None:
        """Add the next span of a prompt, if the budget has anything left for it.

        Logits are needed for the rows from n_scored on, which are a span's last ones, and for the
        row of the last id.
        """
        start, remaining = seq.n_cached, len(seq.ids) - seq.n_cached
        # all but the last token was there already: as much work as a sequence that decodes
        if remaining == 1:
            budget.tokens -= 1
            sketch.work.n_decode += 1
            sketch.work.decode_reads += start + 1
            self._add_span(seq, 1, 1, sketch)
            return
        count = budget.chunk(start, remaining)
        if seq.n_between_layers or self._suits_layers(seq, budget, count, remaining):
            if not (budget.closed or budget.layered):
                self._add_layers(seq, budget, sketch)
            return
        if sketch.work.n_prefill == 0:
            count = max(count, budget.least(remaining))
        if count == 0:
            return
        if seq.n_scored < seq.n_prompt:
            first_scored = max(start, seq.n_scored)
            # One row more than `scores`: it is the one kept for the token of this sequence.
            count = min(count, first_scored + budget.scores + 1 - start)
            n_logits = max(0, start + count - first_scored)
        else:
            n_logits = 1 if count == remaining else 0
        budget.spend(start, count, n_logits)
        sketch.work.add_chunk(start, count)
        self._add_span(seq, count, n_logits, sketch)

    def _suits_layers(self, seq: Sequence, budget: StepBudget, count: int, remaining: int) -> bool:
        """Whether more rows through some of the layers suit a step better than `count` through all.

        One row reads as many keys and values as many rows do, so a step is no shorter than that.
        """
        rows = self._limits.layered_rows
        return count < rows <= min(remaining, budget.tokens) and seq.n_scored == seq.n_prompt

    def _add_layers(self, seq: Sequence, budget: StepBudget, sketch: Sketch) -> None:
        """Begin a chunk that goes through the layers in several steps, or take it further."""
        start, first, n_layers = seq.n_cached, seq.n_layers, self._limits.n_layers
        seq.n_between_layers = seq.n_between_layers or self._limits.layered_rows
        count = seq.n_between_layers
        n = budget.layers(start, count, n_layers, first)
        stop = None if first + n == n_layers else first + n
        seq.n_layers = 0 if stop is None else stop
        n_logits = 1 if stop is None and start + count == len(seq.ids) else 0
        budget.layered = True
        budget.spend(start, count, n_logits, n / n_layers)
        sketch.work.add_chunk(start, count, n / n_layers)
        self._add_span(seq, count, n_logits, sketch)
        sketch.spans[-1].first_layer, sketch.spans[-1].stop_layer = first, stop

    def _add_span(self, seq: Sequence, count: int, n_logits: int, sketch: Sketch, draft: tuple[int, ...] = ()) -> None:
        """Add a span, with the pages that no span has handed out."""
        start, new = seq.n_cached, tuple(seq.pages[seq.n_sent :])
        # of a draft's rows all but one are beyond the sequence's ids
        ids = (*seq.ids[start : start + count], *draft)
        sketch.spans.append(Span(seq.seq_id, start, count, ids, new, n_logits, seq.n_sent, len(draft)))
        seq.n_sent = len(seq.pages)
        if seq.seq_id not in self.known:
            self.known.add(seq.seq_id)
            sketch.started.append(seq)

    # -- waiting sequences -------------------------------------------------------------------------
    def _admit(self, budget: StepBudget, sketch: Sketch) -> None:
        """Admit waiting sequences in the policy's order while there is room."""
        if self._backing_off and self.running:
            return
        held: set[Sequence] = set()
        while len(self.running) < self._limits.max_seqs and budget.tokens > 0:
            seq = self.waiting.first(held)
            if seq is None:
                return
            parent = None if seq.parent is None else self._live.get(seq.parent)
            if parent is None and budget.is_spent and (sketch.work.n_prefill or budget.closed):
                return  # no time is left for its prompt
            if self._is_held(seq, parent):
                held.add(seq)
                continue
            reserve = self._growth.reserve(self.running, seq) if self.running else 0
            admission = self._keeper.admit(seq, parent if parent is not None and parent.pages else None, reserve)
            if admission is None:
                return
            self._start(seq)
            sketch.copies += admission.copies
            if admission.loads:
                sketch.loads += admission.loads
                self._loading[seq.seq_id] = admission.loads
            else:
                self._add_chunk(seq, budget, sketch)

    def _start(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        self._until.pop(seq.seq_id, None)
        if self._policy.changes:
            seq.key = self._policy.key(seq, self._view)
        insort(self.running, seq, key=rank)

    def _is_held(self, seq: Sequence, parent: Sequence | None) -> bool:
        """Whether to wait for another sequence that is about to compute a prefix of this one."""
        if parent is not None and parent.n_generated == 0 and parent.n_cached < parent.n_prompt:
            return True
        other_id, until = self._until.get(seq.seq_id, (None, 0))
        if other_id is None:
            shared = self._shared_work(seq)
            if shared is None:
                return False
            self._until[seq.seq_id] = shared
            return True
        other = self._live.get(other_id)
        if other is not None and other.pages and other.n_cached < until:
            return True
        del self._until[seq.seq_id]
        return self._is_held(seq, parent)

    def _shared_work(self, seq: Sequence) -> tuple[SeqId, int] | None:
        """The running sequence ahead that will compute most of the prefix, and up to where."""
        if self._keeper.cache is None or seq.n_scored < seq.n_prompt:
            return None
        size, best = self._page_size, None
        most = len(seq.ids) - 1
        for other in self.running:
            same = other.request.cache_salt == seq.request.cache_salt
            if not same or other.n_cached >= other.n_prompt or (rank(other) > rank(seq) and not self._policy.changes):
                continue
            common = min(common_ids(seq.ids, other.ids), most) // size * size
            if common > other.n_cached and (best is None or common > best[1]):
                best = other.seq_id, common
        if best is None or best[1] < self._keeper.match(seq).n_tokens + size:
            return None
        return best
