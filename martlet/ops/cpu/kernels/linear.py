"""The product of activations with a packed weight, out = x Wᵀ.

Where an engine's time goes (layouts: `layout.py`).

For each row n of W and each block b of 32 columns, with q the activations' bytes and s their scale
(`quantize.py`):

    out[t, n] = Σ_b  s[t,b] · scale[n,b] · Σ_k (code[n,k] - zero_point) · q[t,k]
                       (± minimum[n,b] · s[t,b] · Σ_k q[t,k])

The inner sum is exact in int32. The outer one is float32, b in order, one fused multiply-add each:
so a row of x gets the same bits alone and among others. One register holds 16 rows of W (or half of
them), a tile up to 8 rows of x: a weight that was loaded and unpacked once is used for all of them.

Bounds: one row reads each byte of W once, so memory's speed. Many rows: the byte product, 64
multiply-adds a cycle on AVX-512 VNNI; a block of 32 columns costs a row 8 of these, 4 float
operations and its share of the unpacking.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.fields import COUNTER, LINEAR, ROWS, ROWS_PER_TILE, SUMS_PER_BLOCK
from martlet.ops.cpu.kernels.layout import BLOCK, GROUP, PANEL_BLOCKS, FloatLayout, QuantLayout
from martlet.ops.cpu.simd.verbs import Verbs

# No bounds or division checks raise, nothing is reassociated, and no wrapper for the interpreter is
# made.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
# Weights of a chunk that many rows come back to: a quarter of a common second-level cache.
L2_BYTES = 256 * 1024
FETCHED_AHEAD = 8192  # bytes of weights, to the second-level cache
TILE_BYTES = ROWS_PER_TILE * BLOCK

# The fields of a linear record; CODEBOOK, X_SCALES, X_SUMS and X_MINS only where quantised.
WEIGHT, N_ROWS, N_COLUMNS, GROUP_BYTES, CODEBOOK, *_ = LINEAR
*_, X, X_SCALES, X_SUMS, X_MINS, X_STRIDE, OUT, OUT_STRIDE, BIAS, RESIDUAL, RESIDUAL_STRIDE = LINEAR


def code_reader(v: Verbs, layout: QuantLayout) -> Callable[..., Any]:
    """(group, line, high line, codebook, upper, j) → its bytes of columns 16 * upper + 4j …."""
    bits, coded = layout.bits, layout.codebook is not None

    @njit(forceinline=True, **OPTIONS)
    def code(group, line, high, codebook, upper, j):  # type: ignore[no-untyped-def]
        if bits == 8:
            return v.load_bytes(group, line + 64 * (4 * upper + j))
        word = v.and_mask(v.shift_right(v.as_ints(v.load_bytes(group, line + 64 * j)), 4 * upper), 0x0F0F0F0F)
        if bits == 5:  # bit i of byte u of the high word: column 4i + u, i = 4 * upper + j
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
    scale_type = layout.scale

    @njit(forceinline=True, **OPTIONS)
    def scale(group, scales, supers, run, lane):  # type: ignore[no-untyped-def]
        if scale_type == "f16":
            return v.load_f16(group, (scales >> 1) + lane)
        if scale_type == "e8m0":
            return v.mul(v.load_exponent(group, scales + lane), v.splat(0.5))
        d = v.load_f16(group, (supers >> 1) + lane)
        if scale_type == "u8":
            return v.mul(d, v.load_u8(group, scales + run * GROUP + lane))
        return v.mul(d, v.load_i8(group, scales + run * GROUP + lane))

    return scale


def minimum_reader(v: Verbs, layout: QuantLayout) -> Callable[..., Any]:
    """(group, scales, supers, run, lane) → the signed factor of the activations' sum."""
    minimum_type, runs = layout.minimum, BLOCK // layout.run

    @njit(forceinline=True, **OPTIONS)
    def minimum(group, scales, supers, run, lane):  # type: ignore[no-untyped-def]
        if minimum_type == "f16":
            return v.load_f16(group, (scales >> 1) + GROUP + lane)
        d = v.load_f16(group, (supers >> 1) + GROUP + lane)
        m = v.load_u8(group, scales + (runs + run) * GROUP + lane)
        return v.mul(v.mul(d, m), v.splat(-1.0))

    return minimum


