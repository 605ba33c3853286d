"""Mixtures of experts: the choice of experts by its definition, each product the bits that `linear`
gives for its row and its expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import random_tensor
from conftest import NAMES
from numpy.typing import NDArray

from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.cpu.simd.isa import chosen_isa
from martlet.ops.interface import Backend, Rows, StepInputs, StepLimits
from martlet.ops.reference import ReferenceBackend
from martlet.quant.table import BlockType, RawTensor
from martlet.spec import Activation, Routing, Scoring

F32 = NDArray[np.float32]
EMPTY = np.zeros(0, np.int32)
KINDS = (BlockType.Q4_0, BlockType.Q6_K, BlockType.Q4_K, BlockType.MXFP4, BlockType.F16, BlockType.F32)
CASES = [(chosen_isa().name, kind) for kind in KINDS]
CASES += [(isa, kind) for isa in NAMES if isa != chosen_isa().name for kind in (BlockType.Q4_K, BlockType.F32)]


def run(ops: Backend, feed: F32, step: Callable[[Any], Any]) -> F32:
    """What `step` returns for the rows of `feed` [T, W]."""
    rows = np.arange(len(feed), dtype=np.int32)

    def captured() -> Any:
        given = ops.empty(Rows.TOKENS, feed.shape[1])
        ops.feed(given)
        return step(given)

    inputs = StepInputs(
        rows, rows, rows, np.array([0, rows.size], np.int32), np.zeros((1, 1), np.int32), EMPTY, feed=feed
    )
    return ops.download(ops.capture(captured, StepLimits(128, 1, 1, 1)).run(inputs))


@pytest.fixture(scope="module")
def backends(kernel_folder: Path) -> Iterator[dict[str, Backend]]:
    made: dict[str, Backend] = {name: CpuBackend(2, kernel_folder, name) for name in NAMES}
    yield {**made, "reference": ReferenceBackend()}
    for ops in made.values():
        ops.close()


def routed(ops: Backend, scores: F32, routing: Routing, bias: F32 | None = None) -> tuple[F32, F32]:
    """Numbers and weights of each row's experts."""
    added = None if bias is None else ops.upload(bias)

    def step(given: Any) -> Any:
        out = ops.empty(Rows.TOKENS, 2 * routing.n_chosen)
        ops.route(given, routing, added, out)
        return out

    out = run(ops, scores, step)
    return out[:, : routing.n_chosen], out[:, routing.n_chosen :]


