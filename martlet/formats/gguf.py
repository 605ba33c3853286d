"""GGUF files: bounds-checked views on a mapping of the file (read `safetensors.py` next).

Source: ggml/docs/gguf.md. A file has magic, version, counts, key-value pairs, a tensor table, then
aligned data. It is untrusted. Every count, length, offset and alignment is checked against the
file's size before use, with Python's unbounded integers, so a hostile header costs neither memory
nor time. Strings of large arrays are decoded only when they are read.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, overload

import numpy as np
from numpy.typing import NDArray

from martlet.errors import FormatError, UnsupportedError
from martlet.formats.files import map_file
from martlet.quant.table import BLOCKS, BlockType, RawTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_DEPTH = 4  # of arrays in arrays
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
BOOL = 7
HEADER_BYTES = 24
MIN_PAIR_BYTES, MIN_TENSOR_BYTES = 14, 33  # of a pair, and of a tensor's entry, with short names
MAX_PAIRS, MAX_TENSORS = 65_536, 131_072  # a hundred times as many as models have
MAX_NAME_BYTES = 65_535
MAX_ITEMS = 1 << 24  # of all arrays together; the largest vocabularies need 2 million
# ggml's other types: withdrawn (4, 5, 31 to 33, 36 to 38), or without a decoder here.
UNREAD_TYPES = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0"} | {
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    40: "NVFP4",
    41: "Q1_0",
}

Bytes = NDArray[np.uint8]


class Strings(Sequence[str]):
    """The strings of an array, decoded as UTF-8 (bad bytes as surrogates) at the first read.

    Opening the file has checked their lengths.
    """

    def __init__(self, data: memoryview, start: int, count: int) -> None:
        self._data, self._start, self._count = data, start, count
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    def _all(self) -> list[str]:
        if self._decoded is None:
            data, at, out = self._data, self._start, []
            unpack = struct.Struct("<Q").unpack_from
            for _ in range(self._count):
                end = at + 8 + unpack(data, at)[0]
                out.append(str(data[at + 8 : end], "utf-8", "surrogateescape"))
                at = end
            self._decoded = out
        return self._decoded

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._all()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file: its header, and its tensors as views that live as long as the mapping."""

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, RawTensor]
    mapping: mmap.mmap
    data_start: int


