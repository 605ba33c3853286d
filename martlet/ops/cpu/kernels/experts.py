"""Mixtures of experts: the choice of experts, and products that read each expert's weights once.

    route          scores → each row's experts and their weights
    sort_choices   pairs of a row and one of its experts, sorted by expert
    gather_rows    the activations of each expert's pairs, put together in tiles
    expert_linear  tiles times their expert's weight (`linear.py`'s products); results go to where
                   their pair belongs
    combine        each row's results by their weights, in the router's order

A pair's product is that of a row with a matrix, so it has the same bits in any company. Sorting
makes no difference to them: each result has one place.

    order  int32: how many experts have pairs, how many tiles; then for each such expert, in order:
           its number, its first pair, its pairs, its first tile
    pairs  int32 [pairs][3]: row, slot (which of the row's experts), expert
    tiles  int32 [tiles][2]: first pair, pairs
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.fields import (
    COMBINE,
    COUNTER,
    EXPERT_LINEAR,
    GATE,
    GATHER_ROWS,
    ORDER_HEAD,
    ORDER_WORDS,
    ROUTE,
    ROWS,
    ROWS_PER_TILE,
    SORT_CHOICES,
    SUMS_PER_BLOCK,
)
from martlet.ops.cpu.kernels.layout import BLOCK, GROUP, FloatLayout, QuantLayout
from martlet.ops.cpu.kernels.linear import OPTIONS, few_rows_float, few_rows_product, many_rows_product, sharer
from martlet.ops.cpu.kernels.rowwise import claimer
from martlet.ops.cpu.simd.mathlib import exponential
from martlet.ops.cpu.simd.verbs import Verbs

IN, IN_STRIDE, OUT, OUT_STRIDE, WIDTH, *_ = ROUTE
*_, CHOSEN, SIGMOID, NORMALISED, FACTOR, BIAS, N_GROUPS, GROUPS_CHOSEN, N_RANKING, SCRATCH = ROUTE
CHOICE, CHOICE_STRIDE, SORTED_CHOSEN, N_EXPERTS, SORT_ORDER, SORT_PAIRS, SORT_TILES = SORT_CHOICES
X, X_SCALES, X_SUMS, X_MINS, X_STRIDE, TO, TO_SCALES, TO_SUMS, TO_MINS, GATHER_COLUMNS, *_ = GATHER_ROWS
*_, SLOT_COLUMNS, X_COLUMNS, GATHER_ORDER, GATHER_PAIRS, GATHER_TILES = GATHER_ROWS
WEIGHTS, N_ROWS, N_COLUMNS, GROUP_BYTES, *_ = EXPERT_LINEAR
*_, PRODUCT_OUT, PRODUCT_STRIDE, EXPERT_BIAS, UNPACKED, UNPACKED_BYTES, SLOT_STRIDE, ORDER, PAIRS = EXPERT_LINEAR
*_, COMBINED_CHOICE, COMBINED_STRIDE, COMBINED = COMBINE
*_, SCORES, SCORES_STRIDE, GATE_GROUPS = GATE
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
    """`choice` to order, pairs and tiles (drawn above), by one thread: it is a microsecond."""

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        if thread == 0:
            n_rows, chosen, n_experts = step[record[ROWS]], record[SORTED_CHOSEN], record[N_EXPERTS]
            order, pairs, tiles = v.i32p(record[SORT_ORDER]), v.i32p(record[SORT_PAIRS]), v.i32p(record[SORT_TILES])
            counts = v.i32p(record[SORT_ORDER] + (ORDER_HEAD + n_experts * ORDER_WORDS) * 4)
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
        n_blocks = record[GATHER_COLUMNS] // BLOCK
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
        to = v.i32p(record[TO] + to_row * record[GATHER_COLUMNS] * 4)
        for k in range(record[GATHER_COLUMNS]):
            to[k] = x[k]

    copy = copy_bytes if as_bytes else copy_floats

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        order, pairs, tiles = v.i32p(record[GATHER_ORDER]), v.i32p(record[GATHER_PAIRS]), v.i32p(record[GATHER_TILES])
        while True:
            tile = v.atomic_add(v.i64p(record[COUNTER]), 0, 1)
            if tile >= order[1]:
                break
            for m in range(tiles[2 * tile + 1]):
                pair = 3 * (tiles[2 * tile] + m)
                copy(record, pairs[pair], pairs[pair + 1], tile * ROWS_PER_TILE + m)

    return kernel


def pair_writer(v: Verbs, rows: int) -> Callable[..., Any]:
    """As `tile_writer`, but of pairs: each goes to its row and slot, with its expert's bias."""

    @njit(forceinline=True, **OPTIONS)
    def write(record, acc, place, n_rows, n):  # type: ignore[no-untyped-def]
        pairs, slot, valid = v.i32p(record[PAIRS]), record[SLOT_STRIDE], record[N_ROWS] - n
        for m in range(n_rows):
            pair = 3 * (place + m)
            out = v.f32p(record[PRODUCT_OUT] + (pairs[pair] * record[PRODUCT_STRIDE] + pairs[pair + 1] * slot) * 4)
            y = v.tile_get(acc, m)
            if record[EXPERT_BIAS] != 0:
                bias = v.f32p(record[EXPERT_BIAS] + pairs[pair + 2] * slot * 4)
                y = v.add(y, v.load_first(bias, n, valid))
            v.store_first(out, n, y, valid)

    return write


