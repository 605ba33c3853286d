"""The product of activations with a packed weight, out = x Wᵀ: where an engine's time goes (layouts: `layout.py`).

For each row n of W and each block b of 32 columns, with q the activations' bytes and s their scale (`quantize.py`):

    out[t, n] = Σ_b  s[t,b] · scale[n,b] · Σ_k (code[n,k] - zero_point) · q[t,k]   (± minimum[n,b] · s[t,b] · Σ_k q[t,k])

The inner sum is exact in int32. The outer one is float32, b in order, one fused multiply-add each: so a row of x gets
the same bits alone and among others. One register holds 16 rows of W (or half of them), a tile up to 8 rows of x: a
weight that was loaded and unpacked once is used for all of them.

Bounds: one row reads each byte of W once, so memory's speed. Many rows: the byte product, 64 multiply-adds a cycle on
AVX-512 VNNI; a block of 32 columns costs a row 8 of these, 4 float operations and its share of the unpacking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.layout import BLOCK, GROUP, FloatLayout, QuantLayout
from martlet.ops.cpu.record import ARGS, COUNTER, ROWS, ROWS_PER_TILE, SUMS_PER_BLOCK
from martlet.ops.cpu.simd import Verbs

__all__ = ["OPTIONS", "linear_float", "linear_quant"]

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
L2_BYTES = 256 * 1024  # weights of a chunk that many rows come back to: a quarter of a common second-level cache
STREAM_BYTES = 24 * 1024  # weights of a chunk for one row: long enough to stream, short enough to share evenly
TILE_BYTES = ROWS_PER_TILE * BLOCK

# The fields of a linear record. GROUP_BYTES and the offsets in a group are the layout's; HIGH … SUPERS only where quantised.
WEIGHT, N_ROWS, N_COLUMNS, GROUP_BYTES, HIGH, SCALES, SUPERS, CODEBOOK = range(ARGS, ARGS + 8)
X, X_SCALES, X_SUMS, X_MINS, X_STRIDE = range(ARGS + 8, ARGS + 13)
OUT, OUT_STRIDE, BIAS, RESIDUAL, RESIDUAL_STRIDE = range(ARGS + 13, ARGS + 18)


def code_reader(v: Verbs, layout: QuantLayout) -> Callable[..., Any]:
    """(group, line, high line, codebook, upper, j) → the bytes of columns 16 * upper + 4j … of this part's rows."""
    bits, coded = layout.bits, layout.codebook is not None

    @njit(forceinline=True, **OPTIONS)
    def code(group, line, high, codebook, upper, j):  # type: ignore[no-untyped-def]
        if bits == 8:
            return v.load_bytes(group, line + 64 * (4 * upper + j))
        word = v.and_mask(v.shift_right(v.as_ints(v.load_bytes(group, line + 64 * j)), 4 * upper), 0x0F0F0F0F)
        if bits == 5:  # bit i of byte u of the high word belongs to column 4i + u, i = 4 * upper + j
            extra = v.as_ints(v.load_bytes(group, high))
            if upper == 0:
                extra = v.shift_left(extra, 4 - j)
            else:
                extra = v.shift_right(extra, j)
            word = v.or_ints(word, v.and_mask(extra, 0x10101010))
        if bits == 6:  # bits 2j and 2j + 1 of byte u of word `upper`
            extra = v.as_ints(v.load_bytes(group, high + 64 * upper))
            if j < 2:
                extra = v.shift_left(extra, 4 - 2 * j)
            else:
                extra = v.shift_right(extra, 2 * j - 4)
            word = v.or_ints(word, v.and_mask(extra, 0x30303030))
        if coded:
            return v.lookup(v.as_bytes(word), codebook)
        return v.as_bytes(word)

    return code


def scale_reader(v: Verbs, layout: QuantLayout) -> Callable[..., Any]:
    """(group, scales, supers, run, lane) → the scales of this part's rows, float32."""
    kind, minimum = layout.scale, layout.minimum == "u8"
    super_bytes = GROUP * (4 if minimum else 2)

    @njit(forceinline=True, **OPTIONS)
    def scale(group, scales, supers, block, run, lane):  # type: ignore[no-untyped-def]
        if kind == "f16":
            return v.load_f16(group, (scales >> 1) + lane)
        if kind == "e8m0":
            return v.mul(v.load_exponent(group, scales + lane), v.splat(0.5))
        d = v.load_f16(group, ((supers + (block >> 3) * super_bytes) >> 1) + lane)
        if kind == "u8":
            return v.mul(d, v.load_u8(group, scales + run * GROUP + lane))
        return v.mul(d, v.load_i8(group, scales + run * GROUP + lane))

    return scale


