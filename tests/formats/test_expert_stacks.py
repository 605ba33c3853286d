"""Stacks of experts as gpt-oss's files have them, against the definitions of their formats."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from martlet.errors import FormatError, UnsupportedError
from martlet.formats.expert_stacks import join_mxfp4, transposed
from martlet.formats.safetensors import read_safetensors
from martlet.quant.ggml import decode
from martlet.quant.table import BlockType, RawTensor

# E2M1 of the OCP Microscaling Formats Specification 1.0, table 5, by code.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def raw(values: np.ndarray, name: str = "experts") -> RawTensor:
    kinds = {np.dtype(np.uint8): BlockType.I8, np.dtype(np.float32): BlockType.F32, np.dtype(np.float16): BlockType.F16}
    return RawTensor(name, values.shape, kinds[values.dtype], np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def test_mxfp4_is_decoded_by_its_definition() -> None:
    """Byte i of a block has codes 2i (low) and 2i + 1; a block's scale is 2^(exponent - 127)."""
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (3, 5, 2, 16), dtype=np.uint8)
    scales = rng.integers(100, 140, (3, 5, 2), dtype=np.uint8)
    tensors = {"w_blocks": raw(blocks), "w_scales": raw(scales), "other": raw(scales)}
    joined = join_mxfp4(Path("model"), tensors)
    assert set(joined) == {"w", "other"}
    assert joined["w"].shape == (3, 5, 64)
    for e in range(3):
        matrix = decode(joined["w"].part(e))
        for row in range(5):
            for k in range(64):
                byte = int(blocks[e, row, k // 32, k % 32 // 2])
                code = byte >> 4 if k % 2 else byte & 15
                assert matrix[row, k] == E2M1[code] * 2.0 ** (int(scales[e, row, k // 32]) - 127)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_transposed_matrices(dtype: type) -> None:
    values = np.random.default_rng(2).normal(size=(2, 3, 4)).astype(dtype)
    stack = transposed(raw(values))
    assert stack.shape == (2, 4, 3)
    for e in range(2):
        assert np.array_equal(decode(stack.part(e)), values[e].T.astype(np.float32))


def test_blocks_without_fitting_scales_are_refused() -> None:
    blocks = raw(np.zeros((2, 3, 1, 16), np.uint8))
    for scales in ({}, {"w_scales": raw(np.zeros((2, 3, 2), np.uint8))}):
        with pytest.raises(FormatError, match=r"w: blocks \[2, 3, 1, 16\]"):
            join_mxfp4(Path("model"), {"w_blocks": blocks, **scales})
    with pytest.raises(FormatError, match="expected"):
        join_mxfp4(Path("model"), {"w_blocks": raw(np.zeros((2, 3, 8), np.uint8))})


def test_unsigned_bytes_are_read_as_codes_only(tmp_path: Path) -> None:
    def write(name: str) -> Path:
        header = json.dumps({name: {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}).encode()
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(16)))
        return path

    tensors, _ = read_safetensors(write("experts.down_proj_blocks"))
    assert tensors["experts.down_proj_blocks"].data.tolist() == list(range(16))
    with pytest.raises(UnsupportedError, match="'U8'"):
        read_safetensors(write("experts.down_proj"))
