"""Paged attention and cache writes of the CPU backend: against float64 formulas, and bit for bit
against themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from kernel_calls import F32, Cache, Kernels, Step, bits, columns, float_bits, page_tables, scratch, states_for
from numpy.typing import NDArray

from martlet.ops.cpu.kernels.fields import ARRIVED, PAGE

F64 = NDArray[np.float64]


@dataclass
class Case:
    """Sequences of `lengths` positions whose last rows[b] are computed, with everything that
    attention needs.
    """

    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    heads: int
    kv_heads: int
    size: int
    window: int = 0
    softcap: float = 0.0
    kind: str = "f16"
    size_of_q: float = 2.0
    n_states: int = 64
    sinks: tuple[float, ...] = ()  # a head's
    k: list[F32] = field(default_factory=list)
    v: list[F32] = field(default_factory=list)
    # of every position, so that any part can be computed
    q: list[F32] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(sum(self.lengths) + self.size)
        self.table, n_pages = page_tables(self.lengths)
        self.cache = Cache(n_pages, self.kv_heads, self.size, self.kind)
        self.scale = self.size**-0.5
        for b, n in enumerate(self.lengths):
            shape = (n, self.kv_heads, self.size)
            k, v = (rng.normal(0, 1, shape).astype(self.cache.keys.dtype).astype(np.float32) for _ in range(2))
            self.cache.fill(b, self.table, k, v)
            self.k.append(k)
            self.v.append(v)
            self.q.append(rng.normal(0, self.size_of_q, (n, self.heads * self.size)).astype(np.float32))

    def run(self, kernels: Kernels, spans: list[tuple[int, int, int]], threads: int = 1) -> list[F32]:
        """The kernel on rows start … stop - 1 of sequence b, for each (b, start, stop)."""
        counts = [stop - start for _, start, stop in spans]
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in spans])
        starts = np.concatenate([[0], np.cumsum(counts)])
        width = self.heads * self.size
        table = self.table[[b for b, *_ in spans]]
        step = Step(positions.size, positions=positions, span_starts=starts, page_table=table)
        q = columns(positions.size, width, width + 7, 2)
        q[:] = np.concatenate([self.q[b][start:stop] for b, start, stop in spans])
        out = columns(positions.size, width, width + 11, 5)
        shape = (self.kv_heads, self.heads // self.kv_heads, self.size)
        own, states = scratch(threads), states_for(self.n_states, self.size)
        options = (float_bits(self.scale), float_bits(self.softcap), self.window)
        sinks = np.array(self.sinks, np.float32)
        address = sinks.ctypes.data if self.sinks else 0
        memory = (own.ctypes.data, states.ctypes.data, self.n_states, 0, self.cache.keys.shape[1], address)
        cache = (*self.cache.addresses, *self.cache.page_bytes)
        name = f"attention_{self.kind}_{min(self.heads // self.kv_heads, 8)}"
        kernels(name, step, q, out, *cache, *shape, *options, *memory, threads=threads)
        assert not states[:, ARRIVED].any()  # ready for the next step
        assert out.base is not None
        # nothing beside it was written
        assert np.isnan(np.delete(out.base, np.s_[5 : 5 + width], 1)).all()
        return np.split(out, starts[1:-1])

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """The last rows of each sequence."""
        return [(b, n - count, n) for b, (n, count) in enumerate(zip(self.lengths, self.rows, strict=True))]

    def expected(self, b: int, position: int) -> F64:
        """Softmax attention by its definition, float64."""
        first = max(0, position - self.window + 1) if self.window else 0
        q = self.q[b][position].astype(np.float64).reshape(self.heads, self.size)
        out = np.empty_like(q)
        for h in range(self.heads):
            g = h // (self.heads // self.kv_heads)
            scores = self.k[b][first : position + 1, g].astype(np.float64) @ q[h] * np.float32(self.scale)
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            largest = max([*scores, *self.sinks[h : h + 1]])
            p, sink = np.exp(scores - largest), sum(np.exp(s - largest) for s in self.sinks[h : h + 1])
            out[h] = p @ self.v[b][first : position + 1, g] / (p.sum() + sink)
        return out.reshape(-1)


# Query heads that share a KV head number 1, 3 and 12 only: each number has a kernel of its own to
# compile.
CASES = {
    "decode": Case((1, 32, 33, 300), (1, 1, 1, 1), 9, 3, 64),
    "prefill": Case((70,), (70,), 9, 3, 64),
    "guesses": Case((300, 41, 66, 34), (4, 2, 5, 3), 9, 3, 64),
    "guesses_of_one_head": Case((300, 41, 66), (4, 2, 5), 4, 4, 16),
    "mixed": Case((131, 1, 64, 95), (67, 1, 1, 30), 6, 2, 32),
    "tiny": Case((40, 5), (40, 2), 4, 4, 8),
    "one_kv_head": Case((90,), (50,), 12, 1, 24),
    "dims_80": Case((45, 33), (13, 33), 2, 2, 80),
    "dims_256_f32": Case((66,), (20,), 3, 1, 256, kind="f32"),
    "window": Case((200, 150), (90, 1), 6, 2, 64, window=37),
    "window_of_one": Case((70,), (70,), 3, 1, 16, window=1),
    "window_of_a_page": Case((100,), (100,), 1, 1, 16, window=32),
    "softcap": Case((75, 40), (20, 1), 6, 2, 64, softcap=20.0, size_of_q=20.0),
    "segments": Case((700, 40, 520, 257), (1, 1, 2, 1), 9, 3, 32),
    "segments_window": Case((900, 513, 600), (1, 1, 20), 6, 2, 16, window=300),
    "segments_too_many_to_share": Case((700, 800), (1, 1), 6, 2, 16, n_states=7),
    "segments_of_a_prompt": Case((600,), (300,), 1, 1, 16, softcap=30.0),
    "sharp": Case((100,), (30,), 2, 2, 64, size_of_q=300.0),  # p is 0 or 1 nearly everywhere
    "sinks": Case((75, 40), (20, 1), 6, 2, 64, window=37, sinks=(0.5, -3.0, 2.0, 1000.0, -1000.0, 4.0)),
    "sinks_segments": Case((700, 40, 520), (1, 1, 2), 6, 2, 32, sinks=(0.5, -3.0, 2.0, 9.0, -20.0, 4.0)),
    "f32_window_softcap": Case((140,), (70,), 6, 2, 40, window=50, softcap=30.0, kind="f32"),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_against_its_definition(kernels: Kernels, name: str) -> None:
    case = CASES[name]
    # A score's error is about sqrt(D) roundings of its size, and p takes it as a relative error.
    bound = 1e-6 * max(4.0, case.size_of_q if not case.softcap else case.softcap)
    for (b, start, stop), got in zip(case.spans, case.run(kernels, case.spans), strict=True):
        for position in range(start, stop):
            assert np.max(np.abs(got[position - start] - case.expected(b, position))) < bound


@pytest.mark.parametrize("name", CASES)
def test_attention_row_does_not_depend_on_company(kernels: Kernels, name: str) -> None:
    case = CASES[name]
    whole = case.run(kernels, case.spans)
    for threads in (2, 4):
        for got, want in zip(case.run(kernels, case.spans, threads), whole, strict=True):
            assert np.array_equal(bits(got), bits(want))
    for (b, start, stop), want in zip(case.spans, whole, strict=True):
        for chunk in (1, 3, 32):
            for first in range(start, stop, chunk if stop - start < 100 else 29 * chunk):
                last = min(first + chunk, stop)
                got = case.run(kernels, [(b, first, last)])[0]
                assert np.array_equal(bits(got), bits(want[first - start : last - start])), (b, first, chunk)


@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_attention_does_not_depend_on_what_a_page_held_before(kernels: Kernels, kind: str) -> None:
    case = Case((50, 33), (20, 1), 6, 2, 32, window=20, kind=kind)
    before = case.run(kernels, case.spans)
    for b, n in enumerate(case.lengths):
        page, place = case.table[b, n // PAGE], n % PAGE
        case.cache.keys[:, page, :, place:] = -65504.0
        case.cache.values[:, page, place:] = 65504.0
    case.cache.values[..., case.size :] = 1.0
    for got, want in zip(case.run(kernels, case.spans), before, strict=True):
        assert np.array_equal(bits(got), bits(want))


def test_attention_of_zeros_that_round_below_zero(best_kernels: Kernels) -> None:
    """A product that rounds to -0 must not become 0 only where a tile has hidden positions behind
    it.
    """
    case = Case((40,), (40,), 1, 1, 16, kind="f32")
    case.k[0][:], case.k[0][0] = 0.0, 1.0
    case.q[0][:] = -85.0 / (16 * case.scale)  # p of position 0 is e^-85, of all others 1
    case.v[0][0], case.v[0][1], case.v[0][2:] = -1e-40, -0.0, 1.0  # row 1: e^-85 * -1e-40 + 1 * -0 = -0
    case.cache.fill(0, case.table, case.k[0], case.v[0])
    whole = case.run(best_kernels, case.spans)[0]
    for position in range(40):
        alone = case.run(best_kernels, [(0, position, position + 1)])[0]
        assert np.array_equal(bits(alone), bits(whole[position : position + 1]))


def test_attention_of_a_nan_query_is_nan_for_its_row_alone(best_kernels: Kernels) -> None:
    case = Case((20,), (20,), 6, 2, 16)
    clean = case.run(best_kernels, case.spans)[0].copy()
    case.q[0][7, :16] = np.nan
    got = case.run(best_kernels, case.spans)[0]
    assert np.isnan(got[7, :16]).all()
    got[7, :16] = clean[7, :16]
    assert np.array_equal(bits(got), bits(clean))


@pytest.mark.parametrize(("heads", "size"), [(3, 64), (1, 8), (2, 40)])
@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_kv_write(kernels: Kernels, kind: str, heads: int, size: int) -> None:
    got, want, width = Cache(4, heads, size, kind), Cache(4, heads, size, kind), heads * size
    slots = np.array([0, 33, 127, 64, 65, 31], np.int32)
    k, v = columns(6, width, width + 3, 1), columns(6, width, width + 4, 2)
    rng = np.random.default_rng(11)
    k[:], v[:] = rng.normal(0, 5, k.shape), rng.normal(0, 5, v.shape)
    kernels(f"kv_write_{kind}", Step(6, slots=slots), k, v, *got.addresses, heads, size, 0, 4, threads=2)
    for t, slot in enumerate(slots):
        want.keys[:, slot // PAGE, :, slot % PAGE] = k[t].reshape(heads, size)
        want.values[:, slot // PAGE, slot % PAGE, :size] = v[t].reshape(heads, size)
    assert np.array_equal(got.keys, want.keys)
    assert np.array_equal(got.values, want.values)


@pytest.mark.parametrize(("kind", "most"), [("f16", 65504.0), ("f32", float(np.finfo(np.float32).max))])
def test_kv_write_keeps_pages_finite(best_kernels: Kernels, kind: str, most: float) -> None:
    cache = Cache(1, 1, 8, kind)
    x = np.array([[np.inf, -np.inf, np.nan, 1e38, 65504.0, -70000.0, 0.0, 65520.0]], np.float32)
    best_kernels(f"kv_write_{kind}", Step(1, slots=[0]), x, x, *cache.addresses, 1, 8, 0, 1)
    stored = cache.keys[0, 0, :, 0]
    assert np.isfinite(stored).all()
    assert stored[[0, 1]].tolist() == [most, -most]
    assert np.array_equal(stored[3:], np.clip(x[0, 3:], -most, most).astype(stored.dtype))
    assert np.array_equal(cache.values[0, 0, 0, :8], stored)
