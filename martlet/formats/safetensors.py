"""Safetensors files: a length, a JSON header, then data (read `files.py` next).

Source: github.com/huggingface/safetensors, README. A file is untrusted: its header is bounded
before it is read, and shapes, types and ranges must agree with each other and with the file's size
before a view is made.
"""

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from martlet.errors import FormatError, UnsupportedError
from martlet.formats.expert_stacks import BLOCKS_ENDING, SCALES_ENDING
from martlet.formats.files import map_file, parse_json
from martlet.quant.table import BLOCKS, BlockType, RawTensor

MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 8
TYPES = {
    "F64": BlockType.F64,
    "F32": BlockType.F32,
    "F16": BlockType.F16,
    "BF16": BlockType.BF16,
    "I64": BlockType.I64,
    "I32": BlockType.I32,
    "I16": BlockType.I16,
    "I8": BlockType.I8,
    "BOOL": BlockType.I8,  # 0 or 1
}


def read_safetensors(path: str | Path) -> tuple[dict[str, RawTensor], mmap.mmap]:
    """A file's tensors by name, and the mapping on which they are views.

    Raises FormatError for a malformed file, UnsupportedError for a type that is not supported.
    """
    path = Path(path)
    mapping = map_file(path, 10, "safetensors")
    size = len(mapping)
    length = int.from_bytes(mapping[:8], "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        message = f"claims a header of {length:,} bytes; at most {min(MAX_HEADER_BYTES, size - 8):,} are possible"
        raise FormatError(path, message, offset=0)
    header = parse_json(path, mapping[8 : 8 + length], "the header", 8)
    start = 8 + length
    whole = np.frombuffer(mapping, np.uint8)
    tensors: dict[str, RawTensor] = {}
    expected = 0
    entries = [_entry(path, name, entry) for name, entry in header.items() if name != "__metadata__"]
    for name, dtype, shape, begin, end in sorted(entries, key=lambda e: (e[3], e[4])):
        if begin != expected:
            word = "overlaps the one before it" if begin < expected else "leaves a gap before it"
            raise FormatError(path, f"tensor {name!r} at {begin:,} {word}, which ends at {expected:,}", offset=start)
        if start + end > size:
            missing = start + end - size
            raise FormatError(
                path, f"tensor {name!r} ends {missing:,} bytes past the end: the file is cut", offset=start
            )
        expected = end
        if end > begin:
            tensors[name] = RawTensor(name, shape, dtype, whole[start + begin : start + end])
    if start + expected != size:
        raise FormatError(path, f"has {size - start - expected:,} bytes after the last tensor", offset=start + expected)
    return tensors, mapping


def _entry(path: Path, name: str, entry: Any) -> tuple[str, BlockType, tuple[int, ...], int, int]:
    """(name, type, shape, begin, end) of a header's entry, checked for consistency."""

    def count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise FormatError(
            path, f"tensor {name!r}: expected dtype, shape and data_offsets, found {str(entry)[:80]}", offset=8
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(count, shape)):
        raise FormatError(path, f"tensor {name!r}: the shape is {str(shape)[:80]}", offset=8)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(count, offsets)) or offsets[0] > offsets[1]:
        raise FormatError(
            path, f"tensor {name!r}: data_offsets are {str(offsets)[:80]}, expected begin ≤ end", offset=8
        )
    if not isinstance(dtype, str):
        raise FormatError(path, f"tensor {name!r}: the dtype is {str(dtype)[:80]}", offset=8)
    if dtype == "U8" and name.endswith((BLOCKS_ENDING, SCALES_ENDING)):
        dtype = "I8"  # codes, not numbers (`expert_stacks.py`)
    if dtype not in TYPES:
        raise UnsupportedError(f"{path}: tensor {name!r} has the type {dtype!r}", TYPES)
    wanted = math.prod(shape) * BLOCKS[TYPES[dtype]].nbytes
    if wanted != offsets[1] - offsets[0]:
        message = (
            f"tensor {name!r}: {dtype} {shape} takes {wanted:,} bytes, data_offsets span {offsets[1] - offsets[0]:,}"
        )
        raise FormatError(path, message, offset=8)
    return name, TYPES[dtype], tuple(shape), offsets[0], offsets[1]