def tile_product(v: Verbs, layout: QuantLayout, rows: int) -> Callable[..., Any]:
    """The function that multiplies part of one group with `rows` rows of x.

    All blocks, one tile of sums.
    """
    code, scale, minimum = code_reader(v, layout), scale_reader(v, layout), minimum_reader(v, layout)
    bits = 8 if layout.codebook is not None else layout.bits
    zero_point = v.byte_zero_point if bits == 8 else layout.zero_point
    zero, bias, dot16 = v.tile_zero(rows), v.tile_bias(rows, zero_point), v.dot16(bits, BLOCK)
    halves, has_minimum = layout.run == 16, layout.minimum is not None
    code_bytes, high_bytes = layout.code_bytes, layout.high_bytes
    block_bytes, super_bytes = layout.block_bytes, layout.super_bytes
    # Measured: where the processor's own fetching falls behind.
    fetches = layout.bits == 6 or (rows == 4 and super_bytes == 0) or (layout.bits > 4 and rows > 1)

    @njit(forceinline=True, **OPTIONS)
    def half(dots, group, line, high, codebook, upper, x, xi):  # type: ignore[no-untyped-def]
        w0 = code(group, line, high, codebook, upper, 0)
        w1 = code(group, line, high, codebook, upper, 1)
        w2 = code(group, line, high, codebook, upper, 2)
        w3 = code(group, line, high, codebook, upper, 3)
        return dot16(dots, w0, w1, w2, w3, x, xi + 16 * upper)

    @njit(forceinline=True, **OPTIONS)
    def product(group, lane, n_blocks, codebook, x, x_scales, x_sums, x_mins, row):  # type: ignore[no-untyped-def]
        """`lane` is the first row of this part.

        Row 0 of the tile is row `row` of the activations' tile.
        """
        acc = zero()
        panel = 0
        for first in range(0, n_blocks, PANEL_BLOCKS):
            n = min(n_blocks - first, PANEL_BLOCKS)
            for b in range(n):
                block = panel + super_bytes + b * block_bytes
                if fetches and lane == 0:
                    for line in range(0, block_bytes, 64):
                        v.prefetch_l2(group, block + FETCHED_AHEAD + line)
                line, high, scales = block + 4 * lane, block + code_bytes + 4 * lane, block + code_bytes + high_bytes
                place = (first + b) * ROWS_PER_TILE
                xi, si, sums = (place + row) * BLOCK, place + row, place * SUMS_PER_BLOCK + row
                if halves:
                    low = half(bias(x_sums, sums), group, line, high, codebook, 0, x, xi)
                    acc = v.tile_fma_int(acc, low, scale(group, scales, panel, 0, lane), x_scales, si)
                    upper = half(bias(x_sums, sums + ROWS_PER_TILE), group, line, high, codebook, 1, x, xi)
                    acc = v.tile_fma_int(acc, upper, scale(group, scales, panel, 1, lane), x_scales, si)
                    if has_minimum:
                        acc = v.tile_fma(acc, minimum(group, scales, panel, 0, lane), x_mins, sums, 1)
                        acc = v.tile_fma(acc, minimum(group, scales, panel, 1, lane), x_mins, sums + ROWS_PER_TILE, 1)
                else:
                    dots = half(bias(x_sums, sums + 2 * ROWS_PER_TILE), group, line, high, codebook, 0, x, xi)
                    dots = half(dots, group, line, high, codebook, 1, x, xi)
                    acc = v.tile_fma_int(acc, dots, scale(group, scales, panel, 0, lane), x_scales, si)
                    if has_minimum:
                        minima = minimum(group, scales, panel, 0, lane)
                        acc = v.tile_fma(acc, minima, x_mins, sums + 2 * ROWS_PER_TILE, 1)
            panel += super_bytes + n * block_bytes
        return acc

    return product


def tile_writer(v: Verbs, rows: int) -> Callable[..., Any]:
    """The function that adds bias and residual to a tile of sums and stores its valid part."""
    load_tile, lanes = v.tile_load(rows), v.lanes

    @njit(forceinline=True, **OPTIONS)
    def write(record, acc, t, n_rows, n):  # type: ignore[no-untyped-def]
        """Rows t … t + n_rows of out, columns n … n + lanes."""
        out, stride = v.f32p(record[OUT]), record[OUT_STRIDE]
        residual, residual_stride = v.f32p(record[RESIDUAL]), record[RESIDUAL_STRIDE]
        valid = record[N_ROWS] - n
        if n_rows == rows and valid >= lanes:
            if record[BIAS] != 0:
                acc = v.tile_add(acc, v.load_f32(v.f32p(record[BIAS]), n))
            if record[RESIDUAL] != 0:
                acc = v.tile_add(acc, load_tile(residual, t * residual_stride + n, residual_stride))
            v.tile_store(acc, out, t * stride + n, stride)
        else:
            for m in range(n_rows):
                y = v.tile_get(acc, m)
                if record[BIAS] != 0:
                    y = v.add(y, v.load_first(v.f32p(record[BIAS]), n, valid))
                if record[RESIDUAL] != 0:
                    y = v.add(y, v.load_first(residual, (t + m) * residual_stride + n, valid))
                v.store_first(out, (t + m) * stride + n, y, valid)

    return write


