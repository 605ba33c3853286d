"""KV pages of 4-bit codes.

Packing them, scores against their keys, sums of their values (`ops/kv_codes.py` defines them).

    keys    [KV head][page]{codes [D][16], scales float16 [D], minima float16 [D]}
    values  [KV head][page]{codes [block][32][16],
             for each block of 32 channels scales float16 [32], minima float16 [32]}

A byte holds item i of its 32 in its low half and item i + 16 in its high half: positions of a key's
channel, channels of a value's block. With x = s c + m a score is Σ (q s) c + Σ q m, and a sum Σ (p
s) c + Σ p m: the scales go into q and p once a page, so that the inner loops multiply codes.

A row first goes to a float16 page (`runtime/f16_window.py`), laid out as in `kv_float.py` but
[page][KV head]; these lie in two places, those kept in the layer's own, those that pass in one that
layers share.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.fields import (
    ALPHAS,
    CONSTANTS,
    COUNTER,
    KV_BLOCK,
    KV_WRITE,
    PAGE,
    Q_STRIDE_FLOATS,
    ROWS,
    ROWS_PER_TILE,
    SCALED_P,
    SCALED_Q,
    SCORES,
    STEP_PAGE_STRIDE,
    STEP_PAGE_TABLE,
    STEP_POSITIONS,
    STEP_RECENT_SLOTS,
    STEP_RECENT_TABLE,
    STEP_SEQS,
    STEP_SPAN_STARTS,
    SUMS,
)
from martlet.ops.cpu.kernels.kv_float import two_at_once, write_claimer
from martlet.ops.cpu.kernels.linear import OPTIONS
from martlet.ops.cpu.simd.verbs import Verbs

K, K_STRIDE, V, V_STRIDE, TO_KEYS, TO_VALUES, KV_HEADS, KV_DIM, RECENT, N_PAGES = KV_WRITE
MOST = 65504.0  # of float16
HALF = KV_BLOCK // 2


def recent_place(v: Verbs) -> Callable[..., Any]:
    """(recent, page, head, heads, size) → where a float16 page has the head's keys and values.

    `recent` is the address of five numbers: how many pages are kept, then where they start, keys
    and values, and where those that pass do.
    """

    @njit(forceinline=True, **OPTIONS)
    def place(recent, page, head, heads, size):  # type: ignore[no-untyped-def]
        where, padded = v.i64p(recent), (size + 15) // 16 * 16
        own = page < where[0]
        number = (page if own else page - where[0]) * heads + head
        keys = (where[1] if own else where[3]) + number * size * PAGE * 2
        values = (where[2] if own else where[4]) + number * padded * PAGE * 2
        return v.i8p(keys), v.i8p(values)

    return place


def kv_write_q4_kernel(v: Verbs) -> Callable[..., None]:
    """Row t of k and v to its float16 page."""
    where, claim = recent_place(v), write_claimer(v)

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        slots, size, heads = v.i32p(step[STEP_RECENT_SLOTS]), record[KV_DIM], record[KV_HEADS]
        padded = (size + 15) // 16 * 16
        while True:
            first, stop, head = claim(record, step[record[ROWS]])
            if first >= stop:
                break
            for t in range(first, stop):
                k = v.f32p(record[K] + (t * record[K_STRIDE] + head * size) * 4)
                x = v.f32p(record[V] + (t * record[V_STRIDE] + head * size) * 4)
                keys, values = where(record[RECENT], slots[t] // PAGE, head, heads, size)
                for d in range(size):
                    v.put_f16(keys, d * PAGE + slots[t] % PAGE, v.bound(k[d], MOST))
                    v.put_f16(values, slots[t] % PAGE * padded + d, v.bound(x[d], MOST))

    return kernel


def pack_q4_kernel(v: Verbs) -> Callable[..., None]:
    """Codes of every page whose last position is in the step. A unit is a page of a KV head."""
    lanes, where = v.lanes, recent_place(v)
    parts = KV_BLOCK // lanes

    @njit(forceinline=True, **OPTIONS)
    def encode(source, start, count, codes, at, scales, minima, i):  # type: ignore[no-untyped-def]
        """The float16 block source[start : start + count], zero-padded, to 16 bytes codes[at :]."""
        low = v.keep_first(v.load_f16(source, start), count, v.splat(0.0))
        high = low
        for part in range(1, parts):
            x = v.keep_first(v.load_f16(source, start + part * lanes), count - part * lanes, v.splat(0.0))
            low, high = v.min(low, x), v.max(high, x)
        least = v.splat(-v.max_lanes(v.sub(v.splat(0.0), low)))
        range_ = v.sub(v.splat(v.max_lanes(high)), least)
        v.put_f16(scales, i, v.first_lane(v.div(range_, v.splat(15.0))))
        v.put_f16(minima, i, v.first_lane(least))
        inverse = v.inverse_or_zero(v.splat(v.f16_at(scales, i)))
        for part in range(parts // 2):
            x = v.keep_first(v.load_f16(source, start + part * lanes), count - part * lanes, v.splat(0.0))
            y = v.load_f16(source, start + HALF + part * lanes)
            y = v.keep_first(y, count - HALF - part * lanes, v.splat(0.0))
            a = v.to_int(v.min(v.round_even(v.mul(v.sub(x, least), inverse)), v.splat(15.0)))
            b = v.to_int(v.min(v.round_even(v.mul(v.sub(y, least), inverse)), v.splat(15.0)))
            v.store_i8(codes, at + part * lanes, v.or_ints(a, v.shift_left(b, 4)))

    @njit(forceinline=True, **OPTIONS)
    def pack(record, recent, page, head):  # type: ignore[no-untyped-def]
        size, heads = record[KV_DIM], record[KV_HEADS]
        blocks, padded = (size + KV_BLOCK - 1) // KV_BLOCK, (size + 15) // 16 * 16
        from_keys, from_values = where(record[RECENT], recent, head, heads, size)
        number = head * record[N_PAGES] + page
        keys = record[TO_KEYS] + number * size * (HALF + 4)
        values = record[TO_VALUES] + number * blocks * PAGE * (HALF + 4)
        codes, scales, minima = v.i8p(keys), v.i8p(keys + size * HALF), v.i8p(keys + size * (HALF + 2))
        for d in range(size):
            encode(from_keys, d * PAGE, PAGE, codes, d * HALF, scales, minima, d)
        codes = v.i8p(values)
        for block in range(blocks):
            beside = values + blocks * PAGE * HALF + block * PAGE * 4
            scales, minima = v.i8p(beside), v.i8p(beside + PAGE * 2)
            for i in range(PAGE):
                d = block * KV_BLOCK
                encode(from_values, i * padded + d, size - d, codes, (block * PAGE + i) * HALF, scales, minima, i)

    @njit(forceinline=True, **OPTIONS)
    def filled(step, starts, positions, b):  # type: ignore[no-untyped-def]
        """The first page whose end span b reaches, and how many it fills."""
        if starts[b + 1] == starts[b]:
            return 0, 0
        first = positions[starts[b]] // PAGE
        return first, (positions[starts[b + 1] - 1] + 1) // PAGE - first

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        starts, positions = v.i32p(step[STEP_SPAN_STARTS]), v.i32p(step[STEP_POSITIONS])
        counter, heads, stride = v.i64p(record[COUNTER]), record[KV_HEADS], step[STEP_PAGE_STRIDE]
        while True:
            unit = v.atomic_add(counter, 0, 1)
            b = 0
            while b < step[STEP_SEQS]:
                first, n = filled(step, starts, positions, b)
                if unit < n * heads:
                    page = first + unit // heads
                    recent = v.i32p(step[STEP_RECENT_TABLE])[b * stride + page]
                    pack(record, recent, v.i32p(step[STEP_PAGE_TABLE])[b * stride + page], unit % heads)
                    break
                unit -= n * heads
                b += 1
            if b == step[STEP_SEQS]:
                break

    return kernel


def q4_scores(v: Verbs, rows: int) -> Callable[..., Any]:
    """(size, scratch, keys, ahead): scratch[SCORES + m * PAGE + i] = q of row m · keys[i]."""
    lanes, load_tile, two = v.lanes, v.tile_load(rows), two_at_once(v, rows)

    @njit(forceinline=True, **OPTIONS)
    def scale_queries(size, scratch, keys):  # type: ignore[no-untyped-def]
        """q s to SCALED_Q, and Σ q m to all of the row's scores."""
        for m in range(rows):
            total = v.splat(0.0)
            for d in range(0, size, lanes):
                q = v.load_f32(scratch, m * Q_STRIDE_FLOATS + d)
                scales = v.keep_first(v.load_f16(keys, size * (HALF // 2) + d), size - d, v.splat(0.0))
                minima = v.keep_first(v.load_f16(keys, size * (HALF // 2 + 1) + d), size - d, v.splat(0.0))
                v.store(scratch, SCALED_Q + m * Q_STRIDE_FLOATS + d, v.mul(q, scales))
                total = v.fma(q, minima, total)
            total = v.splat(v.sum_lanes(total))
            for place in range(0, PAGE, lanes):
                v.store(scratch, SCORES + m * PAGE + place, total)

    @njit(forceinline=True, **OPTIONS)
    def scores(size, scratch, keys, ahead):  # type: ignore[no-untyped-def]
        scale_queries(size, scratch, keys)
        for place in range(0, HALF, lanes):
            low, high = load_tile(scratch, SCORES + place, PAGE), load_tile(scratch, SCORES + HALF + place, PAGE)
            if two:
                for d in range(size):
                    v.prefetch(ahead, d * HALF + place)
                    low = v.tile_fma(low, v.load_low4(keys, d * HALF + place), scratch, SCALED_Q + d, Q_STRIDE_FLOATS)
                    high = v.tile_fma(
                        high, v.load_high4(keys, d * HALF + place), scratch, SCALED_Q + d, Q_STRIDE_FLOATS
                    )
            else:
                for d in range(size):
                    v.prefetch(ahead, d * HALF + place)
                    low = v.tile_fma(low, v.load_low4(keys, d * HALF + place), scratch, SCALED_Q + d, Q_STRIDE_FLOATS)
                for d in range(size):
                    high = v.tile_fma(
                        high, v.load_high4(keys, d * HALF + place), scratch, SCALED_Q + d, Q_STRIDE_FLOATS
                    )
            v.tile_store(low, scratch, SCORES + place, PAGE)
            v.tile_store(high, scratch, SCORES + HALF + place, PAGE)

    return scores


def q4_sums(v: Verbs, rows: int) -> Callable[..., Any]:
    """(size, scratch, state, values, ahead, first, stop): sums = α · sums + p V[first:stop]."""
    lanes, load_tile, two = v.lanes, v.tile_load(rows), two_at_once(v, rows)

    @njit(forceinline=True, **OPTIONS)
    def scale_p(scratch, scales):  # type: ignore[no-untyped-def]
        """p s to SCALED_P, and Σ p m to the row's constant."""
        for m in range(rows):
            total = v.splat(0.0)
            for place in range(0, PAGE, lanes):
                p = v.load_f32(scratch, SCORES + m * PAGE + place)
                v.store(scratch, SCALED_P + m * PAGE + place, v.mul(p, v.load_f16(scales, place)))
                total = v.fma(p, v.load_f16(scales, PAGE + place), total)
            scratch[CONSTANTS + m] = v.sum_lanes(total)

    @njit(forceinline=True, **OPTIONS)
    def begin(scratch, state, at):  # type: ignore[no-untyped-def]
        return v.tile_fma(
            v.tile_scale(load_tile(state, at, lanes), scratch, ALPHAS), v.splat(1.0), scratch, CONSTANTS, 1
        )

    @njit(forceinline=True, **OPTIONS)
    def sums(size, scratch, state, values, ahead, first, stop):  # type: ignore[no-untyped-def]
        blocks, padded = (size + KV_BLOCK - 1) // KV_BLOCK, (size + 15) // 16 * 16
        for block in range(blocks):
            scale_p(scratch, v.advance(values, (blocks * PAGE * HALF + block * PAGE * 4) // 4))
            codes = block * PAGE * HALF
            for part in range(0, HALF, lanes):
                at = SUMS + (block * KV_BLOCK + part) * ROWS_PER_TILE
                above, both = at + HALF * ROWS_PER_TILE, block * KV_BLOCK + HALF < padded
                low = begin(scratch, state, at)
                if both and two:
                    high = begin(scratch, state, above)
                    for i in range(first, stop):
                        v.prefetch(ahead, codes + i * HALF + part)
                        low = v.tile_fma(low, v.load_low4(values, codes + i * HALF + part), scratch, SCALED_P + i, PAGE)
                        high = v.tile_fma(
                            high, v.load_high4(values, codes + i * HALF + part), scratch, SCALED_P + i, PAGE
                        )
                    v.tile_store(high, state, above, lanes)
                else:
                    for i in range(first, stop):
                        v.prefetch(ahead, codes + i * HALF + part)
                        low = v.tile_fma(low, v.load_low4(values, codes + i * HALF + part), scratch, SCALED_P + i, PAGE)
                    if both:
                        high = begin(scratch, state, above)
                        for i in range(first, stop):
                            x = v.load_high4(values, codes + i * HALF + part)
                            high = v.tile_fma(high, x, scratch, SCALED_P + i, PAGE)
                        v.tile_store(high, state, above, lanes)
                v.tile_store(low, state, at, lanes)

    return sums
