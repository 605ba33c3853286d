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

__all__ = ["GGUF", "ModelError", "Weight"]

_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "u1", 10: "u8", 11: "i8", 12: "f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


class ModelError(ValueError):
    """A file that is no model which this program can run; says what is wrong with it."""


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
        self._at = 0
        if self._take(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it does not start with 'GGUF'")
        version = self._number("u4")
        if version not in (2, 3):
            raise ModelError(f"GGUF version {version}: only 2 and 3 (little-endian) are read")
        n_tensors, n_keys = self._number("u8"), self._number("u8")
        self.meta: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._key()
            if key in self.meta:
                raise ModelError(f"key {key} is there twice")
            self.meta[key] = self._value(key, self._number("u4"))
        self._directory(n_tensors)

    def weight(self, name: str, rows: int, cols: int) -> Weight:
        """A tensor that must be there, with this shape; a vector is a matrix of one row."""
        if name not in self.tensors:
            raise ModelError(f"tensor {name} is missing")
        dims, type_, start = self.tensors[name]
        shape = (1, dims[0]) if len(dims) == 1 else (int(np.prod(dims[1:], dtype=object)), dims[0])
        if shape != (rows, cols):
            raise ModelError(f"tensor {name} is {shape[0]} by {shape[1]}, not {rows} by {cols}")
        if type_ not in BLOCKS:
            raise ModelError(f"tensor {name} has type {type_}; read are {', '.join(b.name for b in BLOCKS.values())}")
        try:
            size = row_bytes(type_, cols)
        except ValueError as error:
            raise ModelError(f"tensor {name}: {error}") from None
        if start % self.alignment or start + rows * size > len(self.bytes) - self.data_start:
            raise ModelError(f"tensor {name} of {rows * size} bytes at {start}: unaligned, or past the file's end")
        begin = self.data_start + start
        return Weight(name, type_, rows, cols, self.bytes[begin : begin + rows * size].reshape(rows, size))

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
            if not 1 <= n_dims <= 4:
                raise ModelError(f"tensor {name} has {n_dims} dimensions, not 1 to 4")
            dims = [self._number("u8") for _ in range(n_dims)]
            if name in self.tensors:
                raise ModelError(f"tensor {name} is there twice")
            self.tensors[name] = (dims, self._number("u4"), self._number("u8"))
        self.alignment = self.meta.get("general.alignment", 32)
        if not isinstance(self.alignment, int) or self.alignment <= 0 or self.alignment % 8:
            raise ModelError(f"general.alignment is {self.alignment}, not a multiple of 8")
        self.data_start = -(-self._at // self.alignment) * self.alignment

    def _take(self, n: int) -> bytes:
        if n > len(self.map) - self._at:
            raise ModelError(
                f"the file is cut, or damaged: {n} bytes at {self._at} lie past its end at {len(self.map)}"
            )
        self._at += n
        return self.map[self._at - n : self._at]

    def _number(self, dtype: str) -> Any:
        return np.frombuffer(self._take(int(dtype[1])), "<" + dtype)[0].item()

    def _key(self) -> str:
        size = self._number("u8")
        if size > 65535:
            raise ModelError(f"a name of {size} bytes at {self._at}: at most 65535")
        return self._take(size).decode("utf-8", "replace")

    def _value(self, key: str, type_: int) -> Any:
        if type_ in _SCALARS:
            number = self._number(_SCALARS[type_])
            return bool(number) if type_ == _BOOL else number
        if type_ == _STRING:
            return self._take(self._number("u8")).decode("utf-8", "surrogateescape")
        if type_ != _ARRAY:
            raise ModelError(f"key {key} has value type {type_}, which GGUF does not know")
        inner, n = self._number("u4"), self._number("u8")
        if inner in _SCALARS:
            return np.frombuffer(self._take(n * int(_SCALARS[inner][1])), "<" + _SCALARS[inner])
        if inner != _STRING:
            raise ModelError(f"key {key} is an array of type {inner}: only numbers and strings are read in arrays")
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
