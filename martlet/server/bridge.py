"""Where asyncio meets the engine's thread: with `outlet.py` the only file that knows both (read `sse.py` next, which sends what comes).

    event loop ── jobs: add, abort, embed ──▸ inbox ──▸ engine thread: run jobs, one step, collect the pieces
         ▴                                                    │
         └──── what outlet.py has not written: one call_soon_threadsafe a step

The engine's thread sleeps on a condition while there is nothing to do. It never waits for a reader: pieces go to their
`Ticket`, and a ticket that holds more than it may is cancelled, for its reader is too slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from martlet.engine.driver import Driver, Prepared
from martlet.engine.engine import Engine
from martlet.engine.outputs import OutputBuilder, RequestOutput
from martlet.errors import MartletError, RequestError
from martlet.server.error_replies import ApiError
from martlet.server.http_protocol import BoundedProtocol
from martlet.server.outlet import Numbered, Outlet
from martlet.tokenizer.tokenizer import Tokenizer

__all__ = ["MAX_PIECES", "Bridge", "Ticket"]

MAX_PIECES = 1024  # that wait for a reader; by then the socket's buffers are full as well
ENGINES_STREAMS = 4  # that the engine's thread may write itself: 0.1 ms a step at most
FAILED_STEPS = 3  # in a row, after which the server calls itself not ready
T = TypeVar("T")
logger = logging.getLogger("martlet.server")


class Ticket:
    """What one HTTP request waits for: the answers to its prompts, each a request in the engine."""

    def __init__(self, bridge: Bridge, ticket_id: str, asked: Sequence[Prepared], streams: bool) -> None:
        self.ticket_id = ticket_id
        self.cause: ApiError | None = None  # why the server cancelled it
        self.asked = asked
        self.streams = streams
        self.outlet = Outlet()
        self.builders: list[OutputBuilder] = []  # the engine thread's while it runs; their outputs may be read
        self._bridge = bridge
        self._n_finished = 0
        self._pieces: list[Numbered] = []
        self._news = asyncio.Event()
        self._error: Exception | None = None  # of the outlet, to be raised where pieces are awaited

    @property
    def finished(self) -> bool:
        """Whether every answer has come to its end."""
        return self._n_finished == len(self.asked)

    @property
    def outputs(self) -> list[RequestOutput]:
        """The answers, in the order of the prompts."""
        return [builder.output for builder in self.builders]

    async def pieces(self, timeout_s: float) -> list[Numbered]:
        """Wait, at most so long, for pieces with the numbers of their prompts; none and `finished`: no more will come.

        While it waits, its outlet has what comes first: of what that can write nobody is woken.
        """
        if not self._pieces and not self.finished and self._error is None:
            self.outlet.wait()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                pass  # something may have come at this very moment
            finally:
                self.outlet.leave()
        self._news.clear()
        if self._error is not None:
            raise self._error
        found, self._pieces = self._pieces, []
        return found

    async def result(self) -> list[RequestOutput]:
        """Wait for the whole answers."""
        while not self.finished:
            await self._news.wait()
            self._news.clear()
        return self.outputs

    def cancel(self, cause: ApiError | None = None) -> None:
        """Abort it, in whatever phase it is: when the step that runs is over, its pages are free. No-op after its end."""
        if not self.finished:
            self.cause = self.cause or cause
            self._bridge.abort(self)

    def fail(self, cause: ApiError) -> None:
        """End it here and now: no more news will come."""
        self.cause = self.cause or cause
        self._n_finished = len(self.asked)
        self._news.set()

    def take(self, pieces: Sequence[Numbered], finished: bool) -> None:
        """News of one of its answers."""
        self._n_finished += finished
        self.outlet.arrived()
        if self.cause is None:
            if not (finished or self._pieces) and self._outlet_takes(pieces):
                return
            self._pieces += pieces
        self.outlet.leave()
        if len(self._pieces) > MAX_PIECES:
            self._pieces.clear()
            self.cancel(ApiError(499, f"The reader is too slow: {MAX_PIECES:,} pieces of the answer wait for it."))
        self._news.set()

    def connect(self, wire: BoundedProtocol, encode: Callable[[Sequence[Numbered]], bytes]) -> None:
        """Let pieces leave by the outlet: a few tickets' from the engine's thread, others' from the event loop."""
        engines = sum(ticket.outlet.is_for_engine for ticket in self._bridge.open_tickets)
        self.outlet.connect(wire, encode, for_engine=engines < ENGINES_STREAMS)

    def _outlet_takes(self, pieces: Sequence[Numbered]) -> bool:
        try:
            return self.outlet.take(pieces)
        except Exception as error:  # this answer's alone: the others' news go on
            self._error = error
            return False


