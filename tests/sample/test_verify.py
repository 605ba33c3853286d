"""Which guesses are taken: against plain sampling, exact probabilities, and by chi-square for a
drafter that is wrong on purpose.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.runtime.sampling import Sampling
from martlet.sampling_params import SamplingParams
from martlet.types import Request, SeqId, Span, Started
from tests.sample.toy import sampler

SEQ = SeqId(0)


def started(vocab: int, **params: Any) -> Sampling:
    """Sampling with one sequence, whose prompt is token 0."""
    sampling = Sampling(sampler(vocab))
    request = Request("0", (0,), SamplingParams(**{"max_tokens": None, "seed": 1, **params}))
    sampling.begin((), [Started(SEQ, request)])
    return sampling


def step(sampling: Sampling, rows: np.ndarray, guesses: tuple[int, ...] = ()) -> list[int]:
    """The tokens of a step that verifies guesses; `rows` [guesses + 1, V] are its logits."""
    ids = sampling.ids(SEQ)
    span = Span(SEQ, len(ids) - 1, len(rows), (ids[-1], *guesses), (), len(rows), n_draft=len(guesses))
    [sampled] = sampling.sample([span], rows.astype(np.float32))
    assert sampled.token_id is not None
    return [sampled.token_id, *(token for token, _ in sampled.more)]


@given(st.lists(st.integers(4, 8), min_size=4, max_size=4))
def test_a_row_is_drawn_from_if_all_guesses_before_it_were_drawn(draws: list[int]) -> None:
    guesses = (5, 6, 5)
    rows = 9.0 * np.eye(9)[draws]
    n_right = next((i for i, guess in enumerate(guesses) if guess != draws[i]), len(guesses))
    sampling = started(9, temperature=0.0)
    assert step(sampling, rows, guesses) == draws[: n_right + 1]
    assert sampling.ids(SEQ) == [0, *draws[: n_right + 1]]


def test_nothing_is_drawn_after_an_end() -> None:
    sampling = Sampling(sampler(9))
    request = Request("0", (0,), SamplingParams(max_tokens=None, temperature=0.0, min_tokens=2))
    sampling.begin((), [Started(SEQ, request, stop_ids=frozenset({5, 6}))])
    # the first is before min_tokens
    assert step(sampling, 9.0 * np.eye(9)[[5, 6, 5, 7]], (5, 6, 5)) == [5, 6]


def drawn_with_guesses(model: list[list[float]], guesses: tuple[int, ...], n: int, more: dict[str, Any]) -> list[int]:
    """`n` tokens of a model that looks at the last id, the guesses being verified in every step."""
    sampling, rows = started(4, **more), np.array(model)
    while len(sampling.ids(SEQ)) <= n:
        step(sampling, rows[[sampling.ids(SEQ)[-1], *guesses]], guesses)
    return sampling.ids(SEQ)[1 : n + 1]


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
    for more in SETTINGS:
        settings = {**more, "seed": seed}
        assert drawn_with_guesses(rows, tuple(guesses), 12, settings) == drawn_with_guesses(rows, (), 12, settings)


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


ROW = np.array([0.9, 0.2, -0.4, -1.5])
N = 4000


@pytest.mark.parametrize("guesses", [(3, 3), (0, 1), (2, 0)], ids=["bad on purpose", "likely", "in between"])
def test_tokens_have_the_models_distribution_and_guesses_are_right_as_often_as_it_says(
    guesses: tuple[int, int],
) -> None:
    """Over seeds. A guess is right with the model's own probability of it, whoever guesses:
    exactly, so p ± 4 deviations.

    The tokens of the first two places against the exact probabilities of pairs: 15 degrees of
    freedom, and chance exceeds 37.7 once in a thousand times.
    """
    p, n_right, pairs = softmax(ROW), [0, 0], Counter[tuple[int, int]]()
    for seed in range(N):
        sampling = started(4, temperature=1.0, seed=seed)
        drawn = step(sampling, np.array([ROW] * 3), guesses)
        for place in range(len(drawn) - 1):
            n_right[place] += 1
        if len(drawn) < 2:
            drawn += step(sampling, ROW[None])
        pairs[drawn[0], drawn[1]] += 1
    expected = np.outer(p, p) * N
    chi_square = sum((pairs[a, b] - expected[a, b]) ** 2 / expected[a, b] for a in range(4) for b in range(4))
    assert chi_square < 37.7
    first, second = p[guesses[0]], p[guesses[0]] * p[guesses[1]]
    for count, share in zip(n_right, (first, second), strict=True):
        assert abs(count - N * share) < 4 * (N * share * (1 - share)) ** 0.5
