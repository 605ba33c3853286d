"""KV pages of float16 or float32: writing them, scores against their keys, sums of their values.

Read `attention.py` next.

A page holds 32 positions of one layer, for each KV head its keys transposed, so that a register
holds the same dimension of many positions and a score needs no horizontal sum, and its values in
rows:

    keys    [KV head][page][D][32]          values  [KV head][page][32][D, filled to 16]

so that pages with numbers in a row are one stream of memory, which the processor fetches by itself.

Each function also fetches the same place of the page that comes next: pages may lie anywhere, so
the processor's own prefetchers lose them at every end. It goes to the second-level cache, which can
wait for many more lines at a time than the first can.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.fields import (
    ALPHAS,
    COUNTER,
    KV_WRITE,
    PAGE,
    Q_STRIDE_FLOATS,
    ROWS,
    ROWS_PER_TILE,
    SCORES,
    STEP_SLOTS,
    SUMS,
)
from martlet.ops.cpu.kernels.linear import OPTIONS
from martlet.ops.cpu.simd.verbs import Verbs

K, K_STRIDE, V, V_STRIDE, TO_KEYS, TO_VALUES, KV_HEADS, KV_DIM, _, N_PAGES = KV_WRITE


def write_claimer(v: Verbs) -> Callable[..., Any]:
    """(record, n_rows) → the next rows to write and their KV head, as (first, stop, head); no row
    when there is none.

    A unit is as many rows as a page has: neighbours' keys share cache lines, on which two threads
    would wait for each other.
    """

    @njit(forceinline=True, **OPTIONS)
    def claim(record, n_rows):  # type: ignore[no-untyped-def]
        unit, heads = v.atomic_add(v.i64p(record[COUNTER]), 0, 1), record[KV_HEADS]
        first = unit // heads * PAGE
        return first, min(first + PAGE, n_rows), unit % heads

    return claim


def kv_write_kernel(v: Verbs, half: bool) -> Callable[..., None]:
    """Row t of k and v to slot t: page slot // 32, place slot % 32.

    Pages stay finite: each type saturates.
    """
    put = v.put_f16 if half else v.put_f32
    most = 65504.0 if half else 3.4028234663852886e38
    claim = write_claimer(v)

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        slots, size = v.i32p(step[STEP_SLOTS]), record[KV_DIM]
        keys, values = v.i8p(record[TO_KEYS]), v.i8p(record[TO_VALUES])
        padded = (size + 15) // 16 * 16
        n_rows = step[record[ROWS]]
        while True:
            first, stop, head = claim(record, n_rows)
            if first >= stop:
                break
            for t in range(first, stop):
                slot = slots[t]
                k = v.f32p(record[K] + (t * record[K_STRIDE] + head * size) * 4)
                x = v.f32p(record[V] + (t * record[V_STRIDE] + head * size) * 4)
                number, place = head * record[N_PAGES] + slot // PAGE, slot % PAGE
                key_start, value_start = number * size * PAGE + place, (number * PAGE + place) * padded
                for d in range(size):
                    put(keys, key_start + d * PAGE, v.bound(k[d], most))
                    put(values, value_start + d, v.bound(x[d], most))

    return kernel


def two_at_once(v: Verbs, rows: int) -> bool:
    """Whether a tile is so narrow that two are computed together, so that no sum waits for itself.

    For wider tiles this measured slower.
    """
    return rows * v.lanes <= 64


def float_scores(v: Verbs, rows: int, half: bool) -> Callable[..., Any]:
    """(size, scratch, keys, ahead): scratch[SCORES + m * PAGE + i] = q of row m · keys[i]."""
    load, lanes, item = (v.load_f16 if half else v.load_f32), v.lanes, 2 if half else 4
    zero, two = v.tile_zero(rows), two_at_once(v, rows)

    @njit(forceinline=True, **OPTIONS)
    def scores(size, scratch, keys, ahead):  # type: ignore[no-untyped-def]
        place = 0
        while two and place < PAGE:
            low, high = zero(), zero()
            for d in range(size):
                v.prefetch_l2(ahead, (d * PAGE + place) * item)
                low = v.tile_fma(low, load(keys, d * PAGE + place), scratch, d, Q_STRIDE_FLOATS)
                high = v.tile_fma(high, load(keys, d * PAGE + place + lanes), scratch, d, Q_STRIDE_FLOATS)
            v.tile_store(low, scratch, SCORES + place, PAGE)
            v.tile_store(high, scratch, SCORES + place + lanes, PAGE)
            place += 2 * lanes
        while place < PAGE:
            acc = zero()
            for d in range(size):
                v.prefetch_l2(ahead, (d * PAGE + place) * item)
                acc = v.tile_fma(acc, load(keys, d * PAGE + place), scratch, d, Q_STRIDE_FLOATS)
            v.tile_store(acc, scratch, SCORES + place, PAGE)
            place += lanes

    return scores


def float_sums(v: Verbs, rows: int, half: bool) -> Callable[..., Any]:
    """(size, scratch, state, values, ahead, first, stop): sums = α · sums + p V[first:stop]."""
    load, lanes, item = (v.load_f16 if half else v.load_f32), v.lanes, 2 if half else 4
    load_tile, two = v.tile_load(rows), two_at_once(v, rows)

    @njit(forceinline=True, **OPTIONS)
    def sums(size, scratch, state, values, ahead, first, stop):  # type: ignore[no-untyped-def]
        padded = (size + 15) // 16 * 16
        d = 0
        while two and d + 2 * lanes <= padded:
            at = SUMS + d * ROWS_PER_TILE
            low = v.tile_scale(load_tile(state, at, lanes), scratch, ALPHAS)
            high = v.tile_scale(load_tile(state, at + lanes * ROWS_PER_TILE, lanes), scratch, ALPHAS)
            for i in range(first, stop):
                v.prefetch_l2(ahead, (i * padded + d) * item)
                low = v.tile_fma(low, load(values, i * padded + d), scratch, SCORES + i, PAGE)
                high = v.tile_fma(high, load(values, i * padded + d + lanes), scratch, SCORES + i, PAGE)
            v.tile_store(low, state, at, lanes)
            v.tile_store(high, state, at + lanes * ROWS_PER_TILE, lanes)
            d += 2 * lanes
        while d < padded:
            at = SUMS + d * ROWS_PER_TILE
            acc = v.tile_scale(load_tile(state, at, lanes), scratch, ALPHAS)
            for i in range(first, stop):
                v.prefetch_l2(ahead, (i * padded + d) * item)
                acc = v.tile_fma(acc, load(values, i * padded + d), scratch, SCORES + i, PAGE)
            v.tile_store(acc, state, at, lanes)
            d += lanes

    return sums
