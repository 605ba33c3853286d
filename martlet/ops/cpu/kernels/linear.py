"""The product of activations with a packed weight, out = x Wᵀ.

Where an engine's time goes (layouts: `layout.py`).

For each row n of W and each block b of 32 columns, with q the activations' bytes and s their scale
(`quantize.py`):

    out[t, n] = Σ_b  s[t,b] · scale[n,b] · Σ_k (code[n,k] - zero_point) · q[t,k]
                       (± minimum[n,b] · s[t,b] · Σ_k q[t,k])

The inner sum is exact in int32. The outer one is float32, b in order, one fused multiply-add each:
so a row of x gets the same bits alone and among others. A vector holds 16 rows of W in one register
or several, a tile up to 8 rows of x: a weight that was loaded and unpacked once is used for all of
them. For many rows some processors unpack weights to memory first (`isa.py`).

Bounds: one row reads each byte of W once, so memory's speed. Many rows: the byte product, 64
multiply-adds a cycle on AVX-512 VNNI; a block of 32 columns costs a row 8 of these, 4 float
operations and its share of the unpacking (docs/tuning.md has AVX2's).
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.fields import COUNTER, LINEAR, ROWS, ROWS_PER_TILE, SUMS_PER_BLOCK
from martlet.ops.cpu.kernels.layout import BLOCK, CHUNK_BYTES, GROUP, PANEL_BLOCKS, FloatLayout, QuantLayout
from martlet.ops.cpu.simd.verbs import Verbs

# No bounds or division checks raise, nothing is reassociated, and no wrapper for the interpreter is
# made.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
FETCHED_AHEAD = 8192  # bytes of weights, to the second-level cache

# The fields of a linear record; CODEBOOK, X_SCALES, X_SUMS and X_MINS only where quantised.
WEIGHT, N_ROWS, N_COLUMNS, GROUP_BYTES, CODEBOOK, X, X_SCALES, X_SUMS, X_MINS, X_STRIDE, *_ = LINEAR
*_, OUT, OUT_STRIDE, BIAS, UNPACKED, UNPACKED_BYTES, RESIDUAL, RESIDUAL_STRIDE = LINEAR


def scale_reader(v: Verbs, layout: QuantLayout) -> Callable[..., Any]:
    """(group, scales, supers, run) → the scales of the group's rows, float32."""
    scale_type = layout.scale

    @njit(forceinline=True, **OPTIONS)
    def scale(group, scales, supers, run):  # type: ignore[no-untyped-def]
        if scale_type == "f32":
            return v.load_f32(group, (scales >> 2) + run * GROUP)
        if scale_type == "f16":
            return v.load_f16(group, (scales >> 1))
        if scale_type == "e8m0":
            return v.mul(v.load_exponent(group, scales), v.splat(0.5))
        d = v.load_f16(group, (supers >> 1))
        if scale_type == "u8":
            return v.mul(d, v.load_u8(group, scales + run * GROUP))
        return v.mul(d, v.load_i8(group, scales + run * GROUP))

    return scale


def minimum_reader(v: Verbs, layout: QuantLayout) -> Callable[..., Any]:
    """(group, scales, supers, run) → the signed factor of the activations' sum."""
    minimum_type, runs = layout.minimum, BLOCK // layout.run

    @njit(forceinline=True, **OPTIONS)
    def minimum(group, scales, supers, run):  # type: ignore[no-untyped-def]
        if minimum_type == "f32":
            return v.load_f32(group, (scales >> 2) + (runs + run) * GROUP)
        if minimum_type == "f16":
            return v.load_f16(group, (scales >> 1) + GROUP)
        d = v.load_f16(group, (supers >> 1) + GROUP)
        m = v.load_u8(group, scales + (runs + run) * GROUP)
        return v.mul(v.mul(d, m), v.splat(-1.0))

    return minimum


