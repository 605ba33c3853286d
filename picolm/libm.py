"""expf, sinf and cosf as glibc's C library computes them, in plain double arithmetic: what float32 results depend on.

`np.exp` in float32 differs from glibc's expf in the last bit in a third of all cases. So the exact orders of sums (`tensor.py`)
use these, which need only double `+ - *` in a given order and a rounding at the end: any language can repeat them. Method and
constants: Arm's optimized-routines (`expf.c`, `sincosf.h`), which glibc has used since 2.27 and 2.28.

Differences from the C: picoLM calls the C library, and so gets other bits on another system. Read next: `tensor.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

_SHIFT = float.fromhex("0x1.8p+52")  # adding it leaves the nearest integer in a double's low bits
_EXP = [float.fromhex(h) for h in ("0x1.c6af84b912394p-5", "0x1.ebfce50fac4f3p-3", "0x1.62e42ff0c52d6p-1")]
_LOG2E = float.fromhex("0x1.71547652b82fep+0")
_COS = [float.fromhex(h) for h in ("-0x1.ffffffd0c621cp-2", "0x1.55553e1068f19p-5", "-0x1.6c087e89a359dp-10", "0x1.99343027bf8c3p-16")]  # fmt: skip
_SIN = [float.fromhex(h) for h in ("-0x1.555545995a603p-3", "0x1.1107605230bc4p-7", "-0x1.994eb3774cf24p-13")]
# pi/2 in three pieces of which the first two have 33 bits: n times a piece is exact for every n below 2^20.
_HALF_PI = [float.fromhex(h) for h in ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69")]


def expf(x: F32) -> F32:
    """e^x: 2^(k/32) from a table's formula, times a cubic for the rest."""
    # exp is 0 below and infinite above these anyway; without them the exponent below would wrap.
    z = np.clip(np.nan_to_num(x.astype(np.float64), nan=0.0), -200.0, 200.0) * (_LOG2E * 32)
    k = (z + _SHIFT) - _SHIFT
    r = z - k
    scale = np.ldexp(np.exp2(np.mod(k, 32) / 32), np.floor(k / 32).astype(np.int32))
    p = (_EXP[0] / 32**3) * r + (_EXP[1] / 32**2)
    y = p * (r * r) + ((_EXP[2] / 32) * r + 1.0)
    with np.errstate(over="ignore", under="ignore"):
        return np.where(np.isnan(x), x, y * scale).astype(np.float32)


def powf(base: float, exponent: F32) -> F32:
    """base^exponent, rounded once from double."""
    return np.power(np.float64(np.float32(base)), exponent.astype(np.float64)).astype(np.float32)


def cosf(x: F32) -> F32:
    """Cosine of an angle below a million: the sine, a quarter turn on."""
    return sinf(x, 1)


def sinf(x: F32, turn: int = 0) -> F32:
    """sin(x + turn·pi/2): the angle less n quarter turns, then the sine's or the cosine's polynomial."""
    wide = x.astype(np.float64)
    n = np.rint(wide / (np.pi / 2))
    r = ((wide - n * _HALF_PI[0]) - n * _HALF_PI[1]) - n * _HALF_PI[2]
    r2 = r * r
    r3, r4 = r * r2, r2 * r2
    sine = (r + r3 * _SIN[0]) + (r3 * r2) * (_SIN[1] + r2 * _SIN[2])
    cosine = ((1.0 + r2 * _COS[0]) + r4 * _COS[1]) + (r4 * r2) * (_COS[2] + r2 * _COS[3])
    quarter = (n.astype(np.int64) + turn) & 3
    value = np.where(quarter & 1, cosine, sine)
    return np.where(quarter & 2, -value, value).astype(np.float32)
