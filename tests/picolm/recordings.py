"""What the C program did, as recorded: see tests/data/picolm/README.md."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parents[1] / "data/picolm"
RUNNABLE = ["f32", "f16", "q8_0", "q4_0", "q4_k", "q6_k", "mix_q4km", "tied_q4_0"]
MISREAD = ["q2_k", "q3_k"]  # the C runs them, and reads them wrongly
REFUSED = ["bad_q5_k", "bad_q5_0", "bad_q5_1", "bad_q4_1", "bad_bf16"]
BUILDS = {"sse": "native", "scalar": "scalar"}  # the order of sums that each build of the C has


def arrays(name: str) -> Any:
    """The arrays of a recording."""
    return np.load(DATA / f"{name}.npz")


def notes(name: str) -> Any:
    """The text of a recording."""
    return json.loads(lzma.open(DATA / f"{name}.json.xz").read())


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Equal bit for bit; a NaN equals a NaN."""
    word = np.dtype(f"u{a.dtype.itemsize}")
    return a.shape == b.shape and bool(((a.view(word) == b.view(word)) | (np.isnan(a) & np.isnan(b))).all())


def ties_away(x: NDArray[np.float32]) -> NDArray[np.float16]:
    """float32 to float16 as the C rounds (fault A20): half an ulp is added to the magnitude, and
    the rest cut off.
    """
    bits = x.view(np.uint32)
    sign, exponent, mantissa = bits >> 31 << 15, (bits >> 23 & 255).astype(np.int64) - 112, bits & 0x7FFFFF
    normal = ((exponent.clip(0) << 10) + (mantissa + 0x1000 >> 13)).clip(0, 0x7C00)
    shift = (14 - exponent).clip(0, 31)
    small = np.where(exponent < -10, 0, (mantissa | 0x800000) + (1 << (shift - 1).clip(0)) >> shift)
    half = np.where(exponent > 0, np.where(exponent >= 31, 0x7C00, normal), small)
    half = np.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7E00, np.where((bits >> 23 & 255) == 0, 0, half))
    return (half.astype(np.uint16) | sign.astype(np.uint16)).view(np.float16)


def to_ggml(rows: NDArray[np.uint8], type_: str) -> NDArray[np.uint8]:
    """Q2_K or Q3_K rows in the C's order of bits, as the rows in ggml's order that mean the
    same.
    """
    blocks = rows.reshape(len(rows), -1, {"Q2_K": 84, "Q3_K": 110}[type_])
    j, out = np.arange(256), []
    for block in blocks.reshape(-1, blocks.shape[-1]):
        qs = block[16:80] if type_ == "Q2_K" else block[2:66]
        codes = qs[j // 4] >> (2 * (j % 4)).astype(np.uint8) & 3
        plane = np.zeros(64, np.uint8)
        np.bitwise_or.at(plane, j // 128 * 32 + j % 32, codes << (2 * (j % 128 // 32)).astype(np.uint8))
        if type_ == "Q2_K":
            out.append(np.concatenate([block[:16], plane, block[80:]]))
            continue
        third = np.zeros(32, np.uint8)
        np.bitwise_or.at(
            third, j % 32, (block[66:98][j // 8] >> (j % 8).astype(np.uint8) & 1) << (j // 32).astype(np.uint8)
        )
        scales = block[98:110].copy()
        s = np.arange(16)
        high = scales[8 + s % 8 // 2] >> (s // 8 * 4 + s % 2 * 2).astype(np.uint8) & 3
        packed = np.zeros(12, np.uint8)
        packed[:8] = scales[:8]
        np.bitwise_or.at(packed, 8 + s % 4, high << (2 * (s // 4)).astype(np.uint8))
        out.append(np.concatenate([third, plane, packed, block[:2]]))
    return np.stack(out).reshape(len(rows), -1)
