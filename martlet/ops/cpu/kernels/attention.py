"""Paged attention with an online softmax (FlashAttention, arXiv:2205.14135; paged:
arXiv:2309.06180; pages: `kv_float.py`).

A tile is up to 8 (token, query head) pairs that share a KV head: each key and value loaded is used
for all of them. A row goes over its pages in order of position: scores s, then with m the largest
so far

    α = e^(m_old - m),  p = e^(s - m),  l = α l + Σ p,  sums = α sums + p V    at last sums / l

It starts anew at every segment of 256 positions, and the segments' (m, l, sums) are merged in
order, in the same way: so the segments of one token may be computed by many threads (as in
Flash-Decoding). A unit of work is a tile, or a tile's segment; whoever finishes a tile's last one
merges. Pages and segments have fixed places, so a row's sums group the same way whatever shares its
tile, and a page that a row must not see is an exact no-op for it (α = 1, p = 0).

Of a q4 cache a row sees the positions of its own group in float16, and all before in 4 bits
(`kv_q4.py`): a page that rows of a tile see differently is gone over twice, each time as a no-op
for the rows of the other kind.

Bound by fused multiply-adds when many rows run, by reading the cache for one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from numba import njit

from martlet.ops.cpu.kernels.fields import (
    ALPHAS,
    ARRIVED,
    ATTENTION,
    BYTES,
    COUNTER,
    LARGEST,
    PAGE,
    Q_STRIDE_FLOATS,
    RECENT_TOKENS,
    ROWS_PER_TILE,
    SCORES,
    SCRATCH_FLOATS,
    SEGMENT_PAGES,
    SEGMENT_STATE,
    STATE,
    STEP_PAGE_STRIDE,
    STEP_PAGE_TABLE,
    STEP_POSITIONS,
    STEP_RECENT_TABLE,
    STEP_SEQS,
    STEP_SPAN_STARTS,
    SUMS,
    TOTALS,
    state_floats,
)
from martlet.ops.cpu.kernels.kv_float import float_scores, float_sums
from martlet.ops.cpu.kernels.kv_q4 import q4_scores, q4_sums, recent_place
from martlet.ops.cpu.kernels.kv_q8 import q8_scores, q8_sums
from martlet.ops.cpu.kernels.linear import OPTIONS
from martlet.ops.cpu.kernels.online_softmax import softmax, state_functions
from martlet.ops.cpu.kernels.quantize import quantizer
from martlet.ops.cpu.simd.mathlib import exponential, hyperbolic_tangent
from martlet.ops.cpu.simd.verbs import Verbs

helper = njit(forceinline=True, **OPTIONS)
SEGMENT = SEGMENT_PAGES * PAGE

Q, Q_STRIDE, OUT, OUT_STRIDE, KEYS, VALUES, KEY_BYTES, VALUE_BYTES, *_ = ATTENTION
(
    *_,
    N_KV_HEADS,
    HEADS_PER_KV,
    HEAD_DIM,
    SCALE,
    SOFTCAP,
    WINDOW,
    SCRATCH,
    PARTIALS,
    N_PARTIALS,
    RECENT,
    N_PAGES,
    SINKS,
) = ATTENTION


# How pages of each type give scores, and sums of values.
PAGE_FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "f16": (partial(float_scores, half=True), partial(float_sums, half=True)),
    "f32": (partial(float_scores, half=False), partial(float_sums, half=False)),
    "q8": (q8_scores, q8_sums),
    "q4": (q4_scores, q4_sums),
}


class Unit(NamedTuple):
    """Rows pair … pair + n - 1 of sequence b, KV head g.

    All segments, or `segment` alone, with states at `partials`.
    """

    b: int
    pair: int
    n: int
    g: int
    segment: int
    partials: int  # address of the tile's first state; 0: one thread does the whole tile


def row_functions(v: Verbs, rows: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(record, scratch, first_row, unit): scaled queries to the scratch; outputs from the state."""
    lanes, quantize, exp = v.lanes, quantizer(v, 1), exponential(v)

    @helper
    def begin(record, scratch, first_row, unit):  # type: ignore[no-untyped-def]
        size, heads, scale = record[HEAD_DIM], record[HEADS_PER_KV], v.splat(v.float_bits(record[SCALE]))
        for m in range(rows):  # rows that are not there are zeros
            t, h = first_row + (unit.pair + m) // heads, unit.g * heads + (unit.pair + m) % heads
            q = v.f32p(record[Q] + (t * record[Q_STRIDE] + h * size) * 4)
            for d in range(0, size, lanes):
                here = size - d if m < unit.n else 0
                v.store(scratch, m * Q_STRIDE_FLOATS + d, v.mul(v.load_first(q, d, here), scale))
            scratch[ALPHAS + m] = v.narrow(1.0)

    @helper
    def finish(record, state, first_row, unit):  # type: ignore[no-untyped-def]
        size, heads = record[HEAD_DIM], record[HEADS_PER_KV]
        for m in range(unit.n):
            t, h = first_row + (unit.pair + m) // heads, unit.g * heads + (unit.pair + m) % heads
            out, start = v.f32p(record[OUT] + t * record[OUT_STRIDE] * 4), h * size
            total = v.splat(state[TOTALS + m])
            if record[SINKS] != 0:
                sink = v.splat(v.f32p(record[SINKS])[h])
                total = v.add(total, exp(v.sub(sink, v.splat(state[LARGEST + m]))))
            for d in range(0, size, lanes):
                value = v.div(v.load_f32(state, SUMS + d * ROWS_PER_TILE + m * lanes), total)
                # Never -0, which hidden positions of another tile turn to 0.
                value = v.add(value, v.splat(0.0))
                v.store_first(out, start + d, value, size - d)
            if record[BYTES] != 0:
                quantize(record, out, 0, t, start, start + size)

    return begin, finish


