"""Connects asyncio with the engine's thread; no other file knows both (read `sse.py` next).

    event loop ── jobs: add, abort, embed ──▸ inbox ──▸ engine thread: run jobs, run one step
         ▴                                                        │
         └──── all new pieces: one call_soon_threadsafe a step ───┘

The engine's thread sleeps on a condition while it has no work. It never waits for a client:
pieces go to their `Ticket`, and the bridge cancels a ticket that buffers too many of them.
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
from martlet.engine.outputs import OutputBuilder, Piece, RequestOutput
from martlet.errors import MartletError, RequestError
from martlet.server.error_replies import ApiError
from martlet.tokenizer.tokenizer import Tokenizer

MAX_PIECES = 1024  # buffered for one client; by then the socket's buffers are full as well
FAILED_STEPS = 3  # consecutive failures after which /ready says no
NumberedPiece = tuple[int, Piece]  # the number of the prompt, and a piece of its answer
T = TypeVar("T")
logger = logging.getLogger("martlet.server")


class Ticket:
    """One HTTP request's answers: one engine request per prompt."""

    def __init__(self, bridge: Bridge, ticket_id: str, prepared: Sequence[Prepared], streams: bool) -> None:
        self.ticket_id = ticket_id
        self.cause: ApiError | None = None  # why the server cancelled it
        self.prepared = prepared
        self.streams = streams
        self.builders: list[OutputBuilder] = []  # the engine's thread fills them; any thread reads outputs
        self._bridge = bridge
        self._n_finished = 0
        self._pieces: list[NumberedPiece] = []
        self._news = asyncio.Event()
        self._write_now: Callable[[Sequence[NumberedPiece]], bool] = lambda pieces: False
        self._waits = False  # the stream's task has written everything and waits for pieces
        self._error: Exception | None = None  # raised by `_write_now`; `pieces` raises it in the task

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        return self._n_finished == len(self.prepared)

    @property
    def outputs(self) -> list[RequestOutput]:
        """The answers, in the order of the prompts."""
        return [builder.output for builder in self.builders]

    def write_with(self, write_now: Callable[[Sequence[NumberedPiece]], bool]) -> None:
        """Write pieces with `write_now` while a task waits in `pieces`, which then stays asleep.

        `write_now` returns False if it wrote nothing because the client is behind.
        """
        self._write_now = write_now

    async def pieces(self, timeout_s: float) -> list[NumberedPiece]:
        """Wait up to `timeout_s` for pieces; none follow an empty list once it is `finished`.

        Raises an exception of `write_now`.
        """
        if not self._pieces and not self.finished and self._error is None:
            self._waits = True
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                pass  # pieces may have arrived at this moment
            finally:
                self._waits = False
        self._news.clear()
        if self._error is not None:
            raise self._error
        pieces, self._pieces = self._pieces, []
        return pieces

    async def result(self) -> list[RequestOutput]:
        """Wait until every answer is complete."""
        while not self.finished:
            await self._news.wait()
            self._news.clear()
        return self.outputs

    def cancel(self, cause: ApiError | None = None) -> None:
        """Abort it in any phase; its KV pages are free after the running step. No-op at its end."""
        if not self.finished:
            self.cause = self.cause or cause
            self._bridge.abort(self)

    def fail(self, cause: ApiError) -> None:
        """End it at once, without waiting for the engine."""
        self.cause = self.cause or cause
        self._n_finished = len(self.prepared)
        self._news.set()

    def take(self, pieces: Sequence[NumberedPiece], finished: bool) -> None:
        """Accept new pieces of one answer; `finished` says that they are its last."""
        self._n_finished += finished
        if self.cause is None:
            if self._waits and not (finished or self._pieces) and self._wrote(pieces):
                return
            self._pieces += pieces
        if len(self._pieces) > MAX_PIECES:
            self._pieces.clear()
            self.cancel(ApiError(499, f"The client reads too slowly: {MAX_PIECES:,} pieces of the answer wait for it."))
        self._news.set()

    def _wrote(self, pieces: Sequence[NumberedPiece]) -> bool:
        try:
            return self._write_now(pieces)
        except Exception as error:  # only this answer fails; other tickets still get their pieces
            self._error, self._waits = error, False
            return False


