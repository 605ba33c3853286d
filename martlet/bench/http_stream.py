"""An HTTP client that times the pieces of a streamed answer (read `load_generator.py` next).

It works with any OpenAI-compatible server: HTTP/1.1, one connection per request. It records when
bytes arrive and parses them after the end of the answer, so that the client's own work hardly
affects the times. Formats: https://platform.openai.com/docs/api-reference/chat/streaming,
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from martlet.errors import MartletError, RequestError

MAX_HEAD = 64 << 10


@dataclass(frozen=True, slots=True)
class Target:
    """A server's address, and its API key."""

    host: str
    port: int
    prefix: str  # of paths; ends with "/v1"
    tls: ssl.SSLContext | None = None
    api_key: str | None = None

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> Target:
        """The server at a base URL with or without /v1; RequestError for a wrong URL."""
        try:
            address = urlsplit(url if "//" in url else f"http://{url}")
            port = address.port
        except ValueError:
            address, port = urlsplit("x:"), None
        if address.scheme not in ("http", "https") or not address.hostname:
            raise RequestError(f"{url!r} is no URL of a server; expected http://HOST:PORT or https://….", param="url")
        tls = ssl.create_default_context() if address.scheme == "https" else None
        path = address.path.rstrip("/")
        prefix = path if path.endswith("/v1") else path + "/v1"
        return cls(address.hostname, port or (443 if tls else 80), prefix, tls, api_key)

    def head(self, method: str, path: str, size: int) -> bytes:
        """A request line with its headers."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        if size:
            lines += ["Content-Type: application/json", f"Content-Length: {size}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass(slots=True)
class Answer:
    """The answer to one request; times are those of `time.perf_counter`."""

    due_s: float  # when the request was due
    sent_s: float = 0.0
    times: list[float] = field(default_factory=list)  # of the pieces with text
    end_s: float = 0.0
    n_prompt: int | None = None  # counts from the server's usage
    n_cached: int | None = None
    n_generated: int | None = None
    finish: str | None = None
    error: str | None = None


async def ask(target: Target, path: str, body: bytes, due_s: float, timeout_s: float) -> Answer:
    """Send a request and read its stream to the end; a failure is the answer's `error`."""
    answer = Answer(due_s)
    try:
        async with asyncio.timeout(timeout_s):
            answer.sent_s = time.perf_counter()
            reply = await _exchange(target, target.head("POST", target.prefix + path, len(body)) + body)
    except (OSError, TimeoutError, MartletError) as error:
        answer.error = str(error) or f"the answer did not end within {timeout_s:g} s"
        answer.end_s = time.perf_counter()
        return answer
    answer.end_s = time.perf_counter()
    if reply.status != 200:
        answer.error = f"status {reply.status}: {_message(reply.body)}"
    else:
        _read_events(answer, _events(reply.body_pieces))
    return answer


async def get_json(target: Target, path: str) -> Any:
    """The JSON of a GET request; MartletError, OSError or TimeoutError if it fails."""
    async with asyncio.timeout(30):
        reply = await _exchange(target, target.head("GET", path, 0))
    if reply.status != 200:
        raise MartletError(f"GET {path} was answered {reply.status}: {_message(reply.body)}")
    return orjson.loads(reply.body)


async def _exchange(target: Target, request: bytes) -> _Reply:
    """Send a request; return its complete reply."""
    loop = asyncio.get_running_loop()
    transport, reply = await loop.create_connection(lambda: _Reply(request), target.host, target.port, ssl=target.tls)
    try:
        await reply.complete
    finally:
        transport.close()
    return reply


