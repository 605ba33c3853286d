"""Block formats: rows of bytes to numbers, and the dot product of a row with a vector without storing its numbers.

Every format comes down to `weight = code * scale + offset` for groups of 16 or 32 weights, so a format is one function from bytes to
`Codes`; the dequantiser and the fused dot product are written once, for all. Layouts: ggml's `ggml-quants.h`.

Differences from the C: Q2_K and Q3_K are read in ggml's order (there: garbage); Q4_1, Q5_0, Q5_1, Q5_K, BF16 are read at all (there:
exit). A row must fill its blocks (there: cut). float32 to float16 rounds ties to even (there: away from zero). Read next: `kquants.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from picolm import kquants
from picolm.kquants import Codes, half, unpack
from picolm.libm import F32, U8

Order = Literal["fast", "sse", "scalar"]


class Block(NamedTuple):
    """A format."""

    name: str
    weights: int
    bytes: int
    codes: Callable[[U8], Codes] | None = None


def nibbles(b: U8) -> Codes:
    """Q4_0 (18 bytes), Q4_1 (20), Q5_0 (22), Q5_1 (24): scale, minimum (_1), 32 fifth bits (Q5), 32 nibbles, the low ones first."""
    size, codes = b.shape[-1], unpack(b[..., -16:], 4, 16).astype(np.float32)
    if size >= 22:
        codes += np.unpackbits(b[..., -20:-16], axis=-1, bitorder="little") * np.float32(16)
    if size in (20, 24):
        return Codes(codes, half(b, 0), half(b, 2))
    return Codes(codes - (16 if size >= 22 else 8), half(b, 0))


def q8_0(b: U8) -> Codes:
    """34 bytes: scale, 32 signed bytes."""
    return Codes(b[..., 2:34].view(np.int8).astype(np.float32), half(b, 0))


BLOCKS: dict[int, Block] = {  # by ggml's type numbers
    0: Block("F32", 1, 4), 1: Block("F16", 1, 2), 30: Block("BF16", 1, 2),
    2: Block("Q4_0", 32, 18, nibbles), 3: Block("Q4_1", 32, 20, nibbles), 6: Block("Q5_0", 32, 22, nibbles), 7: Block("Q5_1", 32, 24, nibbles),
    8: Block("Q8_0", 32, 34, q8_0), 10: Block("Q2_K", 256, 84, kquants.q2_k), 11: Block("Q3_K", 256, 110, kquants.q3_k),
    12: Block("Q4_K", 256, 144, kquants.q4_k), 13: Block("Q5_K", 256, 176, kquants.q5_k), 14: Block("Q6_K", 256, 210, kquants.q6_k),
}  # fmt: skip


def row_bytes(type_: int, n: int) -> int:
    """Bytes of a row of n weights."""
    block = BLOCKS[type_]
    if n % block.weights:
        raise ValueError(f"a row of {n} weights does not fill {block.name} blocks of {block.weights}")
    return n // block.weights * block.bytes


def fp16_to_fp32(h: NDArray[np.float16]) -> F32:
    """Exact."""
    return h.astype(np.float32)


def fp32_to_fp16(x: F32) -> NDArray[np.float16]:
    """To nearest, ties to even; too large becomes infinite."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def dequantize_row(rows: U8, type_: int) -> F32:
    """The weights of rows of bytes: [..., bytes] to [..., weights]."""
    block = BLOCKS[type_]
    if block.codes is None:
        if block.name == "BF16":  # the upper half of a float32
            return (rows.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        return rows.view("<f4" if block.name == "F32" else "<f2").astype(np.float32)
    codes, scale, offset = block.codes(rows.reshape(*rows.shape[:-1], -1, block.bytes))
    groups = codes.reshape(*scale.shape, -1)
    groups *= scale[..., None]
    if offset is not None:
        groups += offset[..., None]
    return groups.reshape(*rows.shape[:-1], -1)


def ordered_sum(p: F32, lanes: int) -> F32:
    """Sums of the last axis in a fixed order: one after the other (1 lane), or as SSE does: 4 or 8 sums, folded, then the rest."""
    if lanes == 1:
        return np.add.accumulate(p, axis=-1)[..., -1] + np.float32(0)  # + 0: a sum that starts at 0 is never -0
    whole = p.shape[-1] // lanes * lanes
    steps = np.moveaxis(p[..., :whole].reshape(*p.shape[:-1], -1, lanes), -2, 0)
    acc = np.add.reduce(np.ascontiguousarray(steps), axis=0, initial=np.float32(0))
    if lanes == 8:
        acc = acc[..., :4] + acc[..., 4:]
    total: F32 = (acc[..., 0] + acc[..., 2]) + (acc[..., 1] + acc[..., 3])
    for i in range(whole, p.shape[-1]):
        total = total + p[..., i]
    return total


def vec_dot(rows: U8, x: F32, type_: int, order: Order) -> F32:
    """Products of rows of bytes with a vector. Fused: codes as they are, each group's sum by its scale, the vector's by the offset."""
    if order != "fast":
        return dot_in_order(rows, type_, order)(x)
    block = BLOCKS[type_]
    if block.codes is None:
        return np.asarray(np.einsum("ij,j->i", dequantize_row(rows, type_), x), np.float32)
    codes, scale, offset = block.codes(rows.reshape(len(rows), -1, block.bytes))
    groups = x.reshape(*scale.shape[1:], -1)
    out: F32 = np.einsum("rbg,rbg->r", np.einsum("rbgk,bgk->rbg", codes.reshape(*scale.shape, -1), groups), scale)
    return out if offset is None else out + np.einsum("rbg,bg->r", offset, groups.sum(-1))


def dot_in_order(rows: U8, type_: int, order: Order) -> Callable[[F32], F32]:
    """Rows, ready to be multiplied with vectors in the C's order of additions. It has products of its own for Q4_K and Q6_K: the
    codes are multiplied as they are, and each group's sum with its scale: scale · (codes · x) + offset · sum(x)."""
    block = BLOCKS[type_]
    if block.codes is None or block.name not in ("Q4_K", "Q6_K"):
        numbers = dequantize_row(rows, type_)
        return lambda x: ordered_sum(numbers * x, 8 if order == "sse" else 1)
    codes, scale, offset = block.codes(rows.reshape(*rows.shape[:-1], -1, block.bytes))
    codes = codes.reshape(*scale.shape, -1)

    def dot(x: F32) -> F32:
        groups = x.reshape(codes.shape[-3:])
        sums = scale * ordered_sum(codes * groups, 1)
        if offset is not None:  # Q4_K adds two groups (64 weights) at a time: ((a - b) + c) - d
            less = offset * ordered_sum(groups, 1)
            sums = ((sums[..., 0::2] + less[..., 0::2]) + sums[..., 1::2]) + less[..., 1::2]
        return ordered_sum(sums.reshape(*sums.shape[:-2], -1), 1)

    return dot
