"""Paged attention with an online softmax (FlashAttention, arXiv:2205.14135; paged: arXiv:2309.06180), and cache writes.

A page holds 32 positions of one layer, for each KV head its keys transposed, so that a register holds the same
dimension of many positions and a score needs no horizontal sum, and its values in rows:

    keys    [page][KV head][D][32]          values  [page][KV head][32][D, filled to 16]

A unit of work is a tile of up to 8 (token, query head) pairs that share a KV head: each key and value loaded is used
for all of them. A row goes over its pages in order of position: scores s, then with m the largest so far

    α = e^(m_old - m),  p = e^(s - m),  l = α l + Σ p,  out = α out + p V          and at last out / l

Pages have fixed places, so a row's sums group the same way whatever shares its tile, and a page that a row must not see
is an exact no-op for it (α = 1, p = 0). Bound by fused multiply-adds when many rows run, by reading the cache for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.linear import OPTIONS
from martlet.ops.cpu.mathlib import exponential, hyperbolic_tangent
from martlet.ops.cpu.quantize import quantizer
from martlet.ops.cpu.record import (
    ALPHAS,
    ARGS,
    BYTES,
    COUNTER,
    LARGEST,
    PAGE,
    Q_STRIDE_FLOATS,
    ROWS,
    ROWS_PER_TILE,
    SCORES,
    SCRATCH_FLOATS,
    STEP_PAGE_STRIDE,
    STEP_PAGE_TABLE,
    STEP_POSITIONS,
    STEP_SEQS,
    STEP_SLOTS,
    STEP_SPAN_STARTS,
    SUMS,
    TOTALS,
)
from martlet.ops.cpu.simd import Verbs

__all__ = ["attention_kernel", "kv_write_kernel"]

HIDDEN = -1e30  # the score of a position that must not be seen

Q, Q_STRIDE, OUT, OUT_STRIDE, KEYS, VALUES, N_KV_HEADS, HEADS_PER_KV, HEAD_DIM = range(ARGS, ARGS + 9)
SCALE, SOFTCAP, WINDOW, SCRATCH = range(ARGS + 9, ARGS + 13)  # SOFTCAP and WINDOW 0: none

K, K_STRIDE, V, V_STRIDE, TO_KEYS, TO_VALUES, KV_HEADS, KV_DIM = range(ARGS, ARGS + 8)  # kv_write


def kv_write_kernel(v: Verbs, half: bool) -> Callable[..., None]:
    """Row t of k and v to slot t: page slot // 32, place slot % 32. Pages stay finite: each type saturates."""
    put = v.put_f16 if half else v.put_f32
    most = 65504.0 if half else 3.4028234663852886e38

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        slots, counter, size, heads = (
            v.i32p(step[STEP_SLOTS]),
            v.i64p(record[COUNTER]),
            record[KV_DIM],
            record[KV_HEADS],
        )
        keys, values = v.i8p(record[TO_KEYS]), v.i8p(record[TO_VALUES])
        padded = (size + 15) // 16 * 16
        while True:
            t = v.atomic_add(counter, 0, 1)
            if t >= step[record[ROWS]]:
                break
            page, place = slots[t] // PAGE, slots[t] % PAGE
            k, x = v.f32p(record[K] + t * record[K_STRIDE] * 4), v.f32p(record[V] + t * record[V_STRIDE] * 4)
            for head in range(heads):
                key_start = (page * heads + head) * size * PAGE + place
                value_start = ((page * heads + head) * PAGE + place) * padded
                for d in range(size):
                    put(keys, key_start + d * PAGE, v.bound(k[head * size + d], most))
                    put(values, value_start + d, v.bound(x[head * size + d], most))

    return kernel


