"""From float32 to blocks (read `formats/gguf_write.py` next; `ggml.py` is the inverse).

F32 … Q8_0 are encoded as by ggml's reference encoders (ggml-quants.c), to the same bytes. The other
types are rounded to the nearest code under scales from the extremes of each run of values: valid
blocks with a known error bound, without ggml's search for the least error. Shapes: N blocks; an
encoder turns values, float32 [N, size], into records [N].
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.errors import UnsupportedError
from martlet.quant.blocks import CODEBOOK_IQ4, CODEBOOK_MXFP4, LAYOUTS
from martlet.quant.table import BLOCKS, BlockType

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Blocks = NDArray[Any]  # records of one of LAYOUTS

_CHUNK = 1 << 17  # values encoded at a time


def encode(values: F32, block_type: BlockType) -> U8:
    """Return the rows of a matrix, float32 [n, k], as bytes [n, row_nbytes] of a block type.

    Raises UnsupportedError if the type has no encoder, if k is no whole number of its blocks, or if
    a value is not finite or too large for float16 scales.
    """
    n, k = values.shape
    size = BLOCKS[block_type].size
    if k % size:
        raise UnsupportedError(f"rows of {k} values are not whole blocks of {size}, as {block_type.name} needs")
    values = np.ascontiguousarray(values, np.float32)
    if block_type in _NUMBERS:
        with np.errstate(over="ignore"):  # beyond float16's range is infinite
            return _NUMBERS[block_type](values).view(np.uint8)
    if block_type not in _ENCODERS:
        raise UnsupportedError(
            f"block type {block_type.name} cannot be encoded", [k.name for k in (*_NUMBERS, *_ENCODERS)]
        )
    out = np.zeros(n * k // size, LAYOUTS[block_type])
    flat, step = values.reshape(-1, size), _CHUNK // size
    if not np.isfinite(flat).all():
        raise UnsupportedError(f"{block_type.name} cannot hold values that are not finite")
    try:
        with np.errstate(over="raise"):
            for first in range(0, len(flat), step):
                _ENCODERS[block_type](flat[first : first + step], out[first : first + step])
    except FloatingPointError:
        raise UnsupportedError(f"values up to {np.abs(flat).max():g} are too large for {block_type.name}") from None
    return out.view(np.uint8).reshape(n, -1)


def _bf16(values: F32) -> NDArray[np.uint16]:
    """The upper halves, rounded to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values), bits >> np.uint32(16) | np.uint32(64), rounded).astype(np.uint16)


_NUMBERS: dict[BlockType, Callable[[F32], NDArray[Any]]] = {
    BlockType.F32: lambda values: values,
    BlockType.F16: lambda values: values.astype("<f2"),
    BlockType.BF16: _bf16,
}


# -- bit fields and rounding -----------------------------------------------------------------------
def _pack(codes: NDArray[Any], bits: int, width: int) -> U8:
    """Join fields of 1, 2 or 4 bits, [N, m], to bytes [N, m * bits / 8]; inverts `ggml._unpack`."""
    per_byte = 8 // bits
    groups = codes.reshape(len(codes), -1, per_byte, width) << np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    packed: U8 = np.bitwise_or.reduce(groups, axis=2).reshape(len(codes), -1)
    return packed


def _inverse(scales: F32) -> F32:
    """1 / scale, and 0 for a scale so small that 1 / scale overflows."""
    return np.divide(
        np.float32(1), scales, out=np.zeros_like(scales), where=np.abs(scales) >= np.finfo(np.float32).tiny
    )


def _codes(scaled: F32, least: int, most: int) -> NDArray[np.int8]:
    """The nearest integers in least … most; a half is rounded up."""
    codes: NDArray[np.int8] = np.clip(np.floor(scaled + np.float32(0.5)), least, most).astype(np.int8)
    return codes


def _extreme(values: F32) -> F32:
    """The value farthest from 0 in each run [..., m], with its sign: [..., 1]."""
    return np.take_along_axis(values, np.abs(values).argmax(axis=-1)[..., None], axis=-1)


def _f16(values: F32) -> F32:
    """Values as a float16 stores them."""
    return values.astype(np.float16).astype(np.float32)


