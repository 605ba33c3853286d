"""Row operations and rope of the CPU backend against float64 formulas, and bit for bit against
themselves.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from kernel_calls import F32, Kernels, Step, bits, columns, float_bits
from numpy.typing import NDArray

from martlet.ops.cpu.kernels.fields import STEP_LOGITS
from martlet.spec import Activation

F64 = NDArray[np.float64]
WIDTHS = (1, 8, 17, 576, 1040)
SIMPLE = [activation for activation in Activation if activation is not Activation.SWIGLU_OAI]


def view(rows: int, width: int, seed: int, scale: float = 2.0) -> F32:
    """Normal values in columns of a wider array."""
    made = columns(rows, width, width + 5, 3)
    made[:] = np.random.default_rng(seed).normal(0, scale, made.shape)
    return made


def fresh(rows: int, width: int) -> F32:
    """Columns to write, with NaN on both sides."""
    return columns(rows, width, width + 9, 4)


def assert_beside_untouched(out: F32) -> None:
    """Nothing beside the view was written."""
    assert out.base is not None
    assert np.isnan(np.delete(out.base, np.s_[4 : 4 + out.shape[1]], 1)).all()


def assert_ulps(got: F32, want: F64, ulps: float, floor: float = 2.0**-126) -> None:
    """|got - want| within `ulps` steps of a float32 of want's size, or of `floor` if that is
    larger.
    """
    step = np.spacing(np.maximum(np.abs(want), floor).astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(got.astype(np.float64) - want) / step) <= ulps


def gated(x: F64, activation: Activation) -> F64:
    """act(x) by its definition."""
    if activation is Activation.SILU:
        return x / (1 + np.exp(-x))
    if activation is Activation.GELU_TANH:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * np.vectorize(math.erfc)(-x / math.sqrt(2))


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(kernels: Kernels, width: int) -> None:
    x, weight = view(5, 3 * width, 1), np.random.default_rng(2).normal(1, 0.5, width).astype(np.float32)
    out, eps = fresh(5, 3 * width), 1e-5
    kernels("rms_norm", Step(5), x, out, width, weight.ctypes.data, float_bits(eps), 3)
    grouped = x.astype(np.float64).reshape(5, 3, width)
    want = grouped / np.sqrt(np.mean(grouped**2, -1, keepdims=True) + np.float32(eps)) * weight
    assert_ulps(out, want.reshape(5, -1), 8)
    assert_beside_untouched(out)


def test_rms_norm_row_is_the_same_alone_in_place_and_on_more_threads(kernels: Kernels) -> None:
    x, weight = view(7, 2 * 72, 3), np.ones(72, np.float32)
    args = (72, weight.ctypes.data, float_bits(1e-6), 2)
    whole = fresh(7, 144)
    kernels("rms_norm", Step(7), x, whole, *args)
    for threads in (2, 4):
        again = fresh(7, 144)
        kernels("rms_norm", Step(7), x, again, *args, threads=threads)
        assert np.array_equal(bits(again), bits(whole))
    for t in range(7):
        kernels("rms_norm", Step(1), x[t : t + 1], x[t : t + 1], *args)
    assert np.array_equal(bits(x), bits(whole))


def test_rms_norm_of_zeros_is_zero_and_of_nan_is_nan(best_kernels: Kernels) -> None:
    x, out, weight = np.zeros((2, 20), np.float32), fresh(2, 20), np.ones(20, np.float32)
    x[1, 7] = np.nan
    best_kernels("rms_norm", Step(2), x, out, 20, weight.ctypes.data, float_bits(1e-5), 1)
    assert not out[0].any()
    assert np.isnan(out[1]).all()


@pytest.mark.parametrize("activation", SIMPLE)
def test_act_mul(kernels: Kernels, activation: Activation) -> None:
    name, width = f"act_mul_{activation.value}", 1100
    x = view(3, 2 * width, 4, 4.0)
    x[0, :width] = np.linspace(-20, 20, width)
    x[:, width:] = 1.0
    out = fresh(3, width)
    kernels(name, Step(3), x, out, width, 1, threads=2)
    assert_beside_untouched(out)
    want = gated(x[:, :width].astype(np.float64), activation)
    assert np.max(np.abs(out - want) / np.maximum(1, np.abs(want))) < 5e-7
    x[:, width:] = view(3, width, 5)
    again, alone = fresh(3, width), fresh(1, width)
    kernels(name, Step(3), x, again, width, 1)
    assert np.array_equal(bits(again), bits(out * x[:, width:]))
    kernels(name, Step(1), x[2:], alone, width, 1)
    assert np.array_equal(bits(alone[0]), bits(again[2]))


def test_swiglu_oai(kernels: Kernels) -> None:
    """arXiv:2508.10925: the gate is at most 7, up within ±7, and a NaN stays one."""
    width = 700
    x = view(3, 2 * width, 4, 6.0)
    x[0, :4], x[0, width : width + 4] = (100.0, -1e30, 1e30, 0.0), (100.0, 1.0, -100.0, -1.0)
    x[1, 0], x[2, width] = np.nan, np.nan
    out = fresh(3, width)
    kernels("act_mul_swiglu_oai", Step(3), x, out, width, 1, threads=2)
    assert_beside_untouched(out)
    wide = x.astype(np.float64)
    gate, up = np.minimum(wide[:, :width], 7), np.clip(wide[:, width:], -7, 7)
    with np.errstate(over="ignore"):
        want = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    assert np.isnan(out[1, 0])
    assert np.isnan(out[2, 0])
    assert np.nanmax(np.abs(out - want) / np.maximum(1, np.abs(want))) < 1e-6
    assert out[0, :4].tolist() == pytest.approx([7 * 8, 0, 7 * -6, 0], abs=2e-3)


@pytest.mark.parametrize("activation", SIMPLE)
def test_act_mul_at_the_ends(best_kernels: Kernels, activation: Activation) -> None:
    gate = np.array([0.0, -100.0, 100.0, -1e30, 1e30, np.nan, -3e-39, 88.0], np.float32)
    x = np.concatenate([gate, np.ones(8, np.float32)])[None]
    out = fresh(1, 8)
    best_kernels(f"act_mul_{activation.value}", Step(1), x, out, 8, 1)
    assert out[0, 0] == 0.0
    assert np.array_equal(out[0, 1:5], np.array([0.0, 100.0, 0.0, 1e30], np.float32))
    assert np.isnan(out[0, 5])
    assert abs(out[0, 6]) < 3e-39
    assert out[0, 7] == 88.0


@pytest.mark.parametrize("width", WIDTHS)
def test_add(kernels: Kernels, width: int) -> None:
    x, y, out = view(4, width, 6), view(4, width, 7), fresh(4, width)
    args = (width, y, float_bits(0.22))
    kernels("add", Step(4), x, out, *args, threads=2)
    # one rounding each, as NumPy does
    assert np.array_equal(bits(out), bits(x + np.float32(0.22) * y))
    assert_beside_untouched(out)
    kernels("add", Step(4), x, x, *args)
    assert np.array_equal(bits(x), bits(out))


def test_scale_cap(kernels: Kernels) -> None:
    x, out = view(3, 1030, 8, 40.0), fresh(3, 1030)
    kernels("scale_cap", Step(3), x, out, 1030, float_bits(0.25), float_bits(0.0), threads=2)
    assert np.array_equal(bits(out), bits(x * np.float32(0.25)))
    kernels("scale_cap", Step(3), x, out, 1030, float_bits(2.0), float_bits(30.0))
    want = 30 * np.tanh(2 * x.astype(np.float64) / 30)
    assert np.max(np.abs(out - want)) < 30 * 3e-7
    assert_beside_untouched(out)


def test_capped_nan_stays_nan_and_infinity_becomes_the_cap(best_kernels: Kernels) -> None:
    x, out = np.array([[np.nan, np.inf, -np.inf, 0.0]], np.float32), fresh(1, 4)
    best_kernels("scale_cap", Step(1), x, out, 4, float_bits(1.0), float_bits(50.0))
    assert np.isnan(out[0, 0])
    assert out[0, 1:].tolist() == [50.0, -50.0, 0.0]


@pytest.mark.parametrize("width", WIDTHS)
def test_take_rows(kernels: Kernels, width: int) -> None:
    x, rows = view(6, width, 9), [5, 0, 3, 3]
    out = fresh(4, width)
    kernels("take_rows", Step(6, logit_rows=rows), x, out, width, threads=2, rows=STEP_LOGITS)
    assert np.array_equal(bits(out), bits(x[rows]))
    assert_beside_untouched(out)


@pytest.mark.parametrize(("size", "dims"), [(64, 64), (8, 8), (80, 20), (96, 72), (128, 2)])
def test_rope(kernels: Kernels, size: int, dims: int) -> None:
    positions, heads, half = np.array([0, 1, 77, 131071], np.int32), 3, dims // 2
    frequencies = 10000.0 ** -(np.arange(half) / half)
    table = np.full((4, dims), np.nan, np.float32)
    step = Step(4, positions=positions)
    args = (frequencies.ctypes.data, half, float_bits(1.25), table.ctypes.data)
    kernels("rope_table", step, *args, threads=2)
    angle = positions[:, None] * frequencies
    assert_ulps(table[:, :half] / np.float32(1.25), np.cos(angle), 2, 1.0)
    assert_ulps(table[:, half:] / np.float32(1.25), np.sin(angle), 2, 1.0)

    x, out = view(4, heads * size, 10), fresh(4, heads * size)
    args = (heads, size, table.ctypes.data, half)
    kernels("rope", step, x, out, *args, threads=2)
    assert_beside_untouched(out)
    want = x.astype(np.float64).reshape(4, heads, size)
    c, s = (1.25 * f(angle)[:, None, :] for f in (np.cos, np.sin))
    first, second = want[..., :half].copy(), want[..., half:dims].copy()
    want[..., :half], want[..., half:dims] = first * c - second * s, second * c + first * s
    assert np.max(np.abs(out - want.reshape(4, -1))) < 4e-6
    assert np.array_equal(out[0], np.where(np.arange(heads * size) % size < dims, x[0] * np.float32(1.25), x[0]))
    kernels("rope", step, x, x, *args)
    assert np.array_equal(bits(x), bits(out))
