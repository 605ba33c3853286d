"""Steps against the logits processors of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from martlet.sample import logits as steps
from martlet.sample.logits import Candidates

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROWS = [np.random.default_rng(seed).normal(0, scale, 500) for seed, scale in enumerate((0.1, 1, 2, 4, 8))]
PROMPT = [3, 5, 7, 5, 7, 9, 3, 5]
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.std():.1f}")


def theirs(processor: Any, row: np.ndarray) -> list[float]:
    ids, scores = torch.tensor([PROMPT]), torch.tensor(row[None], dtype=torch.float64)
    return processor(ids, scores)[0].tolist()


def ours(c: Candidates, n: int) -> list[float]:
    full = np.full(n, -np.inf)
    full[c.ids] = c.logits
    return full.tolist()


def of(row: np.ndarray) -> Candidates:
    return Candidates(np.arange(len(row)), row.copy())


@every_row
@pytest.mark.parametrize(
    ("processor", "step", "values"),
    [
        ("TopPLogitsWarper", steps.top_p, (0.1, 0.5, 0.9, 0.99)),
        ("TopKLogitsWarper", steps.top_k, (1, 10, 499)),
        ("MinPLogitsWarper", steps.min_p, (0.01, 0.1, 0.7)),
        ("TypicalLogitsWarper", steps.typical_p, (0.1, 0.5, 0.9, 0.99)),
    ],
)
def test_truncation(row: np.ndarray, processor: str, step: Any, values: tuple[float, ...]) -> None:
    for value in values:
        expected = theirs(getattr(transformers, processor)(value), row)
        assert ours(step(of(row), value), len(row)) == expected, value


@every_row
@pytest.mark.parametrize("penalty", [0.7, 1.1, 2.0])
def test_repetition_penalty(row: np.ndarray, penalty: float) -> None:
    expected = theirs(transformers.RepetitionPenaltyLogitsProcessor(penalty), row)
    assert ours(steps.repetition_penalty(of(row), np.unique(PROMPT), penalty), len(row)) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_no_repeat_ngram(size: int) -> None:
    expected = theirs(transformers.NoRepeatNGramLogitsProcessor(size), ROWS[1])
    banned = [token for token, score in enumerate(expected) if score == -np.inf]
    assert steps.ngram_followers(np.array(PROMPT), size).tolist() == banned