def minimum_reader(v: Verbs, layout: QuantLayout) -> Callable[..., Any]:
    """(group, scales, supers, run, lane) → what multiplies the activations' sum, its sign included."""
    kind, runs = layout.minimum, BLOCK // layout.run

    @njit(forceinline=True, **OPTIONS)
    def minimum(group, scales, supers, block, run, lane):  # type: ignore[no-untyped-def]
        if kind == "f16":
            return v.load_f16(group, (scales >> 1) + GROUP + lane)
        d = v.load_f16(group, ((supers + (block >> 3) * GROUP * 4) >> 1) + GROUP + lane)
        m = v.load_u8(group, scales + (runs + run) * GROUP + lane)
        return v.mul(v.mul(d, m), v.splat(-1.0))

    return minimum


def tile_product(v: Verbs, layout: QuantLayout, rows: int) -> Callable[..., Any]:
    """The function that multiplies part of one group with `rows` rows of x: all blocks, one tile of sums."""
    code, scale, minimum = code_reader(v, layout), scale_reader(v, layout), minimum_reader(v, layout)
    bits = 8 if layout.codebook is not None else layout.bits
    zero_point = v.byte_zero_point if bits == 8 else layout.zero_point
    zero, bias, dot16 = v.tile_zero(rows), v.tile_bias(rows, zero_point), v.dot16(bits, BLOCK)
    halves, has_minimum, scale_bytes = layout.run == 16, layout.minimum is not None, layout.scale_bytes
    code_bytes, high_bytes = (512 if layout.bits == 8 else 256), 64 * layout.high_lines
    tile_sums = ROWS_PER_TILE * SUMS_PER_BLOCK

    @njit(forceinline=True, **OPTIONS)
    def half(dots, group, line, high, codebook, upper, x, xi):  # type: ignore[no-untyped-def]
        w0 = code(group, line, high, codebook, upper, 0)
        w1 = code(group, line, high, codebook, upper, 1)
        w2 = code(group, line, high, codebook, upper, 2)
        w3 = code(group, line, high, codebook, upper, 3)
        return dot16(dots, w0, w1, w2, w3, x, xi + 16 * upper)

    @njit(forceinline=True, **OPTIONS)
    def product(group, lane, regions, n_blocks, codebook, x, x_scales, x_sums, x_mins, row):  # type: ignore[no-untyped-def]
        """`lane` is the first row of this part; row 0 of the tile is row `row` of the activations' tile."""
        acc = zero()
        high_start, scales_start, supers = regions
        for b in range(n_blocks):
            line, high = b * code_bytes + 4 * lane, high_start + b * high_bytes + 4 * lane
            scales = scales_start + b * scale_bytes
            xi, si, sums = b * TILE_BYTES + row * BLOCK, b * ROWS_PER_TILE + row, b * tile_sums + row
            if halves:
                low = half(bias(x_sums, sums), group, line, high, codebook, 0, x, xi)
                acc = v.tile_fma_int(acc, low, scale(group, scales, supers, b, 0, lane), x_scales, si)
                upper = half(bias(x_sums, sums + ROWS_PER_TILE), group, line, high, codebook, 1, x, xi)
                acc = v.tile_fma_int(acc, upper, scale(group, scales, supers, b, 1, lane), x_scales, si)
                if has_minimum:
                    acc = v.tile_fma(acc, minimum(group, scales, supers, b, 0, lane), x_mins, sums, 1)
                    acc = v.tile_fma(acc, minimum(group, scales, supers, b, 1, lane), x_mins, sums + ROWS_PER_TILE, 1)
            else:
                dots = half(bias(x_sums, sums + 2 * ROWS_PER_TILE), group, line, high, codebook, 0, x, xi)
                dots = half(dots, group, line, high, codebook, 1, x, xi)
                acc = v.tile_fma_int(acc, dots, scale(group, scales, supers, b, 0, lane), x_scales, si)
                if has_minimum:
                    minima = minimum(group, scales, supers, b, 0, lane)
                    acc = v.tile_fma(acc, minima, x_mins, sums + 2 * ROWS_PER_TILE, 1)
        return acc

    return product


def tile_writer(v: Verbs) -> Callable[..., Any]:
    """The function that adds bias and residual to a tile of sums and stores its valid part."""

    @njit(forceinline=True, **OPTIONS)
    def write(record, acc, t, n_rows, n):  # type: ignore[no-untyped-def]
        """Rows t … t + n_rows of out, columns n … n + lanes."""
        out, stride = v.f32p(record[OUT]), record[OUT_STRIDE]
        valid = record[N_ROWS] - n
        for m in range(n_rows):
            y = v.tile_get(acc, m)
            if record[BIAS] != 0:
                y = v.add(y, v.load_first(v.f32p(record[BIAS]), n, valid))
            if record[RESIDUAL] != 0:
                residual = v.f32p(record[RESIDUAL])
                y = v.add(y, v.load_first(residual, (t + m) * record[RESIDUAL_STRIDE] + n, valid))
            v.store_first(out, (t + m) * stride + n, y, valid)

    return write


