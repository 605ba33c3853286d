"""Answers that are compared with those of f16 KV pages while a server is idle (ask 28, idea 12)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvloop

from martlet import LLM, SamplingParams
from martlet.config import resolve_config
from martlet.engine.build import build
from martlet.errors import RequestError
from martlet.kv_types import parse_kv_types
from martlet.observe.kv_quality import compare
from martlet.server.lifecycle import Server
from martlet.server.service import Service
from martlet.server.settings import ServerSettings
from tests.equality.tiny_model import write_tiny_model
from tests.system.serving import wait_until

PROMPT = "the thin thread of the thing that thaws " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@contextmanager
def served(model: str, share: float = 1.0, **engine: Any) -> Iterator[httpx.Client]:
    options = {"model": model, "threads": 1, "kv_dtype": "q4", "draft": "off", **engine}
    service = Service(build(resolve_config(options)), ServerSettings(port=0, kv_check_share=share))
    address: list[str] = []
    up = threading.Event()
    server = Server(service, lambda where: (address.append(where), up.set())[1])
    thread = threading.Thread(target=lambda: uvloop.run(server.serve()), daemon=True)
    thread.start()
    assert up.wait(20)
    try:
        with httpx.Client(base_url=address[0], timeout=20) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(20)


def numbers(client: httpx.Client) -> dict[str, float]:
    """What /metrics says of checks, by name and reason."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("martlet:kv_check")]
    named = [
        (line.split("{")[0], line.partition('reason="')[2].split('"')[0], line.rsplit(" ", 1)[1]) for line in lines
    ]
    return {f"{name.removeprefix('martlet:kv_check_')} {reason}".strip(): float(value) for name, reason, value in named}


def ask(client: httpx.Client, n: int = 40, **fields: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": n, "temperature": 0, "ignore_eos": True, **fields}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_an_answer_is_compared_with_that_of_f16_pages(model: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is computed four rows at a time beside a server is what the whole text at once gives; no text is logged."""
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM(model, threads=1, kv_dtype="q4", draft="off") as llm:
        [output] = llm.generate(PROMPT, params)
        assert llm._parts.lens is not None
        ids, n_prompt = [*output.prompt_token_ids, *output.outputs[0].token_ids], len(output.prompt_token_ids)
        whole = compare(llm._parts.lens(256, 128), parse_kv_types("f16"), parse_kv_types("q4"), ids)
    expected = whole.between(n_prompt - 1, len(ids))
    assert len(expected.kld) == 40
    with served(model) as client, caplog.at_level(logging.INFO, "martlet.server"):
        ask(client)
        wait_until(lambda: numbers(client)["divergence_count"] == 1)
        found = numbers(client)
        ask(client)  # it answers on
    assert found["divergence_sum"] == float(expected.kld.mean()) > 0
    assert (found["tokens_total"], found["same_best_tokens_total"]) == (40, expected.agree.sum())
    said = next(record.getMessage() for record in caplog.records if "kv check" in record.getMessage())
    assert said.startswith(
        f"kv check: 40 tokens after {n_prompt}, divergence from f16 {expected.kld.mean():.5f}, same best"
    )


def test_a_share_of_the_answers(model: str) -> None:
    """Every second of four."""
    with served(model, share=0.5) as client:
        for number in range(1, 5):
            ask(client, 3)
            wait_until(lambda done=number // 2: numbers(client)["divergence_count"] == done)  # type: ignore[misc]
        assert numbers(client)["skipped_total busy"] == 0


def test_who_is_not_checked_is_counted(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer without tokens, one beyond the memory of checks, one while another is checked."""
    monkeypatch.setattr("martlet.server.kv_check.MOST_TOKENS", 180)
    with served(model) as client:
        ask(client, 0, echo=True)
        wait_until(lambda: numbers(client)["skipped_total failed"] == 1)
        ask(client, 60)
        wait_until(lambda: numbers(client)["skipped_total long"] == 1)
        ask(client, 2, prompt=["a" * 60, "b" * 60, "c" * 60])  # they end in one step
        wait_until(lambda: numbers(client)["divergence_count"] == 1)
        assert numbers(client)["skipped_total busy"] == 2


def test_a_check_that_fails_is_over(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*parts: object) -> Iterator[object]:
        yield from ()
        raise RuntimeError("nothing there")

    with served(model) as client, caplog.at_level(logging.ERROR, "martlet.server"):
        monkeypatch.setattr("martlet.server.kv_check.parts_of", broken)
        ask(client, 2)
        wait_until(lambda: any("has failed" in record.getMessage() for record in caplog.records))
        monkeypatch.undo()
        ask(client, 2)
        wait_until(lambda: numbers(client)["divergence_count"] == 1)


@pytest.mark.parametrize(
    ("share", "engine", "message"),
    [
        (0.0, {}, "kv_check_share is 0.0"),
        (1.5, {}, "kv_check_share is 1.5"),
        (float("nan"), {}, "kv_check_share is nan"),
        (0.1, {"kv_dtype": "f16"}, "kv_dtype f16 compresses"),
        (0.1, {"backend": "null"}, "the null backend computes nothing"),
    ],
)
def test_what_is_refused(model: str, share: float, engine: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message), served(model, share, **engine):
        pass
