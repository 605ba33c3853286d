"""The K formats: super-blocks of 256 weights with scales that are themselves quantised.

8 groups of 32 weights (Q4_K, Q5_K) or 16 groups of 16, a small integer scale per group, one float16 that scales the scales. Codes
are split over planes of bits, laid out for SIMD: half a super-block is four runs of 32 codes that share 32 bytes, two bits of each
byte a run. Layouts: ggml's `ggml-quants.h`. Functions take bytes [..., blocks, bytes].

Differences from the C: it has Q2_K and Q3_K in another order of bits, and no Q5_K. Read next: `tensor.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from picolm.libm import F32, U8


class Codes(NamedTuple):
    """Weights as `code * scale + offset`: codes [..., blocks, weights], the others [..., blocks, groups]."""

    codes: F32
    scale: F32
    offset: F32 | None = None


def half(b: U8, at: int) -> F32:
    """The float16 at a byte of each block, as [..., blocks, 1]."""
    return np.ascontiguousarray(b[..., at : at + 2]).view("<f2").astype(np.float32)


def unpack(b: U8, bits: int, run: int) -> U8:
    """Codes of 1, 2 or 4 bits: each `run` bytes hold several runs of that many codes, the first run in their lowest bits."""
    bytes_ = b.reshape(*b.shape[:-1], -1, 1, run)
    runs = [bytes_ >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
    return np.concatenate(runs, axis=-2).reshape(*b.shape[:-1], -1)


def q2_k(b: U8) -> Codes:
    """84 bytes: 16 bytes of scale and minimum nibbles, 64 bytes of codes, scale, scale of the minima."""
    scale = half(b, 80) * (b[..., :16] & 15).astype(np.float32)
    minimum = half(b, 82) * (b[..., :16] >> 4).astype(np.float32)
    return Codes(unpack(b[..., 16:80], 2, 32).astype(np.float32), scale, -minimum)


def q3_k(b: U8) -> Codes:
    """110 bytes: 32 bytes of third bits, 64 bytes of codes, 12 bytes of scales (low nibbles, upper bit pairs), scale."""
    codes = unpack(b[..., 32:96], 2, 32) | unpack(b[..., :32], 1, 32) << 2
    scales = unpack(b[..., 96:104], 4, 8) | unpack(b[..., 104:108], 2, 4) << 4
    return Codes(codes.astype(np.float32) - 4.0, half(b, 108) * (scales.astype(np.float32) - 32.0))


def q4_k(b: U8) -> Codes:
    """144 bytes: scale, scale of the minima, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles (32 low, 32 high)."""
    return Codes(unpack(b[..., 16:144], 4, 32).astype(np.float32), *_scales_and_offsets(b))


def q5_k(b: U8) -> Codes:
    """176 bytes: as Q4_K, with 32 bytes of fifth bits before the nibbles; bit j of a byte belongs to run j."""
    codes = unpack(b[..., 48:176], 4, 32) | unpack(b[..., 16:48], 1, 32) << 4
    return Codes(codes.astype(np.float32), *_scales_and_offsets(b))


def q6_k(b: U8) -> Codes:
    """210 bytes: 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed scales, scale. Around 32."""
    codes = unpack(b[..., :128], 4, 64) | unpack(b[..., 128:192], 2, 32) << 4
    scales = b[..., 192:208].view(np.int8).astype(np.float32)
    return Codes(codes.astype(np.float32) - 32.0, half(b, 208) * scales)


def _scales_and_offsets(b: U8) -> tuple[F32, F32]:
    """Eight 6-bit scales and eight 6-bit minima in 12 bytes: the first four of each in the low 6 bits of bytes 0-3 and
    4-7, the last four as nibbles in bytes 8-11 with their upper two bits on top of bytes 0-7."""
    s, m, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = np.concatenate([s & 63, (rest & 15) | (s >> 6) << 4], axis=-1).astype(np.float32)
    minima = np.concatenate([m & 63, (rest >> 4) | (m >> 6) << 4], axis=-1).astype(np.float32)
    return half(b, 0) * scales, -(half(b, 2) * minima)
