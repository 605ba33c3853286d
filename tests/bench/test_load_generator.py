"""The load generator: what it reports of known times, what it doubts, and that it reads any
server's stream (asks row 42).
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from martlet.bench.http_stream import Answer, Target, ask
from martlet.bench.load_generator import Load, LoadRun, bodies, read_dataset, run_load
from martlet.bench.load_report import load_chart, load_compare, load_summary, load_table, read_slo
from martlet.cli import main
from martlet.errors import RequestError
from martlet.toy import spell
from tests.server.serving import serving

SERVER = {"url": "http://x", "model": "m", "dataset": None}
LOAD = Load(requests=2, concurrency=2, gen_tokens=3)


def answer(due: float, times: list[float], end: float, **fields: Any) -> Answer:
    usage = {"n_prompt": 128, "n_cached": 0, "n_generated": len(times)}
    return Answer(due, due, times, end, **{**usage, **fields})


def run_of(*answers: Answer, seconds: float = 2.0, lags: tuple[float, ...] = (0.0,), cpu_s: float = 0.1) -> LoadRun:
    return LoadRun(answers, 0.0, seconds, lags, cpu_s)


class TestReport:
    def test_times_of_a_run(self) -> None:
        """Two answers of three tokens: TTFT 0.5 and 1 s, TPOT 0.1 and 0.2 s, E2E 0.75 and 1.5 s; 6
        tokens in 2 s.
        """
        run = run_of(answer(0.0, [0.5, 0.6, 0.7], 0.75), answer(0.5, [1.5, 1.6, 1.9], 2.0))
        found = load_summary(LOAD, run, read_slo("ttft=600,itl=150"), SERVER)
        assert found["ttft_ms"]["p50"] == pytest.approx(500)
        assert found["ttft_ms"]["p95"] == pytest.approx(1000)
        assert found["tpot_ms"]["mean"] == pytest.approx(150)
        assert found["itl_ms"]["max"] == pytest.approx(300)
        assert found["itl_ms"]["p50"] == pytest.approx(100)
        assert found["e2e_ms"]["max"] == pytest.approx(1500)
        assert found["generated_tokens_per_s"] == pytest.approx(3.0)
        assert found["all_tokens_per_s"] == pytest.approx(131.0)
        assert found["goodput_requests_per_s"] == pytest.approx(0.5)  # the second one is late
        assert found["audit"] == [] or all("load was" in doubt for doubt in found["audit"])
        assert "goodput 0.50 requests/s, 50.0%" in load_table(found)
        ET.fromstring(load_chart(run))

    def test_a_late_start_is_the_requests_own(self) -> None:
        """Sent 0.4 s after it was due: its user has waited for that as well."""
        late = answer(0.0, [0.5], 0.6)
        late.sent_s = 0.4
        found = load_summary(LOAD, run_of(late), {}, SERVER)
        assert found["ttft_ms"]["p50"] == pytest.approx(500)
        assert found["generator"]["sent_late_ms"]["max"] == pytest.approx(400)

    def test_doubts_of_the_answers(self) -> None:
        good, times = [0.1, 0.2, 0.3], [0.1]
        for fields, expected in (
            ({"error": "status 500"}, "1 of 2 requests failed"),
            ({"n_generated": None}, "no usage for 1 answers"),
            ({"n_generated": 2}, "1 of 2 answers do not have the 3 tokens"),
            ({"n_cached": 64}, "25% of the prompt tokens came from the server's cache"),
        ):
            audit = load_summary(LOAD, run_of(answer(0, good, 1), answer(0, good, 1, **fields)), {}, SERVER)["audit"]
            assert any(expected in doubt for doubt in audit), (fields, audit)
        audit = load_summary(LOAD, run_of(answer(0, times, 1, n_generated=3)), {}, SERVER)["audit"]
        assert any("A piece holds 3.0 tokens" in doubt for doubt in audit)
        shared = Load(requests=1, gen_tokens=3, shared_tokens=64)
        audit = load_summary(shared, run_of(answer(0, good, 1, n_cached=64)), {}, SERVER)["audit"]
        assert not any("cache" in doubt for doubt in audit)

    def test_doubts_of_the_generator(self) -> None:
        """A loop that was 50 ms late, a core that was taken, a server that falls behind."""
        one = answer(0, [0.1, 0.2, 0.3], 1)
        audit = load_summary(LOAD, run_of(one, lags=(0.05,) * 100), {}, SERVER)["audit"]
        assert any("loop was 50.0 ms late" in doubt for doubt in audit)
        audit = load_summary(LOAD, run_of(one, cpu_s=1.5), {}, SERVER)["audit"]
        assert any("75% of a core" in doubt for doubt in audit)
        growing = [answer(n, [n + 0.1 * (n + 1)] * 3, n + 9) for n in range(15)]
        audit = load_summary(Load(rate=1.0, gen_tokens=3), run_of(*growing), {}, SERVER)["audit"]
        assert any("falls behind at 1 requests a second" in doubt for doubt in audit)

    def test_unequal_reports_are_not_compared(self) -> None:
        run = run_of(answer(0.0, [0.5, 0.6, 0.7], 0.75))
        found, other = load_summary(LOAD, run, {}, SERVER), load_summary(Load(requests=3), run, {}, SERVER)
        assert "tokens/s   1.00" in load_compare(found, found, "there.json")
        with pytest.raises(RequestError, match="requests: 3 there, 2 here"):
            load_compare(found, other, "there.json")

    @pytest.mark.parametrize("text", ["ttft", "ttft=fast", "speed=5", "itl=-1"])
    def test_limits_that_are_none(self, text: str) -> None:
        with pytest.raises(RequestError, match="--slo"):
            read_slo(text)


class TestRequests:
    def test_the_seed_decides(self) -> None:
        load = Load(requests=3, prompt_tokens=4, shared_tokens=2, groups=2, vocab=1000, warmup=1)
        found = bodies(load, "m", {"top_k": 1})
        assert found == bodies(load, "m", {"top_k": 1})
        prompts = [json.loads(body)["prompt"] for body in found]
        assert [len(prompt) for prompt in prompts] == [6] * 4
        # two groups in turn
        assert prompts[0][:2] == prompts[2][:2] != prompts[1][:2] == prompts[3][:2]
        assert len({tuple(prompt[2:]) for prompt in prompts}) == 4
        assert json.loads(found[0])["top_k"] == 1

    def test_words_for_a_chat(self) -> None:
        [body] = bodies(Load(requests=1, prompt_tokens=5, endpoint="chat", warmup=0), None, {})
        [message] = json.loads(body)["messages"]
        assert len(message["content"].split()) == 5
        assert "model" not in json.loads(body)

    def test_data_sets(self, tmp_path: Path) -> None:
        path = tmp_path / "data"
        path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
        assert read_dataset(path, "completions") == ["a", "b"]
        path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "c"}, {"value": "no"}]}]))
        assert read_dataset(path, "chat") == ["c"]
        messages = [{"role": "user", "content": "d"}]
        path.write_text(json.dumps({"messages": messages}))
        assert read_dataset(path, "chat") == [messages]
        for text, match in (("{", "JSON"), ("", "no prompts"), ('{"question": 1}', "entry 0 has no prompt")):
            path.write_text(text)
            with pytest.raises(RequestError, match=match):
                read_dataset(path, "completions")


@contextmanager
def canned(*parts: bytes) -> Iterator[Target]:
    """A server that answers one connection with these bytes, a part at a time, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                for part in parts:
                    connection.sendall(part)
                    time.sleep(0.005)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield Target.of(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(5)


def asked(target: Target) -> Answer:
    return asyncio.run(ask(target, "/completions", b"{}", time.perf_counter(), 5.0))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECE = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'


class TestStreams:
    def test_events_that_are_cut_anywhere(self) -> None:
        whole = (
            HEAD + chunk(PIECE) + chunk(b": keep-alive\n\n") + chunk(PIECE[:9]) + chunk(PIECE[9:] + DONE) + chunk(b"")
        )
        for cut in range(1, len(whole), 7):
            with canned(whole[:cut], whole[cut:]) as target:
                found = asked(target)
            assert (found.error, len(found.times), found.n_prompt, found.n_generated) == (None, 2, 7, 2), cut
            assert found.sent_s <= found.times[0] <= found.times[1] <= found.end_s

    def test_without_chunks(self) -> None:
        with canned(b"HTTP/1.1 200 OK\r\n\r\n", PIECE, PIECE + DONE) as target:
            found = asked(target)
        assert found.error is None
        assert len(found.times) == 2
        assert found.times[1] > found.times[0]

    @pytest.mark.parametrize(
        ("parts", "expected"),
        [
            ([HEAD + chunk(PIECE)], "ended within the answer"),
            ([HEAD + chunk(PIECE) + chunk(b"")], "without [DONE]"),
            ([HEAD + chunk(b'data: {"error": {"message": "no room"}}\n\n') + chunk(b"")], "no room"),
            ([b'HTTP/1.1 503 X\r\nContent-Length: 32\r\n\r\n{"error": {"message": "too many"}}'[:-2]], "status 503"),
            ([b"SSH-2.0\r\n\r\n"], "not HTTP"),
            ([b""], "before the answer"),
            ([HEAD + chunk(b"data: {\n\n") + chunk(b"")], "not JSON"),
            ([HEAD + chunk(PIECE), b"zz\r\nmore\r\n\r\n"], "begins with b'zz', not with its size"),
            ([HEAD + b"-5\r\n\r\n\r\n"], "not with its size"),
            ([b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n" + PIECE], "ended within the answer"),
            ([b"HTTP/1.1 200 OK\r\n" + b"X: " + b"x" * 70_000], "head is larger than 65,536"),
            ([b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"], "without [DONE]"),
            ([b"HTTP/1.1 500 X\r\nContent-Length: 13\r\n\r\n<html> broken"], "status 500: <html> broken"),
            ([HEAD + chunk(b"data: [1]\n\n") + chunk(b"")], "an error in the stream"),
            ([HEAD + chunk(b'data: {"choices": [7]}\n\ndata: [DONE]\n\n') + chunk(b"")], "not a chunk of an answer"),
            ([HEAD + chunk(b'data: {"choices": 7}\n\ndata: [DONE]\n\n') + chunk(b"")], "not a chunk of an answer"),
            (
                [HEAD + chunk(b'data: {"choices": [{"delta": [1]}]}\n\ndata: [DONE]\n\n') + chunk(b"")],
                "not a chunk of an",
            ),
        ],
    )
    def test_what_goes_wrong_is_said(self, parts: list[bytes], expected: str) -> None:
        with canned(*parts) as target:
            error = asked(target).error
        assert error is not None
        assert expected in error

    def test_a_connection_that_stays_open(self) -> None:
        """The end of the body is the end, trailers and all, though the server does not close; and
        bytes may come singly.
        """
        whole = HEAD + chunk(PIECE) + chunk(PIECE + DONE) + b"0;last\r\nX-Trailer: yes\r\n\r\n"
        for parts in ([whole], [whole[:-1], whole[-1:]], [whole[i : i + 1] for i in range(len(whole))]):
            with socket.create_server(("127.0.0.1", 0)) as listener:

                def work(parts: list[bytes] = parts, listener: socket.socket = listener) -> None:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1 << 16)
                        for part in parts:
                            connection.sendall(part)
                        connection.recv(1)  # until the client closes

                thread = threading.Thread(target=work, daemon=True)
                thread.start()
                found = asked(Target.of(f"http://127.0.0.1:{listener.getsockname()[1]}"))
                thread.join(5)
            assert (found.error, len(found.times), found.n_generated) == (None, 2, 2)

    def test_a_server_that_says_nothing(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            target = Target.of(f"http://127.0.0.1:{listener.getsockname()[1]}")
            found = asyncio.run(ask(target, "/completions", b"{}", time.perf_counter(), 0.2))
        assert found.error == "the answer did not end within 0.2 s"

    def test_usage_that_is_none(self) -> None:
        """Numbers that are no numbers are as good as none: pieces are counted, and the audit says
        so.
        """
        odd = b'data: {"choices": [], "usage": {"prompt_tokens": "7", "completion_tokens": null}}\n\ndata: [DONE]\n\n'
        with canned(HEAD + chunk(PIECE) + chunk(odd) + chunk(b"")) as target:
            found = asked(target)
        assert (found.error, found.n_prompt, found.n_generated) == (None, None, None)

    @pytest.mark.parametrize(
        "answer", [b"HTTP/1.1 500 X\r\nContent-Length: 2\r\n\r\nno", b"<html>", HEAD + b"x\r\n\r\n", b""]
    )
    def test_the_command_against_a_broken_server(self, answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
        """One line, and a status that says so."""
        with canned(answer) as target:
            options = ["--requests", "1", "--model", "m", "--concurrency", "1"]
            assert main(["bench", "serve", f"http://127.0.0.1:{target.port}", *options]) != 0
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "The first request failed" in said


class TestAgainstOurServer:
    def test_a_closed_loop(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """24 characters an answer of one token each, four clients: the table, the report, the
        chart, the comparison.
        """
        with serving(spell("abcdefghijklmnopqrstuvwx"), step_s=0.002) as served:
            options = ["bench", "serve", served.base, "--requests", "8", "--concurrency", "4", "-p", "8", "-n", "24"]
            assert main([*options, "--out", str(tmp_path / "one"), "--slo", "e2e=60000"]) == 0
            assert "4 clients" in capsys.readouterr().out
            assert main([*options, "--json", "--compare", str(tmp_path / "one.json")]) == 0
            found = json.loads(capsys.readouterr().out)
        assert (found["completed"], found["failed"], found["generated_tokens"]) == (8, 0, 192)
        assert found["server"]["model"] == "scripted"
        assert 2 <= found["tpot_ms"]["p50"] < 200  # a step takes 2 ms at least
        assert json.loads((tmp_path / "one.json").read_text())["goodput_share"] == 1.0
        ET.parse(tmp_path / "one.svg")

    def test_an_open_loop(self) -> None:
        """20 arrivals at 200 a second: about 0.1 s, whatever the server does."""
        load = Load(requests=20, concurrency=0, rate=200.0, prompt_tokens=4, gen_tokens=2, endpoint="chat")
        with serving(spell("ab")) as served:
            run = asyncio.run(run_load(Target.of(served.base), load, bodies(load, None, {}), 10.0))
        due = [answer.due_s - run.start_s for answer in run.answers]
        assert due == sorted(due)
        assert 0.02 < due[-1] < 0.4
        assert all(answer.error is None and answer.sent_s >= answer.due_s for answer in run.answers)

    def test_refusals(self, capsys: pytest.CaptureFixture[str]) -> None:
        with serving(spell("ab")) as served:
            for more, status, expected in (
                (["--rate", "0"], 2, "--rate"),
                (["--concurrency", "0"], 2, "concurrency"),
                (["--vocab", "9", "--endpoint", "chat"], 2, "--vocab"),
                (["--body", "[]"], 2, "--body"),
                (["--body", '{"n": "many"}'], 2, "n is"),
                (["--model", "other"], 2, "no model 'other'"),
            ):
                assert main(["bench", "serve", served.base, "--requests", "1", *more]) == status, more
                assert expected in capsys.readouterr().err
        assert main(["bench", "serve", "ftp://x"]) == 2
        assert main(["bench", "serve", "http://127.0.0.1:9"]) == 1
