"""Clients that leave, stall, flood or lie, and an engine that fails: the server answers the next
request.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from martlet.toy import Script, spell
from tests.server.serving import Served, events, serving, wait_until

CHAT = "/v1/chat/completions"


def endless(seq: object, number: int) -> int:
    return 97


def head(path: str, length: int, more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{more}\r\n".encode()


def ask(served: Served, text: str = "hi", **fields: object) -> socket.socket:
    """Send a chat request and read nothing."""
    body = json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()
    connection = served.connect()
    connection.sendall(head(CHAT, len(body)) + body)
    return connection


def is_running(served: Served) -> bool:
    return served.gauge("num_requests_running") > 0


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_while_it_decodes(stream: bool) -> None:
    """Faults SRV-07, OPS-07: within a step nothing runs, pages are free, and it is counted as
    aborted.
    """
    with serving(endless, step_s=0.005, context=2000, n_pages=1000) as served:
        for _ in range(5):
            connection = ask(served, stream=stream)
            wait_until(lambda: is_running(served))
            if stream:
                found = b""
                while b"data: " not in found:
                    found += connection.recv(4096)
            connection.close()
            wait_until(lambda: not is_running(served), 2.0)
        wait_until(lambda: served.gauge("request_success_total", finished_reason="abort") == 5)
        assert served.gauge("num_requests_waiting") == 0
        assert served.gauge("kv_cache_usage_perc") == 0
        # The rule of prometheus.py: an aborted request has an end-to-end time, and one to its first
        # token if there was one.
        assert served.gauge("e2e_request_latency_seconds_count") == 5
        assert served.gauge("time_to_first_token_seconds_count") == 5
        served.check_idle()


def test_client_that_leaves_with_a_request_behind_the_one_that_runs() -> None:
    """Two requests were sent at once: the first ends as well, and the second never runs."""
    with serving(endless, step_s=0.005, context=2000, n_pages=1000) as served:
        connection = ask(served, stream=True)
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
        connection.sendall(head(CHAT, len(body)) + body)
        found = b""
        while b"data: " not in found:
            found += connection.recv(4096)
        connection.close()
        wait_until(lambda: not is_running(served), 2.0)
        served.check_idle()
        assert served.gauge("request_success_total", finished_reason="abort") == 1


def test_client_that_leaves_while_it_waits_or_prefills() -> None:
    with serving(endless, step_s=0.02, context=2000, n_pages=4000) as served:  # room for all
        running = []
        for n_running in (1, 2, 3):
            running.append(ask(served, stream=True))
            wait_until(lambda n=n_running: served.gauge("num_requests_running") == n)  # type: ignore[misc]
        prefilling = ask(served, "x" * 1500, stream=True)  # 13 tokens a step
        wait_until(lambda: served.gauge("num_requests_running") == 4)
        waiting = [ask(served, stream=True) for _ in range(3)]
        wait_until(lambda: served.gauge("num_requests_waiting") == 3)
        for connection in waiting:
            connection.close()
        wait_until(lambda: served.gauge("num_requests_waiting") == 0, 2.0)
        assert served.gauge("num_requests_running") == 4
        prefilling.close()
        wait_until(lambda: served.gauge("num_requests_running") == 3, 2.0)
        for connection in running:
            connection.close()
        served.check_idle()


def test_reader_that_stalls() -> None:
    """Fault SRV-29: others go on, memory is bounded, and the rule is that 1,024 pieces that wait
    are too many.
    """
    name = "m" * 4000  # in every chunk: the socket's buffers hold fewer of them
    with serving(endless, context=40_000, n_pages=10_100, model_name=name) as served:
        stalled = ask(served, stream=True, max_tokens=39_000)
        wait_until(lambda: is_running(served))
        start = time.monotonic()
        assert served.chat(max_tokens=5).status_code == 200
        assert time.monotonic() - start < 2
        wait_until(lambda: not is_running(served), 30)
        wait_until(lambda: served.gauge("request_success_total", finished_reason="abort") == 1)
        assert served.gauge("generation_tokens_total") < 39_000
        stalled.close()
        served.check_idle()


def test_bodies_of_100_mb() -> None:
    """Refused when they are announced, or when they have grown too large; nothing of them is
    kept.
    """
    with serving(spell("abc")) as served:
        for _ in range(3):
            connection = served.connect()
            connection.sendall(head(CHAT, 100_000_000) + b"{" * 1000)
            assert connection.recv(4096).split(b" ")[1] == b"413"
            connection.close()
            assert served.http.post(CHAT, content=(b" " * (1 << 20) for _ in range(100))).status_code == 413
        served.check_idle()


def test_many_connections_that_come_and_go() -> None:
    with serving(spell("abc"), step_s=0.001) as served:
        for number in range(1000):
            connection = served.connect()
            if number % 4 == 1:
                connection.sendall(head(CHAT, 100))  # and no body
            if number % 4 == 2:
                connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            if number % 4 == 3:
                body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
                connection.sendall(head(CHAT, len(body)) + body)
            connection.close()
        served.check_idle()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(10_000)) + b"\r\n",
        b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
        b"\x00" * 1000 + b"\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["one huge header", "many headers", "huge path", "zeros", "negative length", "bad chunk"],
)
def test_heads_that_are_too_much(data: bytes) -> None:
    """Fault SRV-11."""
    with serving(spell("abc")) as served:
        connection = served.connect()
        answer = b""
        try:
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        except (ConnectionResetError, BrokenPipeError):
            pass  # it was closed while we still sent
        assert answer == b"" or answer.split(b" ")[1] in (b"400", b"413", b"414", b"431")
        served.check_idle()


def test_two_streams_at_once_are_those_of_each_alone() -> None:
    """Fault SRV-27."""
    script: Script = lambda seq, number: spell(f"answer to {bytes(seq.request.prompt_ids).decode()}")(seq, number)  # noqa: E731
    with serving(script, step_s=0.001) as served, ThreadPoolExecutor(8) as pool:
        texts = [f"question {number}" for number in range(16)]

        def streamed(text: str) -> str:
            found = events(served.chat(text, stream=True))
            return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found)

        assert list(pool.map(streamed, texts)) == [f"answer to u:{text};a:" for text in texts]
        served.check_idle()


def test_step_that_raises() -> None:
    """Fault SRV-31: every request in it gets an error, the next one is answered, readiness
    follows.
    """
    with serving(endless, step_s=0.002) as served:
        with ThreadPoolExecutor(3) as pool:
            jobs = [pool.submit(served.chat, stream=stream) for stream in (True, False, True)]
            wait_until(lambda: served.gauge("num_requests_running") == 3)
            served.executor.fail = lambda plan: True
            streamed, whole, other = (job.result() for job in jobs)
        assert whole.status_code == 500
        assert "the kernel has caught fire" in whole.json()["error"]["message"]
        for response in (streamed, other):
            assert "the kernel has caught fire" in events(response)[-1]["error"]["message"]
            assert "[DONE]" not in response.text
        for _ in range(3):
            assert served.chat().status_code == 500
        assert served.http.get("/ready").status_code == 503
        assert served.http.get("/ready?deep=1").status_code == 503
        assert served.http.get("/health").status_code == 200  # it may recover without a restart
        served.executor.fail = lambda plan: False
        assert served.http.get("/ready?deep=1").json() == {"ready": True, "trouble": None, "open": 0}
        wait_until(lambda: served.gauge("request_success_total", finished_reason="error") >= 6)
        served.check_idle()


def test_engine_that_hangs_is_seen() -> None:
    """Ask 30: readiness is a heartbeat; busy is not dead."""
    with serving(endless, heartbeat_s=0.2) as served:
        assert served.http.get("/ready").status_code == 200
        hold = threading.Event()
        served.executor.fail = lambda plan: hold.wait(20) and False
        connection = ask(served)
        wait_until(lambda: served.http.get("/ready").status_code == 503)
        assert "in one step" in served.http.get("/ready").json()["trouble"]
        hold.set()
        served.executor.fail = lambda plan: False
        wait_until(lambda: served.http.get("/ready").status_code == 200)
        connection.close()
        served.check_idle()


def test_engine_thread_that_dies_is_not_healthy() -> None:
    """Fault SRV-31: no empty 200."""
    with serving(endless, step_s=0.001) as served:

        def broken() -> None:
            raise RuntimeError("a fault of the bridge")

        served.service.bridge._work_report = broken  # type: ignore[method-assign]
        assert served.chat(max_tokens=3).status_code in (500, 503)
        wait_until(lambda: served.http.get("/health").status_code == 503)
        assert served.chat().status_code == 500
        assert served.http.get("/ready").status_code == 503


def test_abort_by_id() -> None:
    with serving(endless, step_s=0.002) as served, ThreadPoolExecutor(2) as pool:
        job = pool.submit(served.http.post, CHAT, json={"messages": [{"role": "user", "content": "hi"}]},
                          headers={"X-Request-Id": "one"})  # fmt: skip
        wait_until(lambda: is_running(served))
        assert served.post("/abort", {"request_id": "chatcmpl-one"}).status_code == 200
        choice = job.result().json()["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert choice["message"]["content"].startswith("a")
        assert served.post("/abort", {"request_id": "chatcmpl-one"}).status_code == 404
        assert served.post("/abort", {}).json()["error"]["param"] == "request_id"
        served.check_idle()


def test_request_that_takes_too_long() -> None:
    with serving(endless, step_s=0.005, request_timeout_s=0.3) as served:
        assert served.chat(timeout=0.05).json()["error"]["code"] == "timeout"
        assert served.chat().status_code == 408
        assert events(served.chat(stream=True))[-1]["error"]["code"] == "timeout"
        served.check_idle()


def test_queue_that_is_full() -> None:
    """Ask 32: 503 with Retry-After, and others are served."""
    with serving(endless, step_s=0.005, max_waiting=1) as served:  # four run
        open_ = []
        for n_running in (1, 2, 3, 4, 4):
            open_.append(ask(served, stream=True))
            wait_until(lambda n=n_running: served.gauge("num_requests_running") == n)  # type: ignore[misc]
        wait_until(lambda: served.gauge("num_requests_waiting") == 1)
        refused = served.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert served.chat(n=2, stream=True).status_code == 503
        for connection in open_:
            connection.close()
        served.check_idle()


def test_request_that_waits_too_long() -> None:
    with serving(endless, step_s=0.005) as served:
        open_ = [ask(served, stream=True) for _ in range(4)]
        wait_until(lambda: served.gauge("num_requests_running") == 4)
        late = served.chat(queue_timeout=0.05)
        assert late.status_code == 408
        assert late.json()["error"]["code"] == "queue_timeout"
        assert "queue_timeout_s" in late.json()["error"]["message"]
        for connection in open_:
            connection.close()
        served.check_idle()


def test_silence_is_filled_with_comments() -> None:
    """During a long prefill, so that no proxy cuts the connection; the clients skip them."""
    with serving(spell("ab"), step_s=0.05, keep_alive_s=0.05) as served:
        text = served.chat("x" * 100, stream=True).text
        assert text.startswith(": keep-alive\n\n")
        assert events(text)[-1]["choices"][0]["finish_reason"] == "stop"


def test_idle_server_uses_no_processor() -> None:
    """Ask 6."""
    with serving(spell("abc")) as served:
        served.check_idle()
        time.sleep(0.1)
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(1.0)
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.03


def test_memory_does_not_grow() -> None:
    """Fault OPS-01, ask 38: 500 prompts of 200 ids, 20 tokens each."""

    def held() -> int:
        with open("/proc/self/status", encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon", "VmSwap")))

    with serving(endless, context=300) as served:

        def complete(first: int, last: int) -> None:
            for number in range(first, last):
                ids = [(number + position) % 256 for position in range(200)]
                assert served.post("/v1/completions", {"prompt": ids, "max_tokens": 20}).status_code == 200

        complete(0, 100)
        before = held()
        complete(100, 500)
        assert held() - before < 20_000  # KiB


def test_clients_that_leave_at_random() -> None:
    """Ask 22: no page in use afterwards, and other answers unchanged."""

    random_ = random.Random(7)
    with serving(spell("the answer"), step_s=0.0005) as served:

        async def visit() -> None:
            host, port = served.base.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            stream = random_.random() < 0.5
            body = json.dumps(
                {"messages": [{"role": "user", "content": "x" * random_.randrange(60)}], "stream": stream}
            ).encode()
            writer.write(head(CHAT, len(body)) + body)
            await asyncio.sleep(random_.random() * 0.02)
            writer.close()

        async def all_of_them() -> None:
            gate = asyncio.Semaphore(16)

            async def one() -> None:
                async with gate:
                    await visit()

            await asyncio.gather(*(one() for _ in range(300)))

        neighbour = ThreadPoolExecutor(1).submit(
            lambda: [served.chat().json()["choices"][0]["message"]["content"] for _ in range(20)]
        )
        asyncio.run(all_of_them())
        assert set(neighbour.result()) == {"the answer"}
        served.check_idle()
        assert served.gauge("kv_cache_usage_perc") == 0