def first_seen(window: int, position: int) -> int:
    """The first position that the row at `position` sees."""
    return max(0, position - window + 1) if window > 0 else 0


def page_functions(v: Verbs, rows: int, dtype: str) -> Callable[..., Any]:
    """(record, scratch, state, positions, pages, recent, first_row, unit, page, ahead, low, high):
    see one page.

    It is number `page` of the sequence; `ahead` is the next page's place in the cache.
    """
    lanes, tanh, float_place = v.lanes, hyperbolic_tangent(v), recent_place(v)

    @helper
    def cap_scores(record, scratch):  # type: ignore[no-untyped-def]
        if record[SOFTCAP] != 0:
            cap = v.splat(v.float_bits(record[SOFTCAP]))
            for i in range(SCORES, SCORES + rows * PAGE, lanes):
                v.store(scratch, i, v.mul(cap, tanh(v.div(v.load_f32(scratch, i), cap))))

    def form(cache_type: str, own: bool, earlier: bool) -> Callable[..., Any]:
        """See a page: for rows in its own group, for rows of later groups, or for both."""
        page_scores, page_sums = (make(v, rows) for make in PAGE_FORMS[cache_type])
        softmax_tile = softmax(v, rows, own, earlier)

        @helper
        def run(record, scratch, state, positions, first_row, unit, page, here, ahead, low, high):  # type: ignore[no-untyped-def]
            size = record[HEAD_DIM]
            page_scores(size, scratch, here[0], ahead[0])
            cap_scores(record, scratch)
            softmax_tile(scratch, state, positions, first_row, unit, page, record[HEADS_PER_KV], record[WINDOW])
            first, stop = max(0, low - page * PAGE), min(PAGE, high + 1 - page * PAGE)
            page_sums(size, scratch, state, here[1], ahead[1], first, stop)

        return run

    @helper
    def place(record, number):  # type: ignore[no-untyped-def]
        return v.i8p(record[KEYS] + number * record[KEY_BYTES]), v.i8p(record[VALUES] + number * record[VALUE_BYTES])

    if dtype != "q4":
        all_rows = form(dtype, True, True)

        @helper
        def see_at_once(record, scratch, state, positions, pages, recent, first_row, unit, page, ahead, low, high):  # type: ignore[no-untyped-def]
            here, beyond = place(record, unit.g * record[N_PAGES] + pages[page]), place(record, ahead)
            all_rows(record, scratch, state, positions, first_row, unit, page, here, beyond, low, high)

        return see_at_once
    earlier_rows, own_rows = form(dtype, False, True), form("f16", True, False)

    @helper
    def see(record, scratch, state, positions, pages, recent, first_row, unit, page, ahead, low, high):  # type: ignore[no-untyped-def]
        group = page * PAGE // RECENT_TOKENS
        if group < high // RECENT_TOKENS:
            here, beyond = place(record, unit.g * record[N_PAGES] + pages[page]), place(record, ahead)
            earlier_rows(record, scratch, state, positions, first_row, unit, page, here, beyond, low, high)
        if group >= positions[first_row + unit.pair // record[HEADS_PER_KV]] // RECENT_TOKENS:
            here = float_place(record[RECENT], recent[page], unit.g, record[N_KV_HEADS], record[HEAD_DIM])
            own_rows(record, scratch, state, positions, first_row, unit, page, here, here, low, high)

    return see


def tile_attention(v: Verbs, rows: int, dtype: str) -> Callable[..., Any]:
    """(record, scratch, positions, pages, recent, first_row, unit, ahead): a unit of ≤ `rows` rows.

    `pages` and `recent` are the sequence's page numbers, `ahead` the place of the page that this
    thread goes to next.
    """
    see_page = page_functions(v, rows, dtype)
    (clear, merge), (begin, finish) = state_functions(v, rows), row_functions(v, rows)
    first_of, floats_of = helper(first_seen), helper(state_floats)

    @njit(**OPTIONS)
    def attend(record, scratch, positions, pages, recent, first_row, unit, ahead):  # type: ignore[no-untyped-def]
        begin(record, scratch, first_row, unit)
        heads, size, n_pages = record[HEADS_PER_KV], record[HEAD_DIM], record[N_PAGES]
        high = positions[first_row + (unit.pair + unit.n - 1) // heads]
        low = first_of(record[WINDOW], positions[first_row + unit.pair // heads])
        first, last = low // SEGMENT, high // SEGMENT
        state_bytes = floats_of(size) * 4
        whole, shared = v.advance(scratch, STATE), unit.partials != 0
        if first == last:  # taking one segment in changes nothing
            whole = v.advance(scratch, SEGMENT_STATE)
        else:
            clear(whole, size)
        for segment in range(unit.segment if shared else first, (unit.segment if shared else last) + 1):
            state = v.advance(scratch, SEGMENT_STATE)
            if shared:
                state = v.f32p(unit.partials + (segment - first) * state_bytes)
            clear(state, size)
            stop_page = min(high // PAGE, segment * SEGMENT_PAGES + SEGMENT_PAGES - 1) + 1
            for page in range(max(low // PAGE, segment * SEGMENT_PAGES), stop_page):
                follows = page + 1 < stop_page or (not shared and segment < last)
                beyond = unit.g * n_pages + pages[page + 1] if follows else ahead
                see_page(record, scratch, state, positions, pages, recent, first_row, unit, page, beyond, low, high)
            if not shared and first < last:
                merge(whole, state, size)
        if shared:
            arrived = v.i64p(unit.partials + ARRIVED * 4)
            if v.atomic_add(arrived, 0, 1) < last - first:
                return
            arrived[0] = 0
            for segment in range(last - first + 1):
                merge(whole, v.f32p(unit.partials + segment * state_bytes), size)
        finish(record, whole, first_row, unit)

    return attend


def tile_sizes(heads: int, most: int) -> tuple[int, int]:
    """Rows of a tile of one token, and of a few, where `heads` query heads share a KV head."""
    few = min(heads, most)
    return few, min(2 * max(few, 2), most)


def unit_finder(v: Verbs, some: int) -> Callable[..., Any]:
    """(record, step, n_threads, number, cursor) → (unit, cursor), for numbers that never fall; b is
    -1 after the last.

    The cursor, (b, units before b, states used before b), starts as three zeros. A span's last
    tile, which has the most to see, comes first; a tile that is its span's only one is shared if it
    sees more than a segment. Tiles have up to `some` rows where that leaves fewer empty.
    """
    most, first_of, floats_of = v.rows, helper(first_seen), helper(state_floats)

    @helper
    def find(record, step, n_threads, number, cursor):  # type: ignore[no-untyped-def]
        starts, positions = v.i32p(step[STEP_SPAN_STARTS]), v.i32p(step[STEP_POSITIONS])
        heads, size, n_kv_heads = record[HEADS_PER_KV], record[HEAD_DIM], record[N_KV_HEADS]
        state_bytes = floats_of(size) * 4
        b, before, used = cursor
        while b < step[STEP_SEQS]:
            pairs = (starts[b + 1] - starts[b]) * heads
            tile_rows = some if pairs <= some or most < pairs <= 2 * some else most
            tiles = (pairs + tile_rows - 1) // tile_rows
            first = first_of(record[WINDOW], positions[starts[b]]) // SEGMENT
            segments = positions[starts[b + 1] - 1] // SEGMENT - first + 1
            need = segments * n_kv_heads
            shared = tiles == 1 and segments > 1 and n_threads > 1 and used + need <= record[N_PARTIALS]
            count = need if shared else tiles * n_kv_heads
            if number < before + count:
                g, i = (number - before) % n_kv_heads, (number - before) // n_kv_heads
                if shared:
                    states = record[PARTIALS] + (used + g * segments) * state_bytes
                    return Unit(b, 0, pairs, g, first + i, states), (b, before, used)
                pair = (tiles - 1 - i) * tile_rows
                return Unit(b, pair, min(tile_rows, pairs - pair), g, 0, 0), (b, before, used)
            before += count
            used += need if shared else 0
            b += 1
        return Unit(-1, 0, 0, 0, 0, 0), (b, before, used)

    return find


def attention_kernel(v: Verbs, dtype: str, heads: int) -> Callable[..., None]:
    """The kernel for one kind of cache, and for tiles of one token: `heads` query heads share a KV
    head.

    A thread claims a unit ahead, to fetch its first page in time.
    """
    few, some = tile_sizes(heads, v.rows)
    tiles = {rows: tile_attention(v, rows, dtype) for rows in {few, some, v.rows}}
    token, tokens, many = tiles[few], tiles[some], tiles[v.rows]
    find, first_of = unit_finder(v, some), helper(first_seen)

    @helper
    def first_page(record, step, unit):  # type: ignore[no-untyped-def]
        """Where the cache has the first page that a unit sees."""
        if unit.b < 0:
            return 0
        position = v.i32p(step[STEP_POSITIONS])[
            v.i32p(step[STEP_SPAN_STARTS])[unit.b] + unit.pair // record[HEADS_PER_KV]
        ]
        page = max(first_of(record[WINDOW], position) // PAGE, unit.segment * SEGMENT_PAGES)
        pages = v.i32p(step[STEP_PAGE_TABLE] + unit.b * step[STEP_PAGE_STRIDE] * 4)
        return unit.g * record[N_PAGES] + pages[page]

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        starts, positions = v.i32p(step[STEP_SPAN_STARTS]), v.i32p(step[STEP_POSITIONS])
        scratch = v.f32p(record[SCRATCH] + thread * SCRATCH_FLOATS * 4)
        counter = v.i64p(record[COUNTER])
        unit, cursor = find(record, step, n_threads, v.atomic_add(counter, 0, 1), (0, 0, 0))
        while unit.b >= 0:
            following, cursor = find(record, step, n_threads, v.atomic_add(counter, 0, 1), cursor)
            ahead = first_page(record, step, following)
            table = unit.b * step[STEP_PAGE_STRIDE] * 4
            pages, recent = v.i32p(step[STEP_PAGE_TABLE] + table), v.i32p(step[STEP_RECENT_TABLE] + table)
            if unit.n <= few:
                token(record, scratch, positions, pages, recent, starts[unit.b], unit, ahead)
            elif unit.n <= some:
                tokens(record, scratch, positions, pages, recent, starts[unit.b], unit, ahead)
            else:
                many(record, scratch, positions, pages, recent, starts[unit.b], unit, ahead)
            unit = following

    return kernel
