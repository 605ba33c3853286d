"""Functions of float32 vectors that no instruction computes: exp, tanh and the activations.

Read `rowwise.py` next.

exp follows the usual route (as in Cephes): x = n·ln 2 + r with |r| ≤ ln 2 / 2, a polynomial for
e^r, and 2^n put together from its bits. exp(0) is exactly 1 and exp of anything below -87 exactly
0; attention relies on both.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.linear import OPTIONS
from martlet.ops.cpu.simd.verbs import Verbs
from martlet.spec import Activation


def exponential(v: Verbs) -> Callable[..., Any]:
    """e^x in each lane, relative error < 2e-7; 0 below -87, infinity above 88.7, NaN for NaN."""

    @njit(forceinline=True, **OPTIONS)
    def exp(x):  # type: ignore[no-untyped-def]
        bounded = v.max(v.min(x, v.splat(89.0)), v.splat(-88.0))
        n = v.round_even(v.mul(bounded, v.splat(1.4426950408889634)))
        # ln 2 in two parts, the first exact in few bits; from x, to keep a NaN.
        r = v.fma(n, v.splat(-0.693359375), x)
        r = v.fma(n, v.splat(2.12194440e-4), r)
        y = v.splat(1.9875691500e-4)
        y = v.fma(y, r, v.splat(1.3981999507e-3))
        y = v.fma(y, r, v.splat(8.3334519073e-3))
        y = v.fma(y, r, v.splat(4.1665795894e-2))
        y = v.fma(y, r, v.splat(1.6666665459e-1))
        y = v.fma(y, r, v.splat(5.0000001201e-1))
        y = v.add(v.fma(v.mul(y, r), r, r), v.splat(1.0))
        # 2^n in two steps, because n = 128 has no float of its own
        half = v.shift_right_signed(v.to_int(n), 1)
        rest = v.add_ints(v.to_int(n), v.times(half, -1))
        y = v.mul(y, v.as_float(v.shift_left(v.add_ints(half, v.splat_int(127)), 23)))
        y = v.mul(y, v.as_float(v.shift_left(v.add_ints(rest, v.splat_int(127)), 23)))
        return v.where_below(x, v.splat(-87.0), v.splat(0.0), y)

    return exp


def hyperbolic_tangent(v: Verbs) -> Callable[..., Any]:
    """tanh(x) = 1 - 2 / (e^2x + 1), error below 3e-7."""
    exp = exponential(v)

    @njit(forceinline=True, **OPTIONS)
    def tanh(x):  # type: ignore[no-untyped-def]
        one = v.splat(1.0)
        return v.sub(one, v.div(v.splat(2.0), v.add(exp(v.add(x, x)), one)))

    return tanh


def error_function(v: Verbs) -> Callable[..., Any]:
    """erf(x) by Abramowitz and Stegun 7.1.26, error below 2e-7."""
    exp = exponential(v)

    @njit(forceinline=True, **OPTIONS)
    def erf(x):  # type: ignore[no-untyped-def]
        size = v.abs(x)
        t = v.div(v.splat(1.0), v.fma(size, v.splat(0.3275911), v.splat(1.0)))
        y = v.splat(1.061405429)
        y = v.fma(y, t, v.splat(-1.453152027))
        y = v.fma(y, t, v.splat(1.421413741))
        y = v.fma(y, t, v.splat(-0.284496736))
        y = v.fma(y, t, v.splat(0.254829592))
        y = v.sub(v.splat(1.0), v.mul(v.mul(y, t), exp(v.sub(v.splat(0.0), v.mul(size, size)))))
        return v.where_below(x, v.splat(0.0), v.sub(v.splat(0.0), y), y)

    return erf


def gated(v: Verbs, function: Activation) -> Callable[..., Any]:
    """(gate, up) → a feed-forward part's act(gate) * up, in each lane (`spec.Activation`)."""
    if function is Activation.SWIGLU_OAI:
        return swiglu_oai(v)
    act = activation(v, function)

    @njit(forceinline=True, **OPTIONS)
    def product(gate, up):  # type: ignore[no-untyped-def]
        return v.mul(act(gate), up)

    return product


def swiglu_oai(v: Verbs) -> Callable[..., Any]:
    """(gate, up) → g / (1 + e^(-1.702 g)) * (u + 1), g = min(gate, 7), u = up within ±7."""
    exp = exponential(v)

    @njit(forceinline=True, **OPTIONS)
    def product(gate, up):  # type: ignore[no-untyped-def]
        # Not `min`, which would lose a NaN.
        g = v.where_below(v.splat(7.0), gate, v.splat(7.0), gate)
        u = v.where_below(v.splat(7.0), up, v.splat(7.0), v.where_below(up, v.splat(-7.0), v.splat(-7.0), up))
        share = v.div(g, v.add(v.splat(1.0), exp(v.mul(g, v.splat(-1.702)))))
        return v.mul(share, v.add(u, v.splat(1.0)))

    return product


def activation(v: Verbs, function: Activation) -> Callable[..., Any]:
    """The non-linearity act, in each lane."""
    exp, tanh, erf = exponential(v), hyperbolic_tangent(v), error_function(v)

    @njit(forceinline=True, **OPTIONS)
    def silu(x):  # type: ignore[no-untyped-def]
        return v.div(x, v.add(v.splat(1.0), exp(v.sub(v.splat(0.0), x))))

    @njit(forceinline=True, **OPTIONS)
    def gelu_tanh(x):  # type: ignore[no-untyped-def]
        cubic = v.fma(v.mul(v.mul(x, x), x), v.splat(0.044715), x)
        return v.mul(v.mul(x, v.splat(0.5)), v.add(v.splat(1.0), tanh(v.mul(cubic, v.splat(0.7978845608028654)))))

    @njit(forceinline=True, **OPTIONS)
    def gelu(x):  # type: ignore[no-untyped-def]
        return v.mul(v.mul(x, v.splat(0.5)), v.add(v.splat(1.0), erf(v.mul(x, v.splat(0.7071067811865476)))))

    return {Activation.SILU: silu, Activation.GELU_TANH: gelu_tanh, Activation.GELU: gelu}[function]
