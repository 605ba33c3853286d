"""Whole pages of a KV cache: copied, read and written, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.interface import Backend, Rows, StepInputs, StepLimits
from martlet.ops.null import NullBackend
from martlet.ops.oracle import OracleBackend
from martlet.ops.reference import ReferenceBackend
from martlet.quant.table import BlockType, RawTensor
from martlet.spec import Attention

PAGE, HEADS, DIM, N_PAGES = 32, 2, 16, 5
WIDTH = HEADS * DIM
SPEC = Attention(HEADS, HEADS, DIM, 0.25, None)
LIMITS = StepLimits(PAGE, 1, 1, 2)
BACKENDS: dict[str, Callable[[Path], Backend]] = {
    "reference": lambda _: ReferenceBackend(),
    "cpu": lambda folder: CpuBackend(1, folder),
    "oracle": lambda folder: OracleBackend(CpuBackend(1, folder), ReferenceBackend()),
}


class Layer:
    """One layer whose keys are the ids' rows of a table and whose values are another's."""

    def __init__(self, ops: Backend, dtype: str) -> None:
        rows = np.random.default_rng(7).standard_normal((64, 2 * WIDTH)).astype(np.float32)
        table = ops.pack([RawTensor("table", rows.shape, BlockType.F32, rows.reshape(-1).view(np.uint8))])
        self.ops, self.cache = ops, ops.kv_cache(N_PAGES, PAGE, HEADS, DIM, dtype)

        def step() -> Any:
            kv, out = ops.empty(Rows.TOKENS, 2 * WIDTH), ops.empty(Rows.TOKENS, WIDTH)
            ops.embed(table, 1.0, kv)
            k, v = ops.columns(kv, 0, WIDTH), ops.columns(kv, WIDTH, 2 * WIDTH)
            ops.kv_write(k, v, self.cache)
            ops.attention(k, self.cache, SPEC, out)
            return out

        self.program = ops.capture(step, LIMITS)

    def run(self, ids: list[int], start: int, pages: list[int]) -> np.ndarray:
        """Attention of positions start … of a sequence on `pages`."""
        positions = np.arange(start, start + len(ids), dtype=np.int32)
        table = np.array(pages, np.int32)
        slots = table[positions // PAGE] * PAGE + positions % PAGE
        inputs = [np.array(ids), positions, slots, np.array([0, len(ids)]), table[None], np.array([len(ids) - 1])]
        result = self.program.run(StepInputs(*(array.astype(np.int32) for array in inputs)))
        return self.ops.download(result)


@pytest.fixture(params=[(name, dtype) for name in BACKENDS for dtype in ("f16", "f32")], ids=lambda p: "-".join(p))
def layer(request: pytest.FixtureRequest, kernel_folder: Path) -> Iterator[Layer]:
    name, dtype = request.param
    made = Layer(BACKENDS[name](kernel_folder), dtype)
    yield made
    made.ops.close()


def read(layer: Layer, page: int) -> np.ndarray:
    out = np.full(layer.ops.page_bytes(layer.cache), 0xEE, np.uint8)
    layer.ops.read_page(layer.cache, page, out)
    return out


def test_what_attends_to_a_moved_page_gets_the_same_bits(layer: Layer) -> None:
    """A full page copied, and written back from its bytes, serves the position after it as the page
    itself does.
    """
    ids = [(3 * i) % 64 for i in range(PAGE)]
    layer.run(ids, 0, [1])
    expected = layer.run([5], PAGE, [1, 2])
    layer.ops.copy_page(layer.cache, 1, 3)
    layer.ops.write_page(layer.cache, 0, read(layer, 1))
    layer.run([63 - i for i in ids], 0, [1])  # the page itself is used for something else
    assert not np.array_equal(layer.run([5], PAGE, [1, 2]), expected)
    assert np.array_equal(layer.run([5], PAGE, [3, 2]), expected)
    assert np.array_equal(layer.run([5], PAGE, [0, 4]), expected)


def test_a_partly_filled_page_continues_as_a_copy(layer: Layer) -> None:
    ids = list(range(10))
    layer.run(ids, 0, [4])
    layer.ops.copy_page(layer.cache, 4, 2)
    one, other = layer.run([20, 21], 10, [4]), layer.run([20, 21], 10, [2])
    assert np.array_equal(one, other)
    before = layer.run([30], 12, [4])
    layer.run([60], 11, [2])  # what is written to the copy, the original does not have
    assert not np.array_equal(layer.run([30], 12, [2]), before)
    assert np.array_equal(layer.run([30], 12, [4]), before)


def test_page_operations_touch_their_page_only(layer: Layer) -> None:
    for page in range(N_PAGES):
        layer.run([page + i for i in range(PAGE)], 0, [page])
    before = [read(layer, page) for page in range(N_PAGES)]
    assert len({page.tobytes() for page in before}) == N_PAGES
    layer.ops.copy_page(layer.cache, 4, 2)
    layer.ops.write_page(layer.cache, 0, before[3])
    for page, now in enumerate([3, 1, 4, 3, 4]):
        assert np.array_equal(read(layer, page), before[now]), page


def test_a_page_s_size(kernel_folder: Path) -> None:
    """Keys and values of 32 positions: 2 · 32 · heads · dimensions · bytes; the cpu fills values up
    to 16 dimensions.
    """
    reference, cpu = ReferenceBackend(), CpuBackend(1, kernel_folder)
    for ops in (reference, cpu):
        assert ops.page_bytes(ops.kv_cache(3, 32, 2, 16, "f16")) == 2 * 32 * 2 * 16 * 2
        assert ops.page_bytes(ops.kv_cache(3, 32, 4, 64, "f32")) == 2 * 32 * 4 * 64 * 4
    assert reference.page_bytes(reference.kv_cache(3, 32, 2, 20, "f16")) == 2 * 32 * 2 * 20 * 2
    assert cpu.page_bytes(cpu.kv_cache(3, 32, 2, 20, "f16")) == 32 * 2 * (20 + 32) * 2
    both = OracleBackend(cpu, reference)
    assert both.page_bytes(both.kv_cache(3, 32, 2, 16, "f16")) == 2 * 2 * 32 * 2 * 16 * 2
    cpu.close()


def test_the_null_backend_counts() -> None:
    ops = NullBackend()
    cache = ops.kv_cache(3, 32, 2, 16, "f16")
    nothing = np.empty(ops.page_bytes(cache), np.uint8)
    ops.copy_page(cache, 0, 1)
    ops.read_page(cache, 0, nothing)
    ops.write_page(cache, 1, nothing)
    assert [ops.calls[name] for name in ("copy_page", "read_page", "write_page")] == [1, 1, 1]
