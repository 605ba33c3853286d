"""Operations on each row by itself: norms, activations, additions, copies of rows (definitions:
`ops/reference.py`).

A unit of work is a row, or a run of columns of one where rows are few. All are bound by reading
their inputs, a hundredth of a step; sums go lane by lane in the order of the columns and then
halves onto halves.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.fields import (
    ACT_MUL,
    ADD,
    BYTES,
    COMBINE,
    COUNTER,
    GATE,
    RMS_NORM,
    ROWS,
    SCALE_CAP,
    STEP_LOGIT_ROWS,
)
from martlet.ops.cpu.kernels.linear import OPTIONS
from martlet.ops.cpu.kernels.quantize import COLUMNS_A_UNIT, tile_claimer, tile_quantizer
from martlet.ops.cpu.simd.mathlib import exponential, gated, hyperbolic_tangent
from martlet.ops.cpu.simd.verbs import Verbs
from martlet.spec import Activation

IN, IN_STRIDE, OUT, OUT_STRIDE, WIDTH, *_ = ACT_MUL  # and every other's first fields
*_, NORM_WEIGHT, EPS, GROUPS = RMS_NORM
*_, N_GATES = ACT_MUL
*_, CHOICE, CHOICE_STRIDE, CHOSEN = COMBINE
*_, SCORES, SCORES_STRIDE, _ = GATE
*_, OTHER, OTHER_STRIDE, SCALE = ADD
*_, FACTOR, CAP = SCALE_CAP


def claimer(v: Verbs) -> Callable[..., Any]:
    """(record, step) → the next unit: (row, first column, last column); row -1: there is none."""

    @njit(forceinline=True, **OPTIONS)
    def claim(record, step):  # type: ignore[no-untyped-def]
        width = record[WIDTH]
        pieces = (width + COLUMNS_A_UNIT - 1) // COLUMNS_A_UNIT
        unit = v.atomic_add(v.i64p(record[COUNTER]), 0, 1)
        row, first = unit // pieces, unit % pieces * COLUMNS_A_UNIT
        if row >= step[record[ROWS]]:
            return -1, 0, 0
        return row, first, min(first + COLUMNS_A_UNIT, width)

    return claim


def rms_norm_kernel(v: Verbs) -> Callable[..., None]:
    """out = x / sqrt(mean(x²) + eps) * weight over each group of WIDTH columns.

    A unit is a tile's group.
    """
    lanes, quantize, claim = v.lanes, tile_quantizer(v), tile_claimer(v)

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        width, weight, eps = record[WIDTH], v.f32p(record[NORM_WEIGHT]), v.splat(v.float_bits(record[EPS]))
        while True:
            first_row, stop_row, group = claim(record, step, record[GROUPS])
            if first_row >= stop_row:
                break
            for row in range(first_row, stop_row):
                x = v.f32p(record[IN] + (row * record[IN_STRIDE] + group * width) * 4)
                out = v.f32p(record[OUT] + (row * record[OUT_STRIDE] + group * width) * 4)
                squares = v.splat(0.0)
                for k in range(0, width, lanes):
                    value = v.load_first(x, k, width - k)
                    squares = v.fma(value, value, squares)
                mean = v.div(v.splat(v.sum_lanes(squares)), v.splat(v.int_to_f32(width)))
                inverse = v.div(v.splat(1.0), v.sqrt(v.add(mean, eps)))
                for k in range(0, width, lanes):
                    value = v.mul(v.mul(v.load_first(x, k, width - k), inverse), v.load_first(weight, k, width - k))
                    v.store_first(out, k, value, width - k)
            if record[BYTES] != 0:
                out = v.f32p(record[OUT] + first_row * record[OUT_STRIDE] * 4)
                quantize(record, out, record[OUT_STRIDE], first_row, stop_row - first_row, 0, width)

    return kernel


def act_mul_kernel(v: Verbs, function: Activation) -> Callable[..., None]:
    """out = act(gate) * up by groups; a group's gate, WIDTH columns, is followed by its up."""
    product, claim, lanes, quantize = gated(v, function), tile_claimer(v), v.lanes, tile_quantizer(v)

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        width = record[WIDTH]
        pieces = (width + COLUMNS_A_UNIT - 1) // COLUMNS_A_UNIT
        while True:
            first_row, stop_row, unit = claim(record, step, pieces * record[N_GATES])
            if first_row >= stop_row:
                break
            group, first = unit // pieces * width, unit % pieces * COLUMNS_A_UNIT
            stop = min(first + COLUMNS_A_UNIT, width)
            for row in range(first_row, stop_row):
                gate = v.f32p(record[IN] + (row * record[IN_STRIDE] + 2 * group) * 4)
                out = v.f32p(record[OUT] + (row * record[OUT_STRIDE] + group) * 4)
                for k in range(first, stop, lanes):
                    up = v.load_first(gate, width + k, stop - k)
                    v.store_first(out, k, product(v.load_first(gate, k, stop - k), up), stop - k)
            if record[BYTES] != 0:
                out = v.f32p(record[OUT] + first_row * record[OUT_STRIDE] * 4)
                rows = stop_row - first_row
                quantize(record, out, record[OUT_STRIDE], first_row, rows, group + first, group + stop)

    return kernel


