"""Writing GGUF files, whole or in parts (`gguf.py` reads them).

Version 3, little-endian. NumPy scalars and arrays keep their type. Python's values get types: str,
bool, float (32 bits), int (the first of u32, i32, u64, i64 that holds it, since llama.cpp reads
most keys as u32), and lists of these (i32 before u32). Parts are named and numbered as by
llama.cpp's gguf-split.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from martlet.errors import FormatError
from martlet.formats.gguf import ARRAY, BOOL, MAGIC, SCALARS, STRING
from martlet.quant.table import RawTensor

_TYPE_OF = {np.dtype(code): value_type for value_type, code in SCALARS.items() if value_type != BOOL} | {
    np.dtype(np.bool_): BOOL
}
_RANGES = {
    4: (0, 2**32),
    5: (-(2**31), 2**31),
    10: (0, 2**64),
    11: (-(2**63), 2**63),
}  # of a value type: the least integer, and 1 more than the largest


def write_gguf(
    path: str | Path, metadata: Mapping[str, Any], tensors: Sequence[RawTensor], *, parts: int = 1
) -> list[Path]:
    """Write a model and return the files: `path`, or for x.gguf in 3 parts x-00001-of-00003.gguf ….

    `metadata` goes into the first part, without its split.* keys. Parts are cut between tensors and
    about equally large. Raises FormatError for a value that GGUF cannot hold.
    """
    path = Path(path)
    keys = {key: value for key, value in metadata.items() if not key.startswith("split.")}
    if len({tensor.name for tensor in tensors}) < len(tensors):
        _refuse(path, "two tensors have the same name")
    if not 1 <= parts <= max(1, len(tensors)):
        _refuse(path, f"{len(tensors)} tensors cannot make {parts} parts")
    if parts == 1:
        _write_file(path, keys, tensors)
        return [path]
    paths = [path.with_name(f"{path.name.removesuffix('.gguf')}-{i + 1:05}-of-{parts:05}.gguf") for i in range(parts)]
    for i, (file, group) in enumerate(zip(paths, _cut(tensors, parts), strict=True)):
        split = {"no": np.uint16(i), "count": np.uint16(parts), "tensors.count": np.int32(len(tensors))}
        _write_file(file, (keys if i == 0 else {}) | {f"split.{key}": value for key, value in split.items()}, group)
    return paths


def _cut(tensors: Sequence[RawTensor], parts: int) -> list[Sequence[RawTensor]]:
    """Runs of tensors, none empty; a run ends once it has its share of the bytes."""
    total, groups, start, done = sum(t.data.nbytes for t in tensors), [], 0, 0
    for i in range(1, parts):
        end = start
        while end == start or (done * parts < total * i and end < len(tensors) - (parts - i)):
            done += tensors[end].data.nbytes
            end += 1
        groups.append(tensors[start:end])
        start = end
    return [*groups, tensors[start:]]


def _write_file(path: Path, metadata: Mapping[str, Any], tensors: Sequence[RawTensor]) -> None:
    alignment = metadata.get("general.alignment", 32)
    if alignment < 8 or alignment & (alignment - 1):
        _refuse(path, f"general.alignment is {alignment}; expected a power of two, 8 or more")
    header = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        value_type, data = _value(path, key, value)
        header += [_string(key), struct.pack("<I", value_type), data]
    offset = 0
    for tensor in tensors:
        dims = tuple(reversed(tensor.shape))
        header += [_string(tensor.name), struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.type, offset)]
        offset += -(-tensor.data.nbytes // alignment) * alignment
    with open(path, "wb") as file:
        file.write(b"".join(header))
        _pad(file, alignment)
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor.data).data)
            _pad(file, alignment)


def _pad(file: IO[bytes], alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(path: Path, key: str, value: Any) -> tuple[int, bytes]:
    """A value's type and bytes."""
    if isinstance(value, str):
        return STRING, _string(value)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype in _TYPE_OF:
        return ARRAY, struct.pack("<IQ", _TYPE_OF[value.dtype], len(value)) + value.tobytes()
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return ARRAY, _array(path, key, value)
    value_type = _number_type(path, key, [value], (4, 5, 10, 11))
    return value_type, np.array(value, SCALARS[value_type]).tobytes()


def _array(path: Path, key: str, values: Sequence[Any]) -> bytes:
    if values and all(isinstance(value, str) for value in values):
        value_type, data = STRING, b"".join(map(_string, values))
    elif values and all(isinstance(value, Sequence) and not isinstance(value, str | bytes) for value in values):
        value_type, data = ARRAY, b"".join(_array(path, key, value) for value in values)
    else:
        value_type = _number_type(path, key, values, (5, 4, 11, 10))
        data = np.array(values, SCALARS[value_type]).tobytes()
    return struct.pack("<IQ", value_type, len(values)) + data


def _number_type(path: Path, key: str, values: Sequence[Any], order: tuple[int, ...]) -> int:
    """The type that holds all the values; types of integers are tried in `order`."""
    types = {type(value) for value in values}
    if len(types) == 1:
        (type_,) = types
        if type_ is bool or (issubclass(type_, np.generic) and np.dtype(type_) in _TYPE_OF):
            return _TYPE_OF[np.dtype(type_)]
    if types <= {int}:
        fits = (t for t in order if all(_RANGES[t][0] <= value < _RANGES[t][1] for value in values))
        if (value_type := next(fits, None)) is not None:
            return value_type
    elif types <= {int, float}:
        return _TYPE_OF[np.dtype("<f4")]
    _refuse(path, f"{key!r} has a value that GGUF cannot hold: {str(values)[:80]}")


def _refuse(path: Path, message: str) -> NoReturn:
    raise FormatError(path, f"cannot be written: {message}")