def expert_linear_kernel(v: Verbs, layout: QuantLayout | FloatLayout) -> Callable[..., None]:
    """The kernel for weights of one layout. Threads share the groups of all experts' weights, end
    to end, as they share those of one weight in `linear.py`.
    """
    if isinstance(layout, QuantLayout):
        v = Verbs(v.isa, GROUP)
        multiply, unpack_from = few_rows_product(v, layout, pair_writer), v.isa.unpack_from
        many_rows = many_rows_product(v, layout, pair_writer) if unpack_from else None
        unpacked_block = layout.unpacked.block_bytes
    else:
        multiply, unpack_from, many_rows, unpacked_block = few_rows_float(v, layout, pair_writer), 0, None, 0
    share = sharer()

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        order, weights, n_rows = v.i32p(record[ORDER]), v.i64p(record[WEIGHTS]), step[record[ROWS]]
        n_groups = (record[N_ROWS] + GROUP - 1) // GROUP
        in_all, group_bytes = order[0] * n_groups, record[GROUP_BYTES]
        if unpack_from and n_rows >= unpack_from:
            group_bytes = record[N_COLUMNS] // BLOCK * unpacked_block  # a chunk shall fit as unpacked
        ticket = thread
        while True:
            first, stop = share(group_bytes, n_rows, in_all, n_threads, ticket)
            if first >= in_all:
                break
            ticket = n_threads + v.atomic_add(v.i64p(record[COUNTER]), 0, 1)
            while first < stop:
                at = ORDER_HEAD + first // n_groups * ORDER_WORDS
                g = first % n_groups
                g_stop = min(n_groups, g + stop - first)
                weight, place, n, t = weights[order[at]], order[at + 1], order[at + 2], order[at + 3] * ROWS_PER_TILE
                if unpack_from and n >= unpack_from:
                    many_rows(
                        record, weight, t, place, n, g, g_stop, record[UNPACKED] + thread * record[UNPACKED_BYTES]
                    )
                else:
                    for row in range(0, n, ROWS_PER_TILE):
                        for group in range(g, g_stop):
                            multiply(record, weight, t + row, place + row, min(n - row, ROWS_PER_TILE), group)
                first += g_stop - g

    return kernel


def combine_kernel(v: Verbs) -> Callable[..., None]:
    """out = Σ weight · part, parts in the router's order, a fused multiply-add each."""
    claim, lanes = claimer(v), v.lanes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        width, chosen = record[WIDTH], record[COMBINED]
        while True:
            row, first, stop = claim(record, step)
            if row < 0:
                break
            y = v.f32p(record[IN] + row * record[IN_STRIDE] * 4)
            choice = v.f32p(record[COMBINED_CHOICE] + row * record[COMBINED_STRIDE] * 4)
            out = v.f32p(record[OUT] + row * record[OUT_STRIDE] * 4)
            for k in range(first, stop, lanes):
                total = v.splat(0.0)
                for s in range(chosen):
                    part = v.load_first(y, s * width + k, stop - k)
                    total = v.fma(part, v.splat(choice[chosen + s]), total)
                v.store_first(out, k, total, stop - k)

    return kernel


def gate_kernel(v: Verbs) -> Callable[..., None]:
    """out = x * sigmoid(score), GROUPS scores a row, each for as many columns."""
    claim, exp, lanes = claimer(v), exponential(v), v.lanes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        size = record[WIDTH] // record[GATE_GROUPS]
        while True:
            row, first, stop = claim(record, step)
            if row < 0:
                break
            x = v.f32p(record[IN] + row * record[IN_STRIDE] * 4)
            scores = v.f32p(record[SCORES] + row * record[SCORES_STRIDE] * 4)
            out = v.f32p(record[OUT] + row * record[OUT_STRIDE] * 4)
            k = first
            while k < stop:
                group_stop = min(stop, (k // size + 1) * size)
                one, score = v.splat(1.0), v.splat(scores[k // size])
                share = v.div(one, v.add(one, exp(v.sub(v.splat(0.0), score))))
                for i in range(k, group_stop, lanes):
                    v.store_first(out, i, v.mul(v.load_first(x, i, group_stop - i), share), group_stop - i)
                k = group_stop

    return kernel
