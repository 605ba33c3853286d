"""Low-rank updates on the CPU backend: against float64, bit for bit alone and among others, and
rows without one untouched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.interface import Backend, Rows, StepInputs, StepLimits
from martlet.ops.reference import ReferenceBackend
from tests.ops.kernel_calls import F32

LIMITS = StepLimits(24, 24, 24, 1)


def inputs(slots: list[int], logit_rows: list[int]) -> StepInputs:
    zeros = np.zeros(len(slots), np.int32)
    starts = np.array([0, len(slots)], np.int32)
    rows, page_table = np.array(logit_rows, np.int32), np.zeros((1, 1), np.int32)
    return StepInputs(zeros, zeros, zeros, starts, page_table, rows, lora_slots=np.array(slots, np.int32))


class Adapting:
    """A program that updates `out` by x; both are filled before each run."""

    def __init__(self, ops: Backend, k: int, n: int, updates: dict[int, tuple[F32, F32]], rows: Rows) -> None:
        self.ops, self.arrays = ops, []
        table = ops.lora_table(8, k, n)
        for slot, (a, b) in updates.items():
            ops.set_lora(table, slot, a, b)
        self.table, self.sizes, self.rows = table, (k, n), rows
        self.given: list[F32] = []
        self.program = ops.capture(self._step, LIMITS)

    def _step(self) -> Any:
        self.arrays = [self.ops.empty(self.rows, width) for width in self.sizes]
        if isinstance(self.ops, ReferenceBackend):
            for array, values in zip(self.arrays, self.given, strict=True):
                array[:] = values
        self.ops.lora(self.arrays[0], self.table, self.arrays[1])
        return self.arrays[1]

    def __call__(self, x: F32, out: F32, slots: list[int], logit_rows: list[int] | None = None) -> F32:
        self.given = [x, out]
        if not isinstance(self.ops, ReferenceBackend):
            for array, values in zip(self.arrays, self.given, strict=True):
                array.buffer.reshape(-1, array.stride)[: len(values), : array.width] = values
        return self.ops.download(self.program.run(inputs(slots, logit_rows or [])))


def values(rows: int, width: int, seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


@pytest.fixture(scope="module")
def cpu(kernel_folder: Any) -> CpuBackend:
    return CpuBackend(threads=2, kernels=kernel_folder)


@pytest.mark.parametrize(("k", "n", "rank"), [(64, 96, 8), (576, 192, 16), (17, 33, 1), (48, 80, 5)])
def test_against_float64(cpu: CpuBackend, k: int, n: int, rank: int) -> None:
    """The bound that the reference states, with a little for the registers' order."""
    updates = {0: (values(rank, k, 1), values(n, rank, 2)), 5: (values(rank + 3, k, 3), values(n, rank + 3, 4))}
    x, out, slots = values(5, k, 5), values(5, n, 6), [0, -1, 5, 0, 3]
    want = out.astype(np.float64)
    bound = np.abs(want)
    for row, slot in enumerate(slots):
        if slot in updates:
            a, b = (m.astype(np.float64) for m in updates[slot])
            want[row] += b @ (a @ x[row])
            bound[row] += np.abs(b) @ (np.abs(a) @ np.abs(x[row]))
    for ops in (cpu, ReferenceBackend()):
        found = Adapting(ops, k, n, updates, Rows.TOKENS)(x, out, slots)
        assert (np.abs(found - want) <= (k + rank + 8) * 2.0**-24 * bound).all()
        assert np.array_equal(found[[1, 4]], out[[1, 4]])  # no adapter, and an empty slot


def test_a_row_gets_the_same_bits_alone_and_among_others(cpu: CpuBackend) -> None:
    k, n = 100, 70
    run = Adapting(cpu, k, n, {slot: (values(8, k, slot), values(n, 8, slot + 9)) for slot in range(3)}, Rows.TOKENS)
    x, out, slots = values(24, k, 5), values(24, n, 6), [row % 4 - 1 for row in range(24)]
    whole = run(x, out, slots)
    for row in range(24):
        assert np.array_equal(run(x[row : row + 1], out[row : row + 1], slots[row : row + 1])[0], whole[row])
    assert np.array_equal(whole[::4], out[::4])


def test_rows_that_get_logits_have_the_adapter_of_their_token(cpu: CpuBackend) -> None:
    k, n, updates = 32, 40, {0: (values(4, 32, 1), values(40, 4, 2)), 1: (values(4, 32, 3), values(40, 4, 4))}
    x, out, slots, logit_rows = values(3, k, 5), values(3, n, 6), [0, 0, 1, -1, 1], [1, 3, 4]
    expected = Adapting(cpu, k, n, updates, Rows.TOKENS)(x, out, [0, -1, 1])
    assert np.array_equal(Adapting(cpu, k, n, updates, Rows.LOGITS)(x, out, slots, logit_rows), expected)
    found = Adapting(ReferenceBackend(), k, n, updates, Rows.LOGITS)(x, out, slots, logit_rows)
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_slot_can_be_changed_between_two_runs(cpu: CpuBackend) -> None:
    run = Adapting(cpu, 32, 32, {}, Rows.TOKENS)
    x, out = values(1, 32, 1), values(1, 32, 2)
    assert np.array_equal(run(x, out, [2]), out)
    cpu.set_lora(run.table, 2, values(4, 32, 3), values(32, 4, 4))
    changed = run(x, out, [2])
    assert not np.array_equal(changed, out)
    cpu.set_lora(run.table, 2, None, None)
    assert np.array_equal(run(x, out, [2]), out)
