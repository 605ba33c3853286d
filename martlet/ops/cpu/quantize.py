"""Activations to bytes: what a quantised product multiplies (read `linear.py` next).

A block of 32 columns of a row becomes q = round(x / s) with s = max|x| / 127, as in llama.cpp's Q8_0 (but s stays
float32). Beside q lie, for columns 0 … 15, 16 … 31 and both: the negative sum of q, which takes zero points out of a
product exactly, and s · Σ q, which multiplies the minima. Eight rows lie together, block by block:

    q     int8    [T/8][block][8 rows][32]
    s     float32 [T/8][block][8 rows]
    sums  int32   [T/8][block][3][8 rows]       mins  float32, the same shape

Bound by the read of x; a row of 1,536 columns takes about a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import njit

from martlet.ops.cpu.layout import BLOCK
from martlet.ops.cpu.linear import OPTIONS
from martlet.ops.cpu.record import ARGS, COUNTER, ROWS, ROWS_PER_TILE, SUMS_PER_BLOCK
from martlet.ops.cpu.simd import Verbs

__all__ = ["quantize_kernel"]

IN, IN_STRIDE, N_COLUMNS, X, X_SCALES, X_SUMS, X_MINS = range(ARGS, ARGS + 7)
BLOCKS_A_CHUNK = 64


def quantize_kernel(v: Verbs) -> Callable[..., None]:
    """The kernel; a unit of work is one block of one row."""
    lanes, vectors, half = v.lanes, BLOCK // v.lanes, BLOCK // v.lanes // 2

    @njit(forceinline=True, **OPTIONS)
    def one_block(x, i, q, scales, sums, mins):  # type: ignore[no-untyped-def]
        """Columns x[i : i + 32]; the outputs point at this row's place in the block."""
        largest = v.abs(v.load_f32(x, i))
        for part in range(1, vectors):
            largest = v.max(largest, v.abs(v.load_f32(x, i + part * lanes)))
        amax = v.splat(v.max_lanes(largest))
        scale = v.div(amax, v.splat(127.0))
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
            mins[side * ROWS_PER_TILE] = v.first_lane(v.mul(scale, v.to_float(v.splat_int(count))))
        sums[2 * ROWS_PER_TILE] = -total
        mins[2 * ROWS_PER_TILE] = v.first_lane(v.mul(scale, v.to_float(v.splat_int(total))))
        scales[0] = v.first_lane(scale)

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        n_rows, n_blocks = step[record[ROWS]], record[N_COLUMNS] // BLOCK
        units, counter = n_rows * n_blocks, v.i64p(record[COUNTER])
        while True:
            first = v.atomic_add(counter, 0, BLOCKS_A_CHUNK)
            if first >= units:
                break
            for unit in range(first, min(first + BLOCKS_A_CHUNK, units)):
                t, b = unit // n_blocks, unit % n_blocks
                place = (t // ROWS_PER_TILE * n_blocks + b) * ROWS_PER_TILE  # rows of this block
                row = t % ROWS_PER_TILE
                one_block(
                    v.f32p(record[IN]),
                    t * record[IN_STRIDE] + b * BLOCK,
                    v.i8p(record[X] + (place + row) * BLOCK),
                    v.f32p(record[X_SCALES] + (place + row) * 4),
                    v.i32p(record[X_SUMS] + (place * SUMS_PER_BLOCK + row) * 4),
                    v.f32p(record[X_MINS] + (place * SUMS_PER_BLOCK + row) * 4),
                )

    return kernel
