"""Where a stream's pieces leave without a task's turn: nearly all of them do (read `sse.py` first, which has the task).

    engine's thread ── send ──▸ a second handle of the socket      a few streams, whose task waits and has nothing to write
          │                          ▴ one of the two at a time
          └──▸ event loop ── take ──▸ the transport                other streams; TLS; the socket's buffer was full
                   └──▸ the task: what has to wait for its reader, the last piece, comments, errors

Waking the event loop for a token takes two switches of threads and a wait for the interpreter, on a core that the engine
computes with: more than writing the token does. `_open` says whose the socket is. The loop gives it away when nothing waits
to be written, and takes it back, under the lock, before it writes anything. The engine's thread never waits for a reader.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence

from martlet.engine.outputs import Piece
from martlet.server.http_protocol import BoundedProtocol, chunk

__all__ = ["Numbered", "Outlet"]

Numbered = tuple[int, Piece]  # a piece of the answer to prompt so and so


class Outlet:
    """Writes pieces of one response. Everything is the event loop's but for `send`."""

    def __init__(self) -> None:
        """Not connected: all pieces are the task's."""
        self.written_s = 0.0  # when the last piece was, by time.monotonic
        self._wire: BoundedProtocol | None = None
        self._encode: Callable[[Sequence[Numbered]], bytes] = lambda pieces: b""
        self._socket: socket.socket | None = None
        self._waits = False  # the stream's task, for pieces
        self._lock = threading.Lock()  # guards what follows
        self._open = False  # to the engine's thread
        self._under_way = 0  # news that the engine's thread has handed to the event loop and that are not there yet
        self._rest = b""  # of a chunk of which the socket took a part

    def connect(
        self, wire: BoundedProtocol, encode: Callable[[Sequence[Numbered]], bytes], *, for_engine: bool
    ) -> None:
        """From here on pieces are encoded and written here; `for_engine`: by the engine's thread, if that can be."""
        self._wire, self._encode = wire, encode
        self._socket = wire.second_socket() if for_engine else None

    @property
    def is_for_engine(self) -> bool:
        """Whether the engine's thread may write; it takes a file descriptor."""
        return self._socket is not None

    def wait(self) -> None:
        """The task has nothing to write, and begins to wait."""
        self._waits = True
        self._open_soon()

    def leave(self) -> None:
        """Something is there for the task: from now on only it writes."""
        self._waits = False
        with self._lock:
            self._open = False
        self._write_rest()

    def take(self, pieces: Sequence[Numbered]) -> bool:
        """Write pieces that came to the event loop; False if the task has to."""
        if self._wire is None or not self._waits or not self._wire.is_free:
            return False
        if data := self._encode(pieces):
            self._wire.write(chunk(data))
            self.written_s = time.monotonic()
        self._open_soon()
        return True

    def arrived(self) -> None:
        """News that the engine's thread had handed over is there."""
        with self._lock:
            self._under_way -= 1
        self._write_rest()

    def close(self) -> None:
        """No more will be written, but for what the task writes. Idempotent."""
        self.leave()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def send(self, pieces: Sequence[Numbered], finished: bool) -> Sequence[Numbered] | None:
        """In the engine's thread: write pieces and return None, or return what the event loop must now be handed."""
        with self._lock:
            if self._open and not finished:
                left = self._sent(pieces)
                if left is None:
                    return None
                pieces = left
            self._open = False
            self._under_way += 1
            return pieces

    def _sent(self, pieces: Sequence[Numbered]) -> Sequence[Numbered] | None:
        """Write pieces; None if that was all, else those that were not begun."""
        assert self._socket is not None
        try:
            data = chunk(self._encode(pieces))
        except Exception:  # the event loop, which has a reader to tell, will find the same
            return pieces
        try:
            taken = self._socket.send(data) if data else 0
        except OSError:  # its buffer is full, or the reader has gone: the event loop's to find out
            taken = 0
        if taken < len(data):
            self._rest = data[taken:]
            return ()
        self.written_s = time.monotonic()
        return None

    def _write_rest(self) -> None:
        """Write what the engine's thread has left of a chunk, before anything else is."""
        with self._lock:
            rest, self._rest = self._rest, b""
        if rest and self._wire is not None:
            self._wire.write(rest)

    def _open_soon(self) -> None:
        """Once what was written in this turn of the event loop is out."""
        if self._socket is not None:
            asyncio.get_running_loop().call_soon(self._open_now)

    def _open_now(self) -> None:
        if self._waits and self._wire is not None and self._wire.is_empty:
            with self._lock:
                self._open = self._under_way == 0
