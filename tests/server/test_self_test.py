"""A known model has to count before it is served; a damaged file is found out, whatever its headers
say (idea 10).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from martlet.cli import main
from martlet.config import resolve_config
from martlet.engine.build import build
from martlet.server import startup_checks
from martlet.server.startup_checks import check_model
from martlet.toy import scripted_built, spell


def counting(answer: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> bool:
    """A scripted model that is taken for a known one."""
    config = resolve_config({"model": __file__, "backend": "reference", "max_seqs": 4, "max_context": 64, **options})
    monkeypatch.setattr(startup_checks, "KNOWN_FILES", {(Path(__file__).name, Path(__file__).stat().st_size)})
    return check_model(scripted_built(config, spell(answer)))


def test_who_counts_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counting(" 9, 10, 11, 12, 13", monkeypatch)
    for options in ({"kv_dtype": "q4"}, {"backend": "null"}):
        assert not counting("no", monkeypatch, **options)  # not asked


@pytest.mark.parametrize("answer", ["", " 9, 10, 11, 13", "\ufffd\ufffd", " the of and"])
def test_who_does_not_is_refused(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match=r"does not answer as it should.*--no-self-test"):
        counting(answer, monkeypatch)


def test_others_are_not_asked() -> None:
    config = resolve_config({"model": __file__, "backend": "reference", "max_seqs": 4, "max_context": 64})
    assert not check_model(scripted_built(config, spell("no")))


@pytest.mark.model
def test_a_damaged_file(smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One layer's weights overwritten: it opens, it loads, and it is not served."""
    built = build(resolve_config({"model": str(smollm2_path), "max_context": 256}))
    assert check_model(built)
    built.close()
    damaged = tmp_path / smollm2_path.name
    shutil.copyfile(smollm2_path, damaged)
    with damaged.open("r+b") as file:
        file.seek(60_000_000)
        file.write(bytes(range(256)) * 4_000)
    assert main(["serve", str(damaged), "-p", "0", "-c", "256"]) == 1
    assert "does not answer as it should" in capsys.readouterr().err
