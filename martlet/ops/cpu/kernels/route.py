"""Which experts each row goes to (read `experts.py` next: their products).

    route          scores → each row's experts and their weights
    sort_choices   pairs of a row and one of its experts, sorted by expert
    gather_rows    the activations of each expert's pairs, put together in tiles

What the last two write:

    order  int32: how many experts have pairs, how many tiles; then for each such expert, in order:
           its number, its first pair, its pairs, its first tile
    pairs  int32 [pairs][3]: row, slot (which of the row's experts), expert
    tiles  int32 [tiles][2]: first pair, pairs
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.fields import (
    COUNTER,
    GATHER_ROWS,
    ORDER_HEAD,
    ORDER_WORDS,
    ROUTE,
    ROWS,
    ROWS_PER_TILE,
    SORT_CHOICES,
    SUMS_PER_BLOCK,
)
from martlet.ops.cpu.kernels.layout import BLOCK, GROUP
from martlet.ops.cpu.kernels.linear import OPTIONS
from martlet.ops.cpu.simd.mathlib import exponential
from martlet.ops.cpu.simd.verbs import Verbs

IN, IN_STRIDE, OUT, OUT_STRIDE, WIDTH, *_ = ROUTE
*_, CHOSEN, SIGMOID, NORMALISED, FACTOR, BIAS, N_GROUPS, GROUPS_CHOSEN, N_RANKING, SCRATCH = ROUTE
ORDER, PAIRS, TILES, CHOICE, CHOICE_STRIDE, N_CHOSEN, N_EXPERTS = SORT_CHOICES
_, _, _, X, X_SCALES, X_SUMS, X_MINS, X_STRIDE, TO, TO_SCALES, TO_SUMS, TO_MINS, *_ = GATHER_ROWS
*_, N_COLUMNS, SLOT_COLUMNS, X_COLUMNS = GATHER_ROWS
LOWEST, TINY = float("-inf"), 1e-20


def route_kernel(v: Verbs) -> Callable[..., None]:
    """A unit is a row; the thread's scratch has its ranks, probabilities, and sums of groups."""
    exp, lanes = exponential(v), v.lanes
    close_groups, best_of = group_closer(v), best_expert(v)

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        n, chosen = record[WIDTH], record[CHOSEN]
        room = (n + GROUP) * 4  # whole registers are stored
        scratch = record[SCRATCH] + thread * 3 * room
        ranks, p, sums = v.f32p(scratch), v.f32p(scratch + room), v.f32p(scratch + 2 * room)
        while True:
            row = v.atomic_add(v.i64p(record[COUNTER]), 0, 1)
            if row >= step[record[ROWS]]:
                break
            scores = v.f32p(record[IN] + row * record[IN_STRIDE] * 4)
            out = v.f32p(record[OUT] + row * record[OUT_STRIDE] * 4)
            most = scores[0]
            for i in range(1, n):
                most = max(most, scores[i])
            for i in range(0, n, lanes):
                x = v.load_first(scores, i, n - i)
                if record[SIGMOID] != 0:
                    v.store(p, i, v.div(v.splat(1.0), v.add(v.splat(1.0), exp(v.sub(v.splat(0.0), x)))))
                else:
                    v.store(p, i, exp(v.sub(x, v.splat(most))))
            if record[SIGMOID] == 0:
                total = v.narrow(0.0)
                for i in range(n):
                    total += p[i]
                for i in range(n):
                    p[i] = p[i] / total
            bias = v.f32p(record[BIAS])
            for i in range(n):
                rank = scores[i]
                if record[BIAS] != 0:
                    rank = p[i] + bias[i]
                ranks[i] = rank
                if rank != rank:  # NaN ranks last
                    ranks[i] = v.narrow(LOWEST)
            if record[N_GROUPS] > 1:
                close_groups(record, ranks, sums)
            total, before = v.narrow(0.0), -1
            for s in range(chosen):
                before = best_of(ranks, n, before)
                v.put_f32(out, s, v.int_to_f32(before))
                out[chosen + s] = p[before]
                total += p[before]
            total = max(total, v.narrow(TINY))
            factor = v.float_bits(record[FACTOR])
            for s in range(chosen):
                weight = out[chosen + s]
                if record[NORMALISED] != 0:
                    weight = weight / total
                out[chosen + s] = weight * factor

    return kernel


def best_expert(v: Verbs) -> Callable[..., Any]:
    """(ranks, n, before) → the expert that ranks next after expert `before`; -1: before all.

    Of equal ranks the lower number comes first.
    """

    @njit(forceinline=True, **OPTIONS)
    def best(ranks, n, before):  # type: ignore[no-untyped-def]
        number = -1
        for i in range(n):
            left = before < 0 or ranks[i] < ranks[before] or (ranks[i] == ranks[before] and i > before)
            if left and (number < 0 or ranks[i] > ranks[number]):
                number = i
        return number

    return best


