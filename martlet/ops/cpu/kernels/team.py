"""The compiled side of the team of threads: how a program is walked and how threads meet.

Read `program.py` next.

All threads of a team walk the same records. Each claims its share of an operation with an atomic
counter, and where a record says so they meet at a spin barrier before it starts: nobody returns to
the interpreter within a step. A waiting thread yields the processor after a bounded spin, for
machines whose cores are shared; a worker without a step goes to sleep after about a millisecond, in
Python, where the main thread wakes it.

`control` is what they share, a cache line for each word that several threads write.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils

from martlet.ops.cpu.kernels.fields import (
    AHEAD,
    AHEAD_STRIDE,
    ARRIVALS,
    BARRIER,
    BASE,
    CONTROL,
    COUNTER,
    IDLE_SPINS,
    KERNEL,
    LAST,
    LAUNCHED,
    LINE_WORDS,
    N_RECORDS,
    READ,
    RECORD_FIELDS,
    RECORDS,
    SLEEPING,
    STEP_ADDRESS,
    STEP_ENDED,
    STEP_NUMBER,
    STOPPING,
    TO_WAKE,
)
from martlet.ops.cpu.kernels.linear import OPTIONS
from martlet.ops.cpu.simd.emit import I8, I32, I64, verb
from martlet.ops.cpu.simd.verbs import Verbs

BUFFER, N_CHUNKS, RESULT = READ

AHEAD_BYTES = 4096  # what a thread fetches of its next weights before it waits
CHUNK = 1 << 20  # bytes that a thread of `read` reads front to back, as long as a matrix's stream
SPINS = 2000  # looks at a barrier before a thread yields: tens of microseconds


def kernel_caller() -> Any:
    """The verb (address, record, step, thread, n_threads): call a compiled kernel."""
    pointer, word = I8.as_pointer(), I64.as_pointer()
    llvm_type = ir.FunctionType(I32, [pointer, pointer, word, word, I64, I64])

    def emit(b: Any, t: Any, address: Any, *args: Any) -> None:
        # Where Numba's functions put results and errors.
        unused = b.bitcast(cgutils.alloca_once(b, I64), pointer)
        b.call(b.inttoptr(address, llvm_type.as_pointer()), [unused, unused, *args])

    return verb(5, lambda *a: None, emit)


def walker(v: Verbs) -> Callable[..., Any]:
    """(control, step, thread, n_threads): this thread's share of all records of the program."""
    call_kernel = kernel_caller()

    @njit(forceinline=True, **OPTIONS)
    def meet(control, target):  # type: ignore[no-untyped-def]
        v.atomic_add(control, ARRIVALS, 1)
        spins = 0
        while v.atomic_load(control, ARRIVALS) < target:
            spins += 1
            if spins < SPINS:
                v.pause()
            else:
                v.yield_processor()

    @njit(forceinline=True, **OPTIONS)
    def walk(control, thread, n_threads):  # type: ignore[no-untyped-def]
        target, step = control[BASE], v.i64p(control[STEP_ADDRESS])
        for r in range(control[N_RECORDS]):
            record = v.i64p(control[RECORDS] + r * RECORD_FIELDS * 8)
            if record[BARRIER] != 0:
                target += n_threads
                if record[AHEAD] != 0:
                    ahead = v.i8p(record[AHEAD] + thread * record[AHEAD_STRIDE])
                    for line in range(AHEAD_BYTES // 64):
                        v.prefetch(ahead, line * 64)
                meet(control, target)
                # Only where no thread can set it before all have looked: whoever sets it meets the
                # others first.
                if record[BARRIER] == 2 and step[STEP_ENDED] != 0:
                    break
            call_kernel(record[KERNEL], record, step, thread, n_threads)
        meet(control, target + n_threads)

    return walk


def launch_kernel(v: Verbs) -> Callable[..., None]:
    """The main thread's entry: start a step; if nobody has to be woken, walk it at once.

    LAUNCHED tells the caller that workers have to be woken, TO_WAKE which; called again as thread
    1, it only walks.
    """
    walk = walker(v)

    def launch(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        control = v.i64p(record[CONTROL])
        if thread == 0:  # a new step
            control[BASE] = v.atomic_load(control, ARRIVALS)
            v.atomic_add(control, STEP_NUMBER, 1)
            sleepers = False
            for worker in range(1, n_threads):
                if v.atomic_exchange(control, SLEEPING + LINE_WORDS * worker, 0) != 0:
                    control[TO_WAKE + LINE_WORDS * worker] = 1
                    sleepers = True
            if sleepers:
                control[LAUNCHED] = 1
                return
        control[LAUNCHED] = 0
        walk(control, 0, n_threads)

    return launch


def serve_kernel(v: Verbs) -> Callable[..., None]:
    """A worker's entry: walk every step that starts, return when it is time to sleep or to stop."""
    walk = walker(v)

    def serve(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        control = v.i64p(record[CONTROL])
        last = record[LAST]
        while True:
            spins = 0
            while v.atomic_load(control, STEP_NUMBER) == last:
                spins += 1
                v.pause()
                if spins >= IDLE_SPINS:
                    v.atomic_exchange(control, SLEEPING + LINE_WORDS * thread, 1)
                    if v.atomic_load(control, STEP_NUMBER) == last:
                        record[LAST] = last
                        return
                    # A step began meanwhile: whoever takes the mark back first decides who wakes
                    # whom.
                    if v.atomic_exchange(control, SLEEPING + LINE_WORDS * thread, 0) == 0:
                        record[LAST] = last
                        return
            last = v.atomic_load(control, STEP_NUMBER)
            if control[STOPPING] != 0:
                return
            walk(control, thread, n_threads)

    return serve


def read_kernel(v: Verbs) -> Callable[..., None]:
    """Reads N_CHUNKS mebibytes from BUFFER.

    The measure of what a decode cannot exceed (`commands/speed.py`).

    RESULT gets bits of all that was read, so that no read is optimised away.
    """
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
