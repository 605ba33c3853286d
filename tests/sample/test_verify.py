"""Which guesses are taken: against plain sampling, exact probabilities, and by chi-square for a drafter that is wrong on purpose."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.sample.verify import verify
from martlet.types import SeqId, Span
from tests.sample.toy import sequence

CHAIN = Span(SeqId(0), 9, 4, (), 4, draft=(5, 6, 5))


def rows_of(span: Span, tokens: list[int]) -> list[int]:
    """Which rows are drawn from, if these are the draws."""
    drawn: list[int] = []

    def draw(row: int) -> int | None:
        drawn.append(row)
        return tokens[len(drawn)] if len(drawn) < len(tokens) else None

    verify(span, tokens[0], draw)
    return drawn


@given(st.lists(st.integers(4, 8), min_size=1, max_size=6))
def test_a_row_is_drawn_from_if_all_guesses_before_it_were_drawn(tokens: list[int]) -> None:
    chain = [n for n in range(4) if (5, 6, 5)[:n] == tuple(tokens[:n])]
    assert rows_of(CHAIN, tokens) == [1, 2, 3][: max(n for n in chain if n <= len(tokens))]


def drawn_with_guesses(model: dict[tuple[int, ...], np.ndarray], span: Span, n: int, more: dict[str, Any]) -> list[int]:
    """`n` tokens of a model that looks at the last id, `span`'s guesses being verified in every step."""
    sampler, ids = sequence(4, **more), [0]

    def draw(row: int) -> int:
        assert ids[len(ids) - row :] == list(span.draft[:row]), "a row is drawn from whose ids are not those drawn"
        token, _ = sampler.sample(model[(ids[-1],)].astype(np.float32))
        ids.append(token)
        return token

    while len(ids) <= n:
        verify(span, draw(0), draw)
    return ids[1 : n + 1]


logits = st.lists(st.floats(-3, 3), min_size=4, max_size=4)
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 1.4, "top_p": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"temperature": 1.0, "mirostat": 2},
]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(logits, min_size=4, max_size=4), st.lists(st.integers(0, 3), min_size=3, max_size=3), st.integers(0, 99)
)
def test_tokens_are_those_that_plain_sampling_draws(rows: list[list[float]], guesses: list[int], seed: int) -> None:
    model = {(i,): np.array(row) for i, row in enumerate(rows)}
    span = Span(SeqId(0), 0, 4, (), 4, draft=tuple(guesses))
    plain = Span(SeqId(0), 0, 1, (), 1)
    for more in SETTINGS:
        expected = drawn_with_guesses(model, plain, 12, {**more, "seed": seed})
        assert drawn_with_guesses(model, span, 12, {**more, "seed": seed}) == expected


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


ROW = np.array([0.9, 0.2, -0.4, -1.5])
N = 4000


@pytest.mark.parametrize("guesses", [(3, 3), (0, 1), (2, 0)], ids=["bad on purpose", "likely", "in between"])
def test_tokens_have_the_models_distribution_and_guesses_are_right_as_often_as_it_says(
    guesses: tuple[int, int],
) -> None:
    """Over seeds. A guess is right with the model's own probability of it, whoever guesses: exactly, so p ± 4 deviations.

    The tokens of the first two places against the exact probabilities of pairs: 15 degrees of freedom, and
    chance exceeds 37.7 once in a thousand times.
    """
    p, n_right, pairs = softmax(ROW), [0, 0], Counter[tuple[int, int]]()
    span = Span(SeqId(0), 0, 3, (), 3, draft=guesses)
    for seed in range(N):
        sampler, drawn = sequence(4, temperature=1.0, seed=seed), []

        def draw(row: int, sampler: Any = sampler, drawn: list[int] = drawn) -> int:
            n_right[row - 1] += row > 0
            drawn.append(sampler.sample(ROW.astype(np.float32))[0])
            return drawn[-1]

        verify(span, draw(0), draw)
        while len(drawn) < 2:
            draw(0)
        pairs[drawn[0], drawn[1]] += 1
    expected = np.outer(p, p) * N
    chi_square = sum((pairs[a, b] - expected[a, b]) ** 2 / expected[a, b] for a in range(4) for b in range(4))
    assert chi_square < 37.7
    first, second = p[guesses[0]], p[guesses[0]] * p[guesses[1]]
    for count, share in zip(n_right, (first, second), strict=True):
        assert abs(count - N * share) < 4 * (N * share * (1 - share)) ** 0.5
