"""Activations to bytes: what a quantised product multiplies (read `linear.py` next).

A block of 32 columns of a row becomes q = round(x / s) with s = max|x| / 127, as in llama.cpp's Q8_0 (but s stays
float32). Beside q lie, for columns 0 … 15, 16 … 31 and both: the negative sum of q, which takes zero points out of a
product exactly, and s · Σ q, which multiplies the minima. Eight rows lie together, block by block:

    q     int8    [T/8][block][8 rows][32]
    s     float32 [T/8][block][8 rows]
    sums  int32   [T/8][block][3][8 rows]       mins  float32, the same shape

The operation before a product does this for the columns that it has just written and still holds in the first-level
cache: its record's last fields, from BYTES on, say where to. `quantize` is for the products that follow none such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.layout import BLOCK
from martlet.ops.cpu.linear import OPTIONS
from martlet.ops.cpu.record import ARGS, BYTES, COUNTER, ROWS, ROWS_PER_TILE, SUMS_PER_BLOCK
from martlet.ops.cpu.simd import Verbs

__all__ = ["COLUMNS_A_UNIT", "quantize_kernel", "quantizer", "tile_claimer"]

IN, IN_STRIDE, N_COLUMNS = range(ARGS, ARGS + 3)
COLUMNS_A_UNIT = 512


def quantizer(v: Verbs) -> Callable[..., Any]:
    """(record, x, t, first, stop): columns first … stop of row t, x pointing to column 0, to the record's bytes."""
    lanes, vectors, half = v.lanes, BLOCK // v.lanes, BLOCK // v.lanes // 2

    @njit(forceinline=True, **OPTIONS)
    def one_block(x, i, q, scales, sums, mins):  # type: ignore[no-untyped-def]
        """Columns x[i : i + 32]; the outputs point to this row's place in the block."""
        largest = v.abs(v.load_f32(x, i))
        for part in range(1, vectors):
            largest = v.max(largest, v.abs(v.load_f32(x, i + part * lanes)))
        scale = v.div(v.splat(v.max_lanes(largest)), v.splat(127.0))
        inverse = v.inverse_or_zero(scale)
        total = 0
        for side in range(2):
            sum_side = v.splat_int(0)
            for part in range(half):
                column = (side * half + part) * lanes
                value = v.to_int(v.round_even(v.mul(v.load_f32(x, i + column), inverse)))
                v.store_i8(q, column, value)
                sum_side = v.add_ints(sum_side, value)
            count = v.sum_ints(sum_side)
            total += count
            sums[side * ROWS_PER_TILE] = -count
            mins[side * ROWS_PER_TILE] = v.first_lane(scale) * v.int_to_f32(count)
        sums[2 * ROWS_PER_TILE] = -total
        mins[2 * ROWS_PER_TILE] = v.first_lane(scale) * v.int_to_f32(total)
        scales[0] = v.first_lane(scale)

    @njit(forceinline=True, **OPTIONS)
    def quantize(record, x, t, first, stop):  # type: ignore[no-untyped-def]
        place = (t // ROWS_PER_TILE * record[BYTES + 4] + first // BLOCK) * ROWS_PER_TILE  # rows of this block
        row = t % ROWS_PER_TILE
        for i in range(first, stop, BLOCK):
            q, scales = v.i8p(record[BYTES] + (place + row) * BLOCK), v.f32p(record[BYTES + 1] + (place + row) * 4)
            offset = (place * SUMS_PER_BLOCK + row) * 4
            one_block(x, i, q, scales, v.i32p(record[BYTES + 2] + offset), v.f32p(record[BYTES + 3] + offset))
            place += ROWS_PER_TILE

    return quantize


def tile_claimer(v: Verbs) -> Callable[..., Any]:
    """(record, step, pieces) → the next unit as (first row, row after the last, piece); no row when there is none.

    A unit is a tile of eight rows, whose byte forms share cache lines: two threads on them would wait for each other.
    """

    @njit(forceinline=True, **OPTIONS)
    def claim(record, step, pieces):  # type: ignore[no-untyped-def]
        unit = v.atomic_add(v.i64p(record[COUNTER]), 0, 1)
        first = unit // pieces * ROWS_PER_TILE
        return first, min(first + ROWS_PER_TILE, step[record[ROWS]]), unit % pieces

    return claim


def quantize_kernel(v: Verbs) -> Callable[..., None]:
    """The kernel for an activation that its producer has not made bytes of; a unit is a tile's run of columns."""
    quantize, claim = quantizer(v), tile_claimer(v)

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        width = record[N_COLUMNS]
        pieces = (width + COLUMNS_A_UNIT - 1) // COLUMNS_A_UNIT
        while True:
            first_row, stop_row, piece = claim(record, step, pieces)
            if first_row >= stop_row:
                break
            first = piece * COLUMNS_A_UNIT
            for t in range(first_row, stop_row):
                x = v.f32p(record[IN] + t * record[IN_STRIDE] * 4)
                quantize(record, x, t, first, min(first + COLUMNS_A_UNIT, width))

    return kernel
