"""Log-probabilities against Python's own arithmetic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from martlet.errors import SampleError
from martlet.sample.sampler import token_logprobs
from tests.sample.toy import logits, sequence


def test_by_hand() -> None:
    entry = token_logprobs(logits(*np.log([0.125, 0.5, 0.125, 0.25])), 2, 3)
    assert entry.token_id == 2
    assert entry.logprob == pytest.approx(math.log(0.125), abs=1e-6)
    assert entry.rank == 4  # 1, 3, then 0 before 2: equals rank by id
    assert [token for token, _ in entry.top] == [1, 3, 0]
    assert [logp for _, logp in entry.top] == pytest.approx(np.log([0.5, 0.25, 0.125]).tolist(), abs=1e-6)


def test_float64_over_a_large_vocabulary() -> None:
    row = np.random.default_rng(0).normal(3, 4, 40_000).astype(np.float32)
    log_total = math.log(math.fsum(math.exp(x) for x in row.tolist()))
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    for token in (0, 17, order[0], order[5]):
        entry = token_logprobs(row, token, 5)
        assert entry.logprob == pytest.approx(float(row[token]) - log_total, abs=1e-12)
        assert entry.rank == order.index(token) + 1
        assert [i for i, _ in entry.top] == order[:5]


@pytest.mark.parametrize(("top", "n"), [(0, 0), (1, 1), (4, 4), (9, 4), (-1, 4)])
def test_how_many(top: int, n: int) -> None:
    assert len(token_logprobs(logits(1, 2, 3, 4), 0, top).top) == n


def test_impossible_tokens_are_not_listed() -> None:
    entry = token_logprobs(logits(1, -math.inf, 1), 0, 3)
    assert entry.top == ((0, pytest.approx(-math.log(2))), (2, pytest.approx(-math.log(2))))


def test_large_logits_do_not_overflow() -> None:
    assert token_logprobs(logits(3e38, -3e38), 0, 1).logprob == 0.0


def test_nan_is_an_error() -> None:
    with pytest.raises(SampleError):
        token_logprobs(logits(1, math.nan), 0, 1)


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": 0.5}, {"top_k": 2, "repetition_penalty": 1.5}]
)
def test_raw_is_of_the_models_logits_whatever_the_settings(settings: dict[str, Any]) -> None:
    row = logits(3, 2, 1, 0)
    token, entry = sequence(4, (3, 1), logprobs=2, **settings).sample(row)
    assert entry == token_logprobs(row, token, 2)


def test_processed_is_what_the_token_was_drawn_with() -> None:
    # top_k 2 leaves logits 2 and 1; at temperature 0.5 they are 4 and 2.
    seq = sequence(4, logprobs=4, logprobs_mode="processed", top_k=2, temperature=0.5)
    share = math.exp(4) / (math.exp(4) + math.exp(2))
    expected = {1: math.log(share), 3: math.log(1 - share)}
    for _ in range(20):
        token, entry = seq.sample(logits(0, 2, -1, 1))
        assert entry is not None
        assert dict(entry.top) == pytest.approx(expected)
        assert entry.logprob == pytest.approx(expected[token])
        assert entry.rank == {1: 1, 3: 2}[token]


def test_processed_and_greedy_is_certain() -> None:
    for penalty in (1.0, 1.5):
        _, entry = sequence(2, logprobs=2, logprobs_mode="processed", temperature=0, repetition_penalty=penalty).sample(
            logits(1, 2)
        )
        assert entry is not None
        assert (entry.token_id, entry.logprob, entry.rank, entry.top) == (1, 0.0, 1, ((1, 0.0),))


def test_no_logprobs_unless_asked_for() -> None:
    assert sequence(2).sample(logits(1, 2))[1] is None
    entry = sequence(2, logprobs=0).sample(logits(1, 2))[1]
    assert entry is not None
    assert entry.top == ()
