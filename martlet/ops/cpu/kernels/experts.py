"""Products of rows with the experts that they go to: each expert's weights are read once.

`route.py` has sorted the pairs of a row and one of its experts, and put the rows of each expert
together in tiles. A tile is multiplied with its expert's weight by `linear.py`'s products; each
result goes to where its pair belongs. So a pair's product has the same bits in any company.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.fields import (
    COUNTER,
    EXPERT_LINEAR,
    ORDER_HEAD,
    ORDER_WORDS,
    ROWS,
    ROWS_PER_TILE,
)
from martlet.ops.cpu.kernels.layout import BLOCK, GROUP, FloatLayout, QuantLayout
from martlet.ops.cpu.kernels.linear import OPTIONS, few_rows_float, few_rows_product, many_rows_product, sharer
from martlet.ops.cpu.simd.verbs import Verbs

WEIGHT, N_ROWS, N_COLUMNS, GROUP_BYTES, *_ = EXPERT_LINEAR
*_, OUT, OUT_STRIDE, BIAS, UNPACKED, UNPACKED_BYTES, SLOT_STRIDE, ORDER, PAIRS = EXPERT_LINEAR


def pair_writer(v: Verbs, rows: int) -> Callable[..., Any]:
    """As `tile_writer`, but of pairs: each goes to its row and slot, with its expert's bias."""

    @njit(forceinline=True, **OPTIONS)
    def write(record, acc, place, n_rows, n):  # type: ignore[no-untyped-def]
        pairs, slot, valid = v.i32p(record[PAIRS]), record[SLOT_STRIDE], record[N_ROWS] - n
        for m in range(n_rows):
            pair = 3 * (place + m)
            out = v.f32p(record[OUT] + (pairs[pair] * record[OUT_STRIDE] + pairs[pair + 1] * slot) * 4)
            y = v.tile_get(acc, m)
            if record[BIAS] != 0:
                bias = v.f32p(record[BIAS] + pairs[pair + 2] * slot * 4)
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
        order, weights, n_rows = v.i32p(record[ORDER]), v.i64p(record[WEIGHT]), step[record[ROWS]]
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
