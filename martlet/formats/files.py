"""Opening a model's files: mappings and JSON (read `quant/table.py` next).

A path is untrusted like a file's content: it may name nothing, a folder, a pipe that never answers,
or JSON with a key that appears twice, in which two readers would see two models.
"""

import json
import mmap
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from martlet.errors import FormatError

MAX_JSON_BYTES = 256 << 20


def size_of_file(path: Path) -> int:
    """The size in bytes; FormatError if the path is no regular, readable file.

    The path is not opened: opening a pipe would wait for a writer.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise FormatError(path, f"cannot be opened: {reason}") from None
    if not stat.S_ISREG(status.st_mode):
        actual = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise FormatError(path, f"is {actual}, expected a file")
    if not os.access(path, os.R_OK):
        raise FormatError(path, "cannot be opened: you may not read it")
    return status.st_size


def map_file(path: Path, header_bytes: int, format_name: str) -> mmap.mmap:
    """The file, mapped read-only; FormatError if it is shorter than `header_bytes`."""
    size = size_of_file(path)
    if size < header_bytes:
        raise FormatError(
            path,
            f"has {size} bytes, a {format_name} header at least {header_bytes}:"
            f" the file is cut, or not a {format_name} file",
        )
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def parse_json(path: Path, text: bytes, what: str, offset: int | None = None) -> dict[str, Any]:
    """A JSON object; FormatError if `text` is something else, or if an object in it repeats a key.

    `what` and `offset`, in bytes, tell in messages which text of the file it is.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) != len(items):
            twice = next(name for name, count in Counter(name for name, _ in items).items() if count > 1)
            raise FormatError(path, f"{what} has {twice!r} twice", offset=offset)
        return value

    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise FormatError(path, f"{what} is not JSON: {error}", offset=offset) from None
    if not isinstance(value, dict):
        raise FormatError(path, f"{what} is a JSON {type(value).__name__}, expected an object", offset=offset)
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no file. Raises FormatError."""
    if not path.exists():
        return {}
    if size_of_file(path) > MAX_JSON_BYTES:
        raise FormatError(path, f"is larger than {MAX_JSON_BYTES:,} bytes")
    return parse_json(path, path.read_bytes(), "the file")
