"""Block decoding: equal to the `gguf` package bit for bit, and blocks worked by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from martlet.quant.ggml import decode, decode_rows
from martlet.quant.table import BLOCKS, BlockType, RawTensor

SHARED = [
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ1_S",
    "IQ1_M",
]


def tensor(block_type: BlockType, data: bytes | np.ndarray, rows: int = 1) -> RawTensor:
    raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1)
    k = raw.size // rows // BLOCKS[block_type].nbytes * BLOCKS[block_type].size
    return RawTensor("t", (rows, k), block_type, raw)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_equals_the_gguf_package_bit_for_bit(name: str) -> None:
    """Fault QNT-01: 1000 blocks of random bytes, infinite scales and NaN among them."""
    gguf = pytest.importorskip("gguf")
    block_type = BlockType[name]
    raw = np.random.default_rng(1).integers(0, 256, (1000, BLOCKS[block_type].nbytes), np.uint8)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert np.array_equal(decode(tensor(block_type, raw, 1000)).view(np.uint32), expected.view(np.uint32))


def test_q4_0_by_hand() -> None:
    # codes 15, then 0
    values = decode(tensor(BlockType.Q4_0, struct.pack("<e16B", 0.5, *[0x0F] * 16)))[0]
    assert values.tolist() == [3.5] * 16 + [-4.0] * 16  # (15 - 8) / 2, (0 - 8) / 2


def test_q5_1_by_hand() -> None:
    values = decode(tensor(BlockType.Q5_1, struct.pack("<eeI16B", 2.0, -1.0, 1 << 31, *[0] * 15, 0x30)))[0]
    assert values.tolist() == [-1.0] * 31 + [37.0]  # 2 * (16 + 3) - 1


def test_q8_1_and_q8_k_by_hand() -> None:
    """The `gguf` package has neither."""
    assert decode(tensor(BlockType.Q8_1, struct.pack("<ee32b", 0.25, 9.0, -128, *[4] * 31)))[0, :2].tolist() == [-32, 1]
    block = struct.pack("<f256b16h", 0.5, -127, *[3] * 255, *[7] * 16)
    assert decode(tensor(BlockType.Q8_K, block))[0, [0, 255]].tolist() == [-63.5, 1.5]


def test_numbers_become_float32() -> None:
    for block_type, code in ((BlockType.I8, "b"), (BlockType.I16, "h"), (BlockType.I32, "i"), (BlockType.I64, "q")):
        assert decode(tensor(block_type, struct.pack(f"<3{code}", -128, 0, 127)))[0].tolist() == [-128, 0, 127]
    assert decode(tensor(BlockType.F64, struct.pack("<2d", 0.1, 1e300)))[0].tolist() == [np.float32(0.1), np.inf]


def test_rows_are_those_of_the_whole() -> None:
    # more than one chunk, all scales finite
    raw = np.random.default_rng(2).integers(0, 60, (700, 2, 144), np.uint8)
    whole = tensor(BlockType.Q4_K, raw, 700)
    assert np.array_equal(decode_rows(whole, 300, 650), decode(whole)[300:650])
    assert decode_rows(whole, 5, 5).shape == (0, 512)
