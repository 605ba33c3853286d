"""Rejection sampling against exact probabilities: whatever the drafter's distribution, the token has the model's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.sample.rejection import accepted_share, residual, verify

GRID = 2000


def weights(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 20), min_size=size, max_size=size).filter(any)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6).flatmap(lambda n: st.tuples(weights(n), weights(n))))
def test_the_token_has_the_models_distribution(pair: tuple[list[int], list[int]]) -> None:
    """Exactly, over all guesses and both random numbers: the accepting one on a grid, the drawing one by the residual."""
    p, q = (np.array(values, float) / sum(values) for values in pair)
    found, accepted = np.zeros(len(p)), 0.0
    for guess in np.flatnonzero(q):
        share = np.mean([verify(p, q, int(guess), (i + 0.5) / GRID, 0.5)[1] for i in range(GRID)])
        accepted += q[guess] * share
        found[guess] += q[guess] * share
        found += q[guess] * (1 - share) * residual(p, q)
    assert found == pytest.approx(p, abs=2 / GRID)
    assert accepted == pytest.approx(accepted_share(p, q), abs=2 / GRID)


def test_what_is_drawn_after_a_refusal_is_the_residual() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.1, 0.8])
    drawn = [verify(p, q, 2, 0.99, (i + 0.5) / 600) for i in range(600)]
    assert not any(accepted for _, accepted in drawn)
    counts = np.bincount([token for token, _ in drawn], minlength=3)
    assert counts.tolist() == [400, 200, 0]  # (0.4, 0.2, 0) of 0.6


def test_a_perfect_drafter_is_always_believed_and_a_useless_one_never() -> None:
    p = np.array([0.25, 0.75, 0.0])
    assert all(verify(p, p, guess, u, 0.5) == (guess, True) for guess in (0, 1) for u in (0.0, 0.5, 0.999999))
    token, accepted = verify(p, np.array([0.0, 0.0, 1.0]), 2, 0.0, 0.1)
    assert (token, accepted) == (0, False)


def test_chi_square_with_a_deliberately_bad_drafter() -> None:
    """20,000 tokens; the 99.9 % quantile of chi-square with 4 degrees of freedom is 18.47."""
    rng = np.random.default_rng(5)
    p, q = np.array([0.4, 0.3, 0.15, 0.1, 0.05]), np.array([0.02, 0.03, 0.05, 0.1, 0.8])
    n = 20_000
    guesses = rng.choice(5, n, p=q)
    tokens = [verify(p, q, int(guess), *rng.random(2))[0] for guess in guesses]
    counts = np.bincount(tokens, minlength=5)
    assert ((counts - n * p) ** 2 / (n * p)).sum() < 18.47