def sharer() -> Callable[..., Any]:
    """(record, n_rows, n_groups, n_threads, ticket) → the groups (first, stop) that the ticket-th
    claim gets.

    A thread's first ticket is its number. One tile of rows streams the weights once: the first
    claim is then a long run, three quarters of a fair share, and small ones level out what is left.
    Many rows come back to a chunk that stays in the second-level cache.
    """

    @njit(forceinline=True, **OPTIONS)
    def share(record, n_rows, n_groups, n_threads, ticket):  # type: ignore[no-untyped-def]
        if n_rows > ROWS_PER_TILE:
            chunk = max(1, min(L2_BYTES // record[GROUP_BYTES], n_groups // (4 * n_threads)))
            return ticket * chunk, min((ticket + 1) * chunk, n_groups)
        long = n_groups * 3 // (4 * n_threads)
        if ticket < n_threads:
            return ticket * long, (ticket + 1) * long
        short = max(1, n_groups // (16 * n_threads))
        first = n_threads * long + (ticket - n_threads) * short
        return first, min(first + short, n_groups)

    return share


def linear_quant(v: Verbs, layout: QuantLayout) -> Callable[..., None]:
    """The kernel for one quantised layout."""
    one, two, three, four = (tile_product(v, layout, rows) for rows in (1, 2, 3, 4))
    many = tile_product(v, layout, v.rows) if v.rows > 4 else four
    write_one, write_two, write_three, write_four, write_many = (tile_writer(v, rows) for rows in (1, 2, 3, 4, v.rows))
    share, lanes, tile_rows = sharer(), v.lanes, v.rows

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        weight, codebook = record[WEIGHT], v.i8p(record[CODEBOOK])
        n_rows, n_blocks = step[record[ROWS]], record[N_COLUMNS] // BLOCK
        n_groups = (record[N_ROWS] + GROUP - 1) // GROUP
        counter = v.i64p(record[COUNTER])
        tile_bytes = n_blocks * TILE_BYTES
        ticket = thread
        while True:
            first, stop = share(record, n_rows, n_groups, n_threads, ticket)
            if first >= n_groups:
                break
            ticket = n_threads + v.atomic_add(counter, 0, 1)
            for start in range(0, n_rows, tile_rows):
                tile, end = start // ROWS_PER_TILE, min(start + tile_rows, n_rows)
                xt = v.i8p(record[X] + tile * tile_bytes)
                scales = v.f32p(record[X_SCALES] + tile * n_blocks * ROWS_PER_TILE * 4)
                sums = v.i32p(record[X_SUMS] + tile * n_blocks * ROWS_PER_TILE * SUMS_PER_BLOCK * 4)
                mins = v.f32p(record[X_MINS] + tile * n_blocks * ROWS_PER_TILE * SUMS_PER_BLOCK * 4)
                for g in range(first, stop):
                    group = v.i8p(weight + g * record[GROUP_BYTES])
                    for lane in range(0, GROUP, lanes):
                        n, t = g * GROUP + lane, start
                        while t < end:
                            row, left = t % ROWS_PER_TILE, end - t
                            if left == 1:
                                acc1 = one(group, lane, n_blocks, codebook, xt, scales, sums, mins, row)
                                write_one(record, acc1, t, left, n)
                            elif left == 2:
                                acc2 = two(group, lane, n_blocks, codebook, xt, scales, sums, mins, row)
                                write_two(record, acc2, t, left, n)
                            elif left == 3:
                                acc3 = three(group, lane, n_blocks, codebook, xt, scales, sums, mins, row)
                                write_three(record, acc3, t, left, n)
                            elif left < ROWS_PER_TILE:
                                acc4 = four(group, lane, n_blocks, codebook, xt, scales, sums, mins, row)
                                write_four(record, acc4, t, 4, n)
                                left = 4
                            else:
                                acc8 = many(group, lane, n_blocks, codebook, xt, scales, sums, mins, row)
                                write_many(record, acc8, t, left, n)
                            t += left

    return kernel


def linear_float(v: Verbs, layout: FloatLayout) -> Callable[..., None]:
    """The kernel for float weights: x is float32, columns in order, a fused multiply-add each."""
    load = {"f32": v.load_f32, "f16": v.load_f16, "bf16": v.load_bf16}[layout.name]
    write_one, write_few, write_many = (tile_writer(v, rows) for rows in (1, 4, v.rows))
    share, lanes, tile_rows = sharer(), v.lanes, v.rows
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
        counter, x_stride = v.i64p(record[COUNTER]), record[X_STRIDE]
        ticket = thread
        while True:
            first, stop = share(record, n_rows, n_groups, n_threads, ticket)
            if first >= n_groups:
                break
            ticket = n_threads + v.atomic_add(counter, 0, 1)
            for t in range(0, n_rows, tile_rows):
                x = v.f32p(record[X] + t * x_stride * 4)
                left = min(n_rows - t, tile_rows)
                for g in range(first, stop):
                    group = v.i8p(record[WEIGHT] + g * record[GROUP_BYTES])
                    for lane in range(0, GROUP, lanes):
                        n = g * GROUP + lane
                        if left == 1:
                            write_one(record, one(group, lane, n_columns, x, x_stride), t, left, n)
                        elif left <= 4:
                            write_few(record, few(group, lane, n_columns, x, x_stride), t, left, n)
                        else:
                            write_many(record, many(group, lane, n_columns, x, x_stride), t, left, n)

    return kernel
