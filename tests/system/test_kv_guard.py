"""The KV-quality guard at the start of an engine (ask 28, idea 12): types by layer under a limit, measured once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from martlet import LLM
from martlet.cli import main
from martlet.config import Origin, Setting
from martlet.engine import kv_guard
from martlet.errors import RequestError
from martlet.kv_types import parse_kv_types
from martlet.observe.capsule import read_capsule
from martlet.saved_measurements import _path, load_notes, save_note
from tests.equality.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Five layers, of which layers 1 and 3 alone hear what came before."""
    path = tmp_path_factory.mktemp("guard") / "tiny.gguf"
    return str(write_tiny_model(path, quantised=False, n_layers=5, heard=(1, 3)))


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet.saved_measurements.cache_dir", lambda: tmp_path / "home")


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
    notes = [{"kv_dtype": "q4", "kld": kld} for kld in (10**400, "nan", None)]
    for wrong in (
        *notes,
        {"kv_dtype": "q4,q8:99", "kld": 0.1},
        {"kv_dtype": "q5", "kld": 0.1},
        {"kv_dtype": "q4"},
        "q4",
    ):
        save_note("kv_guard", key, wrong)
        assert start(model, kv_guard=100.0)[0]["kv_dtype"].value == "q4"
        assert parse_kv_types(load_notes("kv_guard")[key]["kv_dtype"]) == parse_kv_types("q4")


@pytest.mark.parametrize("damage", [b"[" * 200_000, b"\xff\xfe", b'{"a": [1,', b"[]"])
def test_notes_that_are_no_json_are_none(damage: bytes) -> None:
    save_note("some", "key", 1.0)
    _path("some").write_bytes(damage)
    assert load_notes("some") == {}
    assert save_note("some", "key", 2.0)
    assert load_notes("some") == {"key": 2.0}


def test_notes_of_many_at_once_are_all_kept() -> None:
    """Also of threads of one process, as those of a server with several models."""
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda number: save_note("some", str(number), number), range(100)))
    assert load_notes("some") == {str(number): number for number in range(100)}


def test_where_nothing_can_be_kept_it_says_so(model: str, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file, and no folder", encoding="utf-8")
    with pytest.warns(RuntimeWarning, match="every start measures again"):
        start(model, kv_guard=100.0)


def test_a_layer_that_is_named_never_gets_fewer_bits(model: str) -> None:
    """float32 in layer 1 diverges from float16 by more than the limit; what cannot be kept is told."""
    found, _ = start(model, kv_guard=1e-12, kv_dtype="q8,f32:1")
    assert found["kv_dtype"].value == "f16,f32:1"
    assert "which no choice of types brings to 1e-12" in found["kv_dtype"].note


def test_a_context_of_one_token_has_a_divergence(model: str) -> None:
    assert "divergence 0," in start(model, kv_guard=0.01, max_context=1)[0]["kv_dtype"].note


def test_no_more_of_a_text_is_read_than_can_be_measured(model: str) -> None:
    """A file without an end; and a character that the bound cuts in two is none that is damaged."""
    assert start(model, kv_guard=100.0, kv_guard_text="/dev/zero")[0]["kv_dtype"].value == "q4"


def test_a_character_at_the_bound_of_a_text(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_guard, "MOST_BYTES", 201)
    text = tmp_path / "text"
    text.write_text("ä" * 150, encoding="utf-8")
    assert "on 200 tokens of text" in start(model, kv_guard=100.0, kv_guard_text=text)[0]["kv_dtype"].note
    text.write_bytes("ä".encode() * 99 + b"\xc3")  # a text that ends in half a character
    with pytest.raises(RequestError, match="is not UTF-8"):
        start(model, kv_guard=100.0, kv_guard_text=text)


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
        ({"kv_guard": 10**400, "kv_dtype": "q4"}, "kv_guard is 10000"),
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
