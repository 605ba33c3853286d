"""One streamed answer of any OpenAI-compatible server, with the time of every piece (read `load_generator.py` next, which asks for many).

A client of its own: it notes when bytes came and reads what they say after the answer has ended, so that the clock measures
the server and little of the generator. HTTP/1.1, one connection a request. Formats:
https://platform.openai.com/docs/api-reference/chat/streaming and https://html.spec.whatwg.org/multipage/server-sent-events.html
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

__all__ = ["Answer", "Target", "ask", "get_json"]

MAX_HEAD = 64 << 10


@dataclass(frozen=True, slots=True)
class Target:
    """A server: where it is, and what every request to it carries."""

    host: str
    port: int
    prefix: str  # of paths, "/v1" and what stands before it
    tls: ssl.SSLContext | None = None
    api_key: str | None = None

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> Target:
        """A base URL with or without /v1; RequestError if it is none."""
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit("x:"), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RequestError(f"{url!r} is no URL of a server; expected http://HOST:PORT or https://….", param="url")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        path = parts.path.rstrip("/")
        prefix = path if path.endswith("/v1") else path + "/v1"
        return cls(parts.hostname, port or (443 if tls else 80), prefix, tls, api_key)

    def head(self, method: str, path: str, size: int) -> bytes:
        """A request's line and headers."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        if size:
            lines += ["Content-Type: application/json", f"Content-Length: {size}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass(slots=True)
class Answer:
    """What came for one request; times are `time.perf_counter`'s."""

    due_s: float  # when it was to be sent
    sent_s: float = 0.0
    times: list[float] = field(default_factory=list)  # of the pieces that had text
    end_s: float = 0.0
    n_prompt: int | None = None  # as the server's usage says
    n_cached: int | None = None
    n_generated: int | None = None
    finish: str | None = None
    error: str | None = None


async def ask(target: Target, path: str, body: bytes, due_s: float, timeout_s: float) -> Answer:
    """Send one request and read its stream to the end; what goes wrong stands in the answer."""
    answer = Answer(due_s)
    try:
        async with asyncio.timeout(timeout_s):
            answer.sent_s = time.perf_counter()
            reply = await _exchange(target, target.head("POST", target.prefix + path, len(body)) + body)
    except (OSError, TimeoutError, MartletError) as error:
        answer.error = str(error) or f"no end of the answer after {timeout_s:g} s"
        answer.end_s = time.perf_counter()
        return answer
    answer.end_s = time.perf_counter()
    if reply.status != 200:
        answer.error = f"status {reply.status}: {_message(reply.body)}"
    else:
        _read_events(answer, _events(reply.parts))
    return answer


async def get_json(target: Target, path: str) -> Any:
    """A GET request's JSON; MartletError or OSError if there is none."""
    async with asyncio.timeout(30):
        reply = await _exchange(target, target.head("GET", path, 0))
    if reply.status != 200:
        raise MartletError(f"GET {path} was answered {reply.status}: {_message(reply.body)}")
    return orjson.loads(reply.body)


async def _exchange(target: Target, request: bytes) -> _Reply:
    """Send a request; return when its reply is whole."""
    loop = asyncio.get_running_loop()
    transport, reply = await loop.create_connection(lambda: _Reply(request), target.host, target.port, ssl=target.tls)
    try:
        await reply.whole
    finally:
        transport.close()
    return reply


class _Reply(asyncio.Protocol):
    """A reply as it comes. Meanwhile bytes are kept with their times, and looked at only as far as it takes to see the end."""

    def __init__(self, request: bytes) -> None:
        self.status = 0
        self.parts: list[tuple[float, bytes]] = []  # of the body
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._raw: list[tuple[float, bytes]] = []  # that came and was not looked at
        self._chunks: _Chunks | None = None  # if the body comes in chunks
        self._left: int | None = None  # else its bytes that are to come, if their number is known

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(data for _, data in self.parts)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send the request."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keep what came."""
        self._raw.append((time.perf_counter(), data))
        if self.whole.done():
            return
        try:
            if self.status == 0:
                self._read_head()
            elif self._chunks is None:
                self._read_plain()
            elif len(data) < 4 or data.endswith(b"\r\n\r\n"):  # as the last of all chunks does
                self._read_chunks()
        except MartletError as error:
            self.whole.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has closed, or the network has gone."""
        if self.whole.done():
            return
        try:
            if self.status == 0:
                raise MartletError("the connection ended before an answer began")
            if self._chunks is not None:
                self._read_chunks()
            if not self.whole.done():
                if exc is not None or self._chunks is not None or self._left is not None:
                    raise MartletError("the connection ended in the midst of an answer")
                self.whole.set_result(None)
        except MartletError as error:
            self.whole.set_exception(error)

    def _read_head(self) -> None:
        """Status and headers, once they are there."""
        when, came = self._raw[-1][0], b"".join(data for _, data in self._raw)
        head, end, rest = came.partition(b"\r\n\r\n")
        if not came.startswith(b"HTTP/1."[: len(came)]):
            raise MartletError(f"the answer is not HTTP/1.1: {came[:100]!r}")
        if not end:
            if len(came) > MAX_HEAD:
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
        self.parts += self._raw
        self._raw = []
        if self._left is not None and self._left <= 0:
            self.whole.set_result(None)

    def _read_chunks(self) -> None:
        assert self._chunks is not None
        for when, data in self._raw:
            self.parts += [(when, part) for part in self._chunks.feed(data)]
        self._raw = []
        if self._chunks.ended:
            self.whole.set_result(None)


class _Chunks:
    """The content of a body in chunks (RFC 9112, 7.1)."""

    def __init__(self) -> None:
        self.ended = False
        self._left = 0  # bytes of the chunk that is being read
        self._last = False  # its end was announced: what follows are trailers, and an empty line
        self._rest = b""  # a line that has begun

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Content in these bytes; MartletError if they are no chunks."""
        data, self._rest, at = self._rest + data, b"", 0
        while at < len(data) and not self.ended:
            if self._left:
                part = data[at : at + self._left]
                self._left -= len(part)
                at += len(part)
                yield part
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._rest = data[at:]
                return
            line, at = data[at:end], end + 2
            if self._last:
                self.ended = not line
            elif line:  # an empty one is the end of a chunk
                self._left = _size(line)
                self._last = self._left == 0


def _size(line: bytes) -> int:
    number = line.split(b";")[0].strip()
    if not number or number.strip(b"0123456789abcdefABCDEF"):
        raise MartletError(f"a chunk of the answer begins with {line[:40]!r}, which is no size")
    return int(number, 16)


def _events(parts: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The events of a body, each with the time at which it was whole."""
    found, rest = [], b""
    for when, part in parts:
        *whole, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        found += [(when, event) for event in whole]
    return found


def _read_events(answer: Answer, events: list[tuple[float, bytes]]) -> None:
    """Fill in what the events say."""
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
                answer.error = f"an event is no chunk of an answer: {data[:100]!r}"
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
    found = usage.get(name)
    return found if type(found) is int and found >= 0 else None


def _message(data: bytes) -> str:
    """What an error's body says."""
    try:
        found = orjson.loads(data)
        error = found.get("error", found)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError):
        return data[:300].decode("utf-8", "replace")
