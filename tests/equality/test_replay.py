"""A replayed schedule gives the same bytes: on a tiny model and on SmolLM2, with sequences
preempted and prefixes shared.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from martlet import LLM, SamplingParams, toy
from martlet.cli import main
from martlet.sched.cost import CostModel

# positions, layers, keys and values, heads, values, bytes
PAGE_BYTES_TINY = 32 * 3 * 2 * 2 * 16 * 2
PAGE_BYTES_SMOLLM2 = 32 * 23_040
PREFIX = "The following is a conversation between two old friends who meet at the harbour after many years. "
PARAMS = [
    SamplingParams(temperature=0.9, max_tokens=70, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True),
    SamplingParams(temperature=1.1, top_p=0.9, seed=3, max_tokens=70, n=2, ignore_eos=True),
    SamplingParams(temperature=0.8, max_tokens=70, repetition_penalty=1.2, stop=("e",)),
]


def record(model: Path, capsule: Path, n_pages: int, page_bytes: int, context: int) -> tuple[list[Any], int, int]:
    """Four requests together, then one more; the answers, the preemptions, and the cached
    tokens.
    """
    prompts = [PREFIX + end for end in ("a", "One says:", "They laugh", "zz")]
    with LLM(
        str(model), capsule=str(capsule), max_context=context, kv_memory=n_pages * page_bytes, max_step_tokens=48
    ) as llm:
        outputs = llm.generate(prompts, PARAMS)
        outputs += llm.generate(PREFIX + "One says: hello", PARAMS[0])
        totals = llm.engine.totals
        answers = [[completion.token_ids for completion in output.outputs] for output in outputs]
    return answers, totals.n_preempted, totals.n_cached


def check(model: Path, folder: Path, capsys: pytest.CaptureFixture[str], *sizes: int) -> None:
    capsule = folder / "run.capsule"
    answers, preempted, cached = record(model, capsule, *sizes)
    assert preempted > 0, "the pages were enough for all: the test shows nothing"
    assert cached > 0, "no prefix was shared: the test shows nothing"
    found = json.loads(capsule.read_text())
    assert len(capsule.read_bytes()) < 40_000
    kept = [[list(answer) for answer in request["outputs"]] for request in found["requests"]]
    assert kept == answers
    assert main(["replay", str(capsule), "--model", str(model)]) == 0
    said = capsys.readouterr().out
    assert "all as recorded" in said
    assert "preempted]" in said
    assert "step 1: " in said
    found["requests"][1]["outputs"][0][5] ^= 1
    capsule.write_text(json.dumps(found))
    assert main(["replay", str(capsule), "-q"]) == 1
    assert "BUT RECORDED" in capsys.readouterr().out


def test_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(toy.write_model(tmp_path / "tiny.gguf"), tmp_path, capsys, 8, PAGE_BYTES_TINY, 192)


def test_held_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are forced, several tokens in a step; strings end at a limit; two answers are free or
    of another form.
    """
    model, capsule = toy.write_model(tmp_path / "tiny.gguf"), tmp_path / "held.capsule"
    pair = {"direction": {"enum": ["north", "south"]}, "what": {"type": "string", "minLength": 8}}
    schema = {"type": "object", "properties": pair, "required": list(pair), "additionalProperties": False}
    held: dict[str, Any] = {"temperature": 1.0, "max_tokens": 90}
    params = [
        SamplingParams(**held, seed=4, n=2, structured={"json": schema, "string_limit": 5}),
        SamplingParams(temperature=0.9, max_tokens=60, ignore_eos=True),
        SamplingParams(**held, structured={"regex": "[ab]{20}-[0-9]{20}"}),
    ]
    with LLM(
        str(model), capsule=str(capsule), max_context=192, kv_memory=8 * PAGE_BYTES_TINY, max_step_tokens=48
    ) as llm:
        outputs = llm.generate([PREFIX + end for end in "abc"], params)
        assert llm.engine.totals.n_preempted > 0, "the pages were enough for all: the test shows nothing"
    for answer in outputs[0].outputs:
        found = json.loads(answer.text)
        assert len(found["what"]) == 8
        assert (answer.finish_reason, answer.stop_reason) == ("length", "grammar_limit")
    assert re.fullmatch("[ab]{20}-[0-9]{20}", outputs[2].outputs[0].text)
    assert (outputs[2].outputs[0].finish_reason, outputs[2].outputs[0].stop_reason) == ("stop", None)
    recorded = json.loads(capsule.read_text())["requests"]
    assert [entry["outputs"] for entry in recorded] == [[list(a.token_ids) for a in o.outputs] for o in outputs]
    assert main(["replay", str(capsule), "-q"]) == 0
    assert "all as recorded" in capsys.readouterr().out


