"""Damaged copies of valid files: a reader says FormatError or UnsupportedError, soon, or reads what
the file still holds.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.errors import FormatError, UnsupportedError
from martlet.formats.checkpoint import open_checkpoint
from martlet.formats.gguf import read_gguf
from martlet.formats.gguf_write import write_gguf
from martlet.formats.safetensors import read_safetensors
from martlet.quant.encode import encode
from martlet.quant.ggml import decode
from martlet.quant.table import BLOCKS, BlockType, RawTensor

MAX_S = 1.0  # for files of a few kilobytes
EDGES = [0, 1, 4, 9, 31, 32, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


def model() -> tuple[dict[str, Any], list[RawTensor]]:
    """Metadata of every type of value, and one tensor of each type with an encoder (fault
    QNT-03).
    """
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.rope.freq_base": 1e4,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(20)],
        "tokenizer.ggml.scores": [0.5] * 20,
        "tokenizer.ggml.add_bos_token": True,
        "nested": [[1, 2], [3]],
    }
    values = np.random.default_rng(5).standard_normal((3, 256)).astype(np.float32)
    type_names = ["F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
    tensors = [
        RawTensor(f"blk.0.{name}", (3, 256), BlockType[name], encode(values, BlockType[name]).reshape(-1))
        for name in type_names
    ]
    return metadata, tensors


@pytest.fixture(scope="module")
def files() -> Iterator[dict[str, Path]]:
    """A valid file of each format; the damaged copies are written beside them."""
    with tempfile.TemporaryDirectory() as name:
        gguf, safetensors = Path(name, "m.gguf"), Path(name, "m.safetensors")
        metadata, tensors = model()
        write_gguf(gguf, metadata, tensors)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for i, (dtype, nbytes) in enumerate((("F32", 4), ("F16", 2), ("BF16", 2))):
            begin = [0, 48, 72][i]
            header[f"t{i}"] = {"dtype": dtype, "shape": [3, 4], "data_offsets": [begin, begin + 12 * nbytes]}
        text = json.dumps(header).encode()
        safetensors.write_bytes(len(text).to_bytes(8, "little") + text + bytes(96))
        yield {"gguf": gguf, "safetensors": safetensors}


def damage(data: bytearray, where: list[int], number: int, width: int, cut: int) -> bytes:
    """Put a number at some places, then cut the end off."""
    for at in where:
        at %= len(data)
        data[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")[: len(data) - at]
    return bytes(data[: len(data) - cut % len(data)] if cut else data)


def check(path: Path, data: bytes, read: Callable[[Path], Any]) -> None:
    """Read the damaged copy; what is accepted must be readable to its last byte."""
    copy = path.with_name(f"damaged.{path.name}")
    copy.write_bytes(data)
    start, refused = time.perf_counter(), ""
    try:
        contents = read(copy)
        tensors = contents[0] if isinstance(contents, tuple) else contents.tensors
        for tensor in tensors.values():
            assert (
                tensor.data.nbytes
                == int(np.prod(tensor.shape)) // BLOCKS[tensor.type].size * BLOCKS[tensor.type].nbytes
            )
            decode(tensor)
        if not isinstance(contents, tuple):
            for value in contents.metadata.values():
                list(value) if hasattr(value, "__iter__") else value
    except (FormatError, UnsupportedError) as error:
        refused = str(error)
    assert not refused or str(copy) in refused
    assert time.perf_counter() - start < MAX_S


PLACES = st.lists(st.integers(0, 2**20), max_size=3)
NUMBERS = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**64 - 1))
CUTS = st.one_of(st.just(0), st.integers(1, 2**20))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PLACES, st.booleans(), NUMBERS, st.sampled_from([1, 2, 4, 8]), CUTS)
def test_damaged_gguf(files: dict[str, Path], where: list[int], early: bool, number: int, width: int, cut: int) -> None:
    data = bytearray(files["gguf"].read_bytes())
    header = read_gguf(files["gguf"]).data_start
    where = [at % header for at in where] if early else where
    check(files["gguf"], damage(data, where, number, width, cut), read_gguf)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PLACES, st.booleans(), NUMBERS, st.sampled_from([1, 2, 4, 8]), CUTS)
def test_damaged_safetensors(
    files: dict[str, Path], where: list[int], early: bool, number: int, width: int, cut: int
) -> None:
    data = bytearray(files["safetensors"].read_bytes())
    where = [at % (len(data) - 96) for at in where] if early else where
    check(files["safetensors"], damage(data, where, number, width, cut), read_safetensors)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["F32", "I8", "U8", "t", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "x"]), inner),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I8"]) | JSON,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-4, 16), min_size=2, max_size=2) | JSON,
    }
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from(["t", "u", "__metadata__"]), ENTRY | JSON), st.integers(0, 20))
def test_headers_of_any_json(files: dict[str, Path], header: dict[str, Any], n_bytes: int) -> None:
    text = json.dumps(header).encode()
    check(files["safetensors"], len(text).to_bytes(8, "little") + text + bytes(n_bytes), read_safetensors)


@pytest.mark.parametrize(("cut", "reason"), [(9, "'blk.0.MXFP4' ends 1 "), (108, "'blk.0.MXFP4' ends 100 "), (900, "")])
def test_a_cut_file_is_refused(files: dict[str, Path], cut: int, reason: str) -> None:
    """Fault GGF-15: the message has the number of missing bytes. The last 8 are padding: 24 blocks
    of 17 bytes, of 416.
    """
    copy = files["gguf"].with_name("cut.gguf")
    copy.write_bytes(files["gguf"].read_bytes()[:-cut])
    with pytest.raises(FormatError, match=rf"{reason}.*bytes past the end: the file is cut"):
        open_checkpoint(copy)


def test_types_mix_in_one_file(files: dict[str, Path]) -> None:
    """Fault QNT-03: each tensor is read by its own type; all hold the same values, as well as their
    bits can.
    """
    values = np.random.default_rng(5).standard_normal((3, 256)).astype(np.float32)
    for name, tensor in read_gguf(files["gguf"]).tensors.items():
        assert name == f"blk.0.{tensor.type.name}"
        assert 0 <= np.abs(decode(tensor) - values).mean() < (0.35 if tensor.type is BlockType.Q2_K else 0.12)
