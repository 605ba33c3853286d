"""uvicorn's HTTP/1.1 protocol, extended (read `lifecycle.py` next).

It bounds the size of a request's head and the time that it may take to arrive. It answers HTTP/1.0
clients without chunks: their bodies end with the connection. It answers a client that has shut down
only its sending side.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10  # of a request line and its headers
HEAD_S = 30.0  # within which they must arrive


def chunk(data: bytes) -> bytes:
    """Data as a chunk of a body; b"" for no data, since an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def until_closed(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The application for HTTP/1.0: a body without a length ends with the connection.

    Source: RFC 9112, 6.3.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def plain(message: Message) -> None:
            if message["type"] == "http.response.start":
                if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                    cycle.chunked_encoding = False
            elif cycle.expected_content_length == 0:  # no length given: uvicorn expects this message's
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, plain)

    return answer


class TooLargeError(Exception):
    """A request's head exceeds MAX_HEAD_BYTES."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0  # of the current head, as the parser reported them
    _fed_bytes = 0  # the same, as received: the parser reports a header only when it is complete
    _in_head = False
    _timer: asyncio.TimerHandle | None = None
    sends_no_more = False  # the client shut down its side; only a write would show whether it is gone

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._cycles: list[RequestResponseCycle] = []  # pipelined requests without a full answer
        self._timer = self.loop.call_later(HEAD_S, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every open request that the client is gone; uvicorn tells only the newest."""
        self._stop_timer()
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer the requests of a client that sends no more, then close the connection."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return False  # nothing is left to answer: close
        self.sends_no_more = True
        for cycle in self._cycles:
            cycle.message_event.set()  # wakes tasks that wait for the client to leave
        cycle.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; a head that is too large closes the connection."""
        if self.transport.is_closing():
            return
        self._fed_bytes = self._fed_bytes + len(data) if self._in_head else 0
        super().data_received(data)  # answers exceptions of the callbacks with 400
        if self._in_head and self._fed_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_bytes, self._in_head = 0, True
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._late)
        super().on_message_begin()
        self.scope["martlet.connection"] = self  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        """Count a piece of the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if self.cycle is not None:
            self._cycles = [*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        super()._start_asgi_task(cycle, until_closed(app, cycle) if cycle.scope["http_version"] == "1.0" else app)  # type: ignore[arg-type]

    @property
    def can_write(self) -> bool:
        """Whether `write` may add to the response: it is chunked, and the client keeps up."""
        cycle = self.cycle
        is_open = not (cycle.response_complete or cycle.disconnected or self.flow.write_paused)
        return bool(cycle.chunked_encoding) and is_open

    def write(self, data: bytes) -> None:
        """Write chunks of the current response, as the application's `send` does.

        A closing connection drops them: uvloop would raise, where asyncio does not.
        """
        if not self.transport.is_closing():
            self.transport.write(data)

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