# -- 32 values a block -----------------------------------------------------------------------------
def _symmetric(x: F32, most: int) -> tuple[F32, U8]:
    """Scales [N, 1] that make the extreme value code 0, and codes 0 … most, whose middle is 0."""
    half = (most + 1) // 2
    scales = _extreme(x) / np.float32(-half)
    return scales, np.minimum(np.trunc(x * _inverse(scales) + np.float32(half + 0.5)), most).astype(np.uint8)


def _ranged(x: F32, most: int) -> tuple[F32, F32, U8]:
    """Scales and minima [N, 1], codes 0 … most from the least value to the greatest."""
    least = x.min(axis=1, keepdims=True)
    scales = (x.max(axis=1, keepdims=True) - least) / np.float32(most)
    codes = np.trunc((x - least) * _inverse(scales) + np.float32(0.5))
    return scales, least, np.minimum(codes, most).astype(np.uint8)


def _q4_0(x: F32, b: Blocks) -> None:
    scales, codes = _symmetric(x, 15)
    b["d"], b["qs"] = scales[:, 0], _pack(codes, 4, 16)


def _q4_1(x: F32, b: Blocks) -> None:
    scales, least, codes = _ranged(x, 15)
    b["d"], b["m"], b["qs"] = scales[:, 0], least[:, 0], _pack(codes, 4, 16)


def _q5_0(x: F32, b: Blocks) -> None:
    scales, codes = _symmetric(x, 31)
    b["d"], b["qs"], b["qh"] = scales[:, 0], _pack(codes & 15, 4, 16), _pack(codes >> 4, 1, 1)


def _q5_1(x: F32, b: Blocks) -> None:
    scales, least, codes = _ranged(x, 31)
    b["d"], b["m"] = scales[:, 0], least[:, 0]
    b["qs"], b["qh"] = _pack(codes & 15, 4, 16), _pack(codes >> 4, 1, 1)


def _q8_0(x: F32, b: Blocks) -> None:
    scales = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(scales)
    b["d"], b["qs"] = scales[:, 0], np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled)


def _nearest(codebook: tuple[int, ...], scaled: F32) -> U8:
    """The index [N, m] of the codebook's value nearest to each value; the lowest of equals."""
    codes: U8 = np.abs(np.array(codebook, np.float32) - scaled[:, :, None]).argmin(axis=2).astype(np.uint8)
    return codes


def _mxfp4(x: F32, b: Blocks) -> None:
    """The exponent is the largest value's minus the codebook's (whose largest is 6 = 1.5 * 2²)."""
    most = np.abs(x).max(axis=1)
    exponents = np.where(most > 0, np.clip(np.frexp(most)[1] - 1 - 2 + 127, 0, 254), 0)
    b["e"] = exponents
    scaled = np.ldexp(x, 128 - exponents[:, None])  # the codebook is doubled: 127 + 1
    b["qs"] = _pack(_nearest(CODEBOOK_MXFP4, scaled), 4, 16)


def _iq4_nl(x: F32, b: Blocks) -> None:
    """The extreme value becomes -127, the value of code 0."""
    scales = _f16(_extreme(x) / np.float32(CODEBOOK_IQ4[0]))
    b["d"], b["qs"] = scales[:, 0], _pack(_nearest(CODEBOOK_IQ4, x * _inverse(scales)), 4, 16)


# -- 256 values a block, in sub-blocks of 16 or 32 with scales of their own ------------------------
def _sub_scales(scales: F32, least: int, most: int) -> tuple[F32, NDArray[np.int8], F32]:
    """Scales [N, s] ≈ d * codes: d float16 [N], codes in least … most; (d, codes, d * codes)."""
    d = _f16(_extreme(scales) / np.float32(least or most))  # the extreme scale's code is `least`
    codes = _codes(scales * _inverse(d), least, most)
    return d[:, 0], codes, d * codes.astype(np.float32)


def _signed(x: F32, run: int, half: int, levels: int) -> tuple[F32, NDArray[np.int8], U8]:
    """(block scales [N], sub-block scales [N, s], codes [N, size]) of a type without minima.

    Sub-block scales are in -levels … levels - 1, codes in 0 … 2 * half - 1 with `half` for 0.
    """
    groups = x.reshape(len(x), -1, run)
    d, scales, used = _sub_scales(_extreme(groups)[:, :, 0] / np.float32(-half), -levels, levels - 1)
    codes = _codes(groups * _inverse(used)[:, :, None], -half, half - 1) + np.int8(half)
    return d, scales, codes.reshape(x.shape).view(np.uint8)


