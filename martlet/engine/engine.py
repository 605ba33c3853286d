"""The engine: the loop that turns requests into events (read `sched/scheduler.py` next, then `runtime/runner.py`).

Synchronous, and owned by one thread. Whoever calls `step` while `has_work` drives all requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from martlet.cache.pages import PagePool
from martlet.errors import CapacityError
from martlet.metrics import RequestMetrics
from martlet.runtime.executors import Executor
from martlet.sampling_params import SamplingParams
from martlet.sched.scheduler import Scheduler
from martlet.types import Event, Request

__all__ = ["Engine"]


class Engine:
    """Scheduler and executor, joined. `check` refuses parameters that the model cannot do; times are the `clock`'s."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        pages: PagePool,
        *,
        check: Callable[[SamplingParams], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self._check = check
        self._pages = pages
        self._metrics: dict[str, tuple[RequestMetrics, list[int]]] = {}  # with the indices that have not ended

    def add(self, request: Request) -> RequestMetrics:
        """Accept a request and return its metrics, which fill in as it runs; RequestError if it can never run."""
        if self._check is not None:
            self._check(request.params)
        self.scheduler.add(request)
        metrics = RequestMetrics(request.arrival_s or self.clock(), len(request.prompt_ids))
        self._metrics[request.request_id] = metrics, list(range(request.params.n))
        return metrics

    def step(self) -> list[Event]:
        """Plan, run and commit one step. If it raises, call `clear` before anything else."""
        plan = self.scheduler.plan()
        if plan.added:
            now = self.clock()
            for seq in plan.added:
                metrics, _ = self._metrics[seq.request.request_id]
                metrics.scheduled_s = metrics.scheduled_s or now
        result = self.executor.run(plan)
        return self._measure(self.scheduler.commit(plan, result))

    def abort(self, request_id: str) -> list[Event]:
        """End a request; the events say so, and are empty if it is not there (any more)."""
        return self._measure(self.scheduler.abort(request_id))

    def stop(self, request_id: str, index: int, reason: str) -> list[Event]:
        """End one sequence whose text has reached the stop string `reason`."""
        return self._measure(self.scheduler.stop(request_id, index, reason))

    def clear(self, error: str | None = None) -> list[Event]:
        """End every request, with `error` if that is why. After a step that raised: half a step cannot be finished."""
        now = self.clock()
        for metrics, _ in self._metrics.values():
            metrics.finished_s = now
        self._metrics.clear()
        return self.scheduler.clear(error)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work

    def embed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the mean hidden state of a prompt, [C], computed at once between two steps."""
        need = self._pages.pages_for(len(ids))
        if need > self._pages.n_free:
            raise CapacityError(
                f"The prompt of {len(ids):,} tokens needs {need:,} pages of KV memory and {self._pages.n_free:,} of"
                f" {self._pages.n_pages:,} are free: shorten it, wait for running requests, or raise max_context."
            )
        pages = self._pages.alloc(need)
        try:
            return self.executor.embed(ids, pages)
        finally:
            self._pages.free(pages)

    def close(self) -> None:
        """Free everything. Idempotent."""
        self.executor.close()

    def _measure(self, events: list[Event]) -> list[Event]:
        now = self.clock() if events else 0.0
        for event in events:
            metrics, open_indices = self._metrics[event.request_id]
            if event.token_id is not None:
                if metrics.first_token_s is None:
                    metrics.first_token_s = now
                metrics.n_generated += 1
                metrics.n_first += metrics.first_token_s == now
                metrics.last_token_s = now
            if event.finish is not None:
                open_indices.remove(event.index)
                if not open_indices:
                    metrics.finished_s = now
                    del self._metrics[event.request_id]
        return events
