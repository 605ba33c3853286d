"""`martlet cache`: the files of KV pages, listed and removed."""

from __future__ import annotations

import json
import os
import random
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import pytest

from martlet.cli import main
from martlet.commands.arguments import read_size
from martlet.runtime.disk_file import DiskFile, open_tier
from martlet.runtime.disk_format import Owner
from martlet.types import PageId, Save, SlotId

OWNER = Owner("SmolLM2", "a1b2" * 8, "f16", 32, 10_000)


def kept(folder: Path, owner: Owner = OWNER, pages: int = 3) -> DiskFile:
    """A file with some pages in it."""
    tier = open_tier(folder, 1 << 20, owner)
    assert tier is not None
    for slot in range(pages):
        save = Save(PageId(0), SlotId(slot), bytes([slot]) * 32, bytes(32), tuple(range(32)))
        assert tier.save(save, memoryview(random.Random(slot).randbytes(10_000)))
    return tier


def test_ls_says_whose_pages_how_many_tokens_and_how_large(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 15 of what users ask for."""
    kept(tmp_path).close()
    other = kept(tmp_path, replace(OWNER, fingerprint="c3d4" * 8, model="Bad\x1b[31m"), pages=2)
    (tmp_path / f"{'0' * 32}.kv").write_bytes(b"junk")
    assert main(["cache", "ls", "--kv-disk", str(tmp_path), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert [(rows[n]["model"], rows[n]["tokens"], rows[n]["in_use"]) for n in ("a1b2" * 8, "c3d4" * 8, "0" * 32)] == [
        ("SmolLM2", 96, False),
        ("Bad?[31m", 64, True),
        (None, 0, False),
    ]
    assert 3 * 12_288 <= rows["a1b2" * 8]["disk_bytes"] <= 3 * 12_288 + 3 * 4096
    assert main(["cache", "ls", "--kv-disk", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "SmolLM2, f16" in shown
    assert "96 tokens" in shown
    assert "in use" in shown
    assert "damaged" in shown
    assert "\x1b" not in shown
    other.close()


def test_rm_removes_by_name_and_leaves_what_is_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        kept(tmp_path, replace(OWNER, fingerprint=f"{number}" * 32, model=f"M{number}")).close()
    used = kept(tmp_path, replace(OWNER, fingerprint="d" * 32))
    (tmp_path / "note.txt").write_text("not ours")
    disk = ["--kv-disk", str(tmp_path)]
    assert main(["cache", "rm", "000", "M2", *disk]) == 0
    assert "Removed 2 files" in capsys.readouterr().out
    assert main(["cache", "rm", "000", *disk]) == 2
    assert "no file '000'" in capsys.readouterr().err
    assert main(["cache", "rm", "--all", *disk]) == 1
    captured = capsys.readouterr()
    assert "Removed 1 files" in captured.out
    assert "in use" in captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{'d' * 32}.kv", "note.txt"]
    used.close()
    assert main(["cache", "rm", "--all", *disk]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MARTLET_KV_DISK", raising=False)
    for arguments in (
        ["ls"],
        ["rm", "--kv-disk", "d"],
        ["rm", "x", "--all", "--kv-disk", "d"],
        ["ls", "x", "--kv-disk", "d"],
    ):
        assert main(["cache", *arguments]) == 2, arguments
    monkeypatch.setenv("MARTLET_KV_DISK", str(tmp_path / "none"))
    assert main(["cache", "ls"]) == 0
    assert "No KV pages are kept" in capsys.readouterr().out
    assert not os.path.exists(tmp_path / "none")


def test_sizes() -> None:
    sizes = {"4096": 4096, "512M": 512 << 20, "2G": 2 << 30, "1.5GiB": 3 << 29, "10 kb": 10240, "1t": 1 << 40, "7B": 7}
    assert {text: read_size(text) for text in sizes} == sizes
    for text in ("", "G", "-1", "1e9", "5X", "nan", "1.2.3M", "９"):
        with pytest.raises(ArgumentTypeError, match="expected bytes"):
            read_size(text)
