"""Comparing KV precisions: divergences worked by hand, and the guard's choice by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from martlet.commands.kvcheck import warnings_of
from martlet.kv_types import KvTypes, parse_kv_types
from martlet.observe.kv_quality import choose_types, compare
from martlet.spec import Activation, Attention, DenseFfn, Layer, ModelSpec, Norm

F16, Q8, Q4 = (parse_kv_types(name) for name in ("f16", "q8", "q4"))


class Lens:
    """Logits that a test gives, two rows at a time."""

    def __init__(self, **logits: Sequence[Sequence[float]]) -> None:
        self._logits = {name: np.log(np.array(rows, np.float32)) for name, rows in logits.items()}

    def logits(self, types: KvTypes, ids: Sequence[int]) -> Iterator[Any]:
        rows = self._logits[str(types)]
        for start in range(0, len(ids), 2):
            yield rows[start : start + 2]


def test_divergence_by_hand() -> None:
    """Two tokens: p = (3/4, 1/4) against q = (1/4, 3/4) is 1/2 ln 3; equal distributions are 0."""
    lens = Lens(f16=[[3, 1], [1, 1], [9, 1]], q8=[[1, 3], [2, 2], [1, 1]])
    found = compare(lens, F16, Q8, [0, 0, 1])
    assert found.positions.tolist() == [0, 1]  # nothing follows the last
    assert found.kld.tolist() == pytest.approx([0.5 * math.log(3), 0.0], abs=1e-6)
    assert found.agree.tolist() == [False, True]
    # The tokens that follow are 0 and 1: p gives them 3/4 and 1/2, q 1/4 and 1/2.
    assert found.perplexities == pytest.approx(((8 / 3) ** 0.5, 8**0.5), rel=1e-6)
    assert found.between(1, 5).positions.tolist() == [1]


def test_the_guard_spares_the_costliest_layers_first() -> None:
    costs = [0.001, 0.05, 0.002, 0.03, 0.001]

    def measure(types: KvTypes) -> float:
        return sum(0.0 if types.of(layer).name == "q8" else cost for layer, cost in enumerate(costs))

    assert str(choose_types(Q4, Q8, costs, 0.1, measure)[0]) == "q4"  # all of it fits
    assert str(choose_types(Q4, Q8, costs, 0.04, measure)[0]) == "q4,q8:1"
    assert str(choose_types(Q4, Q8, costs, 0.004, measure)[0]) == "q4,q8:1,q8:3"
    chosen, kld = choose_types(Q4, Q8, costs, 0.0001, measure)
    assert [chosen.of(layer).name for layer in range(5)] == ["q8"] * 5
    assert kld == 0.0


def test_the_guard_measures_what_it_chose() -> None:
    """Where divergences add up to more than their sum, further layers are spared until it fits."""
    costs = [0.03, 0.02, 0.01]
    asked = []

    def measure(types: KvTypes) -> float:
        asked.append(str(types))
        return 2 * sum(0.0 if types.of(layer).name == "q8" else cost for layer, cost in enumerate(costs))

    chosen, kld = choose_types(Q4, Q8, costs, 0.03, measure)
    assert asked == ["q4,q8:0", "q4,q8:0,q8:1"]
    assert (str(chosen), kld) == ("q4,q8:0,q8:1", 0.02)


def test_a_limit_that_nothing_keeps_is_told() -> None:
    chosen, kld = choose_types(Q4, Q8, [0.1, 0.1], 0.01, lambda types: 0.5)
    assert [chosen.of(layer).name for layer in range(2)] == ["q8", "q8"]
    assert kld == 0.5


def spec(head_dim: int) -> ModelSpec:
    norm = Norm(1e-5)
    layer = Layer(Attention(2, 1, head_dim, 1.0, None), DenseFfn(8, Activation.SILU), norm, norm)
    return ModelSpec("llama", "", 10, 8, 64, (layer,) * 4, norm, True)


@pytest.mark.parametrize(
    ("head_dim", "entry", "expected"),
    [
        (64, {"kld": 0.01}, []),
        (32, {"kld": 0.01}, ["heads have 32 dimensions"]),
        (64, {"kld": 0.2}, ["mean divergence of 0.200"]),
        (64, {"kld": 0.01, "layers": [0.001, 0.009, 0.001, 0.001]}, ["layers 1 lose more", "--kv-dtype q4,q8:1"]),
        (64, {"kld": 0.01, "guard": {"kld": 0.2, "limit": 0.1}}, ["no choice of types"]),
    ],
)
def test_warnings(head_dim: int, entry: dict[str, Any], expected: list[str]) -> None:
    """ask 28: thin heads, bad layers, a divergence that users see"""
    found = " ".join(warnings_of(spec(head_dim), {"kv_dtype": "q4", **entry}))
    assert all(text in found for text in expected)
    assert (found == "") == (expected == [])