def page_step(v: Verbs, rows: int, half: bool) -> Callable[..., Any]:
    """The function that takes one tile of `rows` rows over one page."""
    load, lanes = (v.load_f16 if half else v.load_f32), v.lanes
    exp, tanh = exponential(v), hyperbolic_tangent(v)
    zero, load_tile, store_tile = v.tile_zero(rows), v.tile_load(rows), v.tile_store
    parts = PAGE // lanes
    two = rows * lanes <= 32  # narrow tiles: two at once, so that no sum waits for itself (wider ones: measured slower)

    @njit(forceinline=True, **OPTIONS)
    def scores_of(record, scratch, keys):  # type: ignore[no-untyped-def]
        """scratch[SCORES + m * PAGE + i] = q of row m · key i, capped."""
        place = 0
        while two and place < PAGE:
            low, high = zero(), zero()
            for d in range(record[HEAD_DIM]):
                low = v.tile_fma(low, load(keys, d * PAGE + place), scratch, d, Q_STRIDE_FLOATS)
                high = v.tile_fma(high, load(keys, d * PAGE + place + lanes), scratch, d, Q_STRIDE_FLOATS)
            store_tile(low, scratch, SCORES + place, PAGE)
            store_tile(high, scratch, SCORES + place + lanes, PAGE)
            place += 2 * lanes
        while place < PAGE:
            acc = zero()
            for d in range(record[HEAD_DIM]):
                acc = v.tile_fma(acc, load(keys, d * PAGE + place), scratch, d, Q_STRIDE_FLOATS)
            store_tile(acc, scratch, SCORES + place, PAGE)
            place += lanes
        if record[SOFTCAP] != 0:
            cap = v.splat(v.float_bits(record[SOFTCAP]))
            for i in range(SCORES, SCORES + rows * PAGE, lanes):
                v.store(scratch, i, v.mul(cap, tanh(v.div(v.load_f32(scratch, i), cap))))

    @njit(forceinline=True, **OPTIONS)
    def softmax_row(scratch, m, skip, count):  # type: ignore[no-untyped-def]
        """Row m sees places skip … count - 1 of the page: scores to p, and the row's m, l and α."""
        start = SCORES + m * PAGE
        largest = v.splat(scratch[LARGEST + m])
        for part in range(parts):
            score = v.load_f32(scratch, start + part * lanes)
            score = v.keep_first(score, count - part * lanes, v.splat(HIDDEN))
            score = v.keep_first(v.splat(HIDDEN), skip - part * lanes, score)
            largest = v.max(largest, score)
        largest = v.splat(v.max_lanes(largest))
        total = v.splat(0.0)
        for part in range(parts):
            p = exp(v.sub(v.load_f32(scratch, start + part * lanes), largest))
            p = v.keep_first(p, count - part * lanes, v.splat(0.0))
            p = v.keep_first(v.splat(0.0), skip - part * lanes, p)
            v.store(scratch, start + part * lanes, p)
            total = v.add(total, p)
        alpha = v.first_lane(exp(v.sub(v.splat(scratch[LARGEST + m]), largest)))
        scratch[LARGEST + m] = v.first_lane(largest)
        scratch[ALPHAS + m] = alpha
        scratch[TOTALS + m] = scratch[TOTALS + m] * alpha + v.sum_lanes(total)

    @njit(forceinline=True, **OPTIONS)
    def add_values(record, scratch, values, first, stop):  # type: ignore[no-untyped-def]
        """outputs = α · outputs + p · V over places first … stop - 1."""
        padded = (record[HEAD_DIM] + 15) // 16 * 16
        d = 0
        while two and d + 2 * lanes <= padded:
            low = v.tile_scale(load_tile(scratch, SUMS + d * ROWS_PER_TILE, lanes), scratch, ALPHAS)
            high = v.tile_scale(load_tile(scratch, SUMS + (d + lanes) * ROWS_PER_TILE, lanes), scratch, ALPHAS)
            for i in range(first, stop):
                low = v.tile_fma(low, load(values, i * padded + d), scratch, SCORES + i, PAGE)
                high = v.tile_fma(high, load(values, i * padded + d + lanes), scratch, SCORES + i, PAGE)
            store_tile(low, scratch, SUMS + d * ROWS_PER_TILE, lanes)
            store_tile(high, scratch, SUMS + (d + lanes) * ROWS_PER_TILE, lanes)
            d += 2 * lanes
        while d < padded:
            acc = v.tile_scale(load_tile(scratch, SUMS + d * ROWS_PER_TILE, lanes), scratch, ALPHAS)
            for i in range(first, stop):
                acc = v.tile_fma(acc, load(values, i * padded + d), scratch, SCORES + i, PAGE)
            store_tile(acc, scratch, SUMS + d * ROWS_PER_TILE, lanes)
            d += lanes

    return scores_of, softmax_row, add_values


