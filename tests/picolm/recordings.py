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
    """float32 to float16 as the C rounds (fault A20): half an ulp is added to the magnitude, and the rest cut off."""
    bits = x.view(np.uint32)
    sign, exponent, mantissa = bits >> 31 << 15, (bits >> 23 & 255).astype(np.int64) - 112, bits & 0x7FFFFF
    normal = ((exponent.clip(0) << 10) + (mantissa + 0x1000 >> 13)).clip(0, 0x7C00)
    shift = (14 - exponent).clip(0, 31)
    small = np.where(exponent < -10, 0, (mantissa | 0x800000) + (1 << (shift - 1).clip(0)) >> shift)
    half = np.where(exponent > 0, np.where(exponent >= 31, 0x7C00, normal), small)
    half = np.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7E00, np.where((bits >> 23 & 255) == 0, 0, half))
    return (half.astype(np.uint16) | sign.astype(np.uint16)).view(np.float16)
