"""`martlet kvcheck` at the command line, on a tiny model and on SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from martlet import toy
from martlet.cli import main

TEXT = "the thin thread of the thing that thaws " * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(toy.write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = main(["kvcheck", *arguments, "-t", "1", "--json"])
    out = capsys.readouterr().out
    return status, json.loads(out) if out else None


def test_the_same_type_does_not_diverge(model: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(capsys, model, text, "--kv-dtype", "f16", "-c", "200")
    [entry] = found["types"]
    assert status == 0
    assert (entry["kld"], entry["same_best"], entry["perplexity_rise"]) == (0.0, 1.0, 0.0)
    assert [(d["from"], d["to"], d["tokens"]) for d in entry["depths"]] == [(0, 128, 128), (128, 256, 71)]


def test_layers_and_guard(model: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(capsys, model, text, "--kv-dtype", "q4", "-c", "200", "--guard", "1e-9")
    [entry] = found["types"]
    assert status == 0
    # the first 64 positions see float16 alone
    assert entry["depths"][0]["kld"] < entry["depths"][1]["kld"]
    assert len(entry["layers"]) == 3
    assert entry["guard"]["kv_dtype"] == "f16,q8:0,q8:1,q8:2" or entry["guard"]["kld"] <= 1e-9
    assert any("heads have 16 dimensions" in note for note in found["warnings"])
    easy = run(capsys, model, text, "--kv-dtype", "q4", "-c", "200", "--guard", "100")[1]["types"][0]["guard"]
    assert easy["kv_dtype"] == "q4"
    assert easy["kld"] == entry["kld"]  # the choice is measured as the type itself is


def test_the_guard_gives_more_bits_to_the_layers_that_lose_most(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of five layers, only layers 1 and 3 pass on what earlier positions say."""

    def quieten(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values * 1e-4 if "attn_output" in name and name.split(".")[1] not in "13" else values

    model = str(toy.write_model(tmp_path / "five.gguf", quantised=False, n_layers=5, change=quieten))

    def guarded(kv_dtype: str, limit: float) -> dict[str, Any]:
        found = run(capsys, model, text, "--kv-dtype", kv_dtype, "-c", "200", "--guard", str(limit))[1]
        return dict(found["types"][0]["guard"])

    whole = guarded("q4", 100.0)
    assert whole["kv_dtype"] == "q4"
    assert guarded("q4", whole["kld"] / 20)["kv_dtype"] == "q4,q8:1,q8:3"
    assert guarded("q4", 1e-12)["kv_dtype"] in ("f16", "f16,q4:0", "f16,q8:0")
    assert guarded("q8", 1e-12)["kv_dtype"] in ("f16", "f16,q8:0")
    named = guarded("q8,f32:1", 1e-12)  # float32 alone diverges from float16 by more than the limit
    assert named["kv_dtype"] == "f16,f32:1"
    assert named["kld"] > 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-dtype", "q5"], "expected one of f16, f32, q8, q4"),
        (["--kv-dtype", "q4,q8:9"], "layer 9, but the model has 3"),
        (["--guard", "0"], "guard is 0.0"),
        (["--against", "int8"], "kv_dtype is 'int8'"),
    ],
)
def test_what_is_refused(
    arguments: list[str], message: str, model: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kvcheck", model, text, "-t", "1", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.model
def test_the_bars_on_smollm2(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """q8 takes at most 0.55 and q4 0.33 of the memory; on its own docs answers hardly change."""
    text = str(Path(__file__).parents[2] / "docs" / "architecture.md")
    status, found = run(capsys, str(smollm2_path), text, "-c", "1024", "--chunks", "1")
    q8, q4 = found["types"]
    assert status == 0
    assert q8["memory"] <= 0.55
    assert q4["memory"] <= 0.33
    assert q8["kld"] < 0.02
    assert q4["kld"] < 0.05
    assert q8["same_best"] > 0.92
    assert q4["same_best"] > 0.90
