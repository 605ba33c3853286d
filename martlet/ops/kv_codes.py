"""The codes of compressed keys and values, in NumPy.

Read `reference.py` next; kernels make the same codes, bit for bit.

    q8   x ≈ s c            c = round(x / s) in -127 … 127      s = max|x| / 127
    q4   x ≈ s c + m        c = round((x - m) / s) in 0 … 15    m = min x, s = (max x - m) / 15

s and m are float16, and are those of 32 channels of a position; but of q4's keys those of a channel
over the positions of a page: keys have channels that are large at every position, values have not
(KIVI, arXiv:2402.02750, section 3).
"""

import numpy as np
from numpy.typing import NDArray

from martlet.kv_types import KV_BLOCK

F32 = NDArray[np.float32]
MOST = np.float32(65504.0)  # what lies beyond float16 saturates, as it does in f16 pages


def q8_codes(x: F32) -> tuple[NDArray[np.int8], F32]:
    """Codes [..., D] and scales [..., blocks] of heads x [..., D]; the last block may be short."""
    blocks = in_blocks(np.clip(x, -MOST, MOST))
    scale = (np.abs(blocks).max(axis=-1) / np.float32(127)).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(blocks * inverse_or_zero(scale)[..., None]), -127, 127).astype(np.int8)
    return codes.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], scale


def rounded_q8(x: F32) -> F32:
    """What q8 keeps of heads x [..., D].

    Error: scale / 2, that is max|x| / 254 over a block, and what its rounding adds.
    """
    codes, scale = q8_codes(x)
    return codes * np.repeat(scale, KV_BLOCK, axis=-1)[..., : x.shape[-1]]


def in_blocks(x: F32) -> F32:
    """x [..., D], filled up with zeros, as [..., blocks, 32]."""
    size = x.shape[-1]
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % KV_BLOCK)]).reshape(*x.shape[:-1], -1, KV_BLOCK)


def inverse_or_zero(scale: F32) -> F32:
    """1 / scale, float32 [...], and 0 for 0: values below the least float16 are kept as 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)


def q4_codes(x: F32, axis: int) -> tuple[NDArray[np.uint8], F32, F32]:
    """Codes, uint8 [...], of values x, float32 [...]; scales and minima of blocks along `axis`."""
    low = x.min(axis=axis, keepdims=True)
    scale = ((x.max(axis=axis, keepdims=True) - low) / np.float32(15)).astype(np.float16).astype(np.float32)
    return np.clip(np.rint((x - low) * inverse_or_zero(scale)), 0, 15).astype(np.uint8), scale, low


def rounded_q4(x: F32, axis: int) -> F32:
    """The values that q4 keeps of x, float32 [...], in blocks along `axis`.

    Error: (max - min) / 30, and what a float16 scale loses.
    """
    codes, scale, low = q4_codes(x, axis)
    return codes * scale + low


def q4_keys(keys: F32) -> F32:
    """What q4 keeps of a page's keys [P, G, D]: a block is a channel of the page."""
    return rounded_q4(keys, 0)


def q4_values(values: F32) -> F32:
    """What q4 keeps of values [P, G, D], filled up with zeros to whole blocks of 32 channels."""
    rounded = rounded_q4(in_blocks(values), -1)
    return rounded.reshape(*values.shape[:-1], -1)[..., : values.shape[-1]]
