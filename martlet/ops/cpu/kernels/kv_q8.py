"""KV pages of 8-bit codes.

Writing them, scores against their keys, sums of their values (`ops/kv_codes.py` defines them).

As in `kv_float.py`, with a float16 scale for each position and 32 channels behind the codes:

    keys    [KV head][page]{codes [D][32], scales [block][32]}
    values  [KV head][page]{codes [32][D, filled to 16], scales [block][32]}

A key's scale multiplies what its block adds to the score, a value's scale p: so the inner loops are
those of floats.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.fields import (
    ALPHAS,
    KV_BLOCK,
    KV_WRITE,
    PAGE,
    Q_STRIDE_FLOATS,
    ROWS,
    ROWS_PER_TILE,
    SCALED_P,
    SCORES,
    STEP_SLOTS,
    SUMS,
)
from martlet.ops.cpu.kernels.kv_float import two_at_once, write_claimer
from martlet.ops.cpu.kernels.linear import OPTIONS
from martlet.ops.cpu.simd.verbs import Verbs

K, K_STRIDE, V, V_STRIDE, TO_KEYS, TO_VALUES, KV_HEADS, KV_DIM, _, N_PAGES = KV_WRITE
MOST = 65504.0  # what lies beyond float16 saturates


def kv_write_q8_kernel(v: Verbs) -> Callable[..., None]:
    """Row t of k and v to slot t; its codes depend on the row alone."""
    lanes, claim = v.lanes, write_claimer(v)

    @njit(forceinline=True, **OPTIONS)
    def encode(x, size, codes, scales, place):  # type: ignore[no-untyped-def]
        """Codes of x[:size], zero-padded to 16; blocks' scales to scales[place], a page apart."""
        for start in range(0, size, KV_BLOCK):
            stop = min(start + KV_BLOCK, (size + 15) // 16 * 16)
            largest = v.splat(0.0)
            for d in range(start, stop, lanes):
                largest = v.max(largest, v.min(v.abs(v.load_first(x, d, size - d)), v.splat(MOST)))
            at = start + place  # a block has as many places as channels
            v.put_f16(scales, at, v.first_lane(v.div(v.splat(v.max_lanes(largest)), v.splat(127.0))))
            inverse = v.inverse_or_zero(v.splat(v.f16_at(scales, at)))
            for d in range(start, stop, lanes):
                bounded = v.min(v.max(v.load_first(x, d, size - d), v.splat(-MOST)), v.splat(MOST))
                code = v.round_even(v.mul(bounded, inverse))
                v.store_i8(codes, d, v.to_int(v.min(v.max(code, v.splat(-127.0)), v.splat(127.0))))

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        slots, size = v.i32p(step[STEP_SLOTS]), record[KV_DIM]
        padded, scale_bytes = (size + 15) // 16 * 16, (size + KV_BLOCK - 1) // KV_BLOCK * PAGE * 2
        n_rows = step[record[ROWS]]
        while True:
            first, stop, head = claim(record, n_rows)
            if first >= stop:
                break
            for t in range(first, stop):
                slot = slots[t]
                number, place = head * record[N_PAGES] + slot // PAGE, slot % PAGE
                keys = record[TO_KEYS] + number * (size * PAGE + scale_bytes)
                values = record[TO_VALUES] + number * (padded * PAGE + scale_bytes)
                k = v.f32p(record[K] + (t * record[K_STRIDE] + head * size) * 4)
                x = v.f32p(record[V] + (t * record[V_STRIDE] + head * size) * 4)
                to_keys, to_row = v.i8p(keys), v.i8p(values + place * padded)
                # The key's codes use the value's place, until the value comes.
                encode(k, size, to_row, v.i8p(keys + size * PAGE), place)
                for d in range(size):
                    to_keys[d * PAGE + place] = to_row[d]
                encode(x, size, to_row, v.i8p(values + padded * PAGE), place)

    return kernel


def q8_scores(v: Verbs, rows: int) -> Callable[..., Any]:
    """(size, scratch, keys, ahead): scratch[SCORES + m * PAGE + i] = q of row m · keys[i]."""
    load, lanes, zero, two = v.load_i8, v.lanes, v.tile_zero(rows), two_at_once(v, rows)

    @njit(forceinline=True, **OPTIONS)
    def scores(size, scratch, keys, ahead):  # type: ignore[no-untyped-def]
        scales = v.advance(keys, size * PAGE // 4)
        place = 0
        while two and place < PAGE:
            low_total, high_total = zero(), zero()
            for start in range(0, size, KV_BLOCK):
                low, high = zero(), zero()
                for d in range(start, min(start + KV_BLOCK, size)):
                    v.prefetch(ahead, d * PAGE + place)
                    low = v.tile_fma(low, load(keys, d * PAGE + place), scratch, d, Q_STRIDE_FLOATS)
                    high = v.tile_fma(high, load(keys, d * PAGE + place + lanes), scratch, d, Q_STRIDE_FLOATS)
                low_total = v.tile_fma_each(low_total, low, v.load_f16(scales, start + place))
                high_total = v.tile_fma_each(high_total, high, v.load_f16(scales, start + place + lanes))
            v.tile_store(low_total, scratch, SCORES + place, PAGE)
            v.tile_store(high_total, scratch, SCORES + place + lanes, PAGE)
            place += 2 * lanes
        while place < PAGE:
            total = zero()
            for start in range(0, size, KV_BLOCK):
                acc = zero()
                for d in range(start, min(start + KV_BLOCK, size)):
                    v.prefetch(ahead, d * PAGE + place)
                    acc = v.tile_fma(acc, load(keys, d * PAGE + place), scratch, d, Q_STRIDE_FLOATS)
                total = v.tile_fma_each(total, acc, v.load_f16(scales, start + place))
            v.tile_store(total, scratch, SCORES + place, PAGE)
            place += lanes

    return scores


def q8_sums(v: Verbs, rows: int) -> Callable[..., Any]:
    """(size, scratch, state, values, ahead, first, stop): sums = α · sums + p V[first:stop]."""
    load, lanes = v.load_i8, v.lanes
    load_tile, two = v.tile_load(rows), two_at_once(v, rows)

    @njit(forceinline=True, **OPTIONS)
    def scale_p(scratch, scales, block):  # type: ignore[no-untyped-def]
        """p s to SCALED_P."""
        for place in range(0, PAGE, lanes):
            factor = v.load_f16(scales, block + place)
            for m in range(rows):
                p = v.load_f32(scratch, SCORES + m * PAGE + place)
                v.store(scratch, SCALED_P + m * PAGE + place, v.mul(p, factor))

    @njit(forceinline=True, **OPTIONS)
    def sums(size, scratch, state, values, ahead, first, stop):  # type: ignore[no-untyped-def]
        padded = (size + 15) // 16 * 16
        scales = v.advance(values, padded * PAGE // 4)
        for block in range(0, padded, KV_BLOCK):
            scale_p(scratch, scales, block)
            d, end = block, min(block + KV_BLOCK, padded)
            while two and d + 2 * lanes <= end:
                at = SUMS + d * ROWS_PER_TILE
                low = v.tile_scale(load_tile(state, at, lanes), scratch, ALPHAS)
                high = v.tile_scale(load_tile(state, at + lanes * ROWS_PER_TILE, lanes), scratch, ALPHAS)
                for i in range(first, stop):
                    v.prefetch(ahead, i * padded + d)
                    low = v.tile_fma(low, load(values, i * padded + d), scratch, SCALED_P + i, PAGE)
                    high = v.tile_fma(high, load(values, i * padded + d + lanes), scratch, SCALED_P + i, PAGE)
                v.tile_store(low, state, at, lanes)
                v.tile_store(high, state, at + lanes * ROWS_PER_TILE, lanes)
                d += 2 * lanes
            while d < end:
                at = SUMS + d * ROWS_PER_TILE
                acc = v.tile_scale(load_tile(state, at, lanes), scratch, ALPHAS)
                for i in range(first, stop):
                    v.prefetch(ahead, i * padded + d)
                    acc = v.tile_fma(acc, load(values, i * padded + d), scratch, SCALED_P + i, PAGE)
                v.tile_store(acc, state, at, lanes)
                d += lanes

    return sums