class _Reply(asyncio.Protocol):
    """A reply under way: keeps bytes with their times, and parses only enough to find the end."""

    def __init__(self, request: bytes) -> None:
        self.status = 0
        self.body_pieces: list[tuple[float, bytes]] = []
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._raw: list[tuple[float, bytes]] = []  # received and not parsed
        self._chunks: _Chunks | None = None  # of a chunked body
        self._left: int | None = None  # missing bytes of another body, if its length is known

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(data for _, data in self.body_pieces)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send the request."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keep received bytes."""
        self._raw.append((time.perf_counter(), data))
        if self.complete.done():
            return
        try:
            if self.status == 0:
                self._read_head()
            elif self._chunks is None:
                self._read_plain()
            elif len(data) < 4 or data.endswith(b"\r\n\r\n"):  # as the last chunk does
                self._read_chunks()
        except MartletError as error:
            self.complete.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has closed the connection, or the network failed."""
        if self.complete.done():
            return
        try:
            if self.status == 0:
                raise MartletError("the connection ended before the answer began")
            if self._chunks is not None:
                self._read_chunks()
            if not self.complete.done():
                if exc is not None or self._chunks is not None or self._left is not None:
                    raise MartletError("the connection ended within the answer")
                self.complete.set_result(None)
        except MartletError as error:
            self.complete.set_exception(error)

    def _read_head(self) -> None:
        """Parse status and headers once they are complete."""
        when, received = self._raw[-1][0], b"".join(data for _, data in self._raw)
        head, end, rest = received.partition(b"\r\n\r\n")
        if not received.startswith(b"HTTP/1."[: len(received)]):
            raise MartletError(f"the answer is not HTTP/1.1: {received[:100]!r}")
        if not end:
            if len(received) > MAX_HEAD:
                raise MartletError(f"the answer's head is larger than {MAX_HEAD:,} bytes")
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[1].isdigit():
            raise MartletError(f"the answer is not HTTP/1.1: {first[:100]!r}")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.status = int(words[1])
        size = headers.get("content-length", "")
        self._raw = [(when, rest)]
        if headers.get("transfer-encoding", "").lower() == "chunked":
            self._chunks = _Chunks()
            self._read_chunks()
        else:
            self._left = int(size) if size.isdigit() else None
            self._read_plain()

    def _read_plain(self) -> None:
        for _, data in self._raw:
            self._left = None if self._left is None else self._left - len(data)
        self.body_pieces += self._raw
        self._raw = []
        if self._left is not None and self._left <= 0:
            self.complete.set_result(None)

    def _read_chunks(self) -> None:
        assert self._chunks is not None
        for when, data in self._raw:
            self.body_pieces += [(when, piece) for piece in self._chunks.feed(data)]
        self._raw = []
        if self._chunks.ended:
            self.complete.set_result(None)


class _Chunks:
    """Decodes a chunked body (RFC 9112, 7.1)."""

    def __init__(self) -> None:
        self.ended = False
        self._left = 0  # missing bytes of the current chunk
        self._last = False  # the last chunk has begun: trailers and an empty line follow
        self._rest = b""  # an incomplete line

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The content in these bytes; MartletError if they are not chunks."""
        data, self._rest, at = self._rest + data, b"", 0
        while at < len(data) and not self.ended:
            if self._left:
                piece = data[at : at + self._left]
                self._left -= len(piece)
                at += len(piece)
                yield piece
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._rest = data[at:]
                return
            line, at = data[at:end], end + 2
            if self._last:
                self.ended = not line
            elif line:  # an empty line ends a chunk
                self._left = _size(line)
                self._last = self._left == 0


def _size(line: bytes) -> int:
    number = line.split(b";")[0].strip()
    if not number or number.strip(b"0123456789abcdefABCDEF"):
        raise MartletError(f"a chunk of the answer begins with {line[:40]!r}, not with its size")
    return int(number, 16)


def _events(pieces: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The events of a body, each with the time at which it was complete."""
    events, rest = [], b""
    for when, piece in pieces:
        *complete, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        events += [(when, event) for event in complete]
    return events


def _read_events(answer: Answer, events: list[tuple[float, bytes]]) -> None:
    """Fill in the answer from its events."""
    ended = False
    for when, raw in events:
        for data in _data(raw):
            if data == b"[DONE]":
                ended = True
                continue
            try:
                value = orjson.loads(data)
            except ValueError:
                answer.error = f"an event is not JSON: {data[:100]!r}"
                return
            if not isinstance(value, dict) or "error" in value:
                answer.error = f"an error in the stream: {_message(data)}"
                return
            try:
                _read_chunk(answer, value, when)
            except (AttributeError, TypeError):
                answer.error = f"an event is not a chunk of an answer: {data[:100]!r}"
                return
    if not ended:
        answer.error = "the stream ended without [DONE]"
    elif not answer.times:
        answer.error = "the answer has no text"


def _data(raw: bytes) -> Iterator[bytes]:
    for line in raw.split(b"\n"):
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _read_chunk(answer: Answer, chunk: dict[str, Any], when: float) -> None:
    if isinstance(usage := chunk.get("usage"), dict):
        answer.n_prompt = _count(usage, "prompt_tokens")
        answer.n_generated = _count(usage, "completion_tokens")
        details = usage.get("prompt_tokens_details")
        answer.n_cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or choice
        if any(delta.get(name) for name in ("content", "text", "reasoning_content", "tool_calls")):
            answer.times.append(when)
        answer.finish = choice.get("finish_reason") or answer.finish


def _count(usage: dict[str, Any], name: str) -> int | None:
    count = usage.get(name)
    return count if type(count) is int and count >= 0 else None


def _message(data: bytes) -> str:
    """The message in an error's body."""
    try:
        body = orjson.loads(data)
        error = body.get("error", body)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError):
        return data[:300].decode("utf-8", "replace")