def by_hand(scores: F32, routing: Routing, bias: F32 | None) -> tuple[list[list[int]], list[list[float]]]:
    """The definition in float64, row by row, with sorted lists."""
    numbers, weights = [], []
    for row in scores.astype(np.float64):
        p = 1 / (1 + np.exp(-row)) if routing.scoring is Scoring.SIGMOID else np.exp(row - row.max())
        p = p if routing.scoring is Scoring.SIGMOID else p / p.sum()
        rank = row if bias is None else p + bias
        size = routing.n_experts // routing.n_groups
        sums = [sum(sorted(rank[g * size : (g + 1) * size])[-routing.n_ranking :]) for g in range(routing.n_groups)]
        open_groups = sorted(range(routing.n_groups), key=lambda g: -sums[g])[: routing.n_groups_chosen]
        order = sorted((i for i in range(len(row)) if i // size in open_groups), key=lambda i: -rank[i])
        chosen = order[: routing.n_chosen]
        share = sum(p[i] for i in chosen) if routing.normalised else 1
        numbers.append(chosen)
        weights.append([p[i] / share * routing.scale for i in chosen])
    return numbers, weights


ROUTINGS = {
    "softmax": (Routing(11, 3), False),
    "not normalised": (Routing(11, 4, normalised=False, scale=2.5), False),
    "sigmoid": (Routing(40, 8, Scoring.SIGMOID, scale=1.5), False),
    "sigmoid and bias": (Routing(16, 4, Scoring.SIGMOID), True),
    "softmax and bias": (Routing(9, 2), True),
    "groups": (Routing(24, 4, Scoring.SIGMOID, n_groups=4, n_groups_chosen=2, n_ranking=2), True),
    "groups by their best": (Routing(24, 3, n_groups=6, n_groups_chosen=1), False),
    "all": (Routing(4, 4), False),
}


@pytest.mark.parametrize("backend", [*NAMES, "reference"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_route(backends: dict[str, Backend], backend: str, name: str) -> None:
    routing, has_bias = ROUTINGS[name]
    rng = np.random.default_rng(5)
    scores = rng.normal(0, 2, (37, routing.n_experts)).astype(np.float32)
    bias = rng.normal(0, 0.3, routing.n_experts).astype(np.float32) if has_bias else None
    numbers, weights = routed(backends[backend], scores, routing, bias)
    expected, expected_weights = by_hand(scores, routing, bias)
    assert numbers.tolist() == expected
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-6)


@pytest.mark.parametrize("backend", [*NAMES, "reference"])
def test_equal_scores_go_to_the_lower_number(backends: dict[str, Backend], backend: str) -> None:
    scores = np.array([[1, 2, 2, 1, 2, 0]], np.float32)
    numbers, weights = routed(backends[backend], scores, Routing(6, 4))
    assert numbers.tolist() == [[1, 2, 4, 0]]
    np.testing.assert_allclose(weights[0, :3], weights[0, 0])


@pytest.mark.parametrize("backend", [*NAMES, "reference"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38])
def test_numbers_stay_in_range_whatever_the_scores(backends: dict[str, Backend], backend: str, value: float) -> None:
    scores = np.full((3, 6), value, np.float32)
    scores[1, 2:] = 0
    scores[2, :2] = 0
    for routing in (Routing(6, 3), Routing(6, 3, Scoring.SIGMOID, n_groups=2, n_groups_chosen=1, n_ranking=2)):
        for row in routed(backends[backend], scores, routing)[0].tolist():
            assert sorted(set(row)) == sorted(row)
            assert set(row) <= set(range(6))


def expert_products(
    ops: Backend, x: F32, numbers: list[list[int]], stacks: list[RawTensor], bias: F32 | None, own: bool
) -> F32:
    """[T, S, N]: `expert_linear`, whose choice is made by scores that leave none else; `own`: each
    slot has its own columns of x.
    """
    n_experts, n_chosen, n = stacks[0].shape[0], len(numbers[0]), sum(stack.shape[1] for stack in stacks)
    weights = [ops.pack([stack.part(e) for stack in stacks]) for e in range(n_experts)]
    scores = np.full((len(x), n_experts), -50, np.float32)
    for row, chosen in zip(scores, numbers, strict=True):
        row[chosen] = np.arange(n_chosen, 0, -1)
    added = None if bias is None else ops.upload(bias)

    def step(given: Any) -> Any:
        choice, out = ops.empty(Rows.TOKENS, 2 * n_chosen), ops.empty(Rows.TOKENS, n_chosen * n)
        ops.route(ops.columns(given, x.shape[1], x.shape[1] + n_experts), Routing(n_experts, n_chosen), None, choice)
        ops.expert_linear(ops.columns(given, 0, x.shape[1]), choice, weights, out, added)
        return out

    assert x.shape[1] == stacks[0].shape[2] * (n_chosen if own else 1)
    return run(ops, np.concatenate([x, scores], axis=1), step).reshape(len(x), n_chosen, n)


def linear_products(ops: Backend, x: F32, stacks: list[RawTensor], e: int, bias: F32 | None) -> F32:
    """[T, N]: `linear` with expert e's weight."""
    weight = ops.pack([stack.part(e) for stack in stacks])
    added = None if bias is None else ops.upload(bias[e])

    def step(given: Any) -> Any:
        out = ops.empty(Rows.TOKENS, sum(stack.shape[1] for stack in stacks))
        ops.linear(given, weight, out, added)
        return out

    return run(ops, x, step)


def stack(kind: BlockType, n_experts: int, n: int, k: int, seed: int) -> RawTensor:
    flat = random_tensor(kind, n_experts * n, k, seed)
    return RawTensor("experts", (n_experts, n, k), kind, flat.data)


@pytest.mark.parametrize(("isa", "kind"), CASES, ids=str)
def test_each_product_has_the_bits_of_its_row_and_expert_alone(
    backends: dict[str, Backend], isa: str, kind: BlockType
) -> None:
    """Few and many rows, uneven experts, one without rows, gate and up of two types."""
    ops, rng, k, n_experts = backends[isa], np.random.default_rng(3), 256, 5
    stacks = [stack(kind, n_experts, 40, k, 1), stack(BlockType.Q8_0, n_experts, 24, k, 2)]
    bias = rng.normal(size=(n_experts, 64)).astype(np.float32)
    for n_rows in (1, 3, 17, 110):
        x = rng.normal(size=(n_rows, k)).astype(np.float32)
        numbers = [[0 if t % 4 else 3, (1, 4)[t % 2]] for t in range(n_rows)]  # never 2
        added = bias if n_rows > 1 else None
        products = expert_products(ops, x, numbers, stacks, added, own=False)
        for e in range(n_experts):
            expected = linear_products(ops, x, stacks, e, added)
            for t, chosen in enumerate(numbers):
                for s in np.flatnonzero(np.array(chosen) == e):
                    assert np.array_equal(products[t, s].view(np.int32), expected[t].view(np.int32)), (n_rows, t, s)


def test_each_slot_reads_its_own_columns(backends: dict[str, Backend]) -> None:
    rng, k = np.random.default_rng(4), 64
    for name, ops in backends.items():
        for kind in (BlockType.Q4_0, BlockType.F32):
            x, stacks = rng.normal(size=(9, 2 * k)).astype(np.float32), [stack(kind, 3, 32, k, 1)]
            numbers = [[t % 3, (t + 1) % 3] for t in range(9)]
            products = expert_products(ops, x, numbers, stacks, None, own=True)
            for s in range(2):
                part = np.ascontiguousarray(x[:, s * k : (s + 1) * k])
                for t, chosen in enumerate(numbers):
                    expected = linear_products(ops, part, stacks, chosen[s], None)[t]
                    np.testing.assert_allclose(
                        products[t, s], expected, rtol=0, atol=0 if name != "reference" else 1e-4
                    )


@pytest.mark.parametrize("backend", [*NAMES, "reference"])
def test_combine_and_gate(backends: dict[str, Backend], backend: str) -> None:
    ops, rng, width = backends[backend], np.random.default_rng(6), 600
    y, choice = rng.normal(size=(5, 3 * width)).astype(np.float32), rng.normal(size=(5, 6)).astype(np.float32)

    def combined(given: Any) -> Any:
        out = ops.empty(Rows.TOKENS, width)
        ops.combine(ops.columns(given, 0, 3 * width), ops.columns(given, 3 * width, 3 * width + 6), out)
        return out

    expected = sum(choice[:, 3 + s, None].astype(np.float64) * y[:, s * width : (s + 1) * width] for s in range(3))
    np.testing.assert_allclose(run(ops, np.concatenate([y, choice], 1), combined), expected, atol=2e-6)

    def gated(given: Any) -> Any:
        x = ops.columns(given, 0, width)
        ops.gate(x, ops.columns(given, width, width + 3), x)
        return x

    shares = 1 / (1 + np.exp(-choice[:, :3].astype(np.float64)))
    expected = y[:, :width] * np.repeat(shares, width // 3, axis=1)
    np.testing.assert_allclose(run(ops, np.concatenate([y[:, :width], choice[:, :3]], 1), gated), expected, atol=2e-6)


@pytest.mark.parametrize("backend", [*NAMES, "reference"])
def test_act_mul_by_groups(backends: dict[str, Backend], backend: str) -> None:
    """Three groups are three separate gates."""
    ops, x = backends[backend], np.random.default_rng(7).normal(size=(9, 3 * 2 * 40)).astype(np.float32)

    def step(given: Any) -> Any:
        out = ops.empty(Rows.TOKENS, 3 * 40)
        ops.act_mul(given, Activation.SILU, out, 3)
        return out

    gate, up = np.split(x.astype(np.float64).reshape(9, 3, 80), 2, axis=2)
    expected = (gate / (1 + np.exp(-gate)) * up).reshape(9, -1)
    np.testing.assert_allclose(run(ops, x, step), expected, atol=2e-6)


@pytest.mark.parametrize("backend", [*NAMES, "reference"])
def test_softmax_comes_before_the_division_by_the_sum(backends: dict[str, Backend], backend: str) -> None:
    """Fault QNT-07: scores 2, 1, 0, -1 and two experts, with and without `norm_topk_prob`."""
    scores = np.array([[2, 1, 0, -1]], np.float32)
    for normalised, expected in ((True, [0.7311, 0.2689]), (False, [0.6439, 0.2369])):
        numbers, weights = routed(backends[backend], scores, Routing(4, 2, normalised=normalised))
        assert numbers.tolist() == [[0, 1]]
        np.testing.assert_allclose(weights[0], expected, atol=5e-5)