def tile_product(v: Verbs, layout: QuantLayout, rows: int) -> Callable[..., Any]:
    """The function that multiplies a group's blocks with `rows` rows of x."""
    scale, minimum = scale_reader(v, layout), minimum_reader(v, layout)
    bits, product_bits = layout.bits, layout.product_bits
    zero, bias = v.tile_zero(rows), v.tile_bias(rows, v.byte_zero_point if product_bits == 8 else layout.zero_point)
    low_dots, high_dots, dots = (v.dots(bits, product_bits, runs, BLOCK) for runs in ((0,), (1,), (0, 1)))
    halves, has_minimum = layout.run == 16, layout.minimum is not None
    code_bytes, high_bytes = layout.code_bytes, layout.high_bytes
    block_bytes, super_bytes = layout.block_bytes, layout.super_bytes
    # Measured: where the processor's own fetching falls behind.
    fetches = layout.bits == 6 or (layout.bits > 4 and rows > 1)
    fetches = fetches or (super_bytes == 0 and (rows > 2 or layout.bits == 5))
    fetches = fetches and layout.used_bits is None  # what was unpacked is in the cache

    @njit(forceinline=True, **OPTIONS)
    def product(group, n_blocks, codebook, x, x_scales, x_sums, x_mins, row):  # type: ignore[no-untyped-def]
        """Row 0 of the tile is row `row` of the activations' tile."""
        acc = zero()
        panel = 0
        for first in range(0, n_blocks, PANEL_BLOCKS):
            n = min(n_blocks - first, PANEL_BLOCKS)
            for b in range(n):
                block = panel + super_bytes + b * block_bytes
                if fetches:
                    for line in range(0, block_bytes, 64):
                        v.prefetch_l2(group, block + FETCHED_AHEAD + line)
                high, scales = block + code_bytes, block + code_bytes + high_bytes
                place = (first + b) * ROWS_PER_TILE
                xi, si, sums = (place + row) * BLOCK, place + row, place * SUMS_PER_BLOCK + row
                if halves:
                    low = low_dots(bias(x_sums, sums), group, block, high, codebook, x, xi)
                    acc = v.tile_fma_int(acc, low, scale(group, scales, panel, 0), x_scales, si)
                    upper = high_dots(bias(x_sums, sums + ROWS_PER_TILE), group, block, high, codebook, x, xi)
                    acc = v.tile_fma_int(acc, upper, scale(group, scales, panel, 1), x_scales, si)
                    if has_minimum:
                        acc = v.tile_fma(acc, minimum(group, scales, panel, 0), x_mins, sums, 1)
                        acc = v.tile_fma(acc, minimum(group, scales, panel, 1), x_mins, sums + ROWS_PER_TILE, 1)
                else:
                    both = dots(bias(x_sums, sums + 2 * ROWS_PER_TILE), group, block, high, codebook, x, xi)
                    acc = v.tile_fma_int(acc, both, scale(group, scales, panel, 0), x_scales, si)
                    if has_minimum:
                        minima = minimum(group, scales, panel, 0)
                        acc = v.tile_fma(acc, minima, x_mins, sums + 2 * ROWS_PER_TILE, 1)
            panel += super_bytes + n * block_bytes
        return acc

    return product


