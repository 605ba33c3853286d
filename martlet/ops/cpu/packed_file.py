"""Packed weights kept in a file, mapped at the next start (`--packed`; read `backend.py` next).

Packing takes a second for each half gigabyte; mapping takes none, and processes that map one file
share its memory. The file's name says what it was made from (`engine/packed.py`). It holds:

    header  `martlet packed 1`, u64 offset and u64 length of the index, u32 CRC-32 of the index
    parts   groups of rows as `kernels/layout.py` draws them, each from a page border on
    index   JSON: {signature: [n, k, [[layout, n, offset, bytes], …]]}

A signature lists the tensors of a weight: names, types, shapes. The file appears under its name
only when it is whole. One that is damaged is made again, with a warning; the numbers themselves
have no checksum, as a model's file has none.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from martlet.errors import FormatError
from martlet.formats.files import parse_json
from martlet.ops.cpu.kernels.layout import GROUP, LAYOUTS, group_bytes
from martlet.ops.cpu.packed_weights import CpuWeight, Part
from martlet.quant.table import RawTensor

MAGIC = b"martlet packed 1"
HEADER = struct.Struct("<16sQQI")
MAX_INDEX = 1 << 28
ENDING, UNFINISHED = ".packed", ".packing"
_LAYOUTS = {layout.name: layout for layout in LAYOUTS.values()}


def signature(tensors: Sequence[RawTensor]) -> str:
    """What a packed weight was made from."""
    return json.dumps([[tensor.name, tensor.type.name, *tensor.shape] for tensor in tensors])


def read_index(file: Any, path: Path) -> dict[str, Any]:
    """The index of an open packed file. FormatError if the file is none, or is damaged."""
    size = os.fstat(file.fileno()).st_size
    header = file.read(HEADER.size)
    magic, offset, length, crc = HEADER.unpack(header) if len(header) == HEADER.size else (b"", 0, 0, 0)
    if magic != MAGIC or length > MAX_INDEX or offset + length != size:
        raise FormatError(path, "is no whole file of packed weights")
    file.seek(offset)
    text = file.read(length)
    if zlib.crc32(text) != crc:
        raise FormatError(path, "has a damaged index")
    return parse_json(path, text, "the index", offset)


class PackedReader:
    """The weights of a whole file."""

    def __init__(self, path: Path) -> None:
        """FormatError for a damaged file, OSError if there is none."""
        with open(path, "rb") as file:
            entries = read_index(file, path)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._mapping = mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ)
        self._bytes = np.frombuffer(self._mapping, np.uint8)
        try:
            self._weights = {name: self._weight(*entry) for name, entry in entries.items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise FormatError(path, "has an index that does not describe weights") from None

    def _weight(self, n: int, k: int, parts: list[tuple[str, int, int, int]]) -> CpuWeight:
        made = []
        for name, rows, offset, size in parts:
            layout = _LAYOUTS[name]
            needed = -(-rows // GROUP) * group_bytes(layout, k)
            if offset < 0 or offset % mmap.PAGESIZE or size != needed or offset + size > self._bytes.size:
                raise ValueError(name)
            made.append(Part(layout, rows, self._bytes[offset : offset + size]))
        if sum(part.n for part in made) != n or not made:
            raise ValueError("rows")
        return CpuWeight(n, k, tuple(made))

    def take(self, tensors: Sequence[RawTensor]) -> CpuWeight | None:
        """The weight that packing these tensors gives, None if the file has it not."""
        return self._weights.get(signature(tensors))

    def add(self, tensors: Sequence[RawTensor], weight: CpuWeight) -> None:
        """Nothing: the file is whole."""


class PackedWriter:
    """A file in the making; it gets its name from `finish`."""

    def __init__(self, path: Path) -> None:
        """OSError if the folder cannot be written."""
        self._path, self._entries = path, dict[str, Any]()
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        # It outlives its `with`.
        self._file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=UNFINISHED, delete=False)  # noqa: SIM115
        _lock(self._file)
        self._failed = False

    def take(self, tensors: Sequence[RawTensor]) -> CpuWeight | None:
        """None: nothing is there yet."""
        return None

    def add(self, tensors: Sequence[RawTensor], weight: CpuWeight) -> None:
        """Write a weight. A disk that is full ends the file, with a warning."""
        if self._failed:
            return
        try:
            parts = [[part.layout.name, part.n, self._put(part.data), part.data.size] for part in weight.parts]
        except OSError as error:
            self._give_up(error)
            return
        self._entries[signature(tensors)] = [weight.n, weight.k, parts]

    def _put(self, data: Any) -> int:
        """Append bytes from a page border on; return where they are."""
        offset = -(-max(self._file.tell(), HEADER.size) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file.seek(offset)
        self._file.write(data)
        return offset

    def finish(self) -> None:
        """Write the index and give the file its name."""
        if self._failed:
            return
        text = json.dumps(self._entries).encode()
        try:
            offset = self._put(text)
            self._file.seek(0)
            self._file.write(HEADER.pack(MAGIC, offset, len(text), zlib.crc32(text)))
            self._file.close()
            os.replace(self._file.name, self._path)
        except OSError as error:
            self._give_up(error)

    def abandon(self) -> None:
        """Remove what was written."""
        self._failed = True
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._file.name)

    def _give_up(self, error: OSError) -> None:
        self.abandon()
        warnings.warn(f"{self._path}: packed weights are not kept: {error.strerror}.", stacklevel=2)


PackedFile = PackedReader | PackedWriter


@contextlib.contextmanager
def open_packed(path: Path) -> Iterator[PackedFile | None]:
    """The packed file `path`, or a new one that is whole after the `with`.

    None, with a warning, if neither can be had.
    """
    reader = _reader(path)
    if reader is not None:
        yield reader
        return
    try:
        writer = PackedWriter(path)
    except OSError as error:
        warnings.warn(f"{path}: packed weights are not kept: {error.strerror}.", stacklevel=2)
        yield None
        return
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.abandon()
        raise


def _reader(path: Path) -> PackedReader | None:
    try:
        return PackedReader(path)
    except FormatError as error:
        warnings.warn(f"{error} It is made again.", stacklevel=2)
    except OSError:
        pass
    return None


def _remove_abandoned(folder: Path) -> None:
    """Remove files in the making whose process has ended: a lock says which are alive."""
    with contextlib.suppress(ImportError):
        import fcntl

        for path in folder.glob(f".*{UNFINISHED}"):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _lock(file: Any) -> None:
    """Show that a file in the making has a process; the lock ends with it."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
