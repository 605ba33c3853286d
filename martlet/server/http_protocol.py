"""uvicorn's HTTP/1.1, with what it lacks (read `lifecycle.py` next).

Bounds on what comes before a body: how much, and how long it may take. Answers to HTTP/1.0 that end with the connection, since
chunks are HTTP/1.1's. A client that sends no more but may still read, and then gets an answer.
"""

from __future__ import annotations

import asyncio
import socket

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["HEAD_S", "MAX_HEAD_BYTES", "BoundedProtocol", "chunk"]

MAX_HEAD_BYTES = 64 << 10  # of a request's line and headers
HEAD_S = 30.0  # that they may take to arrive


def chunk(data: bytes) -> bytes:
    """Data as a chunk of a body; nothing for none, since an empty chunk is the body's end."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def until_closed(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The application as HTTP/1.0 knows it: a body without a length goes on until the connection is closed (RFC 9112, 6.3)."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def plain(message: Message) -> None:
            if message["type"] == "http.response.start":
                if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                    cycle.chunked_encoding = False
            elif cycle.expected_content_length == 0:  # none was given: what uvicorn is to count is what comes
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, plain)

    return answer


class TooLargeError(Exception):
    """The head has more bytes than it may have."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0  # of the head that is being read, as far as the parser has told
    _fed_bytes = 0  # the same, as bytes that came: the parser tells of a header when it is whole
    _in_head = False
    _timer: asyncio.TimerHandle | None = None
    sends_no_more = False  # the client; it may have gone altogether, which only writing to it would show

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._cycles: list[RequestResponseCycle] = []  # requests that may not have been answered yet
        self._timer = self.loop.call_later(HEAD_S, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone. uvicorn tells the newest request; the one that is answered may have others behind it."""
        self._stop_timer()
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: what it has asked for is answered, then the connection is closed."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return False  # nothing can come of it: close
        self.sends_no_more = True
        for cycle in self._cycles:
            cycle.message_event.set()  # whoever waits for the client to leave
        cycle.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        """Bytes came; a head that is too large closes the connection."""
        if self.transport.is_closing():
            return
        self._fed_bytes = self._fed_bytes + len(data) if self._in_head else 0
        super().data_received(data)  # what the callbacks raise, it answers with 400
        if self._in_head and self._fed_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_bytes, self._in_head = 0, True
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._late)
        super().on_message_begin()
        self.scope["martlet.wire"] = self  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        """More of its path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of it."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its head is whole."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if self.cycle is not None:
            self._cycles = [*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        super()._start_asgi_task(cycle, until_closed(app, cycle) if cycle.scope["http_version"] == "1.0" else app)  # type: ignore[arg-type]

    @property
    def is_chunked(self) -> bool:
        """Whether the response that runs is written in chunks, as `write` takes them."""
        return bool(self.cycle.chunked_encoding)

    @property
    def is_free(self) -> bool:
        """Whether the response that runs may be written by `write`: its head is out, and its reader is not behind."""
        cycle = self.cycle
        return self.is_chunked and not (cycle.response_complete or cycle.disconnected or self.flow.write_paused)

    @property
    def is_empty(self) -> bool:
        """Whether the socket has taken all that was written."""
        return not self.transport.is_closing() and self.transport.get_write_buffer_size() == 0

    def write(self, data: bytes) -> None:
        """Write chunks of that response, as the application's `send` does.

        What `send` passes on its way here takes longer than the writing, for every token of every stream. A reader that has
        gone gets nothing: uvloop would raise, where asyncio does not.
        """
        if not self.transport.is_closing():
            self.transport.write(data)

    def second_socket(self) -> socket.socket | None:
        """Another handle of the connection's socket, which never blocks; None if there can be none, as with TLS."""
        found = self.transport.get_extra_info("socket")
        if found is None or self.transport.get_extra_info("ssl_object") is not None:
            return None
        try:
            second: socket.socket = found.dup()
        except OSError:  # no file descriptor is left
            return None
        second.setblocking(False)
        return second

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise TooLargeError

    def _late(self) -> None:
        self._timer = None
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
