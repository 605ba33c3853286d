"""From blocks to float32, for every type (read `iquants.py` next; `encode.py` is the inverse).

Source: ggml-quants.c of llama.cpp. Every product and sum is done in float32 in that file's order,
so the values are the same bit for bit. Shapes: N blocks; a decoder turns N records of
`blocks.LAYOUTS` into float32 [N, size].
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.quant.blocks import CODEBOOK_IQ4, CODEBOOK_MXFP4, LAYOUTS, PLAIN
from martlet.quant.iquants import I_DECODERS
from martlet.quant.table import BLOCKS, BlockType, RawTensor

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Blocks = NDArray[Any]  # records of one of LAYOUTS

_CHUNK = 1 << 17  # values decoded at a time: the temporaries then stay in the L2 cache


def decode(tensor: RawTensor) -> F32:
    """Return the tensor's values, float32 [*shape]."""
    return decode_rows(tensor, 0, tensor.data.size // tensor.row_nbytes).reshape(tensor.shape)


def decode_rows(tensor: RawTensor, start: int, stop: int) -> F32:
    """Rows start … stop - 1, all dimensions but the last flattened: float32 [stop - start, k].

    Needs a few hundred kilobytes beyond its result.
    """
    k = tensor.shape[-1] if tensor.shape else 1
    data = tensor.rows()[start:stop].reshape(-1)
    out = np.empty(data.size // BLOCKS[tensor.type].nbytes * BLOCKS[tensor.type].size, np.float32)
    _decode_into(tensor.type, data, out)
    return out.reshape(-1, k)


def _decode_into(block_type: BlockType, data: U8, out: F32) -> None:
    """Decode the bytes of whole blocks into out [values]."""
    if block_type in PLAIN:
        with np.errstate(over="ignore"):  # a float64 beyond float32's range becomes infinite
            out[:] = data.view(PLAIN[block_type])
    elif block_type is BlockType.BF16:
        np.left_shift(data.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        blocks, size = data.view(LAYOUTS[block_type]), BLOCKS[block_type].size
        step = _CHUNK // size
        with np.errstate(invalid="ignore", over="ignore"):  # a scale may be infinite, as in ggml
            for first in range(0, len(blocks), step):
                chunk = blocks[first : first + step]
                values = out[first * size : (first + len(chunk)) * size].reshape(len(chunk), size)
                _DECODERS[block_type](chunk, values)


# -- bit fields ------------------------------------------------------------------------------------
def _unpack(packed: U8, bits: int, width: int) -> U8:
    """Split bytes [N, m] into fields of 1, 2 or 4 bits [N, m * 8 / bits], `width` bytes at a time.

    The lowest fields of `width` bytes come first, then their next fields, and so on.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]  # [8 / bits, 1]
    groups = packed.reshape(len(packed), -1, 1, width)
    fields = (groups >> shifts) & np.uint8((1 << bits) - 1)  # [N, m / width, 8 / bits, width]
    return fields.reshape(len(packed), -1)


def _column(values: NDArray[Any]) -> F32:
    """A scale a block, [N], as float32 [N, 1]."""
    return values.astype(np.float32)[:, None]


def _scale(scales: F32, codes: NDArray[Any], out: F32) -> None:
    """out = scales * codes; a scale of [N, s] is for size / s neighbouring codes of [N, size]."""
    shape = (*scales.shape, out.shape[1] // scales.shape[1])
    np.multiply(scales[:, :, None], codes.reshape(shape), out=out.reshape(shape), dtype=np.float32)


def _scale_less(scales: F32, codes: U8, minima: F32, out: F32) -> None:
    """out = scales * codes - minima, with scales and minima [N, s] as in `_scale`."""
    _scale(scales, codes, out)
    groups = out.reshape(*scales.shape, -1)
    np.subtract(groups, minima[:, :, None], out=groups)


# -- 32 values a block -----------------------------------------------------------------------------
def _q4_0(b: Blocks, out: F32) -> None:
    _scale(_column(b["d"]), _unpack(b["qs"], 4, 16).view(np.int8) - np.int8(8), out)


def _q4_1(b: Blocks, out: F32) -> None:
    _scale(_column(b["d"]), _unpack(b["qs"], 4, 16), out)
    out += _column(b["m"])


def _five_bits(b: Blocks) -> U8:
    """Codes of Q5_0 and Q5_1: bit j of the 32-bit number qh is the fifth bit of value j."""
    return _unpack(b["qs"], 4, 16) | (_unpack(b["qh"], 1, 1) << np.uint8(4))


def _q5_0(b: Blocks, out: F32) -> None:
    _scale(_column(b["d"]), _five_bits(b).view(np.int8) - np.int8(16), out)


def _q5_1(b: Blocks, out: F32) -> None:
    _scale(_column(b["d"]), _five_bits(b), out)
    out += _column(b["m"])


def _q8(b: Blocks, out: F32) -> None:
    """Q8_0, Q8_1 and Q8_K; the sums in the last two are for products only."""
    _scale(_column(b["d"]), b["qs"], out)


def _iq4_nl(b: Blocks, out: F32) -> None:
    _scale(_column(b["d"]), np.array(CODEBOOK_IQ4, np.int8)[_unpack(b["qs"], 4, 16)], out)


def _mxfp4(b: Blocks, out: F32) -> None:
    scales = np.ldexp(np.float32(1), b["e"].astype(np.int32) - 128)  # 127 + 1: a doubled codebook
    _scale(_column(scales), np.array(CODEBOOK_MXFP4, np.int8)[_unpack(b["qs"], 4, 16)], out)


# -- 256 values a block, in sub-blocks of 16 or 32 with scales of their own ------------------------
def _q2_k(b: Blocks, out: F32) -> None:
    scales = _column(b["d"]) * (b["scales"] & np.uint8(15)).astype(np.float32)  # [N, 16]
    minima = _column(b["dmin"]) * (b["scales"] >> np.uint8(4)).astype(np.float32)
    _scale_less(scales, _unpack(b["qs"], 2, 32), minima, out)


def _q3_k(b: Blocks, out: F32) -> None:
    """Sixteen 6-bit scales in twelve bytes: first all low 4 bits, then all high 2 bits."""
    low = _unpack(b["scales"][:, :8], 4, 8)  # [N, 16]
    high = _unpack(b["scales"][:, 8:], 2, 4)
    scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    codes = _unpack(b["qs"], 2, 32) | (_unpack(b["hmask"], 1, 32) << np.uint8(2))  # 3 bits, less 4
    _scale(_column(b["d"]) * scales.astype(np.float32), codes.view(np.int8) - np.int8(4), out)


def _six_bit_pairs(packed: U8) -> tuple[F32, F32]:
    """Scales and minima of Q4_K and Q5_K, [N, 8] each, from twelve bytes a, b, c of four:

    a = 2 high bits of scale 4 + i, scale i;  b = 2 high bits of minimum 4 + i, minimum i;
    c = 4 low bits of minimum 4 + i, 4 low bits of scale 4 + i.
    """
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 2 & 48)], axis=1)
    minima = np.concatenate([b & 63, (c >> 4) | (b >> 2 & 48)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(b: Blocks, out: F32) -> None:
    scales, minima = _six_bit_pairs(b["scales"])
    _scale_less(_column(b["d"]) * scales, _unpack(b["qs"], 4, 32), _column(b["dmin"]) * minima, out)


def _q5_k(b: Blocks, out: F32) -> None:
    scales, minima = _six_bit_pairs(b["scales"])
    codes = _unpack(b["qs"], 4, 32) | (_unpack(b["qh"], 1, 32) << np.uint8(4))
    _scale_less(_column(b["d"]) * scales, codes, _column(b["dmin"]) * minima, out)


def _q6_k(b: Blocks, out: F32) -> None:
    codes = _unpack(b["ql"], 4, 64) | (_unpack(b["qh"], 2, 32) << np.uint8(4))
    _scale(_column(b["d"]) * b["scales"].astype(np.float32), codes.view(np.int8) - np.int8(32), out)


def _iq4_xs(b: Blocks, out: F32) -> None:
    """Eight scales of 6 bits: low 4 bits in scales_l, bits 2i and 2i + 1 of scales_h above them."""
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    high = (b["scales_h"][:, None] >> shifts & 3).astype(np.uint8)  # [N, 8]
    scales = (_unpack(b["scales_l"], 4, 1) | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    codes = np.array(CODEBOOK_IQ4, np.int8)[_unpack(b["qs"], 4, 16)]
    _scale(_column(b["d"]) * scales.astype(np.float32), codes, out)


_DECODERS: dict[BlockType, Callable[[Blocks, F32], None]] = {
    BlockType.Q4_0: _q4_0,
    BlockType.Q4_1: _q4_1,
    BlockType.Q5_0: _q5_0,
    BlockType.Q5_1: _q5_1,
    BlockType.Q8_0: _q8,
    BlockType.Q8_1: _q8,
    BlockType.Q2_K: _q2_k,
    BlockType.Q3_K: _q3_k,
    BlockType.Q4_K: _q4_k,
    BlockType.Q5_K: _q5_k,
    BlockType.Q6_K: _q6_k,
    BlockType.Q8_K: _q8,
    BlockType.IQ4_NL: _iq4_nl,
    BlockType.IQ4_XS: _iq4_xs,
    BlockType.MXFP4: _mxfp4,
    **I_DECODERS,
}
assert {*PLAIN, *_DECODERS, BlockType.BF16} == set(BlockType)