def share(v: Verbs) -> Callable[..., Any]:
    """(record, n_rows, n_threads) → groups in a chunk: see L2_BYTES and STREAM_BYTES."""

    @njit(forceinline=True, **OPTIONS)
    def chunk(record, n_rows, n_groups, n_threads):  # type: ignore[no-untyped-def]
        size = record[GROUP_BYTES]
        wanted = (STREAM_BYTES if n_rows == 1 else L2_BYTES) // size
        fair = (n_groups + 4 * n_threads - 1) // (4 * n_threads)
        return max(1, min(wanted, fair))

    return chunk


def linear_quant(v: Verbs, layout: QuantLayout) -> Callable[..., None]:
    """The kernel for one quantised layout."""
    one, few = tile_product(v, layout, 1), tile_product(v, layout, 4)
    many = tile_product(v, layout, v.rows) if v.rows > 4 else few
    write, chunk_of, lanes, tile_rows = tile_writer(v), share(v), v.lanes, v.rows

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        weight, codebook = record[WEIGHT], v.i8p(record[CODEBOOK])
        n_rows, n_blocks = step[record[ROWS]], record[N_COLUMNS] // BLOCK
        n_groups = (record[N_ROWS] + GROUP - 1) // GROUP
        regions = (record[HIGH], record[SCALES], record[SUPERS])
        chunk = chunk_of(record, n_rows, n_groups, n_threads)
        counter = v.i64p(record[COUNTER])
        tile_bytes = n_blocks * TILE_BYTES
        while True:
            first = v.atomic_add(counter, 0, chunk)
            if first >= n_groups:
                break
            for t in range(0, n_rows, tile_rows):
                tile, row = t // ROWS_PER_TILE, t % ROWS_PER_TILE
                xt = v.i8p(record[X] + tile * tile_bytes)
                scales = v.f32p(record[X_SCALES] + tile * n_blocks * ROWS_PER_TILE * 4)
                sums = v.i32p(record[X_SUMS] + tile * n_blocks * ROWS_PER_TILE * SUMS_PER_BLOCK * 4)
                mins = v.f32p(record[X_MINS] + tile * n_blocks * ROWS_PER_TILE * SUMS_PER_BLOCK * 4)
                left = min(n_rows - t, tile_rows)
                for g in range(first, min(first + chunk, n_groups)):
                    group = v.i8p(weight + g * record[GROUP_BYTES])
                    for lane in range(0, GROUP, lanes):
                        n = g * GROUP + lane
                        if left == 1:
                            acc1 = one(group, lane, regions, n_blocks, codebook, xt, scales, sums, mins, row)
                            write(record, acc1, t, left, n)
                        elif left <= 4:
                            acc4 = few(group, lane, regions, n_blocks, codebook, xt, scales, sums, mins, row)
                            write(record, acc4, t, left, n)
                        else:
                            acc8 = many(group, lane, regions, n_blocks, codebook, xt, scales, sums, mins, row)
                            write(record, acc8, t, left, n)

    return kernel


def linear_float(v: Verbs, layout: FloatLayout) -> Callable[..., None]:
    """The kernel for float weights: x stays float32, columns in order, one fused multiply-add each."""
    load = {"f32": v.load_f32, "f16": v.load_f16, "bf16": v.load_bf16}[layout.name]
    write, chunk_of, lanes, tile_rows = tile_writer(v), share(v), v.lanes, v.rows
    zeros = {rows: v.tile_zero(rows) for rows in (1, 4, v.rows)}

    def product_of(rows: int) -> Callable[..., Any]:
        zero = zeros[rows]

        @njit(forceinline=True, **OPTIONS)
        def product(group, lane, n_columns, x, stride):  # type: ignore[no-untyped-def]
            acc = zero()
            for k in range(n_columns):
                acc = v.tile_fma(acc, load(group, k * GROUP + lane), x, k, stride)
            return acc

        return product

    one, few = product_of(1), product_of(4)
    many = product_of(v.rows) if v.rows > 4 else few

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        n_rows, n_columns = step[record[ROWS]], record[N_COLUMNS]
        n_groups = (record[N_ROWS] + GROUP - 1) // GROUP
        chunk = chunk_of(record, n_rows, n_groups, n_threads)
        counter, x_stride = v.i64p(record[COUNTER]), record[X_STRIDE]
        while True:
            first = v.atomic_add(counter, 0, chunk)
            if first >= n_groups:
                break
            for t in range(0, n_rows, tile_rows):
                x = v.f32p(record[X] + t * x_stride * 4)
                left = min(n_rows - t, tile_rows)
                for g in range(first, min(first + chunk, n_groups)):
                    group = v.i8p(record[WEIGHT] + g * record[GROUP_BYTES])
                    for lane in range(0, GROUP, lanes):
                        n = g * GROUP + lane
                        if left == 1:
                            write(record, one(group, lane, n_columns, x, x_stride), t, left, n)
                        elif left <= 4:
                            write(record, few(group, lane, n_columns, x, x_stride), t, left, n)
                        else:
                            write(record, many(group, lane, n_columns, x, x_stride), t, left, n)

    return kernel
