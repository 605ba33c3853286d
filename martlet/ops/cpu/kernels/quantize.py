"""Activations to bytes: what a quantised product multiplies (read `linear.py` next).

A block of 32 columns of a row becomes q = round(x / s) with s = max|x| / 127, as in llama.cpp's
Q8_0 (but s stays float32). Beside q lie, for columns 0 … 15, 16 … 31 and both: the negative sum of
q, which takes zero points out of a product exactly, and s · Σ q, which multiplies the minima. Eight
rows lie together, block by block:

    q     int8    [T/8][block][8 rows][32]
    s     float32 [T/8][block][8 rows]
    sums  int32   [T/8][block][3][8 rows]       mins  float32, the same shape

The operation before a product does this for the columns that it has just written and still holds in
the first-level cache: its record's last fields, from BYTES on, say where to. `quantize` is for the
products that follow none such.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.fields import BYTES, COUNTER, QUANTIZE, ROWS, ROWS_PER_TILE, SUMS_PER_BLOCK
from martlet.ops.cpu.kernels.layout import BLOCK
from martlet.ops.cpu.kernels.linear import OPTIONS
from martlet.ops.cpu.simd.verbs import Verbs

IN, IN_STRIDE, N_COLUMNS = QUANTIZE
COLUMNS_A_UNIT = 512


def quantizer(v: Verbs, rows: int) -> Callable[..., Any]:
    """(record, x, stride, t, first, stop): columns first … stop of rows t … t + rows - 1 to the
    record's bytes.

    x points to column 0 of row t, the next row is `stride` floats on. Rows that are there to fill a
    tile do no harm.
    """
    lanes, parts, store = v.lanes, BLOCK // v.lanes, v.store_rows(rows)
    load, zeros = v.tile_load(rows), v.tile_bias(rows, 0)

    @njit(forceinline=True, **OPTIONS)
    def quantize(record, x, stride, t, first, stop):  # type: ignore[no-untyped-def]
        # Rows before this block.
        place = (t // ROWS_PER_TILE * record[BYTES + 4] + first // BLOCK) * ROWS_PER_TILE
        row = t % ROWS_PER_TILE
        q, scales = v.i8p(record[BYTES]), v.f32p(record[BYTES + 1])
        sums, mins = v.i32p(record[BYTES + 2]), v.f32p(record[BYTES + 3])
        for i in range(first, stop, BLOCK):
            largest = v.tile_abs(load(x, i, stride))
            for part in range(1, parts):
                largest = v.tile_max(largest, v.tile_abs(load(x, i + part * lanes, stride)))
            scale = v.div(v.row_maxima(largest), v.splat(127.0))
            inverse = v.inverse_or_zero(scale)
            store(scales, place + row, scale)
            total, beside = v.splat_int(0), place * SUMS_PER_BLOCK + row
            for side in range(2):
                side_sums = zeros(sums, 0)
                for column in range(side * BLOCK // 2, (side + 1) * BLOCK // 2, lanes):
                    codes = v.tile_codes(load(x, i + column, stride), inverse)
                    v.tile_store_i8(codes, q, (place + row) * BLOCK + column, BLOCK)
                    side_sums = v.tile_add_ints(side_sums, codes)
                count = v.row_sums(side_sums)
                total = v.add_ints(total, count)
                store(sums, beside + side * ROWS_PER_TILE, v.times(count, -1))
                store(mins, beside + side * ROWS_PER_TILE, v.mul(scale, v.to_float(count)))
            store(sums, beside + 2 * ROWS_PER_TILE, v.times(total, -1))
            store(mins, beside + 2 * ROWS_PER_TILE, v.mul(scale, v.to_float(total)))
            place += ROWS_PER_TILE

    return quantize


def tile_quantizer(v: Verbs) -> Callable[..., Any]:
    """(record, x, stride, t, n_rows, first, stop): as `quantizer`, for a tile's existing rows."""
    together = min(ROWS_PER_TILE, v.lanes)
    one, many = quantizer(v, 1), quantizer(v, together)

    @njit(forceinline=True, **OPTIONS)
    def quantize(record, x, stride, t, n_rows, first, stop):  # type: ignore[no-untyped-def]
        if n_rows == 1:
            one(record, x, stride, t, first, stop)
        else:
            for m in range(0, n_rows, together):
                many(record, v.advance(x, m * stride), stride, t + m, first, stop)

    return quantize


def tile_claimer(v: Verbs) -> Callable[..., Any]:
    """(record, step, pieces) → the next unit as (first row, row after the last, piece), or no row.

    A unit is a tile of eight rows, whose byte forms share cache lines: two threads on them would
    wait for each other.
    """

    @njit(forceinline=True, **OPTIONS)
    def claim(record, step, pieces):  # type: ignore[no-untyped-def]
        unit = v.atomic_add(v.i64p(record[COUNTER]), 0, 1)
        first = unit // pieces * ROWS_PER_TILE
        return first, min(first + ROWS_PER_TILE, step[record[ROWS]]), unit % pieces

    return claim


def quantize_kernel(v: Verbs) -> Callable[..., None]:
    """The kernel for an activation that its producer has not made bytes of.

    A unit is a tile's run of columns.
    """
    quantize, claim = tile_quantizer(v), tile_claimer(v)

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        width = record[N_COLUMNS]
        pieces = (width + COLUMNS_A_UNIT - 1) // COLUMNS_A_UNIT
        while True:
            first_row, stop_row, piece = claim(record, step, pieces)
            if first_row >= stop_row:
                break
            first = piece * COLUMNS_A_UNIT
            x = v.f32p(record[IN] + first_row * record[IN_STRIDE] * 4)
            stop = min(first + COLUMNS_A_UNIT, width)
            quantize(record, x, record[IN_STRIDE], first_row, stop_row - first_row, first, stop)

    return kernel