@pytest.mark.model
def test_smollm2(smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(smollm2_path, tmp_path, capsys, 6, PAGE_BYTES_SMOLLM2, 96)


def test_pages_that_went_to_disk_and_came_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The replay writes and reads pages of its own; one that an earlier process had written it
    cannot have.
    """
    # a tiny model would rather compute
    monkeypatch.setattr(CostModel, "load_s", lambda self, n_pages: 0.0)
    model = toy.write_model(tmp_path / "tiny.gguf")
    prompts = [[n] * 5 + list(range(100)) for n in (1, 2, 3, 1, 2)]

    def record(name: str) -> list[int]:
        options: dict[str, Any] = {"kv_disk": str(tmp_path / "kept"), "kv_memory": 6 * PAGE_BYTES_TINY}
        with LLM(str(model), max_context=128, capsule=str(tmp_path / name), **options) as llm:
            outputs = [
                llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True))[
                    0
                ]
                for ids in prompts
            ]
        return [output.metrics.n_loaded for output in outputs if output.metrics]

    assert record("first") == [0, 0, 0, 96, 96]
    assert main(["replay", str(tmp_path / "first"), "-q"]) == 0
    assert "all as recorded" in capsys.readouterr().out
    assert record("second")[0] == 96
    assert main(["replay", str(tmp_path / "second")]) == 2
    assert "record with an empty kv_disk" in capsys.readouterr().err


class TestMismatch:
    @pytest.fixture
    def capsule(self, tmp_path: Path) -> Path:
        model = toy.write_model(tmp_path / "tiny.gguf")
        with LLM(str(model), capsule=str(tmp_path / "c.json"), max_context=64, backend="null") as llm:
            llm.generate("hello", SamplingParams(max_tokens=4, ignore_eos=True))
        return tmp_path / "c.json"

    def test_another_model(self, capsule: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        other = toy.write_model(tmp_path / "other.gguf", quantised=False)
        assert main(["replay", str(capsule), "--model", str(other)]) == 2
        error = capsys.readouterr().err
        assert "'tiny.gguf'" in error
        assert "'other.gguf' has another fingerprint" in error
        assert main(["replay", str(capsule), "--model", str(other), "--force"]) in (0, 1)
        assert "another fingerprint" in capsys.readouterr().err

    def test_no_model(self, capsule: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "tiny.gguf").unlink()
        assert main(["replay", str(capsule)]) == 2
        assert "say where it is with --model" in capsys.readouterr().err

    def test_another_version(self, capsule: Path, capsys: pytest.CaptureFixture[str]) -> None:
        found = json.loads(capsule.read_text()) | {"version": "0.0.1"}
        capsule.write_text(json.dumps(found))
        assert main(["replay", str(capsule), "--json"]) == 0
        captured = capsys.readouterr()
        assert "recorded by version '0.0.1'" in captured.err
        lines = [json.loads(line) for line in captured.out.splitlines()]
        assert lines[0]["spans"] == [["0", 0, 0, 5]]
        assert lines[-1]["differ"] == 0
