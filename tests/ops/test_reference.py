"""The reference operations on values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from martlet.errors import UnsupportedError
from martlet.ops.interface import Rows, StepInputs, StepLimits
from martlet.ops.reference import ReferenceBackend
from martlet.quant.table import BlockType, RawTensor
from martlet.spec import Activation, Attention, Rope

Run = Callable[..., Any]


def f32(*rows: Any) -> np.ndarray:
    return np.array(rows, np.float32)


def raw(matrix: Any) -> RawTensor:
    values = np.array(matrix, np.float32)
    return RawTensor("w", values.shape, BlockType.F32, values.reshape(-1).view(np.uint8))


def run(
    ops: ReferenceBackend,
    step: Callable[[], Any],
    n: int = 1,
    *,
    ids: list[int] | None = None,
    positions: list[int] | None = None,
    slots: list[int] | None = None,
    spans: list[int] | None = None,
    pages: list[list[int]] | None = None,
    logit_rows: list[int] | None = None,
) -> Any:
    """Run a step of n rows, by default one sequence from position 0 on, in its own slots."""
    rows = list(range(n))
    arrays = [
        np.array(given if given is not None else default, np.int32)
        for given, default in (
            (ids, [0] * n),
            (positions, rows),
            (slots, rows),
            (spans, [0, n]),
            (pages, [[0, 1, 2, 3]]),
            (logit_rows, [n - 1]),
        )
    ]
    return ops.capture(step, StepLimits(16, 4, 16, 4)).run(StepInputs(*arrays))


def written(
    ops: ReferenceBackend, rows: Rows, width: int, operation: Callable[[Any], None], n: int, **inputs: Any
) -> Any:
    """What an operation writes to a fresh array."""

    def step() -> Any:
        out = ops.empty(rows, width)
        operation(out)
        return out

    return ops.download(run(ops, step, n, **inputs))


@pytest.fixture
def ops() -> ReferenceBackend:
    return ReferenceBackend()


def test_embed(ops: ReferenceBackend) -> None:
    table = ops.pack([raw([[1, 2], [3, 4], [5, 6]])])
    found = written(ops, Rows.TOKENS, 2, lambda out: ops.embed(table, 0.5, out), 3, ids=[2, 0, 2])
    assert found.tolist() == [[2.5, 3.0], [0.5, 1.0], [2.5, 3.0]]


def test_rms_norm_of_a_row_and_of_heads(ops: ReferenceBackend) -> None:
    x, weight = f32([3, 4, 0, 0]), np.array([2, 1, 1, 1], np.float32)
    found = written(ops, Rows.TOKENS, 4, lambda out: ops.rms_norm(x, weight, 0.0, out), 1)
    # root of the mean square is 2.5
    np.testing.assert_allclose(found, [[2.4, 1.6, 0, 0]], rtol=1e-6)
    found = written(ops, Rows.TOKENS, 4, lambda out: ops.rms_norm(f32([1, 7, 5, 5]), weight[:2], 0.0, out), 1)
    # two heads of 2: roots 5 and 5
    np.testing.assert_allclose(found, [[0.4, 1.4, 2, 1]], rtol=1e-6)
    found = written(ops, Rows.TOKENS, 4, lambda out: ops.rms_norm(f32([0, 0, 0, 0]), weight, 1e-6, out), 1)
    assert found.tolist() == [[0, 0, 0, 0]]
    found = written(ops, Rows.TOKENS, 2, lambda out: ops.rms_norm(f32([1, 1]), weight[:2], 3.0, out), 1)
    np.testing.assert_allclose(found, [[1.0, 0.5]], rtol=1e-6)  # sqrt(1 + 3) = 2


def test_linear_stacked_with_bias_and_residual(ops: ReferenceBackend) -> None:
    weight = ops.pack([raw([[1, 2], [0, 1]]), raw([[-1, 0]])])
    x = f32([1, 10], [2, 3])
    found = written(ops, Rows.TOKENS, 3, lambda out: ops.linear(x, weight, out), 2)
    assert found.tolist() == [[21, 10, -1], [8, 3, -2]]
    bias, residual = np.array([0.5, 0, 1], np.float32), f32([1, 2, 3], [4, 5, 6])
    found = written(ops, Rows.TOKENS, 3, lambda out: ops.linear(x, weight, out, bias, residual), 2)
    assert found.tolist() == [[22.5, 12, 3], [12.5, 8, 5]]


def test_rope_turns_halves_and_leaves_the_rest(ops: ReferenceBackend) -> None:
    rope = Rope(4, (math.pi / 2, math.pi), magnitude=2.0)  # a quarter and a half turn a position
    x = f32([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    found = written(ops, Rows.TOKENS, 5, lambda out: ops.rope(x, 5, rope, out), 2, positions=[0, 1])
    # position 0: as it is, times 2. Position 1: (1, 3) → (-3, 1), (2, 4) → (-2, -4), times 2. The
    # fifth stays.
    np.testing.assert_allclose(found, [[2, 4, 6, 8, 5], [-6, -4, 2, -8, 5]], atol=1e-5)


def test_rope_of_every_head_in_place(ops: ReferenceBackend) -> None:
    x = f32([1, 0, 0, 1])
    run(ops, lambda: ops.rope(x, 2, Rope(2, (math.pi / 2,)), x), positions=[3])
    np.testing.assert_allclose(x, [[0, -1, 1, 0]], atol=1e-5)  # three quarters of a turn


def attend(ops: ReferenceBackend, spec: Attention, q: Any, k: Any, v: Any, page_size: int = 2, **inputs: Any) -> Any:
    """Write k and v, then attend."""
    cache = ops.kv_cache(4, page_size, spec.n_kv_heads, spec.head_dim, "f32")

    def operation(out: Any) -> None:
        ops.kv_write(k, v, cache)
        ops.attention(q, cache, spec, out)

    return written(ops, Rows.TOKENS, spec.n_heads * spec.head_dim, operation, len(q), **inputs)


LN3 = math.log(3.0)


def test_attention_is_causal(ops: ReferenceBackend) -> None:
    spec = Attention(1, 1, 1, scale=2.0, rope=None)
    k = f32([LN3 / 2], [0], [0])  # scores are ln 3, 0, 0: weights 3 : 1 : 1
    found = attend(ops, spec, f32([1], [1], [1]), k, f32([10], [20], [60]))
    np.testing.assert_allclose(found, [[10], [12.5], [22]], rtol=1e-6)


def test_attention_window(ops: ReferenceBackend) -> None:
    spec = Attention(1, 1, 1, scale=1.0, rope=None, window=2)
    zeros = f32([0], [0], [0], [0])
    found = attend(ops, spec, zeros, zeros, f32([1], [3], [7], [9]))
    np.testing.assert_allclose(found, [[1], [2], [5], [8]], rtol=1e-6)  # itself and the one before


def test_attention_softcap(ops: ReferenceBackend) -> None:
    spec = Attention(1, 1, 1, scale=1.0, rope=None, softcap=LN3)
    k = f32([1000], [-1000])  # capped to ±ln 3: weights 3 : 1/3
    found = attend(ops, spec, f32([1], [1]), k, f32([10], [0]))
    np.testing.assert_allclose(found, [[10], [9]], rtol=1e-5)


def test_attention_heads_share_kv_heads(ops: ReferenceBackend) -> None:
    spec = Attention(4, 2, 1, scale=1.0, rope=None)
    found = attend(ops, spec, f32([0, 0, 0, 0]), f32([0, 0]), f32([5, 7]))
    assert found.tolist() == [[5, 5, 7, 7]]


def test_attention_through_pages_of_two_sequences(ops: ReferenceBackend) -> None:
    """Two sequences, pages out of order, the second with two positions from an earlier step."""
    spec = Attention(1, 1, 1, scale=1.0, rope=None)
    cache = ops.kv_cache(4, 2, 1, 1, "f32")
    before = f32([100], [200])
    run(ops, lambda: ops.kv_write(f32([0], [0]), before, cache), 2, slots=[6, 7])  # page 3
    k, v = f32([0], [0], [0]), f32([1], [5], [600])

    def operation(out: Any) -> None:
        ops.kv_write(k, v, cache)
        ops.attention(k, cache, spec, out)

    found = written(
        ops,
        Rows.TOKENS,
        1,
        operation,
        3,
        positions=[0, 1, 2],
        slots=[4, 5, 0],  # page 2; page 0
        spans=[0, 2, 3],
        pages=[[2, 1], [3, 0]],
    )
    np.testing.assert_allclose(found, [[1], [3], [300]], rtol=1e-6)


def test_kv_write_rounds_and_saturates_float16(ops: ReferenceBackend) -> None:
    spec = Attention(1, 1, 1, scale=1.0, rope=None)
    for value, kept in ((1e9, 65504.0), (-1e9, -65504.0), (1 + 2**-11, 1.0), (1 + 2**-10, 1 + 2**-10)):
        cache = ops.kv_cache(1, 2, 1, 1, "f16")

        def operation(out: Any, cache: Any = cache, value: float = value) -> None:
            ops.kv_write(f32([0]), f32([value]), cache)
            ops.attention(f32([0]), cache, spec, out)

        assert written(ops, Rows.TOKENS, 1, operation, 1).tolist() == [[kept]]
    with pytest.raises(UnsupportedError, match="f8"):
        ops.kv_cache(1, 2, 1, 1, "f8")


@pytest.mark.parametrize(
    ("activation", "at_one"),
    [
        (Activation.SILU, 0.7310585786),  # 1 / (1 + 1/e)
        (Activation.GELU, 0.8413447461),  # the normal distribution at 1
        (Activation.GELU_TANH, 0.8411919906),
    ],
)
def test_act_mul(ops: ReferenceBackend, activation: Activation, at_one: float) -> None:
    gate_up = f32([1, -1, 0, 200, -200, 3, 5, 7, 2, 2])
    found = written(ops, Rows.TOKENS, 5, lambda out: ops.act_mul(gate_up, activation, out), 1)
    np.testing.assert_allclose(found, [[3 * at_one, 5 * (at_one - 1), 0, 400, 0]], atol=1e-6, rtol=1e-6)


def test_add_take_rows_and_cap(ops: ReferenceBackend) -> None:
    x, y = f32([1, 2], [3, 4], [5, 6]), f32([10, 20], [30, 40], [50, 60])
    found = written(ops, Rows.TOKENS, 2, lambda out: ops.add(x, y, 0.5, out), 3)
    assert found.tolist() == [[6, 12], [18, 24], [30, 36]]
    found = written(ops, Rows.LOGITS, 2, lambda out: ops.take_logit_rows(x, out), 3, logit_rows=[2, 0])
    assert found.tolist() == [[5, 6], [1, 2]]
    found = written(ops, Rows.TOKENS, 2, lambda out: ops.scale_cap(x, 3.0, None, out), 3)
    assert found.tolist() == [[3, 6], [9, 12], [15, 18]]
    found = written(ops, Rows.TOKENS, 2, lambda out: ops.scale_cap(f32([LN3, 1e6]), 2.0, 4.0, out), 1)
    # tanh(ln 3 / 2) = 1/2
    np.testing.assert_allclose(found, [[4 * math.tanh(LN3 / 2), 4]], rtol=1e-6)
    np.testing.assert_allclose(found[0, 0], 2.0, rtol=1e-6)


def test_steps_without_logit_rows(ops: ReferenceBackend) -> None:
    """A chunk inside a prompt asks for none."""
    weight = ops.pack([raw([[1, 2]])])

    def step() -> Any:
        x, out = ops.empty(Rows.LOGITS, 2), ops.empty(Rows.LOGITS, 1)
        ops.take_logit_rows(f32([1, 2]), x)
        ops.rms_norm(x, np.ones(2, np.float32), 1e-6, x)
        ops.linear(x, weight, out)
        ops.scale_cap(out, 1.0, 30.0, out)
        return out

    assert ops.download(run(ops, step, logit_rows=[])).shape == (0, 1)
