"""Server-sent events: what comes from the engine, written to one reader (read `outlet.py` next; `chat_api.py` for what is written).

The reader may be slow, silent or gone. A piece that cannot be sent within a time cancels the request; while nothing
comes a comment is sent now and then, so that no proxy cuts the connection; when the client leaves the request ends.
Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from martlet.engine.outputs import Piece
from martlet.server.bridge import Ticket
from martlet.server.error_replies import ApiError, api_error
from martlet.server.service import client_left, left, raise_failure
from martlet.server.settings import ServerSettings

__all__ = ["Encoder", "EventStream", "Mould", "event"]

KEEP_ALIVE = b": keep-alive\n\n"
PROGRESS_S = 0.5  # between two events that tell how much of a prompt has been read


class Encoder(Protocol):
    """Turns pieces into the events of one API."""

    def begin(self) -> bytes:
        """What is sent before anything is known."""

    def piece(self, number: int, piece: Piece) -> bytes:
        """The events of one piece of the answer to prompt `number`."""

    def end(self) -> bytes:
        """What is sent when every answer is whole."""

    def error(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""


def event(data: Any, name: str | None = None) -> bytes:
    """One event with a JSON value."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


class Mould:
    """An event of which only one text differs from the next: its bytes before and after it."""

    __slots__ = ("_after", "_before")

    def __init__(self, made: bytes, key: str) -> None:
        """`made` is the event as it is with an empty text under `key`."""
        hole = b'"' + key.encode() + b'":'  # with its quotes no string within JSON has it
        before, found, after = made.partition(hole + b'""')
        assert found, key
        self._before, self._after = before + hole, after

    def cast(self, text: str) -> bytes:
        """The event with this text: the bytes that `event` would make of it."""
        return self._before + orjson.dumps(text) + self._after


class EventStream(Response):
    """The response that streams a ticket's answers."""

    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        ticket: Ticket,
        encoder: Encoder,
        settings: ServerSettings,
        progress: Callable[[], bytes] | None = None,
    ) -> None:
        """`progress` is what is sent now and then until an answer begins; b"": it has begun."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request = request
        self._ticket = ticket
        self._encoder = encoder
        self._settings = settings
        self._progress = progress
        self._written_s = 0.0  # when this task has written last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; however this ends, so does the ticket."""
        self._send = send
        leaving = asyncio.ensure_future(left(self._request))
        leaving.add_done_callback(lambda _: self._ticket.cancel(client_left()))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._write_all()
            except Exception as error:
                await self._write(self._encoder.error(api_error(error)))
                if not isinstance(error, ApiError):
                    raise
            async with asyncio.timeout(self._settings.send_timeout_s):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):  # uvicorn closes a connection whose response was not finished
            self._ticket.cancel(ApiError(499, "The client left, or does not read."))
        finally:
            self._ticket.outlet.close()
            self._ticket.cancel()
            leaving.cancel()

    async def _write_all(self) -> None:
        encoder, ticket, keep_alive_s = self._encoder, self._ticket, self._settings.keep_alive_s
        await self._write(encoder.begin())
        if (wire := self._request.scope.get("martlet.wire")) is not None and wire.is_chunked:
            ticket.connect(wire, self._encoded)
        self._written_s = time.monotonic()
        while True:
            quiet_s = keep_alive_s if self._progress is None else min(keep_alive_s, PROGRESS_S)
            pieces = await ticket.pieces(max(0.0, quiet_s - self._silent_s()))
            if pieces:
                await self._write(self._encoded(pieces))
            elif ticket.finished:
                break
            elif ticket.cause is None and self._silent_s() >= quiet_s:
                await self._write(self._sign_of_life())
        raise_failure(ticket)
        await self._write(encoder.end())

    def _sign_of_life(self) -> bytes:
        if self._progress is not None:
            if told := self._progress():
                return told
            self._progress = None
        return KEEP_ALIVE

    def _silent_s(self) -> float:
        return time.monotonic() - max(self._written_s, self._ticket.outlet.written_s)

    def _encoded(self, pieces: Sequence[tuple[int, Piece]]) -> bytes:
        return b"".join([self._encoder.piece(number, piece) for number, piece in pieces])

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        async with asyncio.timeout(self._settings.send_timeout_s):
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._written_s = time.monotonic()
