"""The KV-quality guard at the start of an engine (ask 28, idea 12): types by layer under a limit, measured once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from martlet import LLM
from martlet.cli import main
from martlet.config import Origin, Setting
from martlet.engine import kv_guard
from martlet.engine.capsule import read_capsule
from martlet.errors import RequestError
from martlet.kv_types import parse_kv_types
from martlet.notes import load_notes, save_note
from tests.equality.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Five layers, of which layers 1 and 3 alone hear what came before."""
    path = tmp_path_factory.mktemp("guard") / "tiny.gguf"
    return str(write_tiny_model(path, quantised=False, n_layers=5, heard=(1, 3)))


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet.notes.cache_dir", lambda: tmp_path / "home")


def start(model: str, **options: Any) -> tuple[dict[str, Setting], list[str]]:
    """The settings of an engine, and the parts of its start."""
    with LLM(model, threads=1, kv_dtype=options.pop("kv_dtype", "q4"), **options) as llm:
        return {setting.name: setting for setting in llm.config.settings()}, [part.name for part in llm.start_timeline]


def test_two_bad_layers_get_eight_bits_and_the_next_start_knows(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers 1 and 3 keep decides the answers, so that they are the ones to be kept well."""
    free, _ = start(model, kv_guard=100.0)
    assert (free["kv_dtype"].value, free["kv_dtype"].origin) == ("q4", Origin.MEASURED)
    whole = float(free["kv_dtype"].note.split()[1].rstrip(","))
    found, parts = start(model, kv_guard=whole / 20)
    assert found["kv_dtype"].value == "q4,q8:1,q8:3"
    assert "q4 was asked for" in found["kv_dtype"].note
    assert found["kv_guard"].origin is Origin.OPTION
    assert parts == ["read", "plan", "guard", "map", "compile", "warm"]

    def again(*arguments: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(kv_guard, "_measured", again)
    assert start(model, kv_guard=whole / 20)[0]["kv_dtype"] == found["kv_dtype"]
    with pytest.raises(AssertionError):
        start(model, kv_guard=whole / 30)  # another limit is another question


def test_what_no_compression_keeps_is_not_compressed(model: str) -> None:
    assert start(model, kv_guard=1e-12)[0]["kv_dtype"].value in ("f16", "f16,q4:0", "f16,q8:0")
    assert start(model, kv_guard=1e-12, kv_dtype="q8")[0]["kv_dtype"].value in ("f16", "f16,q8:0")


def test_a_note_that_is_damaged_is_measured_again(model: str) -> None:
    start(model, kv_guard=100.0)
    [key] = load_notes("kv_guard")
    for wrong in ({"kv_dtype": "q5", "kld": 0.1}, {"kv_dtype": "q4"}, "q4", None):
        save_note("kv_guard", key, wrong)
        assert start(model, kv_guard=100.0)[0]["kv_dtype"].value == "q4"
        assert parse_kv_types(load_notes("kv_guard")[key]["kv_dtype"]) == parse_kv_types("q4")


def test_on_a_text_of_the_users(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also on the command line; what was chosen is what a capsule has, so that a replay does not choose again."""
    text, capsule = tmp_path / "mine.txt", tmp_path / "capsule.json"
    text.write_text("the thin thread of the thing that thaws " * 8, encoding="utf-8")
    arguments = [
        "run",
        model,
        "the",
        "-n",
        "4",
        "--backend",
        "reference",
        "--kv-dtype",
        "q4",
        "--kv-guard",
        "100",
        "-v",
    ]
    assert main([*arguments, "--kv-guard-text", str(text), "--capsule", str(capsule)]) == 0
    assert "of mine.txt; q4 was asked for" in capsys.readouterr().err
    settings = read_capsule(str(capsule))["settings"]
    assert settings["kv_dtype"] == "q4"
    assert not [name for name in settings if name.startswith("kv_guard")]
    text.write_text("too short", encoding="utf-8")
    assert main([*arguments, "--kv-guard-text", str(text)]) == 2
    assert "9 tokens; expected 128" in capsys.readouterr().err
    text.write_bytes(b"\xff" * 200)
    assert main([*arguments, "--kv-guard-text", str(text)]) == 2
    assert "is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_guard": 0.01}, "kv_dtype f16 compresses nothing"),
        ({"kv_guard": 0.01, "kv_dtype": "f32"}, "kv_dtype f32 compresses nothing"),
        ({"kv_guard": 0, "kv_dtype": "q4"}, "kv_guard is 0"),
        ({"kv_guard": float("nan"), "kv_dtype": "q4"}, "kv_guard is nan"),
        ({"kv_guard": "low", "kv_dtype": "q4"}, "kv_guard is 'low'"),
        ({"kv_guard": True, "kv_dtype": "q4"}, "kv_guard is True"),
        ({"kv_guard": 0.01, "kv_dtype": "q4", "backend": "null"}, "the null backend computes nothing"),
        ({"kv_guard_text": "text.txt", "kv_dtype": "q4"}, "but no limit"),
        ({"kv_guard": 0.01, "kv_guard_text": 5, "kv_dtype": "q4"}, "kv_guard_text is 5"),
        ({"kv_guard": 0.01, "kv_guard_text": "no such file", "kv_dtype": "q4"}, "no such file cannot be read"),
        ({"kv_guard": 0.01, "kv_dtype": "q4,q8:9"}, "layer 9, but the model has 5"),
    ],
)
def test_what_is_refused(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(model, **{"threads": 1, **options})
