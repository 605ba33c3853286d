"""KV pages of 8-bit codes: writing them, scores against their keys, sums of their values (`ops/kv_codes.py` defines them).

As in `kv_float.py`, with a scale for each position of a KV head behind its codes:

    keys    [page][KV head]{codes [D][32], scales float32 [32]}
    values  [page][KV head]{codes [32][D, filled to 16], scales float32 [32]}

A key's scale multiplies the score of its place, a value's scale p: so the inner loops are those of floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kv_float import two_at_once
from martlet.ops.cpu.linear import OPTIONS
from martlet.ops.cpu.record import (
    ALPHAS,
    ARGS,
    COUNTER,
    PAGE,
    Q_STRIDE_FLOATS,
    ROWS,
    ROWS_PER_TILE,
    SCORES,
    STEP_SLOTS,
    SUMS,
)
from martlet.ops.cpu.simd import Verbs

__all__ = ["kv_write_q8_kernel", "q8_scores", "q8_sums"]

K, K_STRIDE, V, V_STRIDE, TO_KEYS, TO_VALUES, KV_HEADS, KV_DIM = range(ARGS, ARGS + 8)
MOST, LEAST_SCALE = 65504.0, 1e-30


def kv_write_q8_kernel(v: Verbs) -> Callable[..., None]:
    """Row t of k and v to slot t; its codes depend on the row alone."""
    lanes = v.lanes

    @njit(forceinline=True, **OPTIONS)
    def encode(x, size, codes):  # type: ignore[no-untyped-def]
        """Codes of x[: size], filled with zeros to 16, and their scale."""
        largest = v.splat(0.0)
        for d in range(0, size, lanes):
            largest = v.max(largest, v.min(v.abs(v.load_first(x, d, size - d)), v.splat(MOST)))
        scale = v.max(v.div(v.splat(v.max_lanes(largest)), v.splat(127.0)), v.splat(LEAST_SCALE))
        inverse = v.div(v.splat(1.0), scale)
        for d in range(0, (size + 15) // 16 * 16, lanes):
            bounded = v.min(v.max(v.load_first(x, d, size - d), v.splat(-MOST)), v.splat(MOST))
            v.store_i8(codes, d, v.to_int(v.round_even(v.mul(bounded, inverse))))
        return v.first_lane(scale)

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        slots, counter = v.i32p(step[STEP_SLOTS]), v.i64p(record[COUNTER])
        size, heads = record[KV_DIM], record[KV_HEADS]
        padded = (size + 15) // 16 * 16
        while True:
            t = v.atomic_add(counter, 0, 1)
            if t >= step[record[ROWS]]:
                break
            page, place = slots[t] // PAGE, slots[t] % PAGE
            for head in range(heads):
                keys = record[TO_KEYS] + (page * heads + head) * (size * PAGE + PAGE * 4)
                values = record[TO_VALUES] + (page * heads + head) * (padded * PAGE + PAGE * 4)
                k = v.f32p(record[K] + (t * record[K_STRIDE] + head * size) * 4)
                x = v.f32p(record[V] + (t * record[V_STRIDE] + head * size) * 4)
                to_keys, to_row = v.i8p(keys), v.i8p(values + place * padded)
                v.f32p(keys + size * PAGE)[place] = encode(k, size, to_row)  # a value's place, until the value comes
                for d in range(size):
                    to_keys[d * PAGE + place] = to_row[d]
                v.f32p(values + padded * PAGE)[place] = encode(x, size, to_row)

    return kernel


def scale_places(v: Verbs, rows: int) -> Callable[..., Any]:
    """(scratch, scales): each row's 32 scores, or p, times the scales of their places."""

    @njit(forceinline=True, **OPTIONS)
    def scale(scratch, scales):  # type: ignore[no-untyped-def]
        for place in range(0, PAGE, v.lanes):
            factor = v.load_f32(scales, place)
            for m in range(rows):
                at = SCORES + m * PAGE + place
                v.store(scratch, at, v.mul(v.load_f32(scratch, at), factor))

    return scale


def q8_scores(v: Verbs, rows: int) -> Callable[..., Any]:
    """(size, scratch, keys, ahead): scratch[SCORES + m * PAGE + i] = q of row m · key i of the page at `keys`."""
    load, lanes, zero, two = v.load_i8, v.lanes, v.tile_zero(rows), two_at_once(v, rows)
    scale = scale_places(v, rows)

    @njit(forceinline=True, **OPTIONS)
    def scores(size, scratch, keys, ahead):  # type: ignore[no-untyped-def]
        place = 0
        while two and place < PAGE:
            low, high = zero(), zero()
            for d in range(size):
                v.prefetch(ahead, d * PAGE + place)
                low = v.tile_fma(low, load(keys, d * PAGE + place), scratch, d, Q_STRIDE_FLOATS)
                high = v.tile_fma(high, load(keys, d * PAGE + place + lanes), scratch, d, Q_STRIDE_FLOATS)
            v.tile_store(low, scratch, SCORES + place, PAGE)
            v.tile_store(high, scratch, SCORES + place + lanes, PAGE)
            place += 2 * lanes
        while place < PAGE:
            acc = zero()
            for d in range(size):
                v.prefetch(ahead, d * PAGE + place)
                acc = v.tile_fma(acc, load(keys, d * PAGE + place), scratch, d, Q_STRIDE_FLOATS)
            v.tile_store(acc, scratch, SCORES + place, PAGE)
            place += lanes
        scale(scratch, v.advance(keys, size * PAGE // 4))

    return scores


def q8_sums(v: Verbs, rows: int) -> Callable[..., Any]:
    """(size, scratch, state, values, ahead, first, stop): sums = α · sums + p V over places first … stop - 1."""
    load, lanes = v.load_i8, v.lanes
    load_tile, two, scale = v.tile_load(rows), two_at_once(v, rows), scale_places(v, rows)

    @njit(forceinline=True, **OPTIONS)
    def sums(size, scratch, state, values, ahead, first, stop):  # type: ignore[no-untyped-def]
        padded = (size + 15) // 16 * 16
        scale(scratch, v.advance(values, padded * PAGE // 4))
        d = 0
        while two and d + 2 * lanes <= padded:
            at = SUMS + d * ROWS_PER_TILE
            low = v.tile_scale(load_tile(state, at, lanes), scratch, ALPHAS)
            high = v.tile_scale(load_tile(state, at + lanes * ROWS_PER_TILE, lanes), scratch, ALPHAS)
            for i in range(first, stop):
                v.prefetch(ahead, i * padded + d)
                low = v.tile_fma(low, load(values, i * padded + d), scratch, SCORES + i, PAGE)
                high = v.tile_fma(high, load(values, i * padded + d + lanes), scratch, SCORES + i, PAGE)
            v.tile_store(low, state, at, lanes)
            v.tile_store(high, state, at + lanes * ROWS_PER_TILE, lanes)
            d += 2 * lanes
        while d < padded:
            at = SUMS + d * ROWS_PER_TILE
            acc = v.tile_scale(load_tile(state, at, lanes), scratch, ALPHAS)
            for i in range(first, stop):
                v.prefetch(ahead, i * padded + d)
                acc = v.tile_fma(acc, load(values, i * padded + d), scratch, SCORES + i, PAGE)
            v.tile_store(acc, state, at, lanes)
            d += lanes

    return sums
