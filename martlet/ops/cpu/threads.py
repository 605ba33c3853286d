"""The team of threads, its Python side.

Starts workers, wakes them, runs programs (compiled side: `team.py`).
"""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.errors import CapacityError
from martlet.ops.cpu.kernels.fields import (
    CONTROL,
    LAUNCHED,
    LINE_WORDS,
    N_RECORDS,
    RECORD_FIELDS,
    RECORDS,
    SLEEPING,
    STEP_ADDRESS,
    STEP_NUMBER,
    STOPPING,
    TO_WAKE,
)
from martlet.ops.cpu.store import KernelStore

Words = NDArray[np.int64]


def aligned(n_bytes: int, dtype: Any = np.uint8, align: int = 64) -> NDArray[Any]:
    """A zeroed array [n_bytes / itemsize] that starts on a multiple of `align` bytes."""
    raw = np.zeros(n_bytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + n_bytes].view(dtype)


class Team:
    """`n_threads` threads that walk programs together; the caller's thread is number 0.

    Workers look for the next step for about a millisecond and then sleep, so an idle team uses no
    processor. One run at a time: the engine's thread is the only caller.
    """

    def __init__(self, store: KernelStore, n_threads: int) -> None:
        store.ensure(["launch", "serve"])
        self._store = store  # it owns the code that the workers are in
        self.n_threads = n_threads
        self._launch, self._serve = store.function("launch"), store.function("serve")
        self._control: Words = aligned((SLEEPING + LINE_WORDS * n_threads) * 8, np.int64)
        self._records: Words = aligned(RECORD_FIELDS * 8 * n_threads, np.int64).reshape(n_threads, RECORD_FIELDS)
        self._records[:, CONTROL] = self._control.ctypes.data
        self._unused = np.zeros(4, np.int64)
        self._arguments = (self._unused.ctypes.data, self._unused.ctypes.data, self._records[0].ctypes.data, 0)
        self._wake = [threading.Semaphore(0) for _ in range(n_threads)]
        self._workers = [
            threading.Thread(target=self._work, args=(i,), name=f"martlet-{i}", daemon=True)
            for i in range(1, n_threads)
        ]
        for i, worker in enumerate(self._workers):
            try:
                worker.start()
            except RuntimeError:
                self._workers = self._workers[:i]
                self.close()
                raise CapacityError(f"{i + 1} of {n_threads:,} threads could be started: lower threads.") from None

    def run(self, records_address: int, n_records: int, step_address: int) -> None:
        """Walk a program's records with all threads; returns when every thread is done."""
        control = self._control
        self._finish()
        control[RECORDS], control[N_RECORDS], control[STEP_ADDRESS] = records_address, n_records, step_address
        self._launch(*self._arguments, 0, self.n_threads)
        self._finish()

    def close(self) -> None:
        if self._workers:
            self._finish()
            self._control[STOPPING] = 1
            self._control[N_RECORDS] = 0
            self._control[STEP_NUMBER] += 1
            for wake in self._wake:
                wake.release()
            for worker in self._workers:
                worker.join()
            self._workers = []

    def _finish(self) -> None:
        """Walk a begun step that waits for sleepers; after an interrupt, before the next step."""
        if self._control[LAUNCHED]:
            to_wake = self._control[TO_WAKE::LINE_WORDS]
            for i in np.flatnonzero(to_wake):
                # After an interrupt this may wake a worker in vain: it looks and sleeps again.
                self._wake[i].release()
            to_wake[:] = 0
            self._launch(*self._arguments, 1, self.n_threads)

    def _work(self, i: int) -> None:
        record = self._records[i].ctypes.data
        while True:
            self._serve(self._unused.ctypes.data, self._unused.ctypes.data, record, 0, i, self.n_threads)
            if self._control[STOPPING]:
                return
            self._wake[i].acquire()