def _offset(x: F32, run: int, most_code: int, most: int) -> tuple[F32, F32, U8, U8, U8]:
    """(d, dmin, scales, minima, codes), x ≈ d * scale * code - dmin * minimum; codes unsigned."""
    groups = x.reshape(len(x), -1, run)
    least = np.minimum(groups.min(axis=2), 0)
    dmin, minima, used_minima = _sub_scales(-least, 0, most)
    spread = np.maximum(groups.max(axis=2), 0) + used_minima
    d, scales, used = _sub_scales(spread / np.float32(most_code), 0, most)
    codes = _codes((groups + used_minima[:, :, None]) * _inverse(used)[:, :, None], 0, most_code)
    return d, dmin, scales.view(np.uint8), minima.view(np.uint8), codes.reshape(x.shape).view(np.uint8)


def _q2_k(x: F32, b: Blocks) -> None:
    b["d"], b["dmin"], scales, minima, codes = _offset(x, 16, 3, 15)
    b["scales"], b["qs"] = scales | minima << 4, _pack(codes, 2, 32)


def _q3_k(x: F32, b: Blocks) -> None:
    b["d"], signed, codes = _signed(x, 16, 4, 32)
    scales = (signed + np.int8(32)).view(np.uint8)
    b["scales"] = np.concatenate([_pack(scales & 15, 4, 8), _pack(scales >> 4, 2, 4)], axis=1)
    b["qs"], b["hmask"] = _pack(codes & 3, 2, 32), _pack(codes >> 2, 1, 32)


def _pack_pairs(scales: U8, minima: U8) -> U8:
    """Six-bit scales and minima [N, 8] as twelve bytes: see `ggml._six_bit_pairs`."""
    low, high, least, least_high = scales[:, :4], scales[:, 4:], minima[:, :4], minima[:, 4:]
    thirds = [low | (high >> 4) << 6, least | (least_high >> 4) << 6, high & 15 | (least_high & 15) << 4]
    return np.concatenate(thirds, axis=1)


def _q4_k(x: F32, b: Blocks) -> None:
    b["d"], b["dmin"], scales, minima, codes = _offset(x, 32, 15, 63)
    b["scales"], b["qs"] = _pack_pairs(scales, minima), _pack(codes, 4, 32)


def _q5_k(x: F32, b: Blocks) -> None:
    b["d"], b["dmin"], scales, minima, codes = _offset(x, 32, 31, 63)
    b["scales"], b["qs"], b["qh"] = _pack_pairs(scales, minima), _pack(codes & 15, 4, 32), _pack(codes >> 4, 1, 32)


def _q6_k(x: F32, b: Blocks) -> None:
    b["d"], b["scales"], codes = _signed(x, 16, 32, 128)
    b["ql"], b["qh"] = _pack(codes & 15, 4, 64), _pack(codes >> 4, 2, 32)


def _iq4_xs(x: F32, b: Blocks) -> None:
    groups = x.reshape(len(x), -1, 32)
    b["d"], signed, used = _sub_scales(_extreme(groups)[:, :, 0] / np.float32(CODEBOOK_IQ4[0]), -32, 31)
    scales = (signed + np.int8(32)).view(np.uint8)  # [N, 8]
    b["scales_l"] = _pack(scales & 15, 4, 1)
    b["scales_h"] = ((scales >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)).sum(axis=1)
    scaled = (groups * _inverse(used)[:, :, None]).reshape(x.shape)
    b["qs"] = _pack(_nearest(CODEBOOK_IQ4, scaled), 4, 16)


_ENCODERS: dict[BlockType, Callable[[F32, Blocks], None]] = {
    BlockType.Q4_0: _q4_0,
    BlockType.Q4_1: _q4_1,
    BlockType.Q5_0: _q5_0,
    BlockType.Q5_1: _q5_1,
    BlockType.Q8_0: _q8_0,
    BlockType.Q2_K: _q2_k,
    BlockType.Q3_K: _q3_k,
    BlockType.Q4_K: _q4_k,
    BlockType.Q5_K: _q5_k,
    BlockType.Q6_K: _q6_k,
    BlockType.IQ4_NL: _iq4_nl,
    BlockType.IQ4_XS: _iq4_xs,
    BlockType.MXFP4: _mxfp4,
}
