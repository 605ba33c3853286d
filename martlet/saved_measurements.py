"""Measurements kept between runs (read `commands/speed.py` next, which keeps memory speed).

Each topic is a JSON object in the `notes` folder of MARTLET_HOME. Any program may write there, so
readers check the values.
"""

import json
from pathlib import Path
from typing import Any

from martlet.config import cache_dir


def load_notes(topic: str) -> dict[str, Any]:
    """All measurements of a topic by key; {} if there are none or the file is damaged."""
    try:
        notes = json.loads(_path(topic).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}


def save_note(topic: str, key: str, value: Any) -> bool:
    """Keep a measurement, safe beside other threads and processes; False if it can't be written."""
    path = _path(topic)
    partial = path.with_suffix(".partial")
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            partial.write_text(json.dumps({**load_notes(topic), key: value}), encoding="utf-8")
            partial.replace(path)
    except OSError:
        return False
    return True


def _path(topic: str) -> Path:
    return cache_dir() / "notes" / f"{topic}.json"