def group_closer(v: Verbs) -> Callable[..., Any]:
    """(record, ranks, sums): all but the best groups' experts get the lowest rank."""

    @njit(forceinline=True, **OPTIONS)
    def close(record, ranks, sums):  # type: ignore[no-untyped-def]
        n_groups, size = record[N_GROUPS], record[WIDTH] // record[N_GROUPS]
        for g in range(n_groups):
            best, second = v.narrow(LOWEST), v.narrow(LOWEST)
            for i in range(g * size, (g + 1) * size):
                if ranks[i] > best:
                    second = best
                    best = ranks[i]
                elif ranks[i] > second:
                    second = ranks[i]
            sums[g] = best
            if record[N_RANKING] == 2:
                sums[g] = best + second
        for g in range(n_groups):
            better = 0
            for other in range(n_groups):
                if sums[other] > sums[g] or (sums[other] == sums[g] and other < g):
                    better += 1
            if better >= record[GROUPS_CHOSEN]:
                for i in range(g * size, (g + 1) * size):
                    ranks[i] = v.narrow(LOWEST)

    return close


def sort_choices_kernel(v: Verbs) -> Callable[..., None]:
    """`choice` to order, pairs and tiles (drawn above), by one thread: it takes microseconds."""

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        if thread == 0:
            n_rows, chosen, n_experts = step[record[ROWS]], record[N_CHOSEN], record[N_EXPERTS]
            order, pairs, tiles = v.i32p(record[ORDER]), v.i32p(record[PAIRS]), v.i32p(record[TILES])
            counts = v.i32p(record[ORDER] + (ORDER_HEAD + n_experts * ORDER_WORDS) * 4)
            for e in range(n_experts):
                counts[e] = 0
            for t in range(n_rows):
                choice = v.f32p(record[CHOICE] + t * record[CHOICE_STRIDE] * 4)
                for s in range(chosen):
                    counts[int(choice[s])] += 1
            n_active, first, n_tiles = 0, 0, 0
            for e in range(n_experts):
                n = counts[e]
                counts[e] = first  # from here on: where its next pair goes
                if n > 0:
                    at = ORDER_HEAD + n_active * ORDER_WORDS
                    order[at], order[at + 1], order[at + 2], order[at + 3] = e, first, n, n_tiles
                    for row in range(0, n, ROWS_PER_TILE):
                        tiles[2 * n_tiles], tiles[2 * n_tiles + 1] = first + row, min(n - row, ROWS_PER_TILE)
                        n_tiles += 1
                    n_active += 1
                    first += n
            order[0], order[1] = n_active, n_tiles
            for t in range(n_rows):
                choice = v.f32p(record[CHOICE] + t * record[CHOICE_STRIDE] * 4)
                for s in range(chosen):
                    e = int(choice[s])
                    place = counts[e]
                    counts[e] = place + 1
                    pairs[3 * place], pairs[3 * place + 1], pairs[3 * place + 2] = t, s, e

    return kernel


def gather_rows_kernel(v: Verbs, *, as_bytes: bool) -> Callable[..., None]:
    """The rows of each tile, as bytes with their scales and sums, or as float32 [tiles * 8][K]."""

    @njit(forceinline=True, **OPTIONS)
    def copy_bytes(record, row, slot, to_row):  # type: ignore[no-untyped-def]
        n_blocks = record[N_COLUMNS] // BLOCK
        first = row // ROWS_PER_TILE * (record[X_COLUMNS] // BLOCK) + slot * record[SLOT_COLUMNS] // BLOCK
        place = first * ROWS_PER_TILE + row % ROWS_PER_TILE
        to = to_row // ROWS_PER_TILE * n_blocks * ROWS_PER_TILE + to_row % ROWS_PER_TILE
        x, to_x = v.i64p(record[X]), v.i64p(record[TO])
        scales, to_scales = v.i32p(record[X_SCALES]), v.i32p(record[TO_SCALES])
        sums, to_sums = v.i32p(record[X_SUMS]), v.i32p(record[TO_SUMS])
        mins, to_mins = v.i32p(record[X_MINS]), v.i32p(record[TO_MINS])
        row, to_row = row % ROWS_PER_TILE, to_row % ROWS_PER_TILE
        for _ in range(n_blocks):
            for word in range(BLOCK // 8):
                to_x[to * (BLOCK // 8) + word] = x[place * (BLOCK // 8) + word]
            to_scales[to] = scales[place]
            at, to_at = (place - row) * SUMS_PER_BLOCK + row, (to - to_row) * SUMS_PER_BLOCK + to_row
            for part in range(0, SUMS_PER_BLOCK * ROWS_PER_TILE, ROWS_PER_TILE):
                to_sums[to_at + part] = sums[at + part]
                to_mins[to_at + part] = mins[at + part]
            place += ROWS_PER_TILE
            to += ROWS_PER_TILE

    @njit(forceinline=True, **OPTIONS)
    def copy_floats(record, row, slot, to_row):  # type: ignore[no-untyped-def]
        x = v.i32p(record[X] + (row * record[X_STRIDE] + slot * record[SLOT_COLUMNS]) * 4)
        to = v.i32p(record[TO] + to_row * record[N_COLUMNS] * 4)
        for k in range(record[N_COLUMNS]):
            to[k] = x[k]

    copy = copy_bytes if as_bytes else copy_floats

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        order, pairs, tiles = v.i32p(record[ORDER]), v.i32p(record[PAIRS]), v.i32p(record[TILES])
        while True:
            tile = v.atomic_add(v.i64p(record[COUNTER]), 0, 1)
            if tile >= order[1]:
                break
            for m in range(tiles[2 * tile + 1]):
                pair = 3 * (tiles[2 * tile] + m)
                copy(record, pairs[pair], pairs[pair + 1], tile * ROWS_PER_TILE + m)

    return kernel
