"""The rows of the matrix: every possible pair of features, and every feature with every model and
type of KV pages.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

from covering import LOADS, pair_rows, possible_pairs, recorded_pairs, single_rows
from kinds import KINDS
from matrix import FEATURES

from martlet.kv_types import KV_TYPES

ROWS = list(recorded_pairs())
PAIRED = [name for name, feature in FEATURES.items() if feature.in_pairs]


def test_the_record_is_what_the_generator_makes() -> None:
    made = pair_rows(FEATURES, tuple(KINDS), tuple(KV_TYPES))
    assert made == ROWS, "run `PYTHONPATH=. python tests/equality/covering.py`"


def test_every_possible_pair_is_there_with_each_load_and_nothing_impossible() -> None:
    cells: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
    for row in ROWS:
        cells.setdefault(row.features, []).append((row.model, row.kv_dtype, row.load))
    assert set(cells) == set(possible_pairs(FEATURES))
    for names, runs in cells.items():
        kinds = {FEATURES[name].only_on for name in names} - {None}
        models, kv_types, loads = (set(column) for column in zip(*runs, strict=True))
        assert loads == set(LOADS)
        assert len(kv_types) == len(runs) == len(LOADS)
        assert models == kinds if kinds else len(models) == len(LOADS)
        assert all(FEATURES[one].excludes.count(other) == 0 for one, other in product(names, names))


def test_every_feature_of_pairs_meets_every_model_type_and_both_together() -> None:
    met = {(name, row.model, row.kv_dtype) for row in ROWS for name in row.features}
    free = [name for name in PAIRED if FEATURES[name].only_on is None]
    assert {key for key in met if key[0] in free and key[1] in KINDS} == set(product(free, KINDS, KV_TYPES))
    for name in set(PAIRED) - set(free):
        assert {key for key in met if key[0] == name} == set(product([name], [FEATURES[name].only_on], KV_TYPES))


def test_models_and_types_are_used_evenly() -> None:
    used = Counter((row.model, row.kv_dtype) for row in ROWS if row.model in KINDS)
    assert max(used.values()) <= 2 * min(used.values())


def test_each_feature_is_alone_on_every_model_with_every_type() -> None:
    rows = single_rows(FEATURES, tuple(KINDS), tuple(KV_TYPES))
    assert len(rows) == len(set(rows))
    for name, feature in FEATURES.items():
        models = KINDS if feature.only_on is None else [feature.only_on]
        cells = {(row.model, row.kv_dtype) for row in rows if row.features == (name,)}
        assert cells == set(product(models, KV_TYPES))
