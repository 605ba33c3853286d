"""The online softmax of a tile of rows, and the states that it keeps.

Read `attention.py` next, which drives it.

A state holds of each row the largest score so far, the sum of p = e^(score - largest), and the sums
of p times values; `fields.py` says where. A page that a row does not see leaves its state as it is,
exactly: α = 1 and p = 0.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.fields import (
    ALPHAS,
    LARGEST,
    NEW_LARGEST,
    NEW_TOTALS,
    PAGE,
    RECENT_TOKENS,
    ROWS_PER_TILE,
    SCORES,
    SUMS,
    TOTALS,
)
from martlet.ops.cpu.kernels.linear import OPTIONS
from martlet.ops.cpu.simd.mathlib import exponential
from martlet.ops.cpu.simd.verbs import Verbs

helper = njit(forceinline=True, **OPTIONS)
HIDDEN = -1e30  # the score of a position that must not be seen


def softmax(v: Verbs, rows: int, own: bool, earlier: bool) -> Callable[..., Any]:
    """(scratch, state, positions, first_row, unit, page, heads, window): the tile's scores of a
    page to p, and m, l and α.

    Of a page of their own group only rows see anything if `own`, of one before only if `earlier`.
    """
    lanes, exp, parts = v.lanes, exponential(v), PAGE // v.lanes

    def form(whole: bool) -> Callable[..., Any]:
        @helper
        def seen(x, part, skip, count, otherwise):  # type: ignore[no-untyped-def]
            if whole:
                return x
            x = v.keep_first(x, count - part * lanes, v.splat(otherwise))
            return v.keep_first(v.splat(otherwise), skip - part * lanes, x)

        @helper
        def run(scratch, state, positions, first_row, unit, page, heads, window):  # type: ignore[no-untyped-def]
            skip, count = 0, PAGE
            for m in range(rows):
                if not whole:
                    skip, count = places_seen(positions, first_row, unit, m, heads, window, page)
                largest = v.splat(state[LARGEST + m])
                for part in range(parts):
                    score = v.load_f32(scratch, SCORES + m * PAGE + part * lanes)
                    largest = v.max(largest, seen(score, part, skip, count, HIDDEN))
                scratch[NEW_LARGEST + m] = v.max_lanes(largest)
            for m in range(rows):
                if not whole:
                    skip, count = places_seen(positions, first_row, unit, m, heads, window, page)
                largest, total = v.splat(scratch[NEW_LARGEST + m]), v.splat(0.0)
                for part in range(parts):
                    at = SCORES + m * PAGE + part * lanes
                    p = seen(exp(v.sub(v.load_f32(scratch, at), largest)), part, skip, count, 0.0)
                    v.store(scratch, at, p)
                    total = v.add(total, p)
                scratch[NEW_TOTALS + m] = v.sum_lanes(total)
            for m in range(0, rows, lanes):  # all rows at once
                new = v.load_f32(scratch, NEW_LARGEST + m)
                alpha = exp(v.sub(v.load_f32(state, LARGEST + m), new))
                v.store(scratch, ALPHAS + m, alpha)
                v.store(state, LARGEST + m, new)
                total = v.mul(v.load_f32(state, TOTALS + m), alpha)
                v.store(state, TOTALS + m, v.add(total, v.load_f32(scratch, NEW_TOTALS + m)))

        return run

    @helper
    def places_seen(positions, first_row, unit, m, heads, window, page):  # type: ignore[no-untyped-def]
        """The first place of a page that row m sees, and the one after its last.

        Rows that are not there see as the last.
        """
        position = positions[first_row + (unit.pair + min(m, unit.n - 1)) // heads]
        skip, count = position - window + 1 - page * PAGE if window > 0 else 0, position + 1 - page * PAGE
        if not (own and earlier):
            is_own = position // RECENT_TOKENS == page * PAGE // RECENT_TOKENS
            if (is_own and not own) or (not is_own and not earlier):
                count = 0
        return skip, count

    whole_page, part_of_page = form(True), form(False)

    @helper
    def tile(scratch, state, positions, first_row, unit, page, heads, window):  # type: ignore[no-untyped-def]
        _, count = places_seen(positions, first_row, unit, 0, heads, window, page)
        skip, last_count = places_seen(positions, first_row, unit, rows - 1, heads, window, page)
        if skip <= 0 and count >= PAGE and last_count >= PAGE:
            whole_page(scratch, state, positions, first_row, unit, page, heads, window)
        else:
            part_of_page(scratch, state, positions, first_row, unit, page, heads, window)

    return tile


def state_functions(v: Verbs, rows: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(state, size): nothing seen yet; (state, part, size): take in the next segment."""
    lanes, exp = v.lanes, exponential(v)

    @helper
    def clear(state, size):  # type: ignore[no-untyped-def]
        for m in range(rows):
            state[LARGEST + m] = v.narrow(HIDDEN)
            state[TOTALS + m] = v.narrow(0.0)
        for d in range(0, (size + 15) // 16 * 16 * ROWS_PER_TILE, lanes):
            v.store(state, SUMS + d, v.splat(0.0))

    @helper
    def merge(state, part, size):  # type: ignore[no-untyped-def]
        for m in range(rows):
            before, new = v.splat(state[LARGEST + m]), v.splat(part[LARGEST + m])
            largest = v.max(before, new)
            alpha, beta = exp(v.sub(before, largest)), exp(v.sub(new, largest))
            state[LARGEST + m] = v.first_lane(largest)
            total = v.mul(v.splat(state[TOTALS + m]), alpha)
            state[TOTALS + m] = v.first_lane(v.fma(v.splat(part[TOTALS + m]), beta, total))
            for d in range(0, (size + 15) // 16 * 16, lanes):
                at = SUMS + d * ROWS_PER_TILE + m * lanes
                v.store(state, at, v.fma(v.load_f32(part, at), beta, v.mul(v.load_f32(state, at), alpha)))

    return clear, merge
