"""Two threads and a task that take turns at one socket: every byte goes out once, in order, whoever wrote it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import uvloop

from martlet.engine.outputs import Piece
from martlet.server.bridge import ENGINES_STREAMS, Ticket
from martlet.server.http_protocol import BoundedProtocol, chunk
from martlet.server.outlet import Numbered, Outlet
from martlet.server.sse import Mould, event
from tests.system.scripted_llm import spell
from tests.system.serving import events, serving

TEXT = "abcdefghij" * 12


class Pipe:
    """A transport over one end of a pair of sockets: it keeps what the socket does not take, and says so."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.near.setblocking(False)
        self.kept = b""
        self.by_loop = 0

    @property
    def is_empty(self) -> bool:
        return not self.kept

    @property
    def is_free(self) -> bool:
        return len(self.kept) < 20_000

    def write(self, data: bytes) -> None:
        self.by_loop += 1
        self.kept += data
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.kept = self.kept[self.near.send(self.kept) :] if self.kept else b""

    def second_socket(self) -> socket.socket:
        found = self.near.dup()
        found.setblocking(False)
        return found


class NoBridge:
    """What a ticket needs of its bridge."""

    def __init__(self) -> None:
        self.open_tickets: list[Ticket] = []
        self.aborted = False

    def abort(self, ticket: Ticket) -> None:
        self.aborted = True


def encoded(pieces: Sequence[Numbered]) -> bytes:
    return b"".join(b"%s|" % piece.text.encode() for _, piece in pieces)


@pytest.mark.parametrize("seed", range(6))
def test_bytes_stay_in_order(seed: int) -> None:
    """An engine's thread of random haste, a reader that stalls now and then, a task that writes comments in between."""
    numbers, n_pieces = random.Random(seed), 800
    sizes = [numbers.choice((1, 10, 200, 3000)) for _ in range(n_pieces)]
    pauses = [numbers.choice((0, 0, 0, 0.0005)) for _ in range(n_pieces)]
    pipe, ways = Pipe(), {"engine": 0}

    async def work() -> None:
        loop, ticket = asyncio.get_running_loop(), Ticket(NoBridge(), "t", [object()], True)  # type: ignore[arg-type, list-item]
        ticket.connect(pipe, encoded)  # type: ignore[arg-type]

        def engine() -> None:
            for number in range(n_pieces + 1):
                last = number == n_pieces
                pieces = [] if last else [(0, Piece(0, f"{number}:" + "x" * sizes[number]))]
                left = ticket.outlet.send(pieces, last)
                if left is None:
                    ways["engine"] += 1
                else:
                    loop.call_soon_threadsafe(ticket.take, left, last)
                time.sleep(0 if last else pauses[number])

        thread = threading.Thread(target=engine)
        thread.start()
        while True:
            pieces = await ticket.pieces(0.002)
            ended = not pieces and ticket.finished
            pipe.write(chunk(encoded(pieces)) if pieces else b"!")  # a comment
            while not pipe.is_empty:  # as `send` waits for the transport
                pipe.flush()
                await asyncio.sleep(0)
            if ended:
                break
        thread.join()
        ticket.outlet.close()
        pipe.near.shutdown(socket.SHUT_WR)

    found: list[bytes] = []

    def read() -> None:
        stalls = random.Random(seed)
        while part := pipe.far.recv(stalls.choice((10, 5000, 50_000))):
            found.append(part)
            time.sleep(stalls.choice((0, 0, 0, 0.002)))

    reader = threading.Thread(target=read)
    reader.start()
    asyncio.run(work())
    reader.join(20)
    expected = [b"%d:" % n + b"x" * sizes[n] for n in range(n_pieces)]
    text, came = b"".join(found), b""
    while text:  # chunks, and comments between two of them
        if text[:1] == b"!":
            text = text[1:]
            continue
        size, _, rest = text.partition(b"\r\n")
        came, text = came + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    assert came == b"".join(piece + b"|" for piece in expected)
    assert ways["engine"] > 20, "the engine's thread has hardly written"
    assert pipe.by_loop > 5


