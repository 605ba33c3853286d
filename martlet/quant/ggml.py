"""What the bits of each block type mean: decoding to float32 in NumPy (read `encode.py` for the way back).

These functions are the definition that kernels and packing are checked against, bit for bit with the `gguf` package.
Source of the layouts: ggml-common.h and ggml-quants.c of llama.cpp; MXFP4: OCP Microscaling Formats 1.0. Each decoder
takes blocks, uint8 [n, block bytes], and returns float32 [n, block size].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from martlet.errors import UnsupportedError
from martlet.quant.table import BLOCKS, BlockType, RawTensor

__all__ = ["DECODERS", "IQ4_VALUES", "decode", "decode_rows"]

F32 = NDArray[np.float32]
Blocks = NDArray[np.uint8]

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # E2M1, doubled


def _f16(blocks: Blocks, at: int) -> F32:
    """The float16 at byte `at` of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(codes: Blocks) -> Blocks:
    """Low nibbles, then high ones: [n, 2b]."""
    return np.concatenate([codes & 15, codes >> 4], axis=1)


def _bits(packed: Blocks) -> Blocks:
    """Each bit of little-endian bytes as a byte, [n, 8b]."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _plain(dtype: str) -> Callable[[Blocks], F32]:
    def decode_plain(blocks: Blocks) -> F32:
        return np.ascontiguousarray(blocks).view(dtype).astype(np.float32)

    return decode_plain


def _bf16(blocks: Blocks) -> F32:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(b: Blocks) -> F32:
    return _f16(b, 0) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Blocks) -> F32:
    return _f16(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _f16(b, 2)


def _q5_0(b: Blocks) -> F32:
    codes = _nibbles(b[:, 6:]) | (_bits(b[:, 2:6]) << 4)
    return _f16(b, 0) * (codes.astype(np.float32) - 16)


def _q5_1(b: Blocks) -> F32:
    codes = _nibbles(b[:, 8:]) | (_bits(b[:, 4:8]) << 4)
    return _f16(b, 0) * codes.astype(np.float32) + _f16(b, 2)


def _q8_0(b: Blocks) -> F32:
    return _f16(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _q8_1(b: Blocks) -> F32:
    return _f16(b, 0) * b[:, 4:].view(np.int8).astype(np.float32)


def _q8_k(b: Blocks) -> F32:
    d = np.ascontiguousarray(b[:, :4]).view("<f4").astype(np.float32)
    return d * np.ascontiguousarray(b[:, 4:260]).view(np.int8).astype(np.float32)


def _runs(scales: F32, codes: F32) -> F32:
    """codes [n, 256] times scales [n, r], each for 256 / r columns."""
    n, r = scales.shape
    return (codes.reshape(n, r, -1) * scales[:, :, None]).reshape(n, 256)


def _crumbs(packed: Blocks) -> Blocks:
    """Bit pairs of 64 bytes: pair c of the 32 bytes of a half are 32 columns, [n, 256]."""
    halves = packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return (halves & 3).reshape(-1, 256)


def _q2_k(b: Blocks) -> F32:
    scales, codes = b[:, :16], _crumbs(b[:, 16:80]).astype(np.float32)
    d, dmin = _f16(b, 80), _f16(b, 82)
    least = np.repeat(dmin * (scales >> 4).astype(np.float32), 16, axis=1)
    return _runs(d * (scales & 15).astype(np.float32), codes) - least


def _q3_k(b: Blocks) -> F32:
    third = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1  # [n, 8, 32]
    codes = _crumbs(b[:, 32:96]) | (third.reshape(-1, 256) << 2)
    low, high = b[:, 96:104], b[:, 104:108]
    nibbles = np.concatenate([low & 15, low >> 4], axis=1)
    tops = ((high[:, None, :] >> np.array([0, 2, 4, 6], np.uint8)[None, :, None]) & 3).reshape(-1, 16)
    scales = (nibbles | (tops << 4)).astype(np.float32) - 32
    return _runs(_f16(b, 108) * scales, codes.astype(np.float32) - 4)


def _six_bit_pairs(s: Blocks) -> tuple[F32, F32]:
    """8 scales and 8 minima of 6 bits in 12 bytes (Q4_K, Q5_K)."""
    first, second, third = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_nibbles(packed: Blocks) -> Blocks:
    """128 bytes: of each 32, the low nibbles are 32 columns and the high ones the next 32."""
    quarters = packed.reshape(-1, 4, 32)
    return np.stack([quarters & 15, quarters >> 4], axis=2).reshape(-1, 256)


def _q4_k(b: Blocks) -> F32:
    scales, minima = _six_bit_pairs(b[:, 4:16])
    least = np.repeat(_f16(b, 2) * minima, 32, axis=1)
    return _runs(_f16(b, 0) * scales, _k_nibbles(b[:, 16:]).astype(np.float32)) - least


def _q5_k(b: Blocks) -> F32:
    scales, minima = _six_bit_pairs(b[:, 4:16])
    fifth = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1  # [n, 8, 32]
    codes = _k_nibbles(b[:, 48:]) | (fifth.reshape(-1, 256) << 4)
    least = np.repeat(_f16(b, 2) * minima, 32, axis=1)
    return _runs(_f16(b, 0) * scales, codes.astype(np.float32)) - least


def _q6_k(b: Blocks) -> F32:
    halves = b[:, :128].reshape(-1, 2, 64)
    low = np.concatenate([halves & 15, halves >> 4], axis=2).reshape(-1, 256)
    codes = low | (_crumbs(b[:, 128:192]) << 4)
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return _runs(_f16(b, 208) * scales, codes.astype(np.float32) - 32)


def _iq4_nl(b: Blocks) -> F32:
    return _f16(b, 0) * IQ4_VALUES[_nibbles(b[:, 2:])]


def _iq4_xs(b: Blocks) -> F32:
    tops = np.ascontiguousarray(b[:, 2:4]).view("<u2").astype(np.uint16)  # [n, 1]
    high = (tops >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    scales = (low | (high << 4)).astype(np.float32) - 32
    nibbles = b[:, 8:].reshape(-1, 8, 16)
    values = IQ4_VALUES[np.concatenate([nibbles & 15, nibbles >> 4], axis=2)].reshape(-1, 256)
    return _runs(_f16(b, 0) * scales, values)


def _mxfp4(b: Blocks) -> F32:
    exponent = b[:, :1].astype(np.int32)
    # 2^(e - 128): below e = 2 the result is a subnormal float
    scale = (
        np.where(exponent < 2, np.int32(0x00200000) << exponent, (exponent - 1) << 23).astype(np.int32).view(np.float32)
    )
    return scale * MXFP4_VALUES[_nibbles(b[:, 1:])]


DECODERS: dict[BlockType, Callable[[Blocks], F32]] = {
    BlockType.F32: _plain("<f4"),
    BlockType.F16: _plain("<f2"),
    BlockType.BF16: _bf16,
    BlockType.F64: _plain("<f8"),
    BlockType.I8: _plain("<i1"),
    BlockType.I16: _plain("<i2"),
    BlockType.I32: _plain("<i4"),
    BlockType.I64: _plain("<i8"),
    BlockType.Q4_0: _q4_0,
    BlockType.Q4_1: _q4_1,
    BlockType.Q5_0: _q5_0,
    BlockType.Q5_1: _q5_1,
    BlockType.Q8_0: _q8_0,
    BlockType.Q8_1: _q8_1,
    BlockType.Q2_K: _q2_k,
    BlockType.Q3_K: _q3_k,
    BlockType.Q4_K: _q4_k,
    BlockType.Q5_K: _q5_k,
    BlockType.Q6_K: _q6_k,
    BlockType.Q8_K: _q8_k,
    BlockType.IQ4_NL: _iq4_nl,
    BlockType.IQ4_XS: _iq4_xs,
    BlockType.MXFP4: _mxfp4,
}


def decode(tensor: RawTensor) -> F32:
    """All values of a tensor, float32 of its shape. Raises UnsupportedError for a type that has no decoder."""
    block = BLOCKS[tensor.type]
    if tensor.type not in DECODERS:
        raise UnsupportedError(f"{tensor.name}: the type {tensor.type.name}", (t.name for t in DECODERS))
    values: F32 = DECODERS[tensor.type](tensor.data.reshape(-1, block.nbytes)).reshape(tensor.shape)
    return values


def decode_rows(tensor: RawTensor, start: int, stop: int) -> F32:
    """Rows start … stop - 1 of a matrix, float32 [stop - start, k]: for callers that must not hold the whole."""
    return decode(tensor.take_rows(slice(start, stop)))
