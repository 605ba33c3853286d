"""The equality matrix on SmolLM2: no feature of the engine changes a bit of a request's answer.

matrix.py says what is compared; test_pairs.py has the same for tiny models, with every pair of
features. Here each feature runs alone, and a few pairs do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from loads import make_load
from matrix import FEATURES, check, plain_answers
from seen import Answers

from martlet.kv_types import KV_TYPES

LOAD = make_load(vocab=49_000, prompts=(30, 90, 80, 44, 40, 40), n_new=9, context=128, few=5, some=5)
LONG_LOAD = make_load(vocab=49_000, prompts=(20, 140, 110, 40, 64, 66), n_new=25, context=192, few=7, some=8)
SINGLE = [
    name
    for name, feature in FEATURES.items()
    if not name.startswith("policy") and name != "four threads" and feature.only_on is None
]
PAIRS = [
    ("two threads", "batch"),
    ("two threads", "recompute"),
    ("batch", "evicted"),
    ("batch", "beams"),
    ("other order", "full hit"),
    ("chunks of 7", "partial hit"),
    ("batch", "disk"),
    ("chunks by time", "forks"),
    ("full hit", "recompute"),
    ("partial hit", "policy priority"),
    ("swap", "forks"),
]


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> Answers:
    return plain_answers(smollm2_path, LOAD, "f16")


@pytest.fixture(scope="module")
def plain_long(smollm2_path: Path) -> Callable[[str], Answers]:
    return cache(lambda kv_dtype: plain_answers(smollm2_path, LONG_LOAD, kv_dtype))


@pytest.mark.model
@pytest.mark.parametrize("features", [*((name,) for name in SINGLE), *PAIRS], ids=" + ".join)
def test_a_feature_or_a_pair(smollm2_path: Path, plain: Answers, features: tuple[str, ...], tmp_path: Path) -> None:
    check(smollm2_path, LOAD, plain, "f16", features, tmp_path)


@pytest.mark.model
@pytest.mark.parametrize("kv_dtype", ["q8", "q4"])
def test_compressed_pages_are_as_exact_at_their_precision(
    smollm2_path: Path, plain: Answers, kv_dtype: str, tmp_path: Path
) -> None:
    alone = plain_answers(smollm2_path, LOAD, kv_dtype)
    assert alone.logits["1", 0, 89] != plain.logits["1", 0, 89]
    check(smollm2_path, LOAD, alone, kv_dtype, ("chunks of 7", "recompute"), tmp_path)


@pytest.mark.model
@pytest.mark.exhaustive
@pytest.mark.parametrize(("number", "feature"), list(enumerate(SINGLE)))
def test_longer_answers(
    smollm2_path: Path, plain_long: Callable[[str], Answers], number: int, feature: str, tmp_path: Path
) -> None:
    """Each feature once, in turn on the types of KV pages."""
    kv_dtype = tuple(KV_TYPES)[number % len(KV_TYPES)]
    check(smollm2_path, LONG_LOAD, plain_long(kv_dtype), kv_dtype, (feature,), tmp_path)
