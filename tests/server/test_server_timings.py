"""What a reply says of its time and of the prefix cache (asks 10, 14, 23, 31), and what it never
says (ask 12).
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from martlet.toy import spell
from tests.server.serving import Served, events, serving, wait_until

NUMBERS = {"queue_ms", "prefill_ms", "decode_ms", "ttft_ms", "prompt_tokens", "cached_tokens", "generated_tokens",
           "drafted_tokens", "accepted_tokens", "preemptions", "chunks", "loaded_tokens"}  # fmt: skip


def timings(served: Served, text: str = "hi", **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = served.chat(text, **fields).json()["timings"]
    return found


def test_every_reply_has_times_and_counts_unless_it_is_not_to() -> None:
    with serving(spell("abc")) as served:
        found = timings(served)
        assert {name for name, value in found.items() if isinstance(value, int | float)} >= NUMBERS
        assert (found["prompt_tokens"], found["generated_tokens"]) == (7, 4)
        assert (
            0
            <= found["queue_ms"]
            <= found["queue_ms"] + found["prefill_ms"]
            == pytest.approx(found["ttft_ms"], abs=0.1)
        )
        last = [event for event in events(served.chat(stream=True)) if event["choices"][0]["finish_reason"]]
        assert last[0]["timings"]["generated_tokens"] == 4
        assert served.post("/v1/completions", {"prompt": "hi"}).json()["timings"]["prompt_tokens"] == 2
        assert "timings" not in served.chat(return_timings=False).json()
        assert not any("timings" in event for event in events(served.chat(stream=True, return_timings=False)))


def test_a_reply_says_where_it_left_the_cache() -> None:
    """By hand: pages of four tokens; "u:hello " is there again, then the prompts differ at position
    8.
    """
    with serving(spell("abc"), prefix_cache=True) as served:
        assert timings(served, "hello world")["cache_miss"] == "empty"
        again = served.chat("hello there").json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
        found = again["timings"]
        assert (found["cached_tokens"], found["cache_miss"], found["cache_miss_position"]) == (8, "differs", 8)
        assert found["cache_miss_text"] == "u:hello t"
        assert "w" not in found["cache_miss_text"]  # what another request had there is its own
        assert timings(served, "hello world")["cache_miss"] == "end"


def test_another_salts_cache_is_not_told() -> None:
    """Ask 12: a reply to one key is the same whether another key's requests have the prompt or
    nobody's.
    """
    with serving(spell("abc"), prefix_cache=True, api_keys=("one", "two")) as served:
        seen = []
        for key in ("one", "two"):
            body = {"messages": [{"role": "user", "content": "a secret question"}]}
            reply = served.post("/v1/chat/completions", body, headers={"Authorization": f"Bearer {key}"}).json()
            seen.append({name: value for name, value in reply["timings"].items() if not name.endswith("_ms")})
        assert seen[0] == seen[1]
        assert seen[0]["cache_miss"] == "empty"


def test_reasoning_that_is_left_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask 14. A vocabulary of bytes has no mark of reasoning, so a letter has to do."""
    monkeypatch.setattr("martlet.observe.cache_report._REASONING", ("w",))
    with serving(spell("abc"), prefix_cache=True) as served:
        assert "warnings" not in served.chat("hello world").json()
        n_prompt = len("u:hello there;a:")
        [warning] = served.chat("hello there").json()["warnings"]
        assert warning.startswith("The reasoning of an earlier answer is not in this prompt")
        assert f"{n_prompt - 8} tokens had to be computed again" in warning
        last = events(served.chat("hello you", stream=True))[-1]
        assert ": 6 tokens" in last["warnings"][0]  # of 14
        served.chat("bye world")
        body = {"model": "scripted", "messages": [{"role": "user", "content": "bye you"}], "max_tokens": 4}
        assert served.post("/v1/messages", body).json()["warnings"][0].startswith("The reasoning")


def test_a_preemption_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with serving(spell("a" * 60), n_pages=24, step_s=0.001) as served, caplog.at_level(logging.INFO, "martlet.server"):
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda number: timings(served, "x" * number, max_tokens=50), range(1, 5)))
        assert sum(entry["preemptions"] for entry in found) == served.gauge("num_preemptions_total") > 0
    assert any("preempted: there are too few KV pages" in record.getMessage() for record in caplog.records)


def test_a_stream_tells_how_far_its_prompt_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """ask 24, idea 7: sixteen tokens a step of 205; while four others have the engine it says that
    it waits.
    """
    monkeypatch.setattr("martlet.server.sse.PROGRESS_S", 0.05)
    with serving(spell("a" * 24), step_s=0.04) as served, ThreadPoolExecutor(4) as pool:
        others = [pool.submit(served.chat, "x", max_tokens=12) for _ in range(4)]
        wait_until(lambda: served.service.built.engine.scheduler.n_running == 4)
        found = events(served.chat("y" * 200, stream=True, return_progress=True, max_tokens=8))
        assert [job.result().status_code for job in others] == [200] * 4
        told = [event["prompt_progress"] for event in found if "prompt_progress" in event]
        assert "prompt_progress" not in found[-1]  # nothing once the answer has begun
        first = next(number for number, event in enumerate(found) if event["choices"])
        assert not any("prompt_progress" in event for event in found[first:])
        assert told[0] == {"total": 205, "cache": 0, "processed": 0, "time_ms": 0, "eta_ms": None, "queued": True}
        reading = [entry for entry in told if not entry["queued"]]
        assert len(reading) >= 3
        counts = [entry["processed"] for entry in reading]
        assert counts == sorted(counts)
        assert 0 < counts[0] < counts[-1] <= 205
        assert all(entry["total"] == 205 for entry in reading)
        assert reading[0]["eta_ms"] > reading[-1]["eta_ms"] >= 0
        body = {"prompt": "z" * 100, "stream": True, "return_progress": True}
        assert any("prompt_progress" in event for event in events(served.post("/v1/completions", body)))
        assert served.chat(return_progress=True).json()["error"]["param"] == "return_progress"
