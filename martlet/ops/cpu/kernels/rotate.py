"""Rotary positions (definition: `ops/reference.py`; arXiv:2104.09864), in half-split pairs (i, i +
dims/2).

The angles of a step are computed once for all layers, in float64 and rounded to float32, by
`rope_table`; `rope` then turns each head of each row by its row's angles.
"""

import math
from collections.abc import Callable

from martlet.ops.cpu.kernels.fields import COUNTER, ROPE, ROPE_TABLE, ROWS, STEP_POSITIONS
from martlet.ops.cpu.simd.verbs import Verbs

FREQUENCIES, HALF, MAGNITUDE, TABLE = ROPE_TABLE
IN, IN_STRIDE, OUT, OUT_STRIDE, HEADS, HEAD_DIM, ANGLES, ROPE_HALF = ROPE


def rope_table_kernel(v: Verbs) -> Callable[..., None]:
    """table[t] = cos(position · frequency), then sin, of `half` frequencies each."""

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        positions, frequencies = v.i32p(step[STEP_POSITIONS]), v.f64p(record[FREQUENCIES])
        half, magnitude, counter = record[HALF], v.float_bits(record[MAGNITUDE]), v.i64p(record[COUNTER])
        while True:
            t = v.atomic_add(counter, 0, 1)
            if t >= step[record[ROWS]]:
                break
            table = v.f32p(record[TABLE] + t * half * 8)
            for i in range(half):
                angle = positions[t] * frequencies[i]
                table[i] = v.narrow(math.cos(angle)) * magnitude
                table[half + i] = v.narrow(math.sin(angle)) * magnitude

    return kernel


def rope_kernel(v: Verbs) -> Callable[..., None]:
    """out = x with the first 2 · half columns of each head turned; a unit of work is a row."""
    lanes = v.lanes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        half, size, counter = record[ROPE_HALF], record[HEAD_DIM], v.i64p(record[COUNTER])
        while True:
            t = v.atomic_add(counter, 0, 1)
            if t >= step[record[ROWS]]:
                break
            cosines = v.f32p(record[ANGLES] + t * half * 8)
            for head in range(record[HEADS]):
                x = v.f32p(record[IN] + (t * record[IN_STRIDE] + head * size) * 4)
                out = v.f32p(record[OUT] + (t * record[OUT_STRIDE] + head * size) * 4)
                for i in range(0, half, lanes):
                    n = half - i
                    c, s = v.load_first(cosines, i, n), v.load_first(cosines, half + i, n)
                    first, second = v.load_first(x, i, n), v.load_first(x, half + i, n)
                    v.store_first(out, i, v.sub(v.mul(first, c), v.mul(second, s)), n)
                    v.store_first(out, half + i, v.add(v.mul(second, c), v.mul(first, s)), n)
                for i in range(2 * half, size):
                    out[i] = x[i]

    return kernel
