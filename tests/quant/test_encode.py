"""Encoding: equal to the `gguf` package where it has an encoder, else within the error that the
format allows.
"""

from __future__ import annotations

import numpy as np
import pytest

from martlet.errors import UnsupportedError
from martlet.quant.encode import encode
from martlet.quant.ggml import decode
from martlet.quant.table import BLOCKS, BlockType, RawTensor

F16 = 2.0**-10  # twice what rounding a scale to float16 may cost

# Of each type: the greatest error, as a part of a block's largest magnitude ("most") or of its
# range including 0 ("range"). A half of the step between codes; a whole step for the code that the
# other sign lacks (16 steps of 4 bits are -8 … 7); and a half or whole step of the scales, where
# these are integers themselves.
BOUNDS = {
    "Q4_0": ("most", 1 / 8),
    "Q4_1": ("range", 1 / 30),
    "Q5_0": ("most", 1 / 16),
    "Q5_1": ("range", 1 / 62),
    "Q8_0": ("most", 1 / 254),
    "Q2_K": ("range", 1 / 6 + 1 / 15),
    "Q3_K": ("most", 1 / 4 + 1 / 32),
    "Q4_K": ("range", 1 / 30 + 1 / 63),
    "Q5_K": ("range", 1 / 62 + 1 / 63),
    "Q6_K": ("most", 1 / 32 + 1 / 128),
    "IQ4_NL": ("most", 14 / 127),  # 113 for 127
    "IQ4_XS": ("most", 14 / 127 + 1 / 32),
    "MXFP4": ("most", 2 / 8),  # 6 for almost 8
}


def matrix() -> np.ndarray:
    """Rows of several value_types: normal, positive, negative, small integers with ties, zeros,
    rare large values.
    """
    rng = np.random.default_rng(3)
    normal = rng.standard_normal((20, 512))
    spiked = normal * np.where(rng.random((20, 512)) < 0.01, 50, 1)
    whole = rng.integers(-8, 9, (6, 512))
    return np.concatenate([normal, abs(normal), -abs(normal), whole, np.zeros((2, 512)), spiked]).astype(np.float32)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_equals_the_gguf_package(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    expected = gguf.quants.quantize(matrix(), gguf.GGMLQuantizationType[name]).view(np.uint8)
    assert np.array_equal(encode(matrix(), BlockType[name]), expected)


@pytest.mark.parametrize("name", BOUNDS)
def test_error_bound(name: str) -> None:
    values, block_type = matrix(), BlockType[name]
    actual = decode(RawTensor("t", values.shape, block_type, encode(values, block_type).reshape(-1)))
    blocks = values.reshape(-1, BLOCKS[block_type].size)
    most, low = np.maximum(blocks.max(axis=1), 0), np.minimum(blocks.min(axis=1), 0)
    measure, bound = BOUNDS[name]
    scale = np.maximum(most, -low) if measure == "most" else most - low
    error = np.abs(actual - values).reshape(blocks.shape).max(axis=1)
    assert (error <= scale * (bound + F16)).all()
    assert error.max() >= scale.max() * bound / 16  # the bound says something


def test_q4_0_and_q6_k_by_hand() -> None:
    """The extreme, -4, is code 0 of Q4_0, d = 0.5. In Q6_K, -32 is code 0 of scale 1 = d * -128 /
    -128.
    """
    row = np.array([[-4.0, 3.5] + [0.0] * 30], np.float32)
    assert encode(row, BlockType.Q4_0).tobytes() == b"\x00\x38" + bytes([0x80, 0x8F] + [0x88] * 14)
    block = np.zeros((1, 256), np.float32)
    block[0, :2] = -32, 31
    data = encode(block, BlockType.Q6_K).tobytes()
    # low 4 bits of codes 0 and 63; those of 32 (value 0), 64 columns on, are 0
    assert data[:2] == b"\x00\x0f"
    # high 2 bits: 0 and 3, then 2 for each value 0
    assert data[128:130] == bytes([0b10101000, 0b10101011])
    assert data[192:] == b"\x80" + bytes(15) + b"\x00\xa0"  # scales -128, 0 …; d = -2^-7


def test_nan_survives_bf16() -> None:
    bits = np.array([[0x7F800001, 0xFFFFFFFF, 0x7F800000]], np.uint32)
    actual = encode(bits.view(np.float32), BlockType.BF16).view(np.uint16)
    assert actual.tolist() == [[0x7FC0, 0xFFFF, 0x7F80]]


@pytest.mark.parametrize(
    ("values", "block_type", "reason"),
    [
        (np.zeros((1, 48)), BlockType.Q4_0, "48 values are not whole blocks of 32"),
        (np.zeros((1, 256)), BlockType.IQ1_S, r"IQ1_S.*Q4_K"),
        (np.full((1, 32), np.nan), BlockType.Q8_0, "not finite"),
        (np.full((1, 32), 1e9), BlockType.Q8_0, r"1e\+09 are too large"),
        (np.full((1, 256), 1e30), BlockType.Q4_K, "too large"),
    ],
)
def test_what_cannot_be_encoded_is_refused(values: np.ndarray, block_type: BlockType, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        encode(values.astype(np.float32), block_type)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_values_whose_scale_has_no_inverse(name: str) -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, 3] = 1e-39
    data = encode(values, BlockType[name]).reshape(-1)
    assert np.abs(decode(RawTensor("t", values.shape, BlockType[name], data))).max() <= 1e-38
