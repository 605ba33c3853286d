"""A kernel that only reads memory: the measure of what a decode on this machine cannot exceed (see `bench/bandwidth.py`)."""

from __future__ import annotations

from collections.abc import Callable

from martlet.ops.cpu.fields import ARGS, COUNTER
from martlet.ops.cpu.simd import Verbs

__all__ = ["BUFFER", "N_CHUNKS", "RESULT", "read_kernel"]

BUFFER, N_CHUNKS, RESULT = range(ARGS, ARGS + 3)
CHUNK = 1 << 20  # bytes that a thread reads front to back: as long a stream as a matrix gives it


def read_kernel(v: Verbs) -> Callable[..., None]:
    """Read N_CHUNKS mebibytes from BUFFER, four registers at a time; what was read goes into RESULT, so that it counts."""
    size = 4 * v.lanes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        counter, seen = v.i64p(record[COUNTER]), v.splat_int(0)
        while True:
            chunk = v.atomic_add(counter, 0, 1)
            if chunk >= record[N_CHUNKS]:
                break
            data = v.i8p(record[BUFFER] + chunk * CHUNK)
            for i in range(0, CHUNK, 4 * size):
                first = v.or_ints(v.as_ints(v.load_bytes(data, i)), v.as_ints(v.load_bytes(data, i + size)))
                second = v.as_ints(v.load_bytes(data, i + 2 * size))
                third = v.as_ints(v.load_bytes(data, i + 3 * size))
                seen = v.or_ints(seen, v.or_ints(first, v.or_ints(second, third)))
        if thread == 0:
            v.i64p(record[RESULT])[0] = v.sum_ints(seen)

    return kernel
