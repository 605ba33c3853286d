"""The largest logit of each row, and further steps in one program (for `speculate/eagle.py`).

`advance` turns the step's header, and the arrays that it points to, into those of the next step: a
row a sequence. It is one thread's work of less than a microsecond, with a meeting of all before and
after it. Where nothing is worth going on from, it ends the program.
"""

from collections.abc import Callable

from martlet.ops.cpu.kernels.fields import (
    ADVANCE,
    ARGMAX,
    COUNTER,
    PAGE,
    STEP_ENDED,
    STEP_IDS,
    STEP_LEAST,
    STEP_LOGIT_ROWS,
    STEP_LOGITS,
    STEP_PAGE_STRIDE,
    STEP_PAGE_TABLE,
    STEP_POSITIONS,
    STEP_SEQS,
    STEP_SLOTS,
    STEP_SPAN_STARTS,
    STEP_TOKENS,
)
from martlet.ops.cpu.simd.mathlib import exponential
from martlet.ops.cpu.simd.verbs import Verbs

IN, IN_STRIDE, OUT, OUT_STRIDE, WIDTH, TOKENS, BEFORE, BEFORE_STRIDE = ARGMAX
GUESSES, GUESSES_STRIDE = ADVANCE
INFINITY = float("inf")
TOKEN, PROBABILITY, CHANCE = range(3)  # columns of a guess


def argmax_kernel(v: Verbs) -> Callable[..., None]:
    """out = the largest logit's token, its probability and the chain's. A unit of work is a row."""
    exp, lanes = exponential(v), v.lanes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        width, tokens = record[WIDTH], v.f32p(record[TOKENS])
        while True:
            row = v.atomic_add(v.i64p(record[COUNTER]), 0, 1)
            if row >= step[STEP_LOGITS]:
                break
            x = v.f32p(record[IN] + row * record[IN_STRIDE] * 4)
            out = v.f32p(record[OUT] + row * record[OUT_STRIDE] * 4)
            first = v.splat(v.f32_at(x, 0))
            largest = first
            for k in range(0, width, lanes):
                largest = v.max(largest, v.keep_first(v.load_first(x, k, width - k), width - k, first))
            top = v.max_lanes(largest)
            total = v.splat(0.0)
            for k in range(0, width, lanes):
                share = exp(v.sub(v.load_first(x, k, width - k), v.splat(top)))
                total = v.add(total, v.keep_first(share, width - k, v.splat(0.0)))
            best = 0
            while best < width - 1 and x[best] != top:
                best += 1
            chance = v.first_lane(v.div(v.splat(1.0), v.splat(v.sum_lanes(total))))
            out[TOKEN] = tokens[best]
            out[PROBABILITY] = chance
            if record[BEFORE] != 0:
                chance *= v.f32p(record[BEFORE] + row * record[BEFORE_STRIDE] * 4)[CHANCE]
            out[CHANCE] = chance

    return kernel


def choose_kernel(v: Verbs) -> Callable[..., None]:
    """out = the first column of the largest logit, -1 where it is infinite or one is NaN.

    A unit is a row.

    Bound by reading the logits twice, the second time only up to the largest.
    """
    lanes = v.lanes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        width = record[WIDTH]
        while True:
            row = v.atomic_add(v.i64p(record[COUNTER]), 0, 1)
            if row >= step[STEP_LOGITS]:
                break
            x = v.f32p(record[IN] + row * record[IN_STRIDE] * 4)
            first, odd = v.splat(v.f32_at(x, 0)), v.splat(0.0)
            largest = first
            for k in range(0, width, lanes):
                values = v.keep_first(v.load_first(x, k, width - k), width - k, first)
                largest = v.max(largest, values)
                odd = v.max(odd, v.where_below(values, v.splat(INFINITY), v.splat(0.0), v.splat(1.0)))
            top, best = v.max_lanes(largest), 0
            if v.max_lanes(odd) != 0.0 or top == -INFINITY:
                best = -1
            else:
                while x[best] != top:
                    best += 1
            v.f32p(record[OUT] + row * record[OUT_STRIDE] * 4)[TOKEN] = v.int_to_f32(best)

    return kernel


def advance_kernel(v: Verbs) -> Callable[..., None]:
    """The header and its arrays become those of the next step.

    Rows are in the order of sequences: none is written before it is read.
    """

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        if thread != 0:
            return
        n, least, goes_on = step[STEP_LOGITS], v.float_bits(step[STEP_LEAST]), False
        for row in range(n):
            goes_on |= v.f32p(record[GUESSES] + row * record[GUESSES_STRIDE] * 4)[CHANCE] >= least
        if not goes_on:
            step[STEP_ENDED] = 1
            return
        ids, positions, slots = v.i32p(step[STEP_IDS]), v.i32p(step[STEP_POSITIONS]), v.i32p(step[STEP_SLOTS])
        starts, last_rows = v.i32p(step[STEP_SPAN_STARTS]), v.i32p(step[STEP_LOGIT_ROWS])
        for row in range(n):
            position = positions[last_rows[row]] + 1
            pages = v.i32p(step[STEP_PAGE_TABLE] + row * step[STEP_PAGE_STRIDE] * 4)
            ids[row] = int(v.f32p(record[GUESSES] + row * record[GUESSES_STRIDE] * 4)[TOKEN])
            positions[row], slots[row] = position, pages[position // PAGE] * PAGE + position % PAGE
            starts[row], last_rows[row] = row, row
        starts[n] = n
        step[STEP_TOKENS] = step[STEP_SEQS] = n

    return kernel
