"""One streamed answer of any OpenAI-compatible server, with the time of every piece (read `load.py` next, which asks for many).

A client of its own, on bare sockets: it notes when bytes came and parses what they say after the answer has ended, so that
the clock measures the server and little of the generator. HTTP/1.1, one connection a request. Formats:
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
READ = 1 << 16


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
            events, status, rest = await _events(target, path, body)
    except (OSError, TimeoutError, MartletError) as error:
        answer.error = str(error) or f"no end of the answer after {timeout_s:g} s"
        answer.end_s = time.perf_counter()
        return answer
    answer.end_s = time.perf_counter()
    if status != 200:
        answer.error = f"status {status}: {_message(rest)}"
    else:
        _read_events(answer, events)
    return answer


async def get_json(target: Target, path: str) -> Any:
    """A GET request's JSON; MartletError or OSError if there is none."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls)
        try:
            writer.write(target.head("GET", path, 0))
            status, chunked, size = await _head(reader)
            data = b"".join([part async for part in _parts(reader, chunked, size)])
        finally:
            writer.close()
    if status != 200:
        raise MartletError(f"GET {path} was answered {status}: {_message(data)}")
    return orjson.loads(data)


async def _events(target: Target, path: str, body: bytes) -> tuple[list[tuple[float, bytes]], int, bytes]:
    """The data of each event with the time at which it was whole; for another status than 200 the body as well."""
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls, limit=READ)
    found: list[tuple[float, bytes]] = []
    try:
        writer.write(target.head("POST", target.prefix + path, len(body)) + body)
        status, chunked, size = await _head(reader)
        rest = b""
        async for part in _parts(reader, chunked, size):
            now = time.perf_counter()
            rest += part
            if status == 200:
                *whole, rest = rest.replace(b"\r\n", b"\n").split(b"\n\n")
                found += [(now, event) for event in whole]
    finally:
        writer.close()
    return found, status, rest


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool, int | None]:
    """Status, whether the body comes in chunks, and else its size if that is known."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise MartletError("the connection ended before an answer began") from None
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise MartletError(f"the answer is not HTTP/1.1: {first[:100]!r}")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    size = headers.get("content-length", "")
    return (
        int(words[1]),
        headers.get("transfer-encoding", "").lower() == "chunked",
        int(size) if size.isdigit() else None,
    )


async def _parts(reader: asyncio.StreamReader, chunked: bool, size: int | None) -> Any:
    """A body's bytes as they come."""
    if chunked:
        async for part in _chunks(reader):
            yield part
        return
    left = size
    while left is None or left > 0:
        part = await reader.read(READ if left is None else min(READ, left))
        if not part:
            if left is not None:
                raise MartletError("the connection ended in the midst of an answer")
            return
        left = None if left is None else left - len(part)
        yield part


async def _chunks(reader: asyncio.StreamReader) -> Any:
    """A chunked body's bytes."""
    try:
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        raise MartletError("the connection ended in the midst of an answer") from None


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
            _read_chunk(answer, value, when)
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
        answer.n_prompt = usage.get("prompt_tokens")
        answer.n_generated = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details")
        answer.n_cached = details.get("cached_tokens") if isinstance(details, dict) else None
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or choice
        if any(delta.get(name) for name in ("content", "text", "reasoning_content", "tool_calls")):
            answer.times.append(when)
        answer.finish = choice.get("finish_reason") or answer.finish


def _message(data: bytes) -> str:
    """What an error's body says."""
    try:
        found = orjson.loads(data)
        error = found.get("error", found)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError):
        return data[:300].decode("utf-8", "replace")
