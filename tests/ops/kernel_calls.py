"""Calling one compiled kernel with a hand-made record, for the tests of `martlet/ops/cpu`."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.ops.cpu.kernels.fields import (
    ARGS,
    ARRIVED,
    COUNTER,
    PAGE,
    RECORD_FIELDS,
    ROWS,
    SCRATCH_FLOATS,
    STEP_FIELDS,
    STEP_LOGIT_ROWS,
    STEP_LOGITS,
    STEP_PAGE_STRIDE,
    STEP_PAGE_TABLE,
    STEP_POSITIONS,
    STEP_SEQS,
    STEP_SLOTS,
    STEP_SPAN_STARTS,
    STEP_TOKENS,
    state_floats,
)
from martlet.ops.cpu.simd.isa import isa_named
from martlet.ops.cpu.store import KernelStore
from martlet.ops.cpu.threads import aligned

F32 = NDArray[np.float32]
STEP_ARRAYS = {
    "positions": STEP_POSITIONS,
    "slots": STEP_SLOTS,
    "span_starts": STEP_SPAN_STARTS,
    "page_table": STEP_PAGE_TABLE,
    "logit_rows": STEP_LOGIT_ROWS,
}


def float_bits(value: float) -> int:
    """A float32 as a field of a record."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def bits(values: F32) -> NDArray[np.int32]:
    """The bits of float32 values, so that -0.0 and 0.0 differ and NaN equals itself."""
    return np.ascontiguousarray(values).view(np.int32)


def columns(rows: int, width: int, stride: int, start: int) -> F32:
    """A [rows, width] view of a wider array that is filled with NaN, which shows reads and writes
    beside it.
    """
    return np.full((rows, stride), np.nan, np.float32)[:, start : start + width]


class Step:
    """A step's header; the arrays become int32 and are kept alive."""

    def __init__(self, tokens: int, **arrays: Any) -> None:
        self.words = np.zeros(STEP_FIELDS, np.int64)
        self.words[STEP_TOKENS] = tokens
        self.arrays = {name: np.ascontiguousarray(a, np.int32) for name, a in arrays.items()}
        for name, array in self.arrays.items():
            self.words[STEP_ARRAYS[name]] = array.ctypes.data
        if "logit_rows" in arrays:
            self.words[STEP_LOGITS] = self.arrays["logit_rows"].size
        if "page_table" in arrays:
            self.words[STEP_SEQS], self.words[STEP_PAGE_STRIDE] = self.arrays["page_table"].shape


class Kernels:
    """The kernels of one instruction set."""

    def __init__(self, isa: str, folder: Path) -> None:
        self.isa, self.store = isa, KernelStore(isa_named(isa), folder)
        self.functions: dict[str, Any] = {}

    def prepare(self, name: str, step: Step, args: Sequence[int | F32], threads: int, rows: int) -> Any:
        """A function of no arguments that runs the kernel once; an array stands for its address and
        row stride.
        """
        function = self.functions.setdefault(name, self.store.function(name))
        record, counter, unused = np.zeros(RECORD_FIELDS, np.int64), np.zeros(1, np.int64), np.zeros(4, np.int64)
        fields: list[int] = []
        for arg in args:
            fields += [arg] if isinstance(arg, int) else [arg.ctypes.data, arg.strides[0] // 4]
        record[COUNTER], record[ROWS] = counter.ctypes.data, rows
        record[ARGS : ARGS + len(fields)] = fields
        pointers = [unused.ctypes.data, unused.ctypes.data, record.ctypes.data, step.words.ctypes.data]

        def run() -> None:
            counter[0] = 0
            others = [threading.Thread(target=function, args=(*pointers, i, threads)) for i in range(1, threads)]
            for other in others:
                other.start()
            function(*pointers, 0, threads)
            for other in others:
                other.join()

        run.held = (step, record, counter, unused, args)  # type: ignore[attr-defined]
        return run

    def __call__(self, name: str, step: Step, *args: int | F32, threads: int = 1, rows: int = STEP_TOKENS) -> None:
        self.prepare(name, step, args, threads, rows)()


def page_tables(lengths: Sequence[int], seed: int = 0) -> tuple[NDArray[np.int32], int]:
    """Shuffled page numbers for sequences of these lengths, and how many pages there are, one of
    them unused.
    """
    counts = [-(-n // PAGE) for n in lengths]
    numbers = np.random.default_rng(seed).permutation(sum(counts) + 1).astype(np.int32)
    table = np.zeros((len(lengths), max(counts)), np.int32)
    start = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = numbers[start : start + count]
        start += count
    return table, int(numbers.size)


class Cache:
    """One layer's pages, filled with large finite garbage as a reused page is."""

    def __init__(self, n_pages: int, heads: int, size: int, kind: str) -> None:
        self.heads, self.size, self.kind = heads, size, kind
        dtype, padded = (np.float16 if kind == "f16" else np.float32), -(-size // 16) * 16
        self.keys = np.full((heads, n_pages, size, PAGE), 60000.0, dtype)
        self.values = np.full((heads, n_pages, PAGE, padded), -60000.0, dtype)

    @property
    def addresses(self) -> list[int]:
        """Of keys and values."""
        return [self.keys.ctypes.data, self.values.ctypes.data]

    @property
    def page_bytes(self) -> list[int]:
        """Of one head's keys and values."""
        return [self.keys[0, 0].nbytes, self.values[0, 0].nbytes]

    def fill(self, b: int, table: NDArray[np.int32], k: F32, v: F32) -> None:
        """Put sequence b's keys and values, [positions, heads, size], in their places (the drawing
        in attention.py).
        """
        for position in range(k.shape[0]):
            page, place = table[b, position // PAGE], position % PAGE
            self.keys[:, page, :, place] = k[position]
            self.values[:, page, place, : self.size] = v[position]


def scratch(threads: int) -> F32:
    """Attention's, for each thread; NaN, because a kernel must not read what it has not written."""
    made: F32 = aligned(threads * SCRATCH_FLOATS * 4, np.float32)
    made.fill(np.nan)
    return made


def states_for(n_states: int, head_dim: int) -> F32:
    """What threads share segments through, [n, floats of a state]: no segment has arrived, and all
    else is NaN.
    """
    made: F32 = aligned(n_states * state_floats(head_dim) * 4, np.float32).reshape(n_states, -1)
    made.fill(np.nan)
    made[:, ARRIVED : ARRIVED + 2] = 0.0
    return made
