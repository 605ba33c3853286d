"""Measurements kept between runs, in the `notes` folder of MARTLET_HOME: a JSON object a kind (read `commands/speed.py` next)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from martlet.config import cache_dir

__all__ = ["load_notes", "save_note"]


def load_notes(kind: str) -> dict[str, Any]:
    """What was measured on this machine before; {} where nothing was. Whoever reads it checks it: anybody may write there."""
    try:
        notes = json.loads(_path(kind).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}


def save_note(kind: str, key: str, value: Any) -> bool:
    """Keep a measurement, also beside others who do; False where it cannot be kept, which is no reason to fail."""
    path = _path(kind)
    partial = path.with_suffix(".partial")
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            partial.write_text(json.dumps({**load_notes(kind), key: value}), encoding="utf-8")
            partial.replace(path)
    except OSError:
        return False
    return True


def _path(kind: str) -> Path:
    return cache_dir() / "notes" / f"{kind}.json"
