"""The scheduler: which positions of which sequences the next step computes (read `runtime/runner.py` next).

First come, first served, with a budget of tokens a step. Running sequences that decode come first, one token each; what
is left of the budget goes to prompts, in chunks, oldest first, so that a long prompt never stops a running answer
(arXiv:2308.16369). A sequence is admitted when all pages of its known ids are free; while it decodes it takes a page
when it needs one. When none is free the newest sequence gives all its pages back and waits to be computed again: the
oldest always makes progress.

It knows integers only: no arrays, no clock, no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from martlet.cache.pages import PagePool
from martlet.errors import RequestError
from martlet.types import (
    Event,
    FinishReason,
    PageId,
    Request,
    Sampled,
    SeqId,
    Sequence,
    Span,
    StepPlan,
    StepResult,
)

__all__ = ["Scheduler", "SchedulerLimits"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of a sequence."""

    context: int  # ids of one sequence, prompt and generated
    max_step_tokens: int
    max_seqs: int  # sequences that run at a time
    max_logits: int  # rows of a step that may ask for logits

    def __post_init__(self) -> None:
        assert self.context >= 1
        assert self.max_step_tokens >= self.max_seqs >= 1
        assert self.max_logits >= self.max_seqs


class Scheduler:
    """Owns the sequences and their pages, from `add` to exactly one terminal event each."""

    def __init__(self, pages: PagePool, limits: SchedulerLimits, eos_ids: frozenset[int] = frozenset()) -> None:
        self._pages = pages
        self._limits = limits
        self._eos_ids = eos_ids
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of arrival
        self._live: dict[SeqId, Sequence] = {}
        self._requests: dict[str, list[Sequence]] = {}
        self._known: set[SeqId] = set()  # sequences that a plan has added and none has dropped
        self._dropped: list[SeqId] = []
        self._next_seq = 0
        self._step = 0
        self.n_preempted = 0

    # -- requests -------------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Accept a request: its n sequences wait for their turn.

        Raises RequestError for one that can never run; nothing is kept of it then.
        """
        if request.request_id in self._requests:
            raise RequestError(
                f"A request with the id {request.request_id!r} is still running; choose another.", param="request_id"
            )
        limit = self._limit(request)
        params = request.params
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos_ids)
        sequences = []
        for index in range(params.n):
            seq = Sequence(SeqId(self._next_seq), request, index, list(request.prompt_ids), limit, stop_ids)
            if params.prompt_logprobs is None or index > 0:
                seq.n_scored = seq.n_prompt  # the n sequences share their prompt: the first one reports it
            self._next_seq += 1
            sequences.append(seq)
        for seq in sequences:
            self._live[seq.seq_id] = seq
            self._waiting.append(seq)
        self._requests[request.request_id] = sequences

    def _limit(self, request: Request) -> int:
        """The number of ids at which the request's sequences end; raise RequestError if it can never run."""
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

    def abort(self, request_id: str) -> list[Event]:
        """End all sequences of a request; an unknown id (it may just have ended) gives no events."""
        return [self._finish(seq, FinishReason.ABORT) for seq in list(self._requests.get(request_id, ()))]

    def stop(self, request_id: str, index: int, reason: str) -> list[Event]:
        """End one sequence because its text has reached the stop string `reason`."""
        return [
            self._finish(seq, FinishReason.STOP, stop_reason=reason)
            for seq in list(self._requests.get(request_id, ()))
            if seq.index == index
        ]

    def clear(self, error: str | None = None) -> list[Event]:
        """End every request, with `error` if that is why, whatever a step that failed midway has left behind."""
        ended = list(self._live.values())
        self._dropped += self._known
        self._known.clear()
        for places in (self._waiting, self._running, self._live, self._requests):
            places.clear()
        self._pages.reset()
        finish = FinishReason.ABORT if error is None else FinishReason.ERROR
        return [Event(seq.request.request_id, seq.index, finish=finish, error=error) for seq in ended]

    def decoding(self) -> Iterator[Sequence]:
        """The running sequences whose next span is one token."""
        return (seq for seq in self._running if len(seq.ids) - seq.n_cached == 1)

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._live)

    @property
    def n_running(self) -> int:
        """Sequences that hold pages."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Sequences that wait for their turn."""
        return len(self._waiting)

    # -- a step ---------------------------------------------------------------------------------------------------
    def plan(self) -> StepPlan:
        """Choose the spans of the next step and allocate their pages."""
        tokens = self._limits.max_step_tokens - sum(1 for _ in self.decoding())
        scores = self._limits.max_logits - self._limits.max_seqs  # one row is kept for the token of each sequence
        spans: list[Span] = []
        added: list[Sequence] = []
        position = 0
        while position < len(self._running):  # the list may lose its tail to `_grow`
            seq = self._running[position]
            position += 1
            remaining = len(seq.ids) - seq.n_cached
            if remaining == 1:
                pages = self._grow(seq)
                if pages is not None:
                    spans.append(Span(seq.seq_id, seq.n_cached, 1, pages, 1))
            elif tokens > 0:
                span = self._chunk(seq, (), tokens, scores)
                tokens, scores = tokens - span.count, scores - max(0, span.n_logits - 1)
                spans.append(span)
        while self._waiting and tokens > 0 and len(self._running) < self._limits.max_seqs:
            seq = self._waiting[0]
            if not self._fits(seq):
                break
            self._running.append(self._waiting.popleft())
            pages = self._pages.alloc(self._pages.pages_for(len(seq.ids)))
            seq.pages.extend(pages)
            span = self._chunk(seq, pages, tokens, scores)
            tokens, scores = tokens - span.count, scores - max(0, span.n_logits - 1)
            spans.append(span)
            if seq.seq_id not in self._known:
                self._known.add(seq.seq_id)
                added.append(seq)
        self._step += 1
        return StepPlan(self._step, tuple(spans), tuple(added), tuple(self._dropped))

    def commit(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Take in what a step computed: advance its sequences, end those that are done."""
        del self._dropped[: len(plan.dropped)]  # only now: of a step that failed nobody knows what it still did
        for span in plan.spans:
            seq = self._live.get(span.seq)
            if seq is not None:  # None: aborted while the step ran
                seq.n_cached = span.start + span.count
        events: list[Event] = []
        for sampled in result.sampled:
            seq = self._live.get(sampled.seq)
            if seq is not None:
                events.append(self._accept(seq, sampled))
        return events

    def check(self) -> None:
        """Assert the invariants: every page's owners, each sequence in one place, pages for what is cached."""
        self._pages.check(seq.pages for seq in self._live.values())
        places = [*self._waiting, *self._running]
        assert sorted(seq.seq_id for seq in places) == sorted(self._live), "a sequence is lost or in two places"
        assert sorted(seq.seq_id for seqs in self._requests.values() for seq in seqs) == sorted(self._live)
        assert len(self._running) <= self._limits.max_seqs
        assert all(not seq.pages and seq.n_cached == 0 for seq in self._waiting), "a waiting sequence holds pages"
        for seq in self._running:
            assert seq.n_cached < len(seq.ids) <= seq.limit or seq.n_cached == len(seq.ids) == seq.limit
            assert len(seq.pages) * self._pages.page_size >= seq.n_cached
        order = [seq.seq_id for seq in places if seq in self._running]
        assert order == sorted(order), "running sequences are out of order"

    # -- parts ----------------------------------------------------------------------------------------------------
    def _fits(self, seq: Sequence) -> bool:
        """Whether `seq` may start: room for its ids and the next, and a page of growth for each that runs already."""
        need = self._pages.pages_for(min(len(seq.ids) + 1, seq.limit))
        return need + len(self._running) <= self._pages.n_free

    def _chunk(self, seq: Sequence, pages: tuple[PageId, ...], tokens: int, scores: int) -> Span:
        """The next span of a prompt, of at most `tokens` rows of which at most `scores` are read for the prompt alone.

        Logits are needed for the rows from n_scored on, which are a span's last ones, and for the row of the last id.
        """
        count = min(len(seq.ids) - seq.n_cached, tokens)
        first_scored = max(seq.n_cached, seq.n_scored)
        if seq.n_scored < seq.n_prompt:
            # One row more than `scores`: it is the one kept for the token of this sequence.
            count = min(count, first_scored + scores + 1 - seq.n_cached)
            n_logits = max(0, seq.n_cached + count - first_scored)
        else:
            n_logits = 1 if seq.n_cached + count == len(seq.ids) else 0
        return Span(seq.seq_id, seq.n_cached, count, pages, n_logits)

    def _grow(self, seq: Sequence) -> tuple[PageId, ...] | None:
        """The pages for the next token of a running sequence; None if it is the newest and has to wait itself."""
        if len(seq.pages) * self._pages.page_size > seq.n_cached:
            return ()
        while self._pages.n_free == 0:
            newest = self._running[-1]
            self._preempt(newest)
            if newest is seq:
                return None
        pages = self._pages.alloc(1)
        seq.pages.extend(pages)
        return pages

    def _preempt(self, seq: Sequence) -> None:
        """Give the pages back; the ids stay, and their keys and values are computed again later."""
        self._running.remove(seq)
        self._pages.free(seq.pages)
        seq.pages = []
        seq.n_cached = 0
        self._waiting.appendleft(seq)
        self.n_preempted += 1

    def _accept(self, seq: Sequence, sampled: Sampled) -> Event:
        """Take in one sequence's result."""
        request = seq.request
        seq.n_scored = max(seq.n_scored, min(seq.n_cached, seq.n_prompt))
        if sampled.error is not None:
            return self._finish(seq, FinishReason.ERROR, error=sampled.error)
        if sampled.token_id is None:
            finish = FinishReason.LENGTH if seq.n_cached >= seq.limit else None
        else:
            seq.ids.append(sampled.token_id)
            finish = self._finish_reason(seq, sampled.token_id)
        stop_reason = None
        if finish is FinishReason.STOP and sampled.token_id not in self._eos_ids:
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

    def _finish_reason(self, seq: Sequence, token_id: int) -> FinishReason | None:
        if token_id in seq.stop_ids and seq.n_generated >= seq.request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(seq.ids) >= seq.limit else None

    def _finish(
        self, seq: Sequence, reason: FinishReason, *, stop_reason: str | None = None, error: str | None = None
    ) -> Event:
        self._release(seq)
        return Event(seq.request.request_id, seq.index, finish=reason, stop_reason=stop_reason, error=error)

    def _release(self, seq: Sequence) -> None:
        """Forget a sequence and free its pages."""
        self._pages.free(seq.pages)
        seq.pages = []
        if seq in self._running:
            self._running.remove(seq)
        else:
            self._waiting.remove(seq)
        del self._live[seq.seq_id]
        siblings = self._requests[seq.request.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request.request_id]
        if seq.seq_id in self._known:
            self._known.remove(seq.seq_id)
            self._dropped.append(seq.seq_id)
