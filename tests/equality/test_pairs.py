"""The equality matrix on tiny models: no feature of the engine and no pair changes a bit of any
answer.

`covering.py` makes the rows. All of them are marked `exhaustive` (`make matrix`); what is always
run is each feature alone on a single model, and every fifth row of pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from covering import LOADS, Row, recorded_pairs, single_rows
from kinds import KINDS, WINDOW, write_kind
from loads import Load, make_load
from matrix import FEATURES, check, plain_answers
from seen import Answers

from martlet import LLM
from martlet.kv_types import KV_TYPES

_SIZES: dict[str, Any] = {"vocab": 256, "n_new": 25, "context": 192, "few": 7, "some": 8}
LOAD = make_load(prompts=(20, 140, 110, 40, 64, 66), **_SIZES)
OF_NAME = dict(zip(LOADS, (LOAD, make_load(prompts=(21, 139, 97, 47, 65, 67), seed=6, **_SIZES)), strict=True))
CHOSEN = (("quantised", "f16"), ("window", "f32"), ("softcap", "q8"), ("qk norm", "q4"))
SINGLE = single_rows(FEATURES, tuple(KINDS), tuple(KV_TYPES))
PAIRS = list(recorded_pairs())

Paths = Callable[[str], Path]
Plain = Callable[[str, str, Load], Answers]


def always_run() -> list[Row]:
    """Each feature once, in turn on CHOSEN, and some of the pairs."""
    rows = []
    for number, (name, feature) in enumerate(FEATURES.items()):
        model, kv_dtype = CHOSEN[number % len(CHOSEN)]
        rows.append(Row((name,), feature.only_on or model, kv_dtype))
    return rows + PAIRS[::5]


def grouped(rows: Sequence[Row]) -> list[Any]:
    """Parameters; rows with the same plain answers, and the same fitted heads, go to the same
    worker.
    """
    ordered = sorted(rows, key=lambda row: (row.model, row.kv_dtype, row.load))
    return [
        pytest.param(row, id=str(row), marks=pytest.mark.xdist_group(f"{row.model}-{row.kv_dtype}-{row.load}"))
        for row in ordered
    ]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    folder = tmp_path_factory.mktemp("kinds")
    return cache(lambda kind: write_kind(kind, folder))


@pytest.fixture(scope="module")
def plain(path_of: Paths) -> Plain:
    return cache(lambda kind, kv_dtype, load: plain_answers(path_of(kind), load, kv_dtype))


def run(row: Row, path_of: Paths, plain: Plain, folder: Path) -> None:
    load = OF_NAME[row.load]
    check(path_of(row.model), load, plain(row.model, row.kv_dtype, load), row.kv_dtype, row.features, folder)


@pytest.mark.parametrize("row", grouped(always_run()))
def test_some_rows(path_of: Paths, plain: Plain, row: Row, tmp_path: Path) -> None:
    run(row, path_of, plain, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", grouped([*SINGLE, *PAIRS]))
def test_all_rows(path_of: Paths, plain: Plain, row: Row, tmp_path: Path) -> None:
    run(row, path_of, plain, tmp_path)


def test_kinds_and_types_are_what_they_say(path_of: Paths, plain: Plain) -> None:
    """A matrix of models that are all alike would show little."""
    mixers = {}
    for kind in KINDS:
        with LLM(str(path_of(kind)), backend="null", threads=1) as llm:
            mixers[kind] = [layer.mixer for layer in llm._parts.spec.layers]
    assert [mixer.window for mixer in mixers["quantised"]] == [None] * 3
    assert [mixer.window for mixer in mixers["window"]] == [WINDOW] * 3
    assert [mixer.window for mixer in mixers["softcap"]] == [WINDOW, None, WINDOW]
    assert all(mixer.softcap == 3.0 for mixer in mixers["softcap"])
    assert all(mixer.qk_norm is not None for mixer in mixers["qk norm"])
    assert sum(len(request.prompt_ids) > 2 * WINDOW for request in LOAD.requests) == 2
    for kind in KINDS:
        digests = {kv_dtype: plain(kind, kv_dtype, LOAD).logits["1", 0, 150] for kv_dtype in KV_TYPES}
        assert len(set(digests.values())) == len(KV_TYPES), f"{kind}: two types of KV pages give the same bits"
