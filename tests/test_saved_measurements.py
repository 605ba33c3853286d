"""Measurements kept between runs: damaged files, many writers, no folder to write to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from martlet.saved_measurements import _path, load_notes, save_note


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("martlet.saved_measurements.cache_dir", lambda: tmp_path / "home")
    return tmp_path / "home"


@pytest.mark.parametrize("damage", [b"[" * 200_000, b"\xff\xfe", b'{"a": [1,', b"[]"])
def test_a_damaged_file_holds_nothing_and_is_replaced(damage: bytes) -> None:
    assert save_note("some", "key", 1.0)
    _path("some").write_bytes(damage)
    assert load_notes("some") == {}
    assert save_note("some", "key", 2.0)
    assert load_notes("some") == {"key": 2.0}


def test_notes_of_many_writers_at_once_are_all_kept() -> None:
    """Also of threads of one process, as those of a server with several models."""
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda number: save_note("some", str(number), number), range(100)))
    assert load_notes("some") == {str(number): number for number in range(100)}


def test_a_folder_that_cannot_be_written_is_no_failure(home: Path) -> None:
    home.write_text("a file, and no folder", encoding="utf-8")
    assert not save_note("some", "key", 1.0)
    assert load_notes("some") == {}
