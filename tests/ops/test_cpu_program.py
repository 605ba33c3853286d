"""The recorder's barriers and the team that walks a program."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from blocks import random_tensor

from martlet.errors import UnsupportedError
from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.cpu.kernels.fields import BARRIER, BYTES
from martlet.ops.cpu.program import Recorder
from martlet.ops.cpu.threads import Team
from martlet.ops.interface import Rows, StepInputs, StepLimits
from martlet.quant.table import BlockType
from martlet.spec import Activation

LIMITS = StepLimits(8, 1, 1, 1)
EMPTY = np.zeros(0, np.int32)


def one_row(token: int) -> StepInputs:
    row = np.array([token], np.int32)
    zero = np.zeros(1, np.int32)
    return StepInputs(row, zero, zero, np.array([0, 1], np.int32), np.zeros((1, 1), np.int32), EMPTY)


@pytest.fixture
def ops(kernel_folder: Path) -> CpuBackend:
    backend = CpuBackend(2, kernel_folder)
    yield backend  # type: ignore[misc]
    backend.close()


def test_barriers_stand_only_where_memory_is_shared(ops: CpuBackend) -> None:
    table = ops.pack([random_tensor(BlockType.F32, 16, 32)])

    def step() -> None:
        a, b, c = (ops.empty(Rows.TOKENS, 32) for _ in range(3))
        ops.embed(table, 1.0, a)  # writes a
        ops.embed(table, 2.0, b)  # writes b: nothing shared
        ops.add(a, b, 1.0, c)  # reads both: must wait
        ops.scale_cap(a, 2.0, None, a)  # writes what the last one reads: must wait
        ops.scale_cap(ops.columns(b, 0, 16), 2.0, None, ops.columns(b, 0, 16))  # only b: no wait
        # the other columns: no wait
        ops.scale_cap(ops.columns(b, 16, 32), 2.0, None, ops.columns(b, 16, 32))
        ops.add(b, c, 1.0, b)  # reads and writes all of b: must wait

    program = ops.capture(step, LIMITS)
    assert program._records[:, BARRIER].tolist() == [0, 0, 1, 1, 0, 0, 1]


def test_the_operation_before_a_product_makes_its_bytes(ops: CpuBackend) -> None:
    weight, gate = ops.pack([random_tensor(BlockType.Q4_0, 64, 32)]), ops.pack([random_tensor(BlockType.Q4_0, 64, 32)])
    table, norm = ops.pack([random_tensor(BlockType.F32, 16, 32)]), ops.upload(np.ones(32))

    def step() -> object:
        x, h, wide, y, z = (ops.empty(Rows.TOKENS, n) for n in (32, 32, 64, 32, 64))
        ops.embed(table, 1.0, x)
        ops.rms_norm(x, norm, 1e-5, h)  # makes bytes of h
        ops.linear(h, gate, wide)
        ops.linear(h, weight, z)  # the same bytes again
        ops.act_mul(wide, Activation.SILU, y)  # makes bytes of y
        ops.linear(y, weight, z)
        ops.linear(x, weight, z)  # nobody made bytes of x: an operation of its own does
        return z

    program = ops.capture(step, LIMITS)
    made = [int(record[BYTES] != 0) for record in program._records]
    assert made == [0, 1, 0, 0, 1, 0, 1, 0]
    assert program.n_records == 8


def test_bytes_are_made_anew_after_a_write(ops: CpuBackend) -> None:
    """A product after x has changed must see the new x."""
    table, weight = ops.pack([random_tensor(BlockType.F32, 16, 32)]), ops.pack([random_tensor(BlockType.Q8_0, 16, 32)])
    results = []
    for scale in (1.0, 3.0):

        def step(scale: float = scale) -> object:
            x, y, z = (ops.empty(Rows.TOKENS, n) for n in (32, 16, 16))
            ops.embed(table, 1.0, x)
            ops.linear(x, weight, y)
            ops.scale_cap(x, scale, None, x)
            ops.linear(x, weight, z)
            return y, z

        y, z = ops.capture(step, LIMITS).run(one_row(5))
        results.append((ops.download(y), ops.download(z)))
    assert np.array_equal(results[0][0], results[0][1])
    assert np.allclose(3 * results[1][0], results[1][1], rtol=1e-5)


def test_a_program_keeps_what_it_points_to(ops: CpuBackend) -> None:
    """Caches and scratch that only a program refers to live as long as it."""

    def captured() -> object:
        table, cache = ops.pack([random_tensor(BlockType.F32, 16, 32)]), ops.kv_cache(1, 32, 1, 16, "f16")

        def step() -> object:
            x = ops.empty(Rows.TOKENS, 32)
            ops.embed(table, 1.0, x)
            ops.kv_write(ops.columns(x, 0, 16), ops.columns(x, 16, 32), cache)
            return x

        return ops.capture(step, LIMITS)

    program = captured()
    junk = [np.full(4096, 255, np.uint8) for _ in range(200)]  # would reuse freed memory
    for token in range(16):
        program.run(one_row(token))  # type: ignore[attr-defined]
    assert all(np.all(array == 255) for array in junk)


def test_an_idle_team_sleeps(kernel_folder: Path) -> None:
    """Row 6 of what users ask for: a server without work uses no processor."""
    ops = CpuBackend(4, kernel_folder)
    table = ops.pack([random_tensor(BlockType.F32, 16, 32)])

    def step() -> object:
        x = ops.empty(Rows.TOKENS, 32)
        ops.embed(table, 1.0, x)
        return x

    program = ops.capture(step, LIMITS)
    program.run(one_row(1))
    time.sleep(0.2)  # longer than the spin
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.02
    assert ops.download(program.run(one_row(2))).shape == (1, 32)  # and it wakes
    ops.close()
    ops.close()  # idempotent


def test_what_the_backend_cannot_do_is_refused(ops: CpuBackend) -> None:
    with pytest.raises(UnsupportedError, match="32 tokens, not 16"):
        ops.kv_cache(1, 16, 1, 16, "f16")
    with pytest.raises(UnsupportedError, match=r"'int3'.*f16, f32"):
        ops.kv_cache(1, 32, 1, 16, "int3")
    with pytest.raises(UnsupportedError, match="up to 512"):
        ops.kv_cache(1, 32, 1, 1024, "f16")
    with pytest.raises(UnsupportedError, match=r"isa is 'sse9'.*Supported: .*generic"):
        CpuBackend(1, None, isa="sse9")


def test_the_bandwidth_probe_reads_every_byte(ops: CpuBackend) -> None:
    """One byte that differs, at the very end of the last chunk, shows in what was read."""
    buffer, result = np.zeros(3 << 20, np.uint8), np.zeros(1, np.int64)
    recorder = Recorder(ops.store, LIMITS)
    recorder.emit("read", Rows.TOKENS, [buffer.ctypes.data, 3, result.ctypes.data], [], [])
    program = recorder.finish(Team(ops.store, 1), np.zeros(16, np.int64), None)
    program.replay()
    assert result[0] == 0
    buffer[-1] = 1
    program.replay()
    assert result[0] == 1 << 24  # the top byte of the last lane
    assert ops.read_bandwidth(0.01, mebibytes=4) > 1e8


class InterruptError(Exception):
    pass


@pytest.mark.parametrize("calls", [1, 2])
def test_an_interrupt_while_sleepers_are_woken_leaves_the_team_usable(ops: CpuBackend, calls: int) -> None:
    """An interrupt between a step's begin and its walk: the next step, and closing, finish it
    first.
    """
    table = ops.pack([random_tensor(BlockType.F32, 16, 32)])

    def step() -> object:
        x, y = ops.empty(Rows.TOKENS, 32), ops.empty(Rows.TOKENS, 32)
        ops.embed(table, 1.0, x)
        ops.add(x, x, 1.0, y)
        return y

    program = ops.capture(step, LIMITS)
    expected = ops.download(program.run(one_row(3)))
    time.sleep(0.3)  # the worker sleeps: the next step has to wake it
    team = ops._team
    wake = team._wake[1]

    class Impatient:
        def release(self) -> None:
            if calls == 2:
                wake.release()
            raise InterruptError

        def acquire(self) -> None:
            wake.acquire()

    team._wake[1] = Impatient()  # type: ignore[call-overload]
    with pytest.raises(InterruptError):
        program.run(one_row(4))
    team._wake[1] = wake
    assert np.array_equal(ops.download(program.run(one_row(3))), expected)
    time.sleep(0.3)
    assert np.array_equal(ops.download(program.run(one_row(3))), expected)


def test_closing_after_an_interrupt_does_not_hang(kernel_folder: Path) -> None:
    ops = CpuBackend(2, kernel_folder)
    table = ops.pack([random_tensor(BlockType.F32, 16, 32)])

    def step() -> object:
        x = ops.empty(Rows.TOKENS, 32)
        ops.embed(table, 1.0, x)
        return x

    program = ops.capture(step, LIMITS)
    program.run(one_row(1))
    time.sleep(0.3)
    team, wake = ops._team, ops._team._wake[1]

    class Impatient:
        def release(self) -> None:
            raise InterruptError

        def acquire(self) -> None:
            wake.acquire()

    team._wake[1] = Impatient()  # type: ignore[call-overload]
    with pytest.raises(InterruptError):
        program.run(one_row(2))
    team._wake[1] = wake
    closer = threading.Thread(target=ops.close, daemon=True)
    closer.start()
    closer.join(5)
    assert not closer.is_alive()


def test_what_is_given_is_there_before_the_step_and_may_be_written(ops: CpuBackend) -> None:
    """Columns of a wider array, anew in each run; the rest of the array is the program's own."""

    def step() -> object:
        whole, out = ops.empty(Rows.TOKENS, 48), ops.empty(Rows.TOKENS, 16)
        ops.feed(ops.columns(whole, 16, 48))
        ops.add(ops.columns(whole, 16, 32), ops.columns(whole, 32, 48), 2.0, out)
        ops.scale_cap(out, 1.0, None, ops.columns(whole, 16, 32))  # gone with the next run
        return out

    program = ops.capture(step, LIMITS)
    for n in (1, 3, 2):
        given = np.arange(32 * n, dtype=np.float32).reshape(n, 32) + n
        row = np.zeros(n, np.int32)
        inputs = StepInputs(row, row, row, np.array([0, n], np.int32), np.zeros((1, 1), np.int32), EMPTY, feed=given)
        assert np.array_equal(ops.download(program.run(inputs)), given[:, :16] + 2 * given[:, 16:])