class _Reader:
    """A position in a file's bytes; every read is checked against the end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.size, self.at = path, data, len(data), 0
        self.n_items = 0

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise FormatError(self.path, message, offset=self.at if at is None else at)

    def need(self, n_bytes: int, what: str) -> int:
        """Move past `n_bytes`; returns their start. `what` names them in an error."""
        if n_bytes > self.size - self.at:
            self.fail(
                f"{what} takes {n_bytes:,} bytes, but the file has {self.size - self.at:,} left: it is cut or damaged"
            )
        start = self.at
        self.at += n_bytes
        return start

    def number(self, code: str, what: str) -> int:
        value: int = struct.unpack_from("<" + code, self.data, self.need(struct.calcsize("<" + code), what))[0]
        return value

    def string(self, what: str) -> str:
        """A value's text, bytes that are not UTF-8 as surrogates."""
        length = self.number("Q", f"the length of {what}")
        start = self.need(length, what)
        return str(self.data[start : start + length], "utf-8", "surrogateescape")

    def name(self, what: str) -> str:
        """A key or a tensor's name; it must be UTF-8, for other code compares and prints it."""
        at = self.at
        length = self.number("Q", f"the length of {what}")
        if not 1 <= length <= MAX_NAME_BYTES:
            self.fail(f"{what} claims {length:,} bytes; expected 1 to {MAX_NAME_BYTES:,}", at)
        start = self.need(length, what)
        try:
            return str(self.data[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {bytes(self.data[start : start + length])[:40]!r}", start + error.start)

    def count_items(self, count: int, what: str) -> None:
        """Add to the items of all arrays: as Python objects they are larger than in the file."""
        self.n_items += count
        if self.n_items > MAX_ITEMS:
            self.fail(f"{what} brings the items of all arrays to {self.n_items:,}; at most {MAX_ITEMS:,} are read")

    def skip_strings(self, count: int, what: str) -> Strings:
        if count > (self.size - self.at) // 8:
            self.fail(f"{what} claims {count:,} strings, more than the file's {self.size - self.at:,} bytes can hold")
        self.count_items(count, what)
        start, at, end, data = self.at, self.at, self.size, self.data
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end:
                self.fail(f"{what} ends in the middle of a string: the file is cut or damaged", at)
            at += 8 + unpack(data, at)[0]
        if at > end:
            self.fail(f"{what} reaches byte {at:,} of a file of {end:,}: it is cut or damaged")
        self.at = at
        return Strings(data, start, count)

    def value(self, value_type: int, what: str, depth: int = 0) -> Any:
        if value_type in SCALARS:
            dtype = np.dtype(SCALARS[value_type])
            start = self.need(dtype.itemsize, what)
            value = np.frombuffer(self.data, dtype, 1, start)[0].item()
            return self._boolean(value, what) if value_type == BOOL else value
        if value_type == STRING:
            return self.string(what)
        if value_type != ARRAY:
            self.fail(f"{what} has the unknown value type {value_type}; GGUF has 0 to 12")
        if depth == MAX_DEPTH:
            self.fail(f"{what} nests arrays deeper than {MAX_DEPTH}")
        item, count = self.number("I", f"the type of {what}"), self.number("Q", f"the count of {what}")
        if item == STRING:
            return self.skip_strings(count, what)
        if item in SCALARS:
            dtype = np.dtype(SCALARS[item])
            start = self.need(count * dtype.itemsize, what)
            self.count_items(count, what)
            values = np.frombuffer(self.data, dtype, count, start)
            if item == BOOL:
                return [self._boolean(v, what) for v in values.tolist()]
            return values.tolist()
        if count > (self.size - self.at) // 12:
            self.fail(f"{what} claims {count:,} arrays, more than the file can hold")
        self.count_items(count, what)
        return [self.value(item, what, depth + 1) for _ in range(count)]

    def _boolean(self, value: int, what: str) -> bool:
        if value not in (0, 1):
            self.fail(f"{what} is a boolean stored as {value}; expected 0 or 1")
        return bool(value)


def read_gguf(path: str | Path) -> GgufFile:
    """Open a GGUF file, or one part of a split model.

    Raises FormatError; UnsupportedError where a tensor has a type that is not read here.
    """
    path = Path(path)
    mapping = map_file(path, HEADER_BYTES, "GGUF")
    try:
        return _parse(path, mapping)
    except BaseException as error:
        # The traceback may keep views of the parser alive; the mapping then closes with them.
        error.__traceback__ = None if isinstance(error, FormatError) else error.__traceback__
        raise


def _parse(path: Path, mapping: mmap.mmap) -> GgufFile:
    data = memoryview(mapping)
    reader = _Reader(path, data)
    if bytes(data[:4]) != MAGIC:
        reader.fail(f"starts with {bytes(data[:4])!r}, expected {MAGIC!r}: this is not a GGUF file")
    reader.at = 4
    version = reader.number("I", "the version")
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            reader.fail("big-endian GGUF is not supported: convert the file to little-endian", 4)
        reader.fail(f"GGUF version {version} is not supported; versions 2 and 3 are", 4)
    n_tensors, n_pairs = reader.number("Q", "the tensor count"), reader.number("Q", "the key-value count")
    for count, least, limit, what, at in (
        (n_tensors, MIN_TENSOR_BYTES, MAX_TENSORS, "tensors", 8),
        (n_pairs, MIN_PAIR_BYTES, MAX_PAIRS, "key-value pairs", 16),
    ):
        if count * least > reader.size - reader.at:
            reader.fail(f"claims {count:,} {what}, more than a file of {reader.size:,} bytes can hold", at)
        if count > limit:
            reader.fail(f"claims {count:,} {what}; at most {limit:,} are read", at)
    metadata = _pairs(reader, n_pairs)
    entries = [_entry(reader, i) for i in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment % 8 or alignment & (alignment - 1):
        reader.fail(f"general.alignment is {alignment!r}; expected a power of two, 8 or more")
    data_start = -(-reader.at // alignment) * alignment
    tensors = _tensors(reader, entries, alignment, data_start)
    return GgufFile(path, version, metadata, tensors, mapping, data_start)


def _pairs(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(count):
        at = reader.at
        key = reader.name(f"key {i}")
        if key in metadata:
            reader.fail(f"the key {key!r} appears twice", at)
        metadata[key] = reader.value(reader.number("I", f"the type of {key!r}"), repr(key))
    return metadata


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]  # rows first
    type: BlockType
    offset: int
    nbytes: int
    at: int  # where the entry stands


def _entry(reader: _Reader, i: int) -> _Entry:
    at = reader.at
    name = reader.name(f"the name of tensor {i}")
    n_dims = reader.number("I", f"the dimension count of {name!r}")
    if not 1 <= n_dims <= MAX_DIMS:
        reader.fail(f"tensor {name!r} has {n_dims:,} dimensions; expected 1 to {MAX_DIMS}", at)
    dims = [reader.number("Q", f"a dimension of {name!r}") for _ in range(n_dims)]
    type_number, offset = reader.number("I", f"the type of {name!r}"), reader.number("Q", f"the offset of {name!r}")
    if min(dims) == 0:
        reader.fail(f"tensor {name!r} has a dimension of 0: {dims}", at)
    if type_number in UNREAD_TYPES:
        message = f"{reader.path}: tensor {name!r} has the type {UNREAD_TYPES[type_number]}"
        raise UnsupportedError(message, [t.name for t in BlockType])
    if type_number not in BlockType._value2member_map_:
        reader.fail(
            f"tensor {name!r} has the unknown type {type_number}; known are {', '.join(t.name for t in BlockType)}", at
        )
    block = BLOCKS[BlockType(type_number)]
    if dims[0] % block.size:
        reader.fail(
            f"tensor {name!r} has rows of {dims[0]}, not whole blocks of {block.size} ({BlockType(type_number).name})",
            at,
        )
    nbytes = math.prod(dims) // block.size * block.nbytes
    if nbytes > reader.size:
        reader.fail(f"tensor {name!r} of shape {dims} takes {nbytes:,} bytes, more than the whole file", at)
    return _Entry(name, tuple(reversed(dims)), BlockType(type_number), offset, nbytes, at)


def _tensors(reader: _Reader, entries: list[_Entry], alignment: int, data_start: int) -> dict[str, RawTensor]:
    whole = np.frombuffer(reader.data, np.uint8)
    tensors: dict[str, RawTensor] = {}
    end_of_last, last = 0, ""
    for entry in sorted(entries, key=lambda e: e.offset):
        if entry.offset % alignment:
            reader.fail(f"tensor {entry.name!r} starts at {entry.offset}, not a multiple of {alignment}", entry.at)
        if entry.offset < end_of_last:
            reader.fail(f"tensors {last!r} and {entry.name!r} overlap in the file", entry.at)
        start = data_start + entry.offset
        missing = start + entry.nbytes - reader.size
        if missing > 0:
            reader.fail(
                f"tensor {entry.name!r} ends {missing:,} bytes past the end: the file is cut or damaged", entry.at
            )
        end_of_last, last = entry.offset + entry.nbytes, entry.name
        if entry.name in tensors:
            reader.fail(f"two tensors are called {entry.name!r}", entry.at)
        tensors[entry.name] = RawTensor(entry.name, entry.shape, entry.type, whole[start : start + entry.nbytes])
    return {entry.name: tensors[entry.name] for entry in entries}
