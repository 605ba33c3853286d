"""Attention over q8 and q4 pages on the CPU backend: against the reference, and bit for bit against
itself.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kernel_calls import bits
from numpy.typing import NDArray

from martlet.kv_types import KV_BLOCK, RECENT_TOKENS
from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.cpu.kernels import fields as record
from martlet.ops.cpu.simd.isa import chosen_isa, runnable_isas
from martlet.ops.interface import Backend, Rows, StepLimits
from martlet.ops.kv_codes import q4_codes, q8_codes
from martlet.ops.reference import ReferenceBackend
from martlet.quant.table import BlockType, RawTensor
from martlet.runtime.f16_window import F16Window, recent_pages
from martlet.runtime.flatten import PageTable, StepBuffers
from martlet.spec import Attention
from martlet.types import PageId, SeqId, Span

F32 = NDArray[np.float32]
PAGE, N_PAGES, VOCAB, LENGTH = 32, 39, 512, 400
LENGTHS = (300, 131, 70)
OTHERS = [isa.name for isa in runnable_isas() if isa is not chosen_isa()]
SPECS = {
    "heads of 64": Attention(9, 3, 64, 0.125, None),
    "window and cap": Attention(4, 1, 256, 0.0625, None, window=70, softcap=30.0),
    "heads of 128": Attention(12, 2, 128, 0.09, None),
    "small heads": Attention(4, 2, 24, 0.2, None),
    "heads of 80": Attention(2, 2, 80, 0.1, None, window=33),
}
Spans = list[tuple[int, int, int]]  # sequence, start, count


def pieces(seed: int) -> list[Spans]:
    """Steps of decodes and chunks of odd sizes, mixed."""
    rng, done, steps = np.random.default_rng(seed), [0, 0, 0], []
    while any(a < b for a, b in zip(done, LENGTHS, strict=True)):
        step = []
        for s, length in enumerate(LENGTHS):
            count = int(min(rng.choice([0, 1, 1, 5, 33, 70]), length - done[s]))
            if count:
                step.append((s, done[s], count))
                done[s] += count
        if step:
            steps.append(step)
    return steps


class Layer:
    """Embedding, cache and attention: a token's query, key and value are a row of a table."""

    def __init__(self, ops: Backend, dtype: str, spec: Attention, table: F32 | None = None) -> None:
        self.ops, limits = ops, StepLimits(512, 4, 1, 16)
        recent = recent_pages(limits, PAGE) if dtype == "q4" else None
        self.buffers = StepBuffers(limits, PAGE, F16Window(recent, PAGE) if recent else None)
        self.cache = ops.kv_cache(N_PAGES, PAGE, spec.n_kv_heads, spec.head_dim, dtype, recent)
        q_end, k_end = spec.n_heads * spec.head_dim, (spec.n_heads + spec.n_kv_heads) * spec.head_dim
        width = k_end + spec.n_kv_heads * spec.head_dim
        self.table = (
            np.random.default_rng(1).normal(0, 2, (VOCAB, width)).astype(np.float32) if table is None else table
        )
        weight = ops.pack([RawTensor("t", (VOCAB, width), BlockType.F32, self.table.reshape(-1).view(np.uint8))])

        def step() -> object:
            x, out = ops.empty(Rows.TOKENS, width), ops.empty(Rows.TOKENS, q_end)
            ops.embed(weight, 1.0, x)
            ops.kv_write(ops.columns(x, q_end, k_end), ops.columns(x, k_end, width), self.cache)
            ops.attention(ops.columns(x, 0, q_end), self.cache, spec, out)
            return out

        self.program = ops.capture(step, limits)
        self.ids = [np.random.default_rng(s).integers(0, VOCAB, LENGTH) for s in range(3)]
        self.tables = {SeqId(s): PageTable() for s in range(3)}

    def run(self, steps: list[Spans]) -> list[F32]:
        """The rows of each sequence, in order of position; sequence s has pages 13 s to 13 s +
        12.
        """
        found: list[list[F32]] = [[], [], []]
        for spans in steps:
            made = [
                Span(
                    SeqId(s),
                    start,
                    count,
                    tuple(self.ids[s][start : start + count]),
                    tuple(PageId(13 * s + i) for i in range(13)) if start == 0 else (),
                    0,
                )
                for s, start, count in spans
            ]
            out = self.ops.download(self.program.run(self.buffers.fill(made, self.tables)))
            row = 0
            for s, _, count in spans:
                found[s].append(out[row : row + count])
                row += count
        return [np.concatenate(parts) for parts in found]


WHOLE: list[Spans] = [[(s, 0, length) for s, length in enumerate(LENGTHS)]]


@pytest.mark.parametrize("dtype", ["q8", "q4"])
@pytest.mark.parametrize("name", SPECS)
def test_compressed_attention(kernel_folder: Path, name: str, dtype: str) -> None:
    """Right to what float32 sums differ by; and the same bits for whole prompts, chunks, decodes,
    threads.
    """
    expected = Layer(ReferenceBackend(), dtype, SPECS[name]).run(WHOLE)
    runs = []
    for threads, steps in ((1, WHOLE), (2, pieces(5)), (3, pieces(6))):
        ops = CpuBackend(threads, kernel_folder)
        runs.append(Layer(ops, dtype, SPECS[name]).run(steps))
        ops.close()
    for got, want in zip(runs[0], expected, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)
    for other in runs[1:]:
        for got, same in zip(runs[0], other, strict=True):
            assert np.array_equal(bits(got), bits(same))


