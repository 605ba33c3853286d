"""Clients that speak HTTP/1.0, and such as shut down their side of the connection when they have
asked, as `nc -N` does.
"""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from martlet.toy import spell
from tests.server.serving import Served, serving, wait_until


def talk(served: Served, data: bytes, *, shut: bool) -> tuple[dict[str, str], bytes]:
    """Send it, read to the end of the connection: headers, with the status under "", and the body
    as it came.
    """
    with served.connect() as connection:
        connection.sendall(data)
        if shut:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        while part := connection.recv(1 << 16):
            found += part
    head, _, body = found.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return {"": first.split()[1], **dict(line.lower().split(": ", 1) for line in lines)}, body


def get(path: str, version: str = "1.1") -> bytes:
    return f"GET {path} HTTP/{version}\r\nHost: localhost\r\n\r\n".encode()


def post(body: object, version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def test_http_1_0_knows_no_chunks() -> None:
    """RFC 9112, 6.1: no transfer coding for HTTP/1.0; 6.3: without a length the body ends with the
    connection.
    """
    body = {"prompt": "hi", "stream": True, "max_tokens": 60}
    with serving(spell("hello there " * 5), step_s=0.002) as served:
        headers, stream = talk(served, post(body, "1.0"), shut=False)
        assert headers[""] == "200"
        assert "transfer-encoding" not in headers
        assert "content-length" not in headers
        assert headers["connection"] == "close"
        lines = [line for line in stream.decode().splitlines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        assert "".join(json.loads(x[6:])["choices"][0]["text"] for x in lines[:-1]) == "hello there " * 5
        headers, whole = talk(served, post({**body, "stream": False}, "1.0"), shut=False)
        assert int(headers["content-length"]) == len(whole)
        assert json.loads(whole)["choices"][0]["text"] == "hello there " * 5
        for path, status in (("/health", "200"), ("/none", "404"), ("/chat.js", "404"), ("/static/chat.js", "200")):
            headers, found = talk(served, get(path, "1.0"), shut=False)
            assert (headers[""], int(headers["content-length"])) == (status, len(found)), path
        headers, found = talk(served, b"HEAD /health HTTP/1.0\r\n\r\n", shut=False)
        assert found == b""
        served.check_idle()


def test_a_reader_of_http_1_0_that_stalls_or_leaves() -> None:
    """Its stream is nobody's but the task's, and ends like any other."""
    with serving(lambda seq, n: 97, step_s=0.002, context=2000, n_pages=1000) as served:
        with served.connect() as connection:
            connection.sendall(post({"prompt": "hi", "stream": True, "max_tokens": 1900, "ignore_eos": True}, "1.0"))
            while b"data: " not in connection.recv(4096):
                pass
        wait_until(lambda: served.gauge("num_requests_running") == 0, 2.0)
        served.check_idle()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_half_a_connection_gets_what_is_there(version: str) -> None:
    with serving(spell("hello"), step_s=0.002) as served:
        for path in ("/health", "/v1/models", "/metrics", "/", "/openapi.json"):
            headers, found = talk(served, get(path, version), shut=True)
            assert headers[""] == "200", path
            assert found
        twice = get("/health") + get("/version")
        with served.connect() as connection:
            connection.sendall(twice)
            connection.shutdown(socket.SHUT_WR)
            found = b""
            while part := connection.recv(1 << 16):
                found += part
        assert found.count(b"HTTP/1.1 200") == 2
        served.check_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_half_a_connection_is_one_that_left_and_is_told(stream: bool, version: str) -> None:
    """Whether a client can still read would only show in a write, when all has been computed: the
    request ends at once.
    """
    with serving(lambda seq, n: 97, step_s=0.005, context=2000, n_pages=1000) as served:
        body = {"prompt": "hi", "stream": stream, "max_tokens": 1900, "ignore_eos": True}
        start = time.monotonic()
        headers, found = talk(served, post(body, version), shut=True)
        assert time.monotonic() - start < 2
        assert headers[""] == ("200" if stream else "499")
        assert b"shut down its side before the answer was whole" in found
        assert b"[DONE]" not in found
        wait_until(lambda: served.gauge("request_success_total", finished_reason="abort") == 1)
        served.check_idle()


def test_half_a_connection_in_the_midst_of_a_stream_or_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    with serving(lambda seq, n: 97, step_s=0.005, context=2000, n_pages=1000) as served:
        with served.connect() as connection:
            connection.sendall(post({"prompt": "hi", "stream": True, "max_tokens": 1900, "ignore_eos": True}))
            found = b""
            while found.count(b"data: ") < 5:
                found += connection.recv(4096)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(4096):
                found += part
            assert found.endswith(b"\r\n0\r\n\r\n")
            assert b"shut down its side" in found
        # half a body, half a head, nothing: there is nothing to answer
        with served.connect() as connection:
            connection.sendall(post({"prompt": "hi"})[:-3])
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(4096) == b""
        for data in (b"GET /heal", b""):
            with served.connect() as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(4096) == b""
        served.check_idle()
    assert not caplog.records, "uvicorn found something to complain of"


def test_a_view_of_the_engine_by_half_a_connection(caplog: pytest.LogCaptureFixture) -> None:
    with serving(spell("hello")) as served:
        found: list[bytes] = []

        def look() -> None:
            found.append(talk(served, get("/engine/events"), shut=True)[1])

        looking = threading.Thread(target=look)
        looking.start()
        looking.join(5)
        assert not looking.is_alive()
        assert found[0].endswith(b"0\r\n\r\n")
        served.check_idle()
    assert not caplog.records
