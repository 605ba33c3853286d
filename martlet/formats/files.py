"""Opening what a model consists of: mapped files and JSON (read `gguf.py` and `safetensors.py` next).

A path is untrusted like a file's content: it may name nothing, a folder, a pipe that never answers, or JSON in which a
key stands twice, so that two readers see two models.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any

from martlet.errors import FormatError

__all__ = ["map_file", "parse_json", "read_json", "size_of_file"]

MAX_JSON_BYTES = 256 << 20


def size_of_file(path: Path) -> int:
    """The size in bytes; FormatError where there is no regular file that can be read.

    Opening a pipe would wait for a writer, so what a path names is asked before it is opened.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FormatError(path, f"cannot be opened: {reason}") from None
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, socket or device"
        raise FormatError(path, f"is {what}, expected a file")
    if not os.access(path, os.R_OK):
        raise FormatError(path, "cannot be opened: you may not read it")
    return found.st_size


def map_file(path: Path, least_bytes: int, kind: str) -> mmap.mmap:
    """The file's bytes, mapped read-only. FormatError where it has fewer than `least_bytes`, a header's size."""
    size = size_of_file(path)
    if size < least_bytes:
        raise FormatError(
            path, f"has {size} bytes, a {kind} header at least {least_bytes}: the file is cut, or not a {kind} file"
        )
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def parse_json(path: Path, text: bytes, what: str, offset: int | None = None) -> dict[str, Any]:
    """A JSON object; FormatError where `text` is something else or any object in it has a key twice."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            twice = next(name for name, _ in items if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise FormatError(path, f"{what} has {twice!r} twice", offset=offset)
        return found

    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise FormatError(path, f"{what} is not JSON: {error}", offset=offset) from None
    if not isinstance(value, dict):
        raise FormatError(path, f"{what} is a JSON {type(value).__name__}, expected an object", offset=offset)
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is no file."""
    if not path.exists():
        return {}
    if size_of_file(path) > MAX_JSON_BYTES:
        raise FormatError(path, f"is larger than {MAX_JSON_BYTES:,} bytes")
    return parse_json(path, path.read_bytes(), "the file")
