"""Compressed keys and values: codes worked by hand, bounds, and what rows of the reference's q4
attention see.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from martlet.kv_types import RECENT_TOKENS
from martlet.ops.interface import RecentPages, Rows, StepInputs, StepLimits
from martlet.ops.kv_codes import q4_codes, q4_keys, q4_values, q8_codes, rounded_q8
from martlet.ops.reference import ReferenceBackend
from martlet.spec import Attention

F32 = NDArray[np.float32]
PAGE = 32


def test_q8_by_hand() -> None:
    """The largest of a block is 127 steps of s = 2."""
    codes, scale = q8_codes(np.array([[254.0, -254.0, 1.0, 3.0, 5.0, 100.0]], np.float32))
    assert scale.tolist() == [[2.0]]
    assert codes.tolist() == [[127, -127, 0, 2, 2, 50]]  # 0.5, 1.5 and 2.5 round to even


def test_q8_of_odd_values() -> None:
    """65504 / 127 = 515.78, and the nearest float16 to that is 516."""
    assert rounded_q8(np.zeros((1, 4), np.float32)).tolist() == [[0, 0, 0, 0]]
    assert rounded_q8(np.array([[np.inf, -1e30]], np.float32)).tolist() == [[127 * 516.0, -127 * 516.0]]
    assert rounded_q8(np.full((1, 2), 1e-38, np.float32)).tolist() == [[0, 0]]


def test_blocks_of_q8() -> None:
    """A channel that is large costs the 31 beside it, and no others; 40 channels are a block of 32
    and one of 8.
    """
    x = np.random.default_rng(2).normal(0, 1, (5, 2, 40)).astype(np.float32)
    outlier = x.copy()
    outlier[:, :, 3] = 1000
    assert np.array_equal(rounded_q8(outlier)[..., 32:], rounded_q8(x)[..., 32:])
    assert np.abs(rounded_q8(outlier) - outlier)[..., :32].max() > 1
    codes, scale = q8_codes(x)
    assert (codes.shape, scale.shape) == ((5, 2, 40), (5, 2, 2))
    assert np.array_equal(scale[..., 1], (np.abs(x[..., 32:]).max(-1) / np.float32(127)).astype(np.float16))


def test_q4_by_hand() -> None:
    """-3 … 4.5 in 15 steps of 0.5."""
    codes, scale, low = q4_codes(np.array([[-3.0, 4.5, -2.5, 0.3, -2.75, -2.25]], np.float32), 1)
    assert (scale.item(), low.item()) == (0.5, -3.0)
    assert codes.tolist() == [[0, 15, 1, 7, 0, 2]]


def test_q4_of_one_value_is_that_value() -> None:
    codes, scale, low = q4_codes(np.full((1, 8), -7.25, np.float32), 1)
    assert (scale.item(), low.item(), codes.max()) == (0.0, -7.25, 0)


def test_blocks_of_q4() -> None:
    """A channel of keys that is large at every position costs the others nothing; nor does a block
    of a value's channels.
    """
    rng = np.random.default_rng(2)
    x = rng.normal(0, 1, (PAGE, 2, 64)).astype(np.float16).astype(np.float32)
    outlier = x.copy()
    outlier[:, 0, 5] += 1000
    others = np.delete(np.arange(64), 5)
    assert np.array_equal(q4_keys(outlier)[:, 0, others], q4_keys(x)[:, 0, others])
    outlier = x.copy()
    outlier[7, 1, 40] = 1000
    assert np.array_equal(q4_values(outlier)[7, 1, :32], q4_values(x)[7, 1, :32])
    assert np.abs(q4_values(outlier)[7, 1, 32:] - x[7, 1, 32:])[9:].max() > 0.5
    assert np.array_equal(np.delete(q4_values(outlier), 7, 0), np.delete(q4_values(x), 7, 0))


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-6, 1e-3, 1.0, 100.0, 30000.0]), st.sampled_from([8, 24, 64]))
def test_errors_are_bounded(seed: int, size: float, head_dim: int) -> None:
    x = np.random.default_rng(seed).normal(0, size, (PAGE, 2, head_dim)).clip(-65504, 65504)
    x = x.astype(np.float16).astype(np.float32)
    for start in range(0, head_dim, 32):  # half a step; what a float16 scale loses over 127 steps
        block, kept = x[..., start : start + 32], rounded_q8(x)[..., start : start + 32]
        assert (np.abs(kept - block) <= np.abs(block).max(-1, keepdims=True) / 254 * 1.001 + 127 * 2**-25).all()
    spread = x.max(0, keepdims=True) - x.min(0, keepdims=True)
    # half a step; what a float16 scale loses over 15 steps
    half = spread / 30 + spread * 2**-11 + 2**-25 * 15
    assert (np.abs(q4_keys(x) - x) <= half * 1.01 + np.abs(x) * 2**-22).all()
    assert np.isfinite(q4_values(x)).all()


class Sequence:
    """One sequence on the reference, one head, with q4 pages; computes any run of positions."""

    def __init__(self, k: F32, v: F32, window: int | None = None) -> None:
        self.ops, self.k, self.v = ReferenceBackend(), k, v
        self.spec = Attention(1, 1, k.shape[1], 1.0, None, window=window)
        self.cache = self.ops.kv_cache(8, PAGE, 1, k.shape[1], "q4", RecentPages(8, 0))

    def run(self, start: int, count: int) -> F32:
        """The pages lie in order; the recent page of page n is page 7 - n."""
        rows = np.arange(start, start + count, dtype=np.int32)
        table = np.arange(8, dtype=np.int32)[None]
        recent = table[:, ::-1].copy()
        inputs = StepInputs(
            rows,
            rows,
            rows,
            np.array([0, count], np.int32),
            table,
            rows[:0],
            recent[0][rows // PAGE] * PAGE + rows % PAGE,
            recent,
        )

        def step() -> F32:
            out = self.ops.empty(Rows.TOKENS, self.k.shape[1])
            self.ops.kv_write(self.k[rows], self.v[rows], self.cache)
            self.ops.attention(np.zeros((count, self.k.shape[1]), np.float32), self.cache, self.spec, out)
            return out

        return self.ops.download(self.ops.capture(step, StepLimits(256, 1, 1, 8)).run(inputs))


def test_rows_see_their_own_group_as_it_is_and_earlier_ones_in_4_bits() -> None:
    """Without scores a row is the mean of the values that it sees."""
    rng = np.random.default_rng(3)
    v = rng.normal(0, 1, (200, 32)).astype(np.float16).astype(np.float32)
    k = np.zeros_like(v)
    got = Sequence(k, v).run(0, 200)
    rounded = np.concatenate([q4_values(v[i : i + PAGE, None])[:, 0] for i in range(0, 192, PAGE)])
    for position in (0, 31, 63, 64, 100, 127, 128, 191, 199):
        border = position // RECENT_TOKENS * RECENT_TOKENS
        seen = np.concatenate([rounded[:border], v[border : position + 1]])
        np.testing.assert_allclose(got[position], seen.mean(0), atol=1e-5)
        assert border == 0 or not np.allclose(got[position], v[: position + 1].mean(0), atol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
def test_q4_rows_do_not_depend_on_chunks(window: int | None) -> None:
    rng = np.random.default_rng(4)
    k, v = (rng.normal(0, 1, (200, 16)).astype(np.float32) for _ in range(2))
    whole = Sequence(k, v, window).run(0, 200)
    for size in (1, 7, 64, 100):
        sequence = Sequence(k, v, window)
        pieces = [sequence.run(start, min(size, 200 - start)) for start in range(0, 200, size)]
        np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-6)
