"""One engine for several threads: whose turn it is, and where events go (read `outputs.py` next).

Threads take turns, one step at a time. A step serves every request, so a thread that waits for its
own answer also drives the others'. A forked child has none of the engine's threads and gets an
error. A request without a reader is aborted: after an exception, or when its stream is closed or
collected.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from martlet.config import Setting
from martlet.engine.engine import Engine
from martlet.engine.outputs import OutputBuilder, RequestOutput
from martlet.errors import MartletError
from martlet.tokenizer.tokenizer import Tokenizer
from martlet.types import Event, Request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with its answer's settings and warnings; `finished` is called with the output."""

    request: Request
    settings: tuple[Setting, ...] = ()
    warnings: tuple[str, ...] = ()
    finished: Callable[[RequestOutput], None] = lambda output: None


class Driver:
    """The engine and the requests in it, for any number of threads."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine: Engine | None = engine
        self._tokenizer = tokenizer
        self._process = os.getpid()
        self._builders: dict[str, tuple[OutputBuilder, Prepared]] = {}
        self._lock = threading.Lock()  # held by the thread that uses the engine
        self._left: deque[OutputBuilder] = deque()  # without a reader: to be aborted

    def start(self, prepared: Prepared) -> OutputBuilder:
        """Add a request; RequestError if it can never run."""
        with self._inside() as engine:
            builder = OutputBuilder(prepared.request, self._tokenizer, engine.stop, prepared.settings)
            builder.output.warnings = prepared.warnings
            builder.output.metrics = engine.add(builder.request)
            self._builders[prepared.request.request_id] = builder, prepared
        return builder

    def run(self, requests: Sequence[Prepared], show: Callable[[int], None] = lambda done: None) -> list[RequestOutput]:
        """Answer requests, in their order; `show` is called with the number of whole answers.

        Raises RequestError for a request that can never run. Any error aborts all requests of the
        call.
        """
        builders: list[OutputBuilder] = []
        try:
            for prepared in requests:
                builders.append(self.start(prepared))
            while waiting := sum(not builder.output.finished for builder in builders):
                self.step()
                show(len(builders) - waiting)
            show(len(builders))
        except BaseException:  # also Ctrl-C: the answers have no reader any more
            self.abandon(builders)
            raise
        return [builder.output for builder in builders]

    def step(self) -> None:
        """Run one step and deliver its events; a step that fails ends every request, and raises."""
        with self._inside() as engine:
            self._abort_left()
            try:
                self._deliver(engine.step())
            except BaseException as error:  # half a step cannot be finished
                self._deliver(engine.clear(None if isinstance(error, KeyboardInterrupt) else f"a step failed: {error}"))
                raise

    def take(self, builder: OutputBuilder) -> tuple[str, bool]:
        """The new text of a request, and whether it is whole."""
        with self._lock:
            return builder.take(), builder.output.finished

    def between_steps(self, work: Callable[[], T]) -> T:
        """Call `work` while no step runs, and return its result."""
        with self._inside():
            return work()

    def embed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """The mean hidden state of a prompt, float32 [C]."""
        with self._inside() as engine:
            return engine.embed(ids)

    def abandon(self, builders: Iterable[OutputBuilder]) -> None:
        """Abort the requests that still run."""
        if self.is_forked:
            return
        self._left.extend(builders)
        with self._lock:
            self._abort_left()

    def abandon_soon(self, builder: OutputBuilder) -> None:
        """Abort a request from a finalizer; if it runs inside a step, the next step does it."""
        self._left.append(builder)
        if self._lock.acquire(blocking=False):
            try:
                self._abort_left()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Forget every request; the engine is its owner's to close. Idempotent."""
        if self.is_forked:
            return
        with self._lock:
            self._engine = None
            self._builders = {}

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child, which lacks the engine's threads and the lock's owner."""
        return os.getpid() != self._process

    @contextmanager
    def _inside(self) -> Iterator[Engine]:
        """The engine, for this thread alone; MartletError if it is closed or in a forked child."""
        if self.is_forked:
            raise MartletError(
                "This LLM was loaded before the process forked, and its threads are not in the child: load it there, or"
                " start the child with multiprocessing's method 'spawn'."
            )
        with self._lock:
            if self._engine is None:
                raise MartletError("This LLM is closed; make a new one.")
            yield self._engine

    def _deliver(self, events: Iterable[Event]) -> None:
        touched = {}
        for event in events:
            entry = self._builders.get(event.request_id)
            if entry is not None:
                entry[0].accept(event)
                touched[event.request_id] = entry
        for request_id, (builder, prepared) in touched.items():
            builder.end_stopped()
            if builder.output.finished:
                del self._builders[request_id]
                prepared.finished(builder.output)

    def _abort_left(self) -> None:
        while self._left:
            request_id = self._left.popleft().request.request_id
            if request_id in self._builders and self._engine is not None:
                self._deliver(self._engine.abort(request_id))


class Stream:
    """The text of one answer as it comes; `close`, or the end of its `with`, aborts the request."""

    def __init__(self, driver: Driver, builder: OutputBuilder) -> None:
        self._driver = driver
        self._builder = builder

    @property
    def output(self) -> RequestOutput:
        return self._builder.output

    @property
    def result(self) -> RequestOutput | None:
        """The whole answer; None until it is there."""
        return self._builder.output if self._builder.output.finished else None

    def close(self) -> None:
        """Abort the request if it still runs."""
        self._driver.abandon([self._builder])

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        while True:
            text, finished = self._driver.take(self._builder)
            if text:
                return text
            if finished:
                self._builder.raise_error()
                raise StopIteration
            try:
                self._driver.step()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._builder.output.finished:
            self._driver.abandon_soon(self._builder)
