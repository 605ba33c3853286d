"""The scheduler: requests in, plans out, results in, events out (read `sched/planner.py` next).

It owns every sequence from `add` to exactly one terminal event. `plan` says what the next step
computes, `commit` takes in what the step found.

It knows integers only: no arrays, no text, and of the clock what it is told.
"""

from collections.abc import Iterator
from functools import partial

from martlet.cache.pages import PagePool
from martlet.cache.radix import RadixCache
from martlet.errors import CapacityError, RequestError
from martlet.sched.admission import PageKeeper, common_ids
from martlet.sched.budget import WriteBehind
from martlet.sched.cost import CostModel, Work
from martlet.sched.limits import SchedulerLimits
from martlet.sched.planner import NO_DRAFTS, Drafts, Planner
from martlet.sched.policy import DECODE_WEIGHT, POLICIES, Policy
from martlet.sched.queue import QUEUE_TIMEOUT, rank
from martlet.types import (
    Added,
    Event,
    FinishReason,
    PageId,
    Request,
    Sampled,
    SeqId,
    Sequence,
    StepPlan,
    StepResult,
    stop_ids,
)

__all__ = ["Scheduler", "SchedulerLimits"]

MOST_TENANTS = 4096  # whose service is remembered while they are away


class Scheduler:
    """Requests and their sequences. Times are in seconds, of a clock that only goes forward."""

    def __init__(
        self,
        pages: PagePool,
        limits: SchedulerLimits,
        eos_ids: frozenset[int] = frozenset(),
        *,
        cache: RadixCache | None = None,
        policy: Policy = POLICIES["fcfs"],
        share_granularity: int = 1,
        row_tile: int = 4,
    ) -> None:
        self._pages = pages
        self._limits = limits
        self._eos_ids = eos_ids
        self._policy = policy
        self._live: dict[SeqId, Sequence] = {}
        self._requests: dict[str, list[Sequence]] = {}
        self.cache = cache
        self.cost = CostModel(row_tile)
        self._keeper = PageKeeper(pages, cache, self.cost, share_granularity)
        self._planner = Planner(limits, self._keeper, policy, self.cost, self, self._live)
        self._dropped: list[SeqId] = []
        self._service: dict[str, float] = {}  # tokens computed for each tenant, weighted
        self._pending: list[Event] = []  # ends that a plan has brought
        self._planned: tuple[float, Work] = (0.0, Work())
        self.started: list[Sequence] = []  # that the newest plan has added
        self._write_behind = WriteBehind()
        self._next_seq = 0
        self._step = 0

    # -- requests ----------------------------------------------------------------------------------
    def add(self, request: Request, now: float = 0.0) -> None:
        """Accept a request: its n sequences wait for their turn.

        Raises RequestError for one that can never run and CapacityError where the queue is full;
        nothing is kept then.
        """
        if request.request_id in self._requests:
            raise RequestError(
                f"A request with the id {request.request_id!r} is still running; choose another.", param="request_id"
            )
        limit = self.limit_of(request)
        params = request.params
        self._planner.waiting.check_room(params.n, params.n * len(request.prompt_ids))
        ends = stop_ids(params, self._eos_ids)
        self._join(request.scheduling.tenant)
        sequences: list[Sequence] = []
        for index in range(params.n):
            seq = Sequence(SeqId(self._next_seq), request, index, list(request.prompt_ids), limit, ends)
            if params.prompt_logprobs is None or index > 0:
                # the n sequences share their prompt: the first one reports it
                seq.n_scored = seq.n_prompt
            seq.arrival_s = request.arrival_s or now
            if index > 0:  # they wait until the first one has computed the prompt
                seq.parent, seq.n_common = sequences[0].seq_id, seq.n_prompt
            self._next_seq += 1
            sequences.append(seq)
        for seq in sequences:
            self._live[seq.seq_id] = seq
            self._planner.waiting.add(seq)
        self._planner.waiting.watch(sequences[0])
        self._requests[request.request_id] = sequences

    def fork(self, request: Request, parent: tuple[str, int], now: float = 0.0) -> None:
        """Accept a request that goes on from a sequence that lives: (request id, index).

        It shares the parent's full pages, as far as the ids are the same and computed, and gets a
        copy of the page that is so in part; if the parent has ended by the time that it is
        admitted, what the prefix cache has kept of it.
        """
        source = next((seq for seq in self._requests.get(parent[0], ()) if seq.index == parent[1]), None)
        self.add(request, now)
        if source is not None and source.request.cache_salt == request.cache_salt:
            for seq in self._requests[request.request_id]:
                seq.parent, seq.n_common = source.seq_id, common_ids(source.ids, seq.ids)

    def limit_of(self, request: Request) -> int:
        """The number of ids at which the sequences end; raises RequestError if it can never run."""
        n_prompt, max_tokens = len(request.prompt_ids), request.params.max_tokens
        context = self._limits.context
        if n_prompt == 0:
            raise RequestError("The prompt has no tokens; give at least one.", param="prompt")
        least = n_prompt if max_tokens == 0 else n_prompt + 1
        if least > context:
            raise RequestError(
                f"The prompt has {n_prompt:,} tokens and the context holds {context:,}, of which the answer needs at"
                f" least {least - n_prompt}: shorten the prompt by {least - context:,} tokens or raise max_context.",
                param="prompt",
                code="context_length_exceeded",
            )
        limit = context if max_tokens is None else min(context, n_prompt + max_tokens)
        need, have = self._pages.pages_for(limit), self._pages.n_pages
        if need > have:
            raise RequestError(
                f"The request needs {need:,} pages of KV memory ({n_prompt:,} prompt tokens, up to {limit:,} in all)"
                f" and there are {have:,}: lower max_tokens, shorten the prompt, or raise kv_memory.",
                param="max_tokens",
                code="kv_memory_exceeded",
            )
        return limit

    def adapters(self) -> set[str]:
        """The adapters of all sequences that live."""
        return {seq.request.adapter for seq in self._live.values() if seq.request.adapter}

    def abort(self, request_id: str) -> list[Event]:
        """End all sequences of a request; an unknown id, perhaps just ended, gives no events."""
        return [self._finish(seq, FinishReason.ABORT) for seq in list(self._requests.get(request_id, ()))]

    def stop(self, request_id: str, index: int, reason: str) -> list[Event]:
        """End one sequence because its text has reached the stop string `reason`."""
        return [
            self._finish(seq, FinishReason.STOP, stop_reason=reason)
            for seq in list(self._requests.get(request_id, ()))
            if seq.index == index
        ]

    def clear(self, error: str | None = None) -> list[Event]:
        """End every request, with `error` if that is why, whatever a failed step left behind."""
        ended = list(self._live.values())
        self._dropped += self._planner.known
        self._live.clear()
        self._requests.clear()
        self._planner.clear()
        finish = FinishReason.ABORT if error is None else FinishReason.ERROR
        pending, self._pending = self._pending, []
        return pending + [Event(seq.request.request_id, seq.index, finish=finish, error=error) for seq in ended]

    @property
    def running(self) -> list[Sequence]:
        """The sequences that hold pages, in the policy's order."""
        return self._planner.running

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._live)

    @property
    def waiting(self) -> Iterator[Sequence]:
        """Those that wait, in the policy's order."""
        return iter(self._planner.waiting)

    @property
    def n_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._planner.running)

    @property
    def n_waiting(self) -> int:
        """Sequences that wait for their turn."""
        return len(self._planner.waiting)

    @property
    def n_preempted(self) -> int:
        """How often a sequence lost its pages."""
        return self._planner.n_preempted

    def borrow(self, n_tokens: int) -> tuple[PageId, ...]:
        """Pages for so many positions, for use between two steps; to be given to the pool's `free`.

        Raises RequestError for more than the context and CapacityError where too few are free.
        """
        if n_tokens > self._limits.context:
            raise RequestError(
                f"The prompt has {n_tokens:,} tokens and the context holds {self._limits.context:,}: shorten the prompt"
                f" by {n_tokens - self._limits.context:,} tokens or raise max_context.",
                param="prompt",
                code="context_length_exceeded",
            )
        need = self._pages.pages_for(n_tokens)
        pages = self._keeper.take(need, save=False)
        if pages is None:
            raise CapacityError(
                f"The prompt of {n_tokens:,} tokens needs {need:,} pages of KV memory and {self._keeper.n_available:,} of"
                f" {self._pages.n_pages:,} are free: shorten it, wait for running requests, or raise max_context."
            )
        return pages

    @property
    def n_free(self) -> int:
        """Pages that no sequence uses: free, or kept by the prefix cache until needed."""
        return self._keeper.n_available

    # -- a step ------------------------------------------------------------------------------------
    def plan(self, now: float = 0.0, drafts: Drafts = NO_DRAFTS) -> StepPlan:
        """Choose the spans of the next step and allocate their pages; `now`, the time, only grows.

        `drafts` are guesses of what comes next in sequences that decode; how much of them fits is
        decided here.
        """
        self._expire(now)
        sketch = self._planner.plan(now, drafts)
        self._planned = now, sketch.work
        self.started = sketch.started
        self._step += 1
        return StepPlan(
            self._step,
            tuple(sketch.spans),
            tuple([Added(seq.seq_id, seq.request.request_id, seq.index, seq.request.adapter) for seq in self.started]),
            tuple(self._dropped),
            tuple(sketch.preempted),
            self._keeper.saves(self._write_behind.most),
            tuple(sketch.loads),
            tuple(sketch.copies),
        )

    def flush_plan(self, most: int) -> StepPlan | None:
        """A plan that only writes up to `most` pages to the second tier, for idle moments.

        None if nothing is left to be written.
        """
        saves = self._keeper.saves(most)
        if not saves:
            return None
        self._step, self.started = self._step + 1, []
        return StepPlan(self._step, (), dropped=tuple(self._dropped), saves=saves)

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[Event]:
        """Take in what a step computed: advance its sequences, end those that are done."""
        # only now: of a step that failed nobody knows what it still did
        del self._dropped[: len(plan.dropped)]
        self._planner.take_moves(plan, result)
        self._write_behind.saved(len(plan.saves), result.save_s)
        live, publish = self._live, self.cache is not None
        for span in plan.spans:
            seq = live.get(span.seq)
            if seq is not None and span.stop_layer is None:  # None: aborted while the step ran
                seq.n_between_layers = 0
                # what is right of a draft is taken in with its tokens
                count = span.count - span.n_draft
                seq.n_cached = span.start + count
                if publish and (count > 1 or seq.n_cached == seq.n_prompt):
                    self._keeper.publish(seq)
        if self._policy.serves:
            self._serve(plan)
        self._measure(plan, now - result.load_s - result.save_s)
        events, self._pending = self._pending, []
        for sampled in result.sampled:
            seq = live.get(sampled.seq)
            if seq is not None:
                events.append(self._accept(seq, sampled))
                if sampled.more:
                    events += self._accept_more(seq, sampled)
        return events

    def check(self) -> None:
        """Assert the invariants: pages' owners, sequences in one place, pages of the cached."""
        owners = [seq.pages for seq in self._live.values()]
        if self.cache is not None:
            self.cache.check()
            owners.append(self.cache.pages())
        self._pages.check(owners)
        waiting, running = self._planner.waiting, self._planner.running
        places = [*waiting, *running]
        assert sorted(seq.seq_id for seq in places) == sorted(self._live), "a sequence is lost or in two places"
        assert sorted(seq.seq_id for seqs in self._requests.values() for seq in seqs) == sorted(self._live)
        assert len(running) <= self._limits.max_seqs
        assert all(not seq.pages and seq.n_cached == 0 for seq in waiting), "a waiting sequence holds pages"
        assert sum(seq.n_prompt for seq in waiting) == waiting.n_tokens
        for seq in running:
            assert seq.n_cached < len(seq.ids) <= seq.limit or seq.n_cached == len(seq.ids) == seq.limit
            assert len(seq.pages) * self._pages.page_size >= seq.n_cached
        for seqs in (waiting, running):
            order = [rank(seq) for seq in seqs]
            assert order == sorted(order), "sequences are out of order"

    # -- what policies ask -------------------------------------------------------------------------
    def n_matched(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence that the prefix cache holds."""
        return self._keeper.match(seq).n_tokens

    def service(self, tenant: str) -> float:
        """Tokens computed for a tenant, weighted."""
        return self._service.get(tenant, 0.0)

    def _join(self, tenant: str) -> None:
        """A tenant that comes back starts level with the least served of those that are there:
        absence saves nothing.
        """
        if self._policy.serves:
            there = {seq.request.scheduling.tenant for seq in self._live.values()}
            if tenant not in there:
                least = min((self.service(other) for other in there), default=0.0)
                if len(self._service) >= MOST_TENANTS:
                    self._service = {other: had for other, had in self._service.items() if other in there}
                self._service[tenant] = max(self.service(tenant), least)

    def _serve(self, plan: StepPlan) -> None:
        """Count what a step has computed for each tenant."""
        for span in plan.spans:
            seq = self._live.get(span.seq)
            if seq is not None and span.stop_layer is None:
                weight = DECODE_WEIGHT if span.start >= seq.n_prompt else span.count
                self._service[seq.request.scheduling.tenant] += weight

    # -- parts -------------------------------------------------------------------------------------
    def _expire(self, now: float) -> None:
        """End the requests whose time in the queue is over."""
        for seq in self._planner.waiting.expired(now):
            siblings = self._requests.get(seq.request.request_id, [])
            started = any(other.pages or other.seq_id in self._planner.known for other in siblings)
            if siblings and siblings[0].request is seq.request and not started:
                error = (
                    f"The request waited {now - seq.arrival_s:.1f} s and had not started: its queue_timeout_s,"
                    f" {seq.request.scheduling.queue_timeout_s:g}, is over. Try again later, or give it more time."
                )
                ends = partial(self._finish, reason=FinishReason.ERROR, stop_reason=QUEUE_TIMEOUT, error=error)
                self._pending += map(ends, list(siblings))

    def _measure(self, plan: StepPlan, now: float) -> None:
        """Learn from the time that a step took."""
        started, work = self._planned
        if plan.spans and now > started:
            self.cost.observe(work, now - started)
            self._write_behind.step(now - started)
            self._planner.waiting.measure(round(work.n_decode + work.n_prefill), now - started)

    def _accept(self, seq: Sequence, sampled: Sampled) -> Event:
        """Take in one sequence's result."""
        request = seq.request
        if seq.n_scored < seq.n_prompt:
            seq.n_scored = min(seq.n_cached, seq.n_prompt)
        if sampled.error is not None:
            return self._finish(seq, FinishReason.ERROR, error=sampled.error)
        if sampled.token_id is None:
            finish = FinishReason.LENGTH if seq.n_cached >= seq.limit else None
        else:
            seq.ids.append(sampled.token_id)
            finish = self._finish_reason(seq, sampled.token_id)
        stop_reason: int | str | None = sampled.limit if finish is not None else None
        if stop_reason is None and finish is FinishReason.STOP and sampled.token_id not in self._eos_ids:
            stop_reason = sampled.token_id
        if finish is not None:
            self._release(seq)
        return Event(
            request.request_id,
            seq.index,
            sampled.token_id,
            sampled.logprobs,
            sampled.prompt_logprobs,
            finish,
            stop_reason,
        )

    def _accept_more(self, seq: Sequence, sampled: Sampled) -> Iterator[Event]:
        """Take in the tokens after the first: each says that the guess before it was right, so its
        position is good.
        """
        for token_id, logprobs in sampled.more:
            if seq.seq_id not in self._live:
                return
            seq.n_cached += 1
            yield self._accept(seq, Sampled(seq.seq_id, token_id, logprobs, limit=sampled.limit))

    def _finish_reason(self, seq: Sequence, token_id: int) -> FinishReason | None:
        params = seq.request.params
        # Before min_tokens no end is sampled, unless a grammar's text is complete and nothing else
        # can follow.
        if token_id in seq.stop_ids and (seq.n_generated >= params.min_tokens or params.structured is not None):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(seq.ids) >= seq.limit else None

    def _finish(
        self, seq: Sequence, reason: FinishReason, *, stop_reason: str | None = None, error: str | None = None
    ) -> Event:
        self._release(seq)
        return Event(seq.request.request_id, seq.index, finish=reason, stop_reason=stop_reason, error=error)

    def _release(self, seq: Sequence) -> None:
        """Forget a sequence; its pages stay in the cache while there is room."""
        self._planner.leave(seq)
        del self._live[seq.seq_id]
        siblings = self._requests[seq.request.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request.request_id]
        if seq.seq_id in self._planner.known:
            self._planner.known.remove(seq.seq_id)
            self._dropped.append(seq.seq_id)