class Bridge:
    """Owns the engine's thread. The event loop calls every method but those named `_work…`."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        on_end: Callable[[Ticket, int], None] = lambda ticket, number: None,
    ) -> None:
        """`on_end` is called at the end of each answer, with its ticket and its prompt's number."""
        self.engine = engine
        self._on_end = on_end
        self.failed_steps = 0  # consecutive
        self.error: str | None = None  # what ended the thread
        self._driver = Driver(engine, tokenizer)
        self._open: dict[str, Ticket] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._closing = False
        self._busy_since: float | None = None  # start of the thread's current round; None: it sleeps
        self._live: list[tuple[Ticket, int, OutputBuilder]] = []  # only the engine's thread uses it
        self._thread = threading.Thread(target=self._work, name="martlet-engine", daemon=True)

    # -- the event loop's side ---------------------------------------------------------------------
    def start(self) -> None:
        """Start the engine's thread; call it from the event loop that serves."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, ticket_id: str, prepared: Sequence[Prepared], *, streams: bool = False) -> Ticket:
        """Add requests to the engine, all or none, and wait until it has accepted them.

        Raises RequestError if a request can never run or its id is in use, and CapacityError if
        the queue is full.
        """
        ticket = Ticket(self, ticket_id, prepared, streams)
        if ticket_id in self._open:
            raise RequestError(
                f"A request with the id {ticket_id!r} is still open; choose another.", param="request_id"
            )
        self._open[ticket_id] = ticket
        try:
            await self.call(lambda: self._work_add(ticket))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):  # the engine may have accepted it by now
                self.abort(ticket)
            self._open.pop(ticket_id, None)
            raise
        return ticket

    async def call(self, job: Callable[[], T]) -> T:
        """Run a job in the engine's thread, between two steps, and return its result."""
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
        """An awaitable of the prompt's mean hidden state, float32 [C]."""
        return self.call(lambda: self._driver.embed(ids))

    def abort(self, ticket: Ticket) -> None:
        """End a request after the running step."""
        with contextlib.suppress(MartletError):  # the engine has stopped, and the request with it
            self._post(lambda: self._work_abort(ticket))

    def find(self, ticket_id: str) -> Ticket | None:
        """The open ticket with this id."""
        return self._open.get(ticket_id)

    @property
    def open_tickets(self) -> list[Ticket]:
        """Tickets whose requests run or wait."""
        return list(self._open.values())

    @property
    def has_ended(self) -> bool:
        """Whether the thread accepts no more jobs."""
        return self._closing or self.error is not None

    def trouble(self, limit_s: float) -> str | None:
        """Why the engine answers no request now; None if it can.

        The engine counts as stuck if its current round began more than `limit_s` ago.
        """
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
        """End the thread after the running step; the caller closes the engine. Idempotent."""
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

    def _deliver(self, news: list[tuple[Ticket, int, Sequence[NumberedPiece], bool]]) -> None:
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

    # -- the engine's thread -----------------------------------------------------------------------
    def _work(self) -> None:
        try:
            while self._work_round():
                pass
        except BaseException as error:  # a bug in this file: clients that wait get an error
            logger.exception("the engine's thread has ended")
            with self._wake:
                self.error = (str(error) or type(error).__name__).rstrip(".")
                jobs, self._inbox = self._inbox, deque()
            for job in jobs:
                job()
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._fail_all)

    def _work_round(self) -> bool:
        """Run the inbox's jobs, then a step; False when the bridge closes."""
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
        if self.engine.has_work:  # a job may have aborted the last request
            try:
                self._driver.step()
                self.failed_steps = 0
            except Exception as error:  # the driver has failed every request; the engine can continue
                self.failed_steps += 1
                logger.error("a step failed: %s: %s", type(error).__name__, error)
        self._work_report()
        return True

    def _work_add(self, ticket: Ticket) -> None:
        try:
            for prepared in ticket.prepared:
                ticket.builders.append(self._driver.start(prepared))
        except BaseException:
            self._driver.abandon(ticket.builders)
            raise
        self._live += [(ticket, number, builder) for number, builder in enumerate(ticket.builders)]

    def _work_abort(self, ticket: Ticket) -> None:
        self._driver.abandon(ticket.builders)

    def _work_report(self) -> None:
        """Send all new pieces to the event loop in one call."""
        news: list[tuple[Ticket, int, Sequence[NumberedPiece], bool]] = []
        for ticket, number, builder in self._live:
            finished = builder.output.finished
            pieces = [(number, piece) for piece in builder.pieces()] if ticket.streams else []
            if pieces or finished:
                news.append((ticket, number, pieces, finished))
        if any(finished for *_, finished in news):
            self._live = [entry for entry in self._live if not entry[2].output.finished]
        if news and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, news)