def unpacker(v: Verbs, layout: QuantLayout) -> Callable[..., Any]:
    """The function (group, n_blocks, codebook, to) that writes a group in its `unpacked` layout."""
    scale, minimum = scale_reader(v, layout), minimum_reader(v, layout)
    codes = v.unpack(layout.bits, layout.product_bits)
    runs, has_minimum = BLOCK // layout.run, layout.minimum is not None
    block_bytes, super_bytes = layout.block_bytes, layout.super_bytes
    code_bytes, scales_at = layout.code_bytes, layout.code_bytes + layout.high_bytes
    to_bytes, to_scales = layout.unpacked.block_bytes, layout.unpacked.code_bytes

    @njit(forceinline=True, **OPTIONS)
    def unpack(group, n_blocks, codebook, to):  # type: ignore[no-untyped-def]
        for b in range(n_blocks):
            panel = b // PANEL_BLOCKS * (super_bytes + PANEL_BLOCKS * block_bytes)
            block, place = panel + super_bytes + b % PANEL_BLOCKS * block_bytes, b * to_bytes
            codes(group, block, block + code_bytes, codebook, to, place)
            for run in range(runs):
                at = ((place + to_scales) >> 2) + run * GROUP
                v.store(to, at, scale(group, block + scales_at, panel, run))
                if has_minimum:
                    v.store(to, at + runs * GROUP, minimum(group, block + scales_at, panel, run))

    return unpack


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
    """(group_bytes, n_rows, n_groups, n_threads, ticket) → the groups (first, stop) that the
    ticket-th claim gets.

    A thread's first ticket is its number. One tile of rows streams the weights once: the first
    claim is then a long run, three quarters of a fair share, and small ones level out what is left.
    Many rows come back to a chunk that stays in the second-level cache.
    """

    @njit(forceinline=True, **OPTIONS)
    def share(group_bytes, n_rows, n_groups, n_threads, ticket):  # type: ignore[no-untyped-def]
        if n_rows > ROWS_PER_TILE:
            chunk = max(1, min(CHUNK_BYTES // group_bytes, n_groups // (4 * n_threads)))
            return ticket * chunk, min((ticket + 1) * chunk, n_groups)
        long = n_groups * 3 // (4 * n_threads)
        if ticket < n_threads:
            return ticket * long, (ticket + 1) * long
        short = max(1, n_groups // (16 * n_threads))
        first = n_threads * long + (ticket - n_threads) * short
        return first, min(first + short, n_groups)

    return share


def linear_quant(v: Verbs, layout: QuantLayout) -> Callable[..., None]:
    """The kernel for one quantised layout.

    A vector holds a whole group, in as many registers as that takes: a product reads the weights
    once, front to back.
    """
    v = Verbs(v.isa, GROUP)
    few_rows, share, unpack_from = few_rows_product(v, layout), sharer(), v.isa.unpack_from
    many_rows = many_rows_product(v, layout) if unpack_from else None
    unpacked_block = layout.unpacked.block_bytes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        n_rows, n_groups = step[record[ROWS]], (record[N_ROWS] + GROUP - 1) // GROUP
        unpacks, group_bytes = unpack_from and n_rows >= unpack_from, record[GROUP_BYTES]
        if unpacks:
            group_bytes = record[N_COLUMNS] // BLOCK * unpacked_block
        ticket = thread
        while True:
            first, stop = share(group_bytes, n_rows, n_groups, n_threads, ticket)
            if first >= n_groups:
                break
            ticket = n_threads + v.atomic_add(v.i64p(record[COUNTER]), 0, 1)
            if unpacks:
                unpacked = record[UNPACKED] + thread * record[UNPACKED_BYTES]
                many_rows(record, record[WEIGHT], 0, 0, n_rows, first, stop, unpacked)
            else:
                for t in range(0, n_rows, ROWS_PER_TILE):
                    for g in range(first, stop):
                        few_rows(record, record[WEIGHT], t, t, min(n_rows - t, ROWS_PER_TILE), g)

    return kernel


Writer = Callable[[Verbs, int], Callable[..., Any]]


def few_rows_product(v: Verbs, layout: QuantLayout, writer: Writer = tile_writer) -> Callable[..., Any]:
    """The function (record, weight, t, place, n_rows, g): rows t … t + n_rows of the activations,
    one tile at most, times group g of the weight. The writer gets `place` for row t.
    """
    tile_rows, locate = v.rows, tile_locator(v)
    one, two, three, four = (tile_product(v, layout, rows) for rows in (1, 2, 3, 4))
    write_one, write_two, write_three, write_four = (writer(v, rows) for rows in (1, 2, 3, 4))
    eight, write_eight = tile_product(v, layout, tile_rows), writer(v, tile_rows)

    @njit(forceinline=True, **OPTIONS)
    def multiply(record, weight, t, place, n_rows, g):  # type: ignore[no-untyped-def]
        x, scales, sums, mins = locate(record, t)
        group, codebook = v.i8p(weight + g * record[GROUP_BYTES]), v.i8p(record[CODEBOOK])
        n_blocks, n, row = record[N_COLUMNS] // BLOCK, g * GROUP, 0
        while row < n_rows:
            left = n_rows - row
            if left == 1:
                acc1 = one(group, n_blocks, codebook, x, scales, sums, mins, row)
                write_one(record, acc1, place + row, left, n)
            elif left == 2:
                acc2 = two(group, n_blocks, codebook, x, scales, sums, mins, row)
                write_two(record, acc2, place + row, left, n)
            elif left == 3:
                acc3 = three(group, n_blocks, codebook, x, scales, sums, mins, row)
                write_three(record, acc3, place + row, left, n)
            elif left < ROWS_PER_TILE or tile_rows == 4:
                left = 4
                acc4 = four(group, n_blocks, codebook, x, scales, sums, mins, row)
                write_four(record, acc4, place + row, left, n)
            else:
                acc8 = eight(group, n_blocks, codebook, x, scales, sums, mins, row)
                write_eight(record, acc8, place + row, left, n)
            row += left

    return multiply


def many_rows_product(v: Verbs, layout: QuantLayout, writer: Writer = tile_writer) -> Callable[..., Any]:
    """The function (record, weight, t, place, n_rows, first, stop, unpacked): n_rows rows from t on
    times groups first … stop of the weight, which it unpacks to the address `unpacked` once.
    """
    tile_rows, block_bytes = v.rows, layout.unpacked.block_bytes
    product, write = tile_product(v, layout.unpacked, tile_rows), writer(v, tile_rows)
    locate, unpack = tile_locator(v), unpacker(v, layout)

    @njit(forceinline=True, **OPTIONS)
    def multiply(record, weight, t, place, n_rows, first, stop, unpacked):  # type: ignore[no-untyped-def]
        codebook, n_blocks = v.i8p(record[CODEBOOK]), record[N_COLUMNS] // BLOCK
        group_bytes = n_blocks * block_bytes
        for g in range(first, stop):
            group = v.i8p(weight + g * record[GROUP_BYTES])
            unpack(group, n_blocks, codebook, v.i8p(unpacked + (g - first) * group_bytes))
        for row in range(0, n_rows, tile_rows):
            x, scales, sums, mins = locate(record, t + row)
            for g in range(first, stop):
                group = v.i8p(unpacked + (g - first) * group_bytes)
                acc = product(group, n_blocks, codebook, x, scales, sums, mins, (t + row) % ROWS_PER_TILE)
                write(record, acc, place + row, min(n_rows - row, tile_rows), g * GROUP)

    return multiply


def tile_locator(v: Verbs) -> Callable[..., Any]:
    """(record, t) → the tile of row t's activations: bytes, scales, sums and minima."""

    @njit(forceinline=True, **OPTIONS)
    def locate(record, t):  # type: ignore[no-untyped-def]
        first = t // ROWS_PER_TILE * (record[N_COLUMNS] // BLOCK) * ROWS_PER_TILE
        x, scales = v.i8p(record[X] + first * BLOCK), v.f32p(record[X_SCALES] + first * 4)
        first *= 4 * SUMS_PER_BLOCK
        return x, scales, v.i32p(record[X_SUMS] + first), v.f32p(record[X_MINS] + first)

    return locate


def linear_float(v: Verbs, layout: FloatLayout) -> Callable[..., None]:
    """The kernel for float weights: x is float32, columns in order, a fused multiply-add each."""
    multiply, share, tile_rows = few_rows_float(v, layout), sharer(), v.rows

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        n_rows, n_groups = step[record[ROWS]], (record[N_ROWS] + GROUP - 1) // GROUP
        ticket = thread
        while True:
            first, stop = share(record[GROUP_BYTES], n_rows, n_groups, n_threads, ticket)
            if first >= n_groups:
                break
            ticket = n_threads + v.atomic_add(v.i64p(record[COUNTER]), 0, 1)
            for t in range(0, n_rows, tile_rows):
                for g in range(first, stop):
                    multiply(record, record[WEIGHT], t, t, min(n_rows - t, tile_rows), g)

    return kernel


def few_rows_float(v: Verbs, layout: FloatLayout, writer: Writer = tile_writer) -> Callable[..., Any]:
    """As `few_rows_product`, for float weights."""
    load = {"f32": v.load_f32, "f16": v.load_f16, "bf16": v.load_bf16}[layout.name]
    write_one, write_few, write_many = (writer(v, rows) for rows in (1, 4, v.rows))
    zeros = {rows: v.tile_zero(rows) for rows in (1, 4, v.rows)}
    lanes, tile_rows = v.lanes, v.rows

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

    @njit(forceinline=True, **OPTIONS)
    def multiply(record, weight, t, place, n_rows, g):  # type: ignore[no-untyped-def]
        group, n_columns, x_stride = v.i8p(weight + g * record[GROUP_BYTES]), record[N_COLUMNS], record[X_STRIDE]
        for row in range(0, n_rows, tile_rows):
            x, left = v.f32p(record[X] + (t + row) * x_stride * 4), min(n_rows - row, tile_rows)
            for lane in range(0, GROUP, lanes):
                n = g * GROUP + lane
                if left == 1:
                    acc1 = one(group, lane, n_columns, x, x_stride)
                    write_one(record, acc1, place + row, left, n)
                elif left <= 4:
                    acc4 = few(group, lane, n_columns, x, x_stride)
                    write_few(record, acc4, place + row, left, n)
                else:
                    acc8 = many(group, lane, n_columns, x, x_stride)
                    write_many(record, acc8, place + row, left, n)

    return multiply
