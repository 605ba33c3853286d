"""The engine: the loop that turns requests into events (read `sched/scheduler.py` next).

    drafts → plan → run → commit → events

Synchronous, and owned by one thread: `step` while `has_work` drives all requests. What watches it
and what guesses tokens are plugged in (`StepRecorder`, `DraftSource`); `assemble.py` makes the
usual ones.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from martlet.cache.pages import PagePool
from martlet.errors import ADAPTER_GONE, RequestError
from martlet.metrics import EngineTotals, Observer, RequestMetrics
from martlet.models.lora import Adapter
from martlet.runtime.executors import Executor
from martlet.sampling_params import SamplingParams
from martlet.sched.planner import NO_DRAFTS, Drafts
from martlet.sched.scheduler import Scheduler
from martlet.types import Event, Request, SeqId, Started, StepPlan, StepResult
from martlet.types import Sequence as Running

# by which the end of the last request may be late: a process that is killed then loses nothing
IDLE_FLUSH_S = 0.1
CLOSE_FLUSH_S = 2.0
FLUSH_PAGES = 8  # of a plan


class DraftSource(Protocol):
    """Chooses drafts for a step, and learns how they did (`speculate/judge.py`)."""

    def propose(self, running: Sequence[Running], n_waiting: int, forced: Mapping[SeqId, tuple[int, ...]]) -> Drafts:
        """Drafts for sequences that decode; `forced` are ids that are next to certain."""

    def committed(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """A step ended; `seconds` is its time, drafting included."""


class StepRecorder(Protocol):
    """Fills in metrics and tells observers (`observe/recorder.py`)."""

    totals: EngineTotals

    def accepted(self, request: Request) -> RequestMetrics:
        """A request was accepted: its metrics, which fill in as it runs."""

    def planned(self, plan: StepPlan, started: Sequence[Running], now: float) -> None:
        """A step is about to run; `started` are the sequences of `plan.added`."""

    def committed(self, plan: StepPlan, result: StepResult, events: list[Event], times: tuple[float, ...]) -> None:
        """A step ended; `times` are when it began, was planned, and had run."""

    def ended(self, events: list[Event]) -> None:
        """Sequences ended outside of a step."""

    def cleared(self, events: list[Event]) -> None:
        """Every request ended, perhaps because of the step that runs."""

    def watch(self, observer: Observer) -> None:
        """Tell one more observer."""

    def unwatch(self, observer: Observer) -> None:
        """Tell an observer no more."""

    def close(self) -> None:
        """Close the observers. Idempotent."""


class Engine:
    """Scheduler and executor, joined. `check` refuses parameters that the model cannot do; times
    are the `clock`'s.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        pages: PagePool,
        recorder: StepRecorder,
        speculator: DraftSource | None = None,
        *,
        check: Callable[[SamplingParams], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self._check_params = check
        self._pages = pages
        self._closed = False
        self._adapters: set[str] = set()  # by digest, that requests may use
        self._leaving: set[str] = set()  # of them no longer, as soon as no sequence does
        self._recorder = recorder
        self._speculator = speculator
        self._forced: dict[SeqId, tuple[int, ...]] = {}  # ids that the last step says will come

    def add(self, request: Request) -> RequestMetrics:
        """Accept a request; its metrics fill in as it runs. RequestError if it can never run."""
        self._check(request)
        self.scheduler.add(request, self.clock())
        return self._recorder.accepted(request)

    def fork(self, request: Request, parent: tuple[str, int]) -> RequestMetrics:
        """Accept a request whose ids go on from those of a sequence that lives (request id, index),
        sharing its pages.
        """
        self._check(request)
        self.scheduler.fork(request, parent, self.clock())
        return self._recorder.accepted(request)

    def step(self) -> list[Event]:
        """Plan, run and commit one step. If it raises, call `clear` before anything else."""
        start = self.clock()
        drafts = self._drafts()
        events = self._run(self.scheduler.plan(self.clock(), drafts), start)
        if self._leaving:
            self._drop_adapters()
        if not self.scheduler.has_work:
            self._flush(IDLE_FLUSH_S)
        return events

    def abort(self, request_id: str) -> list[Event]:
        """End a request; the events say so, and are empty if it is not there (any more)."""
        return self._ended(self.scheduler.abort(request_id))

    def stop(self, request_id: str, index: int, reason: str) -> list[Event]:
        """End one sequence whose text has reached the stop string `reason`."""
        return self._ended(self.scheduler.stop(request_id, index, reason))

    def clear(self, error: str | None = None) -> list[Event]:
        """End every request, with `error` if that is why. After a step that raised: half a step
        cannot be finished.
        """
        events = self.scheduler.clear(error)
        self._recorder.cleared(events)
        return events

    @property
    def totals(self) -> EngineTotals:
        """Counts since the start."""
        return self._recorder.totals

    def watch(self, observer: Observer) -> None:
        """Tell one more observer of what happens from here on."""
        self._recorder.watch(observer)

    def unwatch(self, observer: Observer) -> None:
        """Tell an observer no more."""
        self._recorder.unwatch(observer)

    @property
    def pages(self) -> PagePool:
        """Whose the pages of the KV cache are, to be read between two steps."""
        return self._pages

    @property
    def n_pages(self) -> int:
        """Pages of the KV cache."""
        return self._pages.n_pages

    @property
    def n_free_pages(self) -> int:
        """Pages of the KV cache that a sequence could have."""
        return self.scheduler.n_free

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work

    def embed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the mean hidden state of a prompt, [C], computed at once between two steps."""
        pages = self.scheduler.borrow(len(ids))
        try:
            return self.executor.embed(ids, pages)
        finally:
            self._pages.free(pages)

    def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter, for requests that name its digest. Between two steps."""
        self.executor.add_adapter(adapter)
        self._adapters.add(adapter.digest)
        self._leaving.discard(adapter.digest)

    def remove_adapter(self, digest: str) -> None:
        """Take no more requests with an adapter; it is freed when its last request is over."""
        if digest in self._adapters:
            self._adapters.remove(digest)
            self._leaving.add(digest)
            self._drop_adapters()

    def close(self) -> None:
        """Write what the second tier lacks, as time allows, and free everything. Idempotent."""
        try:
            if not self._closed:
                self._closed = True
                self._flush(CLOSE_FLUSH_S)
        finally:
            self._recorder.close()
            self.executor.close()

    def _check(self, request: Request) -> None:
        params = request.params
        if self._check_params is not None:
            self._check_params(params)
        if request.adapter and request.adapter not in self._adapters:
            raise RequestError("The adapter of the request is not loaded (any more).", param="model", code=ADAPTER_GONE)
        if params.draft_tokens and self._speculator is None:
            raise RequestError(
                f"draft_tokens is {params.draft_tokens}, and this engine guesses nothing: leave it out, or start the"
                " engine with draft=auto.",
                param="draft_tokens",
            )

    def _drafts(self) -> Drafts:
        """Guesses for the next step."""
        if self._speculator is None:
            if not self._forced:
                return NO_DRAFTS
            decoding = [seq.seq_id for seq in self.scheduler.running if len(seq.ids) - seq.n_cached == 1]
            return {seq: self._forced[seq] for seq in decoding if seq in self._forced}
        return self._speculator.propose(self.scheduler.running, self.scheduler.n_waiting, self._forced)

    def _run(self, plan: StepPlan, start: float) -> list[Event]:
        planned, scheduler = self.clock(), self.scheduler
        started = scheduler.started
        self._recorder.planned(plan, started, planned)
        result = self.executor.run(plan, [Started.of(seq) for seq in started])
        ran = self.clock()
        events = scheduler.commit(plan, result, ran)
        if self._speculator is not None:
            self._speculator.committed(plan, result, ran - start)
        self._forced = {sampled.seq: sampled.forced for sampled in result.sampled if sampled.forced}
        self._recorder.committed(plan, result, events, (start, planned, ran))
        return events

    def _drop_adapters(self) -> None:
        """Let go of adapters that were removed and that no sequence uses any more."""
        used = self.scheduler.adapters()
        for digest in self._leaving - used:
            self.executor.remove_adapter(digest)
        self._leaving &= used

    def _flush(self, seconds: float) -> None:
        """Write pages to the second tier for about so long, while nothing else is to be done."""
        now = self.clock()
        stop = now + seconds
        while now < stop and (plan := self.scheduler.flush_plan(FLUSH_PAGES)) is not None:
            self._run(plan, now)
            now = self.clock()

    def _ended(self, events: list[Event]) -> list[Event]:
        self._recorder.ended(events)
        if events and not self.scheduler.has_work:
            self._flush(IDLE_FLUSH_S)
        return events
