"""The equality matrix on tiny models: each feature of the engine and each pair changes no bit of any answer.

Every kind of attention and every type of KV pages is in it. All of it together is marked `exhaustive` (`make matrix`);
what is always run has each feature on CHOSEN, and each pair on one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from kinds import KINDS, WINDOW, write_kind
from loads import make_load
from matrix import FEATURES, check, kind_of, pairs_of, plain_answers
from seen import Answers

from martlet import LLM
from martlet.kv_types import KV_TYPES

LOAD = make_load(vocab=256, prompts=(20, 140, 110, 40, 64, 66), n_new=25, context=192, few=7, some=8)
OTHER_LOAD = make_load(vocab=256, prompts=(21, 139, 97, 47, 65, 67), n_new=25, context=192, few=7, some=8, seed=6)
CHOSEN = [("quantised", "f16"), ("window", "f32"), ("softcap", "q8"), ("qk norm", "q4")]
COMBINATIONS = [(kind, kv_dtype) for kind in KINDS for kv_dtype in KV_TYPES]
PAIRS = pairs_of()

Paths = Callable[[str], Path]
Plain = Callable[[str, str], Answers]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    folder = tmp_path_factory.mktemp("kinds")
    return cache(lambda kind: write_kind(kind, folder))


@pytest.fixture(scope="module")
def plain(path_of: Paths) -> Plain:
    return cache(lambda kind, kv_dtype: plain_answers(path_of(kind), LOAD, kv_dtype))


def named(pairs: list[tuple[str, str]], sign: str) -> list[str]:
    return [sign.join(pair) for pair in pairs]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("kind", "kv_dtype"), CHOSEN, ids=named(CHOSEN, "-"))
def test_a_feature(path_of: Paths, plain: Plain, kind: str, kv_dtype: str, feature: str, tmp_path: Path) -> None:
    if feature == "four threads" and (kind, kv_dtype) != CHOSEN[0]:
        pytest.skip("slow where there are fewer processors: once is enough")
    kind = kind_of((feature,), kind)
    check(path_of(kind), LOAD, plain(kind, kv_dtype), kv_dtype, (feature,), tmp_path)


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=named(PAIRS, " + "))
def test_a_pair(path_of: Paths, plain: Plain, number: int, tmp_path: Path) -> None:
    kind, kv_dtype = CHOSEN[number % len(CHOSEN)]
    kind = kind_of(PAIRS[number], kind)
    check(path_of(kind), LOAD, plain(kind, kv_dtype), kv_dtype, PAIRS[number], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("features", [*((name,) for name in FEATURES), *PAIRS], ids=" + ".join)
@pytest.mark.parametrize(("kind", "kv_dtype"), COMBINATIONS, ids=named(COMBINATIONS, "-"))
def test_all(path_of: Paths, plain: Plain, kind: str, kv_dtype: str, features: tuple[str, ...], tmp_path: Path) -> None:
    if kind_of(features, kind) != kind and kind != COMBINATIONS[0][0]:
        pytest.skip("the model of that feature is the same for all kinds: once is enough")
    kind = kind_of(features, kind)
    check(path_of(kind), LOAD, plain(kind, kv_dtype), kv_dtype, features, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("feature", [name for name in FEATURES if FEATURES[name].in_pairs])
@pytest.mark.parametrize(("kind", "kv_dtype"), CHOSEN, ids=named(CHOSEN, "-"))
def test_other_requests(path_of: Paths, kind: str, kv_dtype: str, feature: str, tmp_path: Path) -> None:
    kind = kind_of((feature,), kind)
    answers = plain_answers(path_of(kind), OTHER_LOAD, kv_dtype)
    check(path_of(kind), OTHER_LOAD, answers, kv_dtype, (feature,), tmp_path)


def test_kinds_and_types_are_what_they_say(path_of: Paths, plain: Plain) -> None:
    """A matrix of models that are all alike would show little."""
    found = {}
    for kind in KINDS:
        with LLM(str(path_of(kind)), backend="null", threads=1) as llm:
            found[kind] = [layer.mixer for layer in llm._parts.spec.layers]
    assert [mixer.window for mixer in found["quantised"]] == [None] * 3
    assert [mixer.window for mixer in found["window"]] == [WINDOW] * 3
    assert [mixer.window for mixer in found["softcap"]] == [WINDOW, None, WINDOW]
    assert all(mixer.softcap == 3.0 for mixer in found["softcap"])
    assert all(mixer.qk_norm is not None for mixer in found["qk norm"])
    assert sum(len(request.prompt_ids) > 2 * WINDOW for request in LOAD.requests) == 2
    for kind in KINDS:
        digests = {kv_dtype: plain(kind, kv_dtype).logits["1", 0, 150] for kv_dtype in KV_TYPES}
        assert len(set(digests.values())) == len(KV_TYPES), f"{kind}: two types of KV pages give the same bits"
