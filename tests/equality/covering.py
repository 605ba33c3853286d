"""The rows of the equality matrix: each feature alone everywhere, and pairs of features as a
covering array.

`single_rows` crosses every feature with every model and every type of KV pages. `pair_rows` has
each possible pair of features twice, on two models, with two types of KV pages and two loads of
requests; it spreads the features evenly over models and types. A new feature adds two rows for each
feature that is there, a new model or a new type adds none to the pairs.

The pairs are recorded in `pairs.txt`, so that a change to them is seen. After a change to FEATURES,
KINDS or KV_TYPES run `PYTHONPATH=. python tests/equality/covering.py`. Read `test_pairs.py` next.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matrix import Feature

LOADS = ("first", "second")
RECORD = Path(__file__).with_name("pairs.txt")


@dataclass(frozen=True)
class Row:
    """A run of one load: which features are on, on which model, with which type of KV pages."""

    features: tuple[str, ...]
    model: str
    kv_dtype: str
    load: str = LOADS[0]

    def __str__(self) -> str:
        return " | ".join((" + ".join(self.features), self.model, self.kv_dtype, self.load))


def possible_pairs(features: Mapping[str, Feature]) -> list[tuple[str, str]]:
    """All pairs of features that can be on together."""
    return [
        (first, second)
        for first, second in itertools.combinations([name for name in features if features[name].in_pairs], 2)
        if second not in features[first].excludes and first not in features[second].excludes
    ]


def single_rows(features: Mapping[str, Feature], models: Sequence[str], kv_types: Sequence[str]) -> list[Row]:
    """Each feature alone, on every model that has it, with every type of KV pages."""
    return [
        Row((name,), model, kv_dtype)
        for name, feature in features.items()
        for model in (models if feature.only_on is None else [feature.only_on])
        for kv_dtype in kv_types
    ]


def pair_rows(features: Mapping[str, Feature], models: Sequence[str], kv_types: Sequence[str]) -> list[Row]:
    """Each possible pair of features with each load, every time on another model and with another
    type of KV pages.

    Of the combinations of a model and a type a row takes what its features have not met, above all
    the feature with fewer rows to come, else what they have met least.
    """
    met: Counter[tuple[str, str, str]] = Counter()
    to_come = Counter(name for names in possible_pairs(features) for name in names * len(LOADS))
    rows = []
    for names in possible_pairs(features):
        fixed = [model for name in names if (model := features[name].only_on) is not None]
        before: list[Row] = []
        for load in LOADS:
            free = [
                (model, kv_dtype)
                for model, kv_dtype in itertools.product(fixed or models, kv_types)
                if all((model != row.model or fixed) and kv_dtype != row.kv_dtype for row in before)
            ]

            def meetings(cell: tuple[str, str], names: tuple[str, str] = names) -> tuple[float, int, int]:
                counts = [met[name, *cell] for name in names]
                missed = sum(1 / to_come[name] for name, count in zip(names, counts, strict=True) if count == 0)
                return -missed, sum(counts), met["", *cell]

            model, kv_dtype = min(free, key=meetings)
            to_come.subtract(names)
            met.update((name, model, kv_dtype) for name in (*names, ""))
            before.append(Row(names, model, kv_dtype, load))
        rows += before
    return rows


def recorded_pairs() -> Iterator[Row]:
    """The rows of `pairs.txt`."""
    for line in RECORD.read_text().splitlines():
        features, model, kv_dtype, load = line.split(" | ")
        yield Row(tuple(features.split(" + ")), model, kv_dtype, load)


def _record() -> None:
    from kinds import KINDS
    from matrix import FEATURES

    from martlet.kv_types import KV_TYPES

    RECORD.write_text("".join(f"{row}\n" for row in pair_rows(FEATURES, tuple(KINDS), tuple(KV_TYPES))))


if __name__ == "__main__":
    _record()