def test_an_encoder_that_fails_is_the_tasks_to_tell() -> None:
    async def work() -> None:
        def broken(pieces: Sequence[Numbered]) -> bytes:
            raise ValueError("no such character")

        ticket = Ticket(NoBridge(), "t", [object()], True)  # type: ignore[arg-type, list-item]
        ticket.connect(Pipe(), broken)  # type: ignore[arg-type]
        waiting = asyncio.ensure_future(ticket.pieces(5))
        await asyncio.sleep(0.01)
        left = ticket.outlet.send([(0, Piece(0, "a"))], False)
        assert left is not None
        ticket.take(left, False)
        with pytest.raises(ValueError, match="no such character"):
            await waiting
        ticket.outlet.close()

    asyncio.run(work())


def test_not_connected_everything_is_the_tasks() -> None:
    outlet = Outlet()
    pieces = [(0, Piece(0, "a"))]
    assert outlet.send(pieces, False) == pieces
    assert not outlet.take(pieces)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_reader_that_has_gone_gets_nothing(new_loop: Any) -> None:
    """What the engine's thread has left of a chunk may come after the end of the connection; the news behind it are others'."""

    async def work() -> None:
        near, far = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near)
        wire = BoundedProtocol.__new__(BoundedProtocol)
        wire.transport = transport
        far.close()
        transport.abort()
        await asyncio.sleep(0.02)
        assert not wire.is_empty
        wire.write(b"x")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work())


@pytest.mark.parametrize("text", ["", "a", '"quoted"\\\n', "\u2028 \U0001f600 \x00", '"text":""'])
def test_a_mould_gives_the_event_itself(text: str) -> None:
    def made(text: str) -> bytes:
        return event({"id": 'x"text":""', "choices": [{"index": 0, "text": text, "logprobs": None}], "usage": None})

    assert Mould(made(""), "text").cast(text) == made(text)


def sent_by(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count which way pieces take."""
    ways = {"engine": 0, "loop": 0}
    send, take = Outlet.send, Outlet.take

    def counted_send(self: Outlet, pieces: Any, finished: bool) -> Any:
        left = send(self, pieces, finished)
        ways["engine"] += left is None
        return left

    def counted_take(self: Outlet, pieces: Any) -> bool:
        took = take(self, pieces)
        ways["loop"] += took
        return took

    monkeypatch.setattr(Outlet, "send", counted_send)
    monkeypatch.setattr(Outlet, "take", counted_take)
    return ways


def text_of(data: dict[str, Any]) -> str:
    """The text of one event, of any API."""
    if data.get("choices"):
        choice = data["choices"][0]
        return choice.get("text") or choice.get("delta", {}).get("content") or ""
    if data.get("type") == "response.output_text.delta":
        return data["delta"]
    return data["delta"].get("text", "") if data.get("type") == "content_block_delta" else ""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_one_stream_is_the_engines(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all of its events are written by the engine's thread, and are what the task would have written."""
    ways = sent_by(monkeypatch)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 120, "stream": True}
    if path == "/v1/messages":
        body["model"] = "scripted"
    if path == "/v1/completions":
        body = {"prompt": "hi", "max_tokens": 120, "stream": True}
    if path == "/v1/responses":
        body = {"input": "hi", "max_output_tokens": 120, "stream": True}
    with serving(spell(TEXT), step_s=0.002) as served:
        answer = served.post(path, body).text
        served.check_idle()
    text = "".join(map(text_of, events(answer)))
    assert text == TEXT
    assert ways["engine"] > 80


def test_of_many_streams_the_event_loop_writes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = sent_by(monkeypatch)
    found: list[str] = []
    with serving(spell(TEXT), step_s=0.002, context=512, n_pages=2048) as served:

        def ask() -> None:
            body = json.dumps({"prompt": "hi", "max_tokens": 120, "stream": True})
            answer = events(served.post("/v1/completions", body).text)
            found.append("".join(data["choices"][0]["text"] for data in answer))

        threads = [threading.Thread(target=ask) for _ in range(3 * ENGINES_STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        served.check_idle()
    assert found == [TEXT] * len(threads)
    assert ways["engine"] > 80
    assert ways["loop"] > 0