def tile_attention(v: Verbs, rows: int, half: bool) -> Callable[..., Any]:
    """The function for one tile of up to `rows` rows, first (token, head) pair `pair` of a span, KV head `g`."""
    scores_of, softmax_row, add_values = page_step(v, rows, half)
    lanes, item, quantize = v.lanes, 2 if half else 4, quantizer(v)

    @njit(forceinline=True, **OPTIONS)
    def begin(record, scratch, first_row, pair, n, g):  # type: ignore[no-untyped-def]
        """Queries, scaled, to the scratch; rows that are not there are zeros."""
        size, heads, scale = record[HEAD_DIM], record[HEADS_PER_KV], v.splat(v.float_bits(record[SCALE]))
        for m in range(rows):
            t, h = first_row + (pair + m) // heads, g * heads + (pair + m) % heads
            q = v.f32p(record[Q] + (t * record[Q_STRIDE] + h * size) * 4)
            for d in range(0, size, lanes):
                here = size - d if m < n else 0
                v.store(scratch, m * Q_STRIDE_FLOATS + d, v.mul(v.load_first(q, d, here), scale))
            scratch[LARGEST + m] = v.narrow(HIDDEN)
            scratch[TOTALS + m] = v.narrow(0.0)
            scratch[ALPHAS + m] = v.narrow(1.0)
        for d in range(0, (size + 15) // 16 * 16 * ROWS_PER_TILE, lanes):
            v.store(scratch, SUMS + d, v.splat(0.0))

    @njit(forceinline=True, **OPTIONS)
    def finish(record, scratch, first_row, pair, n, g):  # type: ignore[no-untyped-def]
        size, heads = record[HEAD_DIM], record[HEADS_PER_KV]
        for m in range(n):
            t, h = first_row + (pair + m) // heads, g * heads + (pair + m) % heads
            out, start = v.f32p(record[OUT] + t * record[OUT_STRIDE] * 4), h * size
            total = v.splat(scratch[TOTALS + m])
            for d in range(0, size, lanes):
                value = v.div(v.load_f32(scratch, SUMS + d * ROWS_PER_TILE + m * lanes), total)
                value = v.add(value, v.splat(0.0))  # never -0, which another tile's hidden positions turn to 0
                v.store_first(out, start + d, value, size - d)
            if record[BYTES] != 0:
                quantize(record, out, t, start, start + size)

    @njit(**OPTIONS)
    def attend(record, scratch, positions, pages, first_row, pair, n, g):  # type: ignore[no-untyped-def]
        """Rows pair … pair + n - 1 of a span whose first row of the step is `first_row`."""
        begin(record, scratch, first_row, pair, n, g)
        heads, window = record[HEADS_PER_KV], record[WINDOW]
        low, high = positions[first_row + pair // heads], positions[first_row + (pair + n - 1) // heads]
        low = max(0, low - window + 1) if window > 0 else 0
        key_floats = record[HEAD_DIM] * PAGE
        value_floats = (record[HEAD_DIM] + 15) // 16 * 16 * PAGE
        for page in range(low // PAGE, high // PAGE + 1):
            number = pages[page] * record[N_KV_HEADS] + g
            scores_of(record, scratch, v.i8p(record[KEYS] + number * key_floats * item))
            for m in range(n):
                position = positions[first_row + (pair + m) // heads]
                skip = position - window + 1 - page * PAGE if window > 0 else 0
                softmax_row(scratch, m, skip, position + 1 - page * PAGE)
            first, stop = max(0, low - page * PAGE), min(PAGE, high + 1 - page * PAGE)
            add_values(record, scratch, v.i8p(record[VALUES] + number * value_floats * item), first, stop)
        finish(record, scratch, first_row, pair, n, g)

    return attend


def attention_kernel(v: Verbs, half: bool) -> Callable[..., None]:
    """The kernel for one kind of cache. Units go from the last, which have the most to see, to the first."""
    one, few = tile_attention(v, 1, half), tile_attention(v, 4, half)
    many = tile_attention(v, v.rows, half) if v.rows > 4 else few
    tile_rows = v.rows

    @njit(forceinline=True, **OPTIONS)
    def tiles_of(record, starts, b):  # type: ignore[no-untyped-def]
        return ((starts[b + 1] - starts[b]) * record[HEADS_PER_KV] + tile_rows - 1) // tile_rows * record[N_KV_HEADS]

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        starts, positions = v.i32p(step[STEP_SPAN_STARTS]), v.i32p(step[STEP_POSITIONS])
        scratch = v.f32p(record[SCRATCH] + thread * SCRATCH_FLOATS * 4)
        counter, n_kv_heads = v.i64p(record[COUNTER]), record[N_KV_HEADS]
        units = 0
        for b in range(step[STEP_SEQS]):
            units += tiles_of(record, starts, b)
        while True:
            unit = units - 1 - v.atomic_add(counter, 0, 1)
            if unit < 0:
                break
            b = 0
            while unit >= tiles_of(record, starts, b):
                unit -= tiles_of(record, starts, b)
                b += 1
            pair, g = unit // n_kv_heads * tile_rows, unit % n_kv_heads
            n = min(tile_rows, (starts[b + 1] - starts[b]) * record[HEADS_PER_KV] - pair)
            pages = v.i32p(step[STEP_PAGE_TABLE] + b * step[STEP_PAGE_STRIDE] * 4)
            if n == 1:
                one(record, scratch, positions, pages, starts[b], pair, n, g)
            elif n <= 4:
                few(record, scratch, positions, pages, starts[b], pair, n, g)
            else:
                many(record, scratch, positions, pages, starts[b], pair, n, g)

    return kernel
