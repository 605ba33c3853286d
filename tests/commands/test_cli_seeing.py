"""What the command line shows of a run: the cache's report, the numbers, the trace, the capsule."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from martlet import toy
from martlet.cli import main
from martlet.observe.trace import read_trace

COMMON = ["--max-tokens", "4", "--ignore-eos", "--temperature", "0", "-c", "200"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(toy.write_model(tmp_path_factory.mktemp("seeing") / "tiny.gguf"))


def test_run_explains_the_cache(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", model, "hello", "--raw", "-q", "--explain-cache", *COMMON]) == 0
    assert "cache: 0 of 5 prompt tokens; no earlier prompt continues like this" in capsys.readouterr().err


def test_run_json_has_the_numbers(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """asks row 31: queue, prefill and decode times, cached tokens, preemptions, with every
    answer.
    """
    assert main(["run", model, "hello", "--raw", "--json", "-q", *COMMON]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["prompt_tokens"] == 5
    assert metrics["generated_tokens"] == 4
    assert (metrics["cached_tokens"], metrics["preemptions"], metrics["chunks"]) == (0, 0, 1)
    assert metrics["ttft_ms"] == pytest.approx(metrics["queue_ms"] + metrics["prefill_ms"], abs=0.01)
    assert 0 < metrics["itl_p50_ms"] <= metrics["itl_max_ms"] <= metrics["decode_ms"]


def test_run_says_what_was_kept(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate is of what was computed: 96 of 100 tokens are three pages on disk."""
    for kept in ("", ", 96 of them kept from before, the rest"):
        assert main(["run", model, "a" * 100, "--raw", "--kv-disk", str(tmp_path), *COMMON]) == 0
        assert f"100 prompt tokens{kept} at " in capsys.readouterr().err


def test_chat_says_why(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The second turn repeats the first: all of it but the new text is cached, and the report says
    where it ends.
    """
    monkeypatch.setattr("sys.stdin", io.StringIO("/why\nhello there\n/why\nand you?\n/exit\n"))
    assert main(["chat", model, "--explain-cache", *COMMON]) == 0
    said = capsys.readouterr().err
    assert "Nothing has been answered yet." in said
    reports = [line for line in said.splitlines() if line.startswith("cache: ")]
    assert len(reports) == 3
    assert reports[0] == reports[1]  # by the option, and by /why
    assert reports[0].startswith("cache: 0 of")
    first, _, rest = reports[2].removeprefix("cache: ").partition(" of ")
    assert int(first) > 20
    assert int(rest.split()[0]) - int(first) < 40
    assert "ttft_ms" in said


def test_trace_and_capsule_of_a_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, capsule = tmp_path / "t.json", tmp_path / "c.json"
    arguments = ["run", model, "hello", "--raw", "-q", "--trace", str(trace), "--capsule", str(capsule)]
    # sampled, with a drawn seed
    assert main([*arguments, "--max-tokens", "4", "--ignore-eos", "-c", "200"]) == 0
    assert {"step 1", "prefill", "decode"} <= {event["name"] for event in read_trace(trace)}
    assert json.loads(trace.read_text())[-1]
    capsys.readouterr()
    assert main(["replay", str(capsule)]) == 0
    said = capsys.readouterr().out
    assert "1 answers, 4 tokens, all as recorded" in said
    assert "step 4: 1 rows; 0: 7+1 → " in said


def test_a_trace_that_cannot_be_written_is_said_at_the_start(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--trace", "--capsule"):
        assert main(["run", model, "hello", "--raw", option, str(tmp_path / "no" / "x.json"), *COMMON]) == 2
        assert "No such file or directory" in capsys.readouterr().err
