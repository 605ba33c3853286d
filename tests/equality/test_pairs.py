"""The equality matrix on tiny models: each feature of the engine and each pair changes no bit of any answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from kinds import KINDS, write_kind
from matrix import FEATURES, Load, differences, make_load, pairs_of, plain_answers, run_row
from seen import Answers

KV_DTYPES = ("f16", "f32", "q8", "q4")
COMBINATIONS = [(kind, kv_dtype) for kind in KINDS for kv_dtype in KV_DTYPES]
CHOSEN = [("quantised", "f16"), ("window", "f32"), ("softcap", "q8"), ("qk norm", "q4")]
CHOSEN += [("quantised", "q4"), ("window", "f16"), ("softcap", "f16"), ("qk norm", "q8")]
PAIRS = pairs_of()
LOAD = make_load(vocab=256, prompts=(20, 140, 110, 40, 64, 66), n_new=25)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("kinds")
    return cache(lambda kind: write_kind(kind, folder))


@pytest.fixture(scope="module")
def plain(path_of: Callable[[str], Path]) -> Callable[[str, str], Answers]:
    return cache(lambda kind, kv_dtype: plain_answers(path_of(kind), LOAD, kv_dtype))


def check(path: Path, load: Load, plain: Answers, kv_dtype: str, features: tuple[str, ...], folder: Path) -> None:
    """The same bits, and every feature has shown that it happened."""
    seen = run_row(path, load, kv_dtype, features, folder)
    assert differences(seen.answers, plain, load) == []
    assert [name for name in features if not FEATURES[name].proof(seen)] == [], "features that did not happen"


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("kind", "kv_dtype"), COMBINATIONS, ids=["-".join(pair) for pair in COMBINATIONS])
def test_a_feature_alone(path_of, plain, kind: str, kv_dtype: str, feature: str, tmp_path: Path) -> None:
    check(path_of(kind), LOAD, plain(kind, kv_dtype), kv_dtype, (feature,), tmp_path)


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=[" + ".join(pair) for pair in PAIRS])
def test_a_pair(path_of, plain, number: int, tmp_path: Path) -> None:
    kind, kv_dtype = COMBINATIONS[number % len(COMBINATIONS)]
    check(path_of(kind), LOAD, plain(kind, kv_dtype), kv_dtype, PAIRS[number], tmp_path)