class Bridge:
    """Owns the engine's thread. Everything here is called from the event loop, but for what begins with `_work`."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        on_end: Callable[[Ticket, int], None] = lambda ticket, number: None,
    ) -> None:
        """`on_end` sees each answer at its end: its ticket, and the number of its prompt."""
        self.engine = engine
        self._on_end = on_end
        self.failed_steps = 0  # in a row
        self.error: str | None = None  # what ended the thread, if anything did
        self._driver = Driver(engine, tokenizer)
        self._open: dict[str, Ticket] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._closing = False
        self._busy_since: float | None = None  # when the thread's present round began; None while it sleeps
        self._live: list[tuple[Ticket, int, OutputBuilder]] = []  # the engine thread's
        self._thread = threading.Thread(target=self._work, name="martlet-engine", daemon=True)

    # -- the event loop's side -------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the engine's thread; call it from the event loop that will be served."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, ticket_id: str, asked: Sequence[Prepared], *, streams: bool = False) -> Ticket:
        """Hand requests to the engine, all or none, and wait until they are accepted.

        RequestError if one can never run, CapacityError if the queue is full.
        """
        ticket = Ticket(self, ticket_id, asked, streams)
        if ticket_id in self._open:
            raise RequestError(
                f"A request with the id {ticket_id!r} is still open; choose another.", param="request_id"
            )
        self._open[ticket_id] = ticket
        try:
            await self.call(lambda: self._work_add(ticket))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):  # it may be in the engine by now, with nobody to read it
                self.abort(ticket)
            self._open.pop(ticket_id, None)
            raise
        return ticket

    async def call(self, job: Callable[[], T]) -> T:
        """Run a job in the engine's thread, between two steps, and return what it returns."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def done(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run() -> None:
            try:
                result, error = job(), None
            except Exception as raised:
                result, error = None, raised
            loop.call_soon_threadsafe(done, result, error)

        self._post(run)
        return await future

    def embed(self, ids: list[int]) -> Any:
        """The mean hidden state of a prompt, to be awaited; [C]."""
        return self.call(lambda: self._driver.embed(ids))

    def abort(self, ticket: Ticket) -> None:
        """End a request as soon as the step that runs is over."""
        with contextlib.suppress(MartletError):  # the engine has stopped: so has the request
            self._post(lambda: self._work_abort(ticket))

    def find(self, ticket_id: str) -> Ticket | None:
        """The open ticket of this id."""
        return self._open.get(ticket_id)

    @property
    def open_tickets(self) -> list[Ticket]:
        """All that run or wait."""
        return list(self._open.values())

    @property
    def has_ended(self) -> bool:
        """Whether the thread takes no more jobs."""
        return self._closing or self.error is not None

    def trouble(self, limit_s: float) -> str | None:
        """Why no request can be answered now; None if the thread sleeps or has begun a round within `limit_s`."""
        if self.error is not None:
            return f"the engine's thread has ended: {self.error}"
        if not self._thread.is_alive():
            return "the engine's thread does not run"
        since = self._busy_since
        if since is not None and (age := time.monotonic() - since) > limit_s:
            return f"the engine has been in one step for {age:.0f} s"
        if self.failed_steps >= FAILED_STEPS:
            return f"the last {self.failed_steps} steps failed"
        return None

    def close(self) -> None:
        """End the thread after the step that runs. The engine is its owner's to close. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._driver.close()

    def _post(self, job: Callable[[], None]) -> None:
        with self._wake:
            if self.error is not None or self._closing:
                raise MartletError(f"The engine has stopped: {self.error or 'the server shuts down'}.")
            self._inbox.append(job)
            self._wake.notify()

    def _deliver(self, news: list[tuple[Ticket, int, Sequence[Numbered], bool]]) -> None:
        for ticket, number, pieces, finished in news:
            ticket.take(pieces, finished)
            if finished:
                self._on_end(ticket, number)
            if ticket.finished:
                self._open.pop(ticket.ticket_id, None)

    def _fail_all(self) -> None:
        error = ApiError(500, f"The engine has stopped: {self.error}.", code="engine_error")
        for ticket in self.open_tickets:
            ticket.fail(error)
        self._open.clear()

    # -- the engine's thread ---------------------------------------------------------------------------------------
    def _work(self) -> None:
        try:
            while self._work_round():
                pass
        except BaseException as error:  # a fault of this file: whoever waits must learn of it
            logger.exception("the engine's thread has ended")
            with self._wake:
                self.error = (str(error) or type(error).__name__).rstrip(".")
                jobs, self._inbox = self._inbox, deque()
            for job in jobs:
                job()
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._fail_all)

    def _work_round(self) -> bool:
        """Run what is in the inbox, then a step; False at the end."""
        with self._wake:
            self._busy_since = None
            while not (self._inbox or self._live or self._closing):
                self._wake.wait()
            if self._closing:
                return False
            jobs, self._inbox = self._inbox, deque()
            self._busy_since = time.monotonic()
        for job in jobs:
            job()
        if self.engine.has_work:  # what was live may just have been aborted
            try:
                self._driver.step()
                self.failed_steps = 0
            except Exception as error:  # the driver has ended every request with it; the engine can go on
                self.failed_steps += 1
                logger.error("a step failed: %s: %s", type(error).__name__, error)
        self._work_report()
        return True

    def _work_add(self, ticket: Ticket) -> None:
        try:
            for asked in ticket.asked:
                ticket.builders.append(self._driver.start(asked))
        except BaseException:
            self._driver.abandon(ticket.builders)
            raise
        self._live += [(ticket, number, builder) for number, builder in enumerate(ticket.builders)]

    def _work_abort(self, ticket: Ticket) -> None:
        self._driver.abandon(ticket.builders)

    def _work_report(self) -> None:
        """Hand everything new to the event loop, all at once."""
        news = []
        for ticket, number, builder in self._live:
            finished = builder.output.finished
            pieces = [(number, piece) for piece in builder.pieces()] if ticket.streams else []
            if (pieces or finished) and (left := ticket.outlet.send(pieces, finished)) is not None:
                news.append((ticket, number, left, finished))
        if any(finished for *_, finished in news):
            self._live = [entry for entry in self._live if not entry[2].output.finished]
        if news and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, news)
