"""Server-sent events: writes a ticket's pieces to a client (read `chat_api.py` for their content).

The client may be slow, silent or gone. If a piece cannot be sent within `send_timeout_s`, the
request is cancelled. While no token comes, a comment is sent now and then, so that no proxy closes
the connection. When the client leaves, the request ends.
Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from martlet.engine.outputs import Piece
from martlet.server.bridge import NumberedPiece, Ticket
from martlet.server.error_replies import ApiError, api_error
from martlet.server.http_protocol import BoundedProtocol, chunk
from martlet.server.service import client_left, left, raise_failure
from martlet.server.settings import ServerSettings

KEEP_ALIVE = b": keep-alive\n\n"
PROGRESS_S = 0.5  # between two events with the prompt's progress


class Encoder(Protocol):
    """Turns pieces into the events of one API."""

    def begin(self) -> bytes:
        """The events before the first token."""

    def piece(self, number: int, piece: Piece) -> bytes:
        """The events of a piece of the answer to prompt `number`."""

    def end(self) -> bytes:
        """The events after the last answer is complete."""

    def error(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""


def event(data: Any, name: str | None = None) -> bytes:
    """One event with a JSON value."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


class EventTemplate:
    """An event whose one text changes: the bytes before and after it are made once."""

    __slots__ = ("_after", "_before")

    def __init__(self, empty: bytes, key: str) -> None:
        """`empty` is the event with an empty text under `key`."""
        field = b'"' + key.encode() + b'":'  # JSON escapes quotes, so no string contains it
        before, empty_text, after = empty.partition(field + b'""')
        assert empty_text, key
        self._before, self._after = before + field, after

    def fill(self, text: str) -> bytes:
        """The event with this text, byte for byte as `event` makes it."""
        return self._before + orjson.dumps(text) + self._after


class EventStream(Response):
    """Streams a ticket's answers."""

    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        ticket: Ticket,
        encoder: Encoder,
        settings: ServerSettings,
        progress: Callable[[], bytes] | None = None,
    ) -> None:
        """`progress` makes an event of the prompt's progress; b"" once an answer has begun."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request = request
        self._ticket = ticket
        self._encoder = encoder
        self._settings = settings
        self._progress = progress
        self._written_s = 0.0  # time.monotonic() of the last write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every event; the ticket ends with the stream, for whatever reason."""
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
        except (TimeoutError, OSError):  # uvicorn closes the connection of an unfinished response
            self._ticket.cancel(ApiError(499, "The client left, or does not read."))
        finally:
            self._ticket.cancel()
            leaving.cancel()

    async def _write_all(self) -> None:
        encoder, ticket, keep_alive_s = self._encoder, self._ticket, self._settings.keep_alive_s
        await self._write(encoder.begin())
        self._written_s = time.monotonic()
        connection: BoundedProtocol | None = self._request.scope.get("martlet.connection")
        if connection is not None:
            ticket.write_with(partial(self._write_now, connection))
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

    def _write_now(self, connection: BoundedProtocol, pieces: Sequence[NumberedPiece]) -> bool:
        """Write stream chunks straight to the transport, without waking this response's task.

        For every token of every stream the task and `send` would cost more than the writing.
        """
        if not connection.can_write:
            return False
        if data := self._encoded(pieces):
            connection.write(chunk(data))
            self._written_s = time.monotonic()
        return True

    def _sign_of_life(self) -> bytes:
        if self._progress is not None:
            if progress := self._progress():
                return progress
            self._progress = None
        return KEEP_ALIVE

    def _silent_s(self) -> float:
        return time.monotonic() - self._written_s

    def _encoded(self, pieces: Sequence[NumberedPiece]) -> bytes:
        return b"".join([self._encoder.piece(number, piece) for number, piece in pieces])

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        async with asyncio.timeout(self._settings.send_timeout_s):
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._written_s = time.monotonic()
