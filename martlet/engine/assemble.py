"""An engine with the usual recorder and speculator: where these wings are plugged in (read
`engine.py` first).
"""

import time
from collections.abc import Callable, Sequence

from martlet.cache.pages import PagePool
from martlet.engine.engine import Engine
from martlet.metrics import Observer
from martlet.observe.recorder import Recorder
from martlet.runtime.executors import Executor
from martlet.sampling_params import SamplingParams
from martlet.sched.scheduler import Scheduler
from martlet.speculate.drafter import Drafter
from martlet.speculate.judge import Speculator


def assemble(
    scheduler: Scheduler,
    executor: Executor,
    pages: PagePool,
    *,
    check: Callable[[SamplingParams], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    observers: Sequence[Observer] = (),
    drafter: Drafter | None = None,
) -> Engine:
    """The engine, with `Engine`'s parameters. No `drafter`: only forced tokens are guessed."""
    recorder = Recorder(clock, lambda: (scheduler.n_running, scheduler.n_waiting, scheduler.n_free), observers)
    speculator = None if drafter is None else Speculator(drafter, scheduler.cost, clock)
    if speculator is not None:
        recorder.totals.speculation = speculator.totals
    return Engine(scheduler, executor, pages, recorder, speculator, check=check, clock=clock)
