"""Stream chunks that the event loop writes at once, and those of the task: all bytes go out once,
in order.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import uvloop

from martlet.engine.outputs import Piece
from martlet.server.bridge import NumberedPiece, Ticket
from martlet.server.http_protocol import BoundedProtocol
from martlet.server.sse import EventStream, EventTemplate, event
from martlet.toy import spell
from tests.server.serving import events, serving

TEXT = "abcdefghij" * 12


class NoBridge:
    """What a ticket needs of its bridge."""

    def abort(self, ticket: Ticket) -> None:
        pass


def ticket_of_one() -> Ticket:
    return Ticket(NoBridge(), "t", [object()], True)  # type: ignore[arg-type, list-item]


@pytest.mark.parametrize("seed", range(6))
def test_pieces_stay_in_order(seed: int) -> None:
    """A client that is behind now and then, and a task that is slow to write what it is left
    with.
    """
    numbers, n_pieces = random.Random(seed), 800
    written: list[int] = []
    ways = {"now": 0, "task": 0}

    def write_now(pieces: Sequence[NumberedPiece]) -> bool:
        if numbers.random() < 0.2:  # the transport is full
            return False
        ways["now"] += len(pieces)
        written.extend(int(piece.text) for _, piece in pieces)
        return True

    async def work() -> None:
        ticket = ticket_of_one()
        ticket.write_with(write_now)

        async def steps() -> None:
            for number in range(n_pieces):
                ticket.take([(0, Piece(0, str(number)))], False)
                for _ in range(numbers.choice((0, 1, 3))):
                    await asyncio.sleep(0)
            ticket.take([], True)

        running = asyncio.ensure_future(steps())
        while (pieces := await ticket.pieces(5)) or not ticket.finished:
            written.extend(int(piece.text) for _, piece in pieces)
            ways["task"] += len(pieces)
            await asyncio.sleep(0)
        await running

    asyncio.run(work())
    assert written == list(range(n_pieces))
    assert min(ways.values()) > 20, ways


def test_an_encoder_that_fails_is_the_tasks_to_tell() -> None:
    async def work() -> None:
        def broken(pieces: Sequence[NumberedPiece]) -> bool:
            raise ValueError("no such character")

        ticket = ticket_of_one()
        ticket.write_with(broken)
        waiting = asyncio.ensure_future(ticket.pieces(5))
        await asyncio.sleep(0.01)
        ticket.take([(0, Piece(0, "a"))], False)
        with pytest.raises(ValueError, match="no such character"):
            await waiting

    asyncio.run(work())


def test_without_a_writer_the_task_gets_every_piece() -> None:
    async def work() -> None:
        ticket, pieces = ticket_of_one(), [(0, Piece(0, "a"))]
        waiting = asyncio.ensure_future(ticket.pieces(5))
        await asyncio.sleep(0.01)
        ticket.take(pieces, False)
        assert await waiting == pieces

    asyncio.run(work())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_reader_that_has_gone_gets_nothing(new_loop: Any) -> None:
    """A chunk written after the end of the connection raises nothing: other tickets' pieces follow
    it.
    """

    async def work() -> None:
        near, far = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near)
        connection = BoundedProtocol.__new__(BoundedProtocol)
        connection.transport = transport
        far.close()
        transport.abort()
        await asyncio.sleep(0.02)
        connection.write(b"x")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work())


@pytest.mark.parametrize("text", ["", "a", '"quoted"\\\n', "\u2028 \U0001f600 \x00", '"text":""'])
def test_a_template_gives_the_event_itself(text: str) -> None:
    def made(text: str) -> bytes:
        return event({"id": 'x"text":""', "choices": [{"index": 0, "text": text, "logprobs": None}], "usage": None})

    assert EventTemplate(made(""), "text").fill(text) == made(text)


def text_of(data: dict[str, Any]) -> str:
    """The text of one event, of any API."""
    if data.get("choices"):
        choice = data["choices"][0]
        return choice.get("text") or choice.get("delta", {}).get("content") or ""
    if data.get("type") == "response.output_text.delta":
        return data["delta"]
    return data["delta"].get("text", "") if data.get("type") == "content_block_delta" else ""


def count_writes(monkeypatch: pytest.MonkeyPatch) -> dict[bool, int]:
    """Count how often the event loop could write at once, and how often not."""
    counts = {True: 0, False: 0}
    write_now = EventStream._write_now

    def counted(self: EventStream, connection: BoundedProtocol, pieces: Sequence[NumberedPiece]) -> bool:
        wrote = write_now(self, connection, pieces)
        counts[wrote] += 1
        return wrote

    monkeypatch.setattr(EventStream, "_write_now", counted)
    return counts


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_nearly_all_events_are_written_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the events that the task would have written."""
    counts = count_writes(monkeypatch)
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
    assert counts[True] > 80


def test_of_many_streams_too(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_writes(monkeypatch)
    texts: list[str] = []
    with serving(spell(TEXT), step_s=0.002, context=512, n_pages=2048) as served:

        def ask() -> None:
            body = json.dumps({"prompt": "hi", "max_tokens": 120, "stream": True})
            answer = events(served.post("/v1/completions", body).text)
            texts.append("".join(data["choices"][0]["text"] for data in answer))

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        served.check_idle()
    assert texts == [TEXT] * len(threads)
    assert counts[True] > 80 * len(threads)