@pytest.mark.parametrize("isa", OTHERS)
@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_compressed_attention_on_other_instruction_sets(kernel_folder: Path, isa: str, dtype: str) -> None:
    ops = CpuBackend(1, kernel_folder, isa=isa)
    got = Layer(ops, dtype, SPECS["heads of 80"]).run(pieces(7))
    ops.close()
    for found, want in zip(got, Layer(ReferenceBackend(), dtype, SPECS["heads of 80"]).run(WHOLE), strict=True):
        np.testing.assert_allclose(found, want, atol=2e-4)


def heads_of(layer: Layer, spec: Attention, count: int) -> tuple[F32, F32]:
    """Keys and values [count, G, D] of the first positions of sequence 0."""
    rows = layer.table[layer.ids[0][:count]]
    width = spec.n_kv_heads * spec.head_dim
    k, v = rows[:, -2 * width : -width], rows[:, -width:]
    return k.reshape(count, spec.n_kv_heads, -1), v.reshape(count, spec.n_kv_heads, -1)


def test_q8_pages_hold_the_defined_codes(kernel_folder: Path) -> None:
    spec, ops = SPECS["heads of 80"], CpuBackend(1, kernel_folder)
    layer = Layer(ops, "q8", spec)
    layer.run([[(0, 0, 40)], [(1, 0, 1)], [(2, 0, 1)]])
    k, v = heads_of(layer, spec, PAGE)
    size = 80 * 32 + 3 * 32 * 2  # three blocks, the last of 16 channels
    # page 0 of each head
    keys, values = (x.reshape(2, -1)[:, :size] for x in (layer.cache.keys, layer.cache.values))
    for g in range(2):
        for got, x, transposed in ((keys[g], k[:, g], True), (values[g], v[:, g], False)):
            codes, scales = q8_codes(x)
            stored = got[: 80 * 32].view(np.int8)
            assert np.array_equal(stored.reshape(80, 32).T if transposed else stored.reshape(32, 80), codes)
            assert np.array_equal(got[80 * 32 :].view(np.float16).reshape(3, 32).T, scales)
    ops.close()


def test_q4_pages_hold_the_defined_codes(kernel_folder: Path) -> None:
    spec, ops = SPECS["heads of 80"], CpuBackend(1, kernel_folder)
    layer = Layer(ops, "q4", spec)
    layer.run([[(0, 0, 5)], [(1, 0, 1), (0, 5, 1)], [(2, 0, 1), (0, 6, 34)]])
    k, v = (x.astype(np.float16).astype(np.float32) for x in heads_of(layer, spec, PAGE))
    codes, scales, low = q4_codes(k, 0)  # [32, G, 80], [1, G, 80]
    key_page = layer.cache.keys.reshape(2, -1)[:, : 80 * 20]
    for g in range(2):
        packed = codes[:16, g].T | codes[16:, g].T << 4
        assert np.array_equal(key_page[g, : 80 * 16].reshape(80, 16), packed)
        assert np.array_equal(key_page[g, 80 * 16 :].view(np.float16), np.concatenate([scales[0, g], low[0, g]]))
    filled = np.pad(v, [(0, 0), (0, 0), (0, 16)]).reshape(PAGE, 2, 3, 32)
    codes, scales, low = q4_codes(filled, 3)
    value_page = layer.cache.values.reshape(2, -1)[:, : 3 * 32 * 20]
    for g in range(2):
        packed = (codes[:, g, :, :16] | codes[:, g, :, 16:] << 4).transpose(1, 0, 2)
        assert np.array_equal(value_page[g, : 3 * 512].reshape(3, 32, 16), packed)
        beside = value_page[g, 3 * 512 :].view(np.float16).reshape(3, 2, 32)
        assert np.array_equal(beside[:, 0], scales[:, g, :, 0].T)
        assert np.array_equal(beside[:, 1], low[:, g, :, 0].T)
    ops.close()


@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_what_a_page_held_before_is_not_seen(kernel_folder: Path, dtype: str) -> None:
    spec, ops = SPECS["heads of 64"], CpuBackend(2, kernel_folder)
    layer = Layer(ops, dtype, spec)
    clean = layer.run(WHOLE)
    ids, before = layer.ids, layer.tables
    layer.ids, layer.tables = [np.full(LENGTH, 11)] * 3, {SeqId(s): PageTable() for s in range(3)}
    for table in before.values():
        layer.buffers.release(table)
    layer.run(WHOLE)
    for table in layer.tables.values():
        layer.buffers.release(table)
    layer.ids, layer.tables = ids, before
    for got, want in zip(layer.run(pieces(8)), clean, strict=True):
        assert np.array_equal(bits(got), bits(want))
    ops.close()


@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_odd_values_leave_pages_finite(kernel_folder: Path, dtype: str) -> None:
    """Infinite and huge keys and values saturate as in f16 pages; a position of zeros stays
    zeros.
    """
    spec, ops = Attention(1, 1, 32, 1.0, None), CpuBackend(1, kernel_folder)
    table = np.random.default_rng(1).normal(0, 2, (VOCAB, 96)).astype(np.float32)
    table[:, :32] /= 32  # no score decides alone
    table[0:128, 32:] = 0.0
    table[128:256, 32:] = 1e-40
    table[256:384, 64:] = [np.inf, -np.inf, 1e38, -70000.0] * 8
    got = Layer(ops, dtype, spec, table).run(pieces(9))
    for found, want in zip(got, Layer(ReferenceBackend(), dtype, spec, table).run(WHOLE), strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=0.1)  # of 65504
    ops.close()


def test_kernels_have_the_constants_of_the_types() -> None:
    """The store of compiled kernels knows their own folder's code only, so the constants stand
    there as well.
    """
    assert (record.RECENT_TOKENS, record.KV_BLOCK) == (RECENT_TOKENS, KV_BLOCK)
