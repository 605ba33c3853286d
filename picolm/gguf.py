"""GGUF files: key-value metadata, a directory of tensors, and their bytes, mapped into memory and read only where used.

    "GGUF" version n_tensors n_keys | key type value … | name dims type offset … | padding | tensor data

The file is untrusted: every read and every tensor is checked before anything is computed. A weight is a view of the map: its pages
belong to the kernel, and `forget` gives them back early, so that a file larger than memory passes through a bounded resident set.

Differences from the C (model.c): it checks the magic and the version only. Layout: ggml's `docs/gguf.md`. Read next: `config.py`.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from picolm.quant import BLOCKS, dequantize_row, row_bytes

_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "u1", 10: "u8", 11: "i8", 12: "f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


class ModelError(ValueError):
    """A file that is no model which this program can run; says what is wrong with it."""


def check(fine: bool, otherwise: str) -> None:
    """Go on if the file is as it has to be."""
    if not fine:
        raise ModelError(otherwise)


@dataclass
class Weight:
    """A matrix in the file: rows of bytes. `held` has it as numbers, where memory allows."""

    name: str
    type: int
    rows: int
    cols: int
    raw: NDArray[np.uint8]
    held: NDArray[np.float32] | None = field(default=None, repr=False)

    def numbers(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start to stop as float32."""
        return self.held[start:stop] if self.held is not None else dequantize_row(self.raw[start:stop], self.type)

    def decode(self, step: int, i: int) -> None:
        """Fill the i-th `step` rows of `held`."""
        assert self.held is not None
        self.held[i * step : (i + 1) * step] = dequantize_row(self.raw[i * step : (i + 1) * step], self.type)


class GGUF:
    """An open file: `meta`, and tensors by name."""

    def __init__(self, path: str | Path) -> None:
        try:
            with open(path, "rb") as f:
                self.map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}") from None
        self.bytes = np.frombuffer(self.map, np.uint8)
        self._at, self.used = 0, set[str]()
        check(self._take(4) == b"GGUF", f"{path} is not a GGUF file: it does not start with 'GGUF'")
        version = self._number("u4")
        check(version in (2, 3), f"GGUF version {version}: only 2 and 3 (little-endian) are read")
        n_tensors, n_keys = self._number("u8"), self._number("u8")
        self.meta: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._key()
            check(key not in self.meta, f"key {key!r} is there twice")
            self.meta[key] = self._value(key, self._number("u4"))
        self._directory(n_tensors)

    def weight(self, name: str, rows: int, cols: int) -> Weight:
        """A tensor that must be there, with this shape; a vector is a matrix of one row."""
        check(name in self.tensors, f"tensor {name} is missing")
        self.used.add(name)
        dims, type_, start = self.tensors[name]
        shape = (1, dims[0]) if len(dims) == 1 else (int(np.prod(dims[1:], dtype=object)), dims[0])
        check(shape == (rows, cols), f"tensor {name} is {shape[0]} by {shape[1]}, not {rows} by {cols}")
        check(type_ in BLOCKS, f"tensor {name} has type {type_}, not {', '.join(b.name for b in BLOCKS.values())}")
        block = BLOCKS[type_]
        check(cols % block.weights == 0, f"tensor {name}: {cols} is no multiple of {block.name}'s {block.weights}")
        size = row_bytes(type_, cols)
        begin, end = self.data_start + start, self.data_start + start + rows * size
        inside = start % self.alignment == 0 and end <= len(self.bytes)
        check(inside, f"tensor {name} of {rows * size} bytes at {start}: unaligned, or past the file's end")
        return Weight(name, type_, rows, cols, self.bytes[begin:end].reshape(rows, size))

    def forget(self, weight: Weight) -> None:
        """Let the kernel drop these pages now; they come back from the file when read again."""
        begin = weight.raw.ctypes.data - self.bytes.ctypes.data
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(self.map, "madvise"):
            self.map.madvise(mmap.MADV_DONTNEED, page, begin + weight.raw.nbytes - page)

    def _directory(self, n_tensors: int) -> None:
        self.tensors: dict[str, tuple[list[int], int, int]] = {}
        for _ in range(n_tensors):
            name, n_dims = self._key(), self._number("u4")
            check(1 <= n_dims <= 4, f"tensor {name} has {n_dims} dimensions, not 1 to 4")
            check(name not in self.tensors, f"tensor {name} is there twice")
            dims = [self._number("u8") for _ in range(n_dims)]
            self.tensors[name] = (dims, self._number("u4"), self._number("u8"))
        n = self.alignment = self.meta.get("general.alignment", 32)
        check(isinstance(n, int) and n > 0 and n % 8 == 0, f"general.alignment is {n}, not a multiple of 8")
        self.data_start = -(-self._at // n) * n

    def _take(self, n: int) -> bytes:
        at, end = self._at, len(self.map)
        check(n <= end - at, f"the file is cut, or damaged: {n} bytes at {at} lie past its end at {end}")
        self._at += n
        return self.map[at : at + n]

    def _number(self, dtype: str) -> Any:
        return np.frombuffer(self._take(int(dtype[1])), "<" + dtype)[0].item()

    def _key(self) -> str:
        size = self._number("u8")
        check(size <= 65535, f"a name of {size} bytes at {self._at}: at most 65535")
        return self._take(size).decode("utf-8", "replace")

    def _value(self, key: str, type_: int) -> Any:
        if type_ in _SCALARS:
            number = self._number(_SCALARS[type_])
            return bool(number) if type_ == _BOOL else number
        if type_ == _STRING:
            return self._take(self._number("u8")).decode("utf-8", "surrogateescape")
        check(type_ == _ARRAY, f"key {key} has value type {type_}, which GGUF does not know")
        inner, n = self._number("u4"), self._number("u8")
        if inner in _SCALARS:
            return np.frombuffer(self._take(n * int(_SCALARS[inner][1])), "<" + _SCALARS[inner])
        check(inner == _STRING, f"key {key} is an array of type {inner}: only numbers and strings are read in arrays")
        return self._strings(n)

    def _strings(self, n: int) -> list[str]:
        """An array of strings, without a function call a string: vocabularies have a quarter of a million."""
        data, at, out = self.map, self._at, []
        for _ in range(n):
            end = at + 8 + int.from_bytes(data[at : at + 8], "little")
            if end > len(data) or at + 8 > len(data):
                raise ModelError(f"the file ends inside an array of {n} strings")
            out.append(data[at + 8 : end].decode("utf-8", "surrogateescape"))
            at = end
        self._at = at
        return out