def add_kernel(v: Verbs) -> Callable[..., None]:
    """out = x + scale * y."""
    claim, lanes = claimer(v), v.lanes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        scale = v.float_bits(record[SCALE])
        while True:
            row, first, stop = claim(record, step)
            if row < 0:
                break
            x = v.f32p(record[IN] + row * record[IN_STRIDE] * 4)
            y = v.f32p(record[OTHER] + row * record[OTHER_STRIDE] * 4)
            out = v.f32p(record[OUT] + row * record[OUT_STRIDE] * 4)
            for k in range(first, stop, lanes):
                scaled = v.mul(v.load_first(y, k, stop - k), v.splat(scale))
                v.store_first(out, k, v.add(v.load_first(x, k, stop - k), scaled), stop - k)

    return kernel


def scale_cap_kernel(v: Verbs) -> Callable[..., None]:
    """out = x * factor, then cap * tanh(out / cap) where there is a cap."""
    tanh, claim, lanes = hyperbolic_tangent(v), claimer(v), v.lanes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        factor, cap = v.splat(v.float_bits(record[FACTOR])), v.splat(v.float_bits(record[CAP]))
        while True:
            row, first, stop = claim(record, step)
            if row < 0:
                break
            x = v.f32p(record[IN] + row * record[IN_STRIDE] * 4)
            out = v.f32p(record[OUT] + row * record[OUT_STRIDE] * 4)
            for k in range(first, stop, lanes):
                value = v.mul(v.load_first(x, k, stop - k), factor)
                if record[CAP] != 0:
                    value = v.mul(cap, tanh(v.div(value, cap)))
                v.store_first(out, k, value, stop - k)

    return kernel


def take_rows_kernel(v: Verbs) -> Callable[..., None]:
    """out[l] = x[logit_rows[l]]."""
    claim, lanes = claimer(v), v.lanes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        rows = v.i32p(step[STEP_LOGIT_ROWS])
        while True:
            row, first, stop = claim(record, step)
            if row < 0:
                break
            x = v.f32p(record[IN] + rows[row] * record[IN_STRIDE] * 4)
            out = v.f32p(record[OUT] + row * record[OUT_STRIDE] * 4)
            for k in range(first, stop, lanes):
                v.store_first(out, k, v.load_first(x, k, stop - k), stop - k)

    return kernel


def combine_kernel(v: Verbs) -> Callable[..., None]:
    """out = Σ weight · part, parts in the router's order, a fused multiply-add each."""
    claim, lanes = claimer(v), v.lanes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        width, chosen = record[WIDTH], record[CHOSEN]
        while True:
            row, first, stop = claim(record, step)
            if row < 0:
                break
            y = v.f32p(record[IN] + row * record[IN_STRIDE] * 4)
            choice = v.f32p(record[CHOICE] + row * record[CHOICE_STRIDE] * 4)
            out = v.f32p(record[OUT] + row * record[OUT_STRIDE] * 4)
            for k in range(first, stop, lanes):
                total = v.splat(0.0)
                for s in range(chosen):
                    part = v.load_first(y, s * width + k, stop - k)
                    total = v.fma(part, v.splat(choice[chosen + s]), total)
                v.store_first(out, k, total, stop - k)

    return kernel


def gate_kernel(v: Verbs) -> Callable[..., None]:
    """out = x * sigmoid(score), GROUPS scores a row, each for as many columns."""
    claim, exp, lanes = claimer(v), exponential(v), v.lanes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        size = record[WIDTH] // record[GROUPS]
        while True:
            row, first, stop = claim(record, step)
            if row < 0:
                break
            x = v.f32p(record[IN] + row * record[IN_STRIDE] * 4)
            scores = v.f32p(record[SCORES] + row * record[SCORES_STRIDE] * 4)
            out = v.f32p(record[OUT] + row * record[OUT_STRIDE] * 4)
            k = first
            while k < stop:
                group_stop = min(stop, (k // size + 1) * size)
                one, score = v.splat(1.0), v.splat(scores[k // size])
                share = v.div(one, v.add(one, exp(v.sub(v.splat(0.0), score))))
                for i in range(k, group_stop, lanes):
                    v.store_first(out, i, v.mul(v.load_first(x, i, group_stop - i), share), group_stop - i)
                k = group_stop

    return kernel
