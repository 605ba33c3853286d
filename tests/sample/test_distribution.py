"""Chi-square: how often each token is drawn, against exact probabilities worked out here by the
textbook's formulas.

Seeds are fixed, so a test passes always or never. The bound is the value that chance exceeds once
in 31,000 times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from martlet.sampling_params import SamplingParams
from tests.sample.toy import sampler, sequence

LOGITS = [2.1, 1.9, 1.2, 0.9, 0.5, 0.1, -0.4, -0.9, -1.5, -2.2, -3.0, -4.1]
N_DRAWS = 20_000
ROW = np.array(LOGITS, np.float32)

Probabilities = dict[int, float]


def normalise(weights: Probabilities) -> Probabilities:
    total = math.fsum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def plain(temperature: float = 1.0) -> Probabilities:
    return normalise({i: math.exp(x / temperature) for i, x in enumerate(LOGITS)})


def reweigh(p: Probabilities, temperature: float) -> Probabilities:
    return normalise({token: value ** (1 / temperature) for token, value in p.items()})


def nucleus(p: Probabilities, share: float) -> Probabilities:
    kept: Probabilities = {}
    for token, value in sorted(p.items(), key=lambda item: -item[1]):
        if sum(kept.values()) >= share:
            break
        kept[token] = value
    return normalise(kept)


def best(p: Probabilities, k: int) -> Probabilities:
    return normalise(dict(sorted(p.items(), key=lambda item: -item[1])[:k]))


def typical(p: Probabilities, share: float) -> Probabilities:
    entropy = -math.fsum(value * math.log(value) for value in p.values())
    kept: Probabilities = {}
    for token, value in sorted(p.items(), key=lambda item: abs(-math.log(item[1]) - entropy)):
        kept[token] = value
        if sum(kept.values()) >= share:
            break
    return normalise(kept)


def xtc_mixture(p: Probabilities, probability: float, threshold: float) -> Probabilities:
    top = [token for token, value in p.items() if value >= threshold]
    gone = set(top) - {min(top, key=lambda token: p[token])}
    cut = normalise({token: value for token, value in p.items() if token not in gone})
    return {token: (1 - probability) * p[token] + probability * cut.get(token, 0.0) for token in p}


def dynamic(p: Probabilities, value: float, spread: float) -> Probabilities:
    entropy = -math.fsum(x * math.log(x) for x in p.values()) / math.log(len(p))
    return reweigh(p, value - spread + 2 * spread * entropy)


CASES: list[tuple[dict[str, Any], Callable[[], Probabilities]]] = [
    ({}, plain),
    ({"temperature": 0.9}, lambda: plain(0.9)),
    ({"temperature": 2.5}, lambda: plain(2.5)),
    ({"top_k": 5}, lambda: best(plain(), 5)),
    ({"top_p": 0.8}, lambda: nucleus(plain(), 0.8)),
    ({"top_p": 0.8, "temperature": 2.0}, lambda: reweigh(nucleus(plain(), 0.8), 2.0)),
    (
        {"top_p": 0.8, "temperature": 2.0, "samplers": ["temperature", "top_p"]},
        lambda: nucleus(plain(2.0), 0.8),
    ),
    ({"min_p": 0.2}, lambda: normalise({t: v for t, v in plain().items() if v >= 0.2 * max(plain().values())})),
    ({"typical_p": 0.6}, lambda: typical(plain(), 0.6)),
    (
        {"top_n_sigma": 0.9},
        lambda: normalise({t: v for t, v in plain().items() if LOGITS[t] >= max(LOGITS) - 0.9 * float(np.std(LOGITS))}),
    ),
    ({"xtc_probability": 0.4, "xtc_threshold": 0.12}, lambda: xtc_mixture(plain(), 0.4, 0.12)),
    ({"dynatemp_range": 0.5, "temperature": 0.8}, lambda: dynamic(plain(), 0.8, 0.5)),
    # min_p then drops none
    ({"top_k": 8, "top_p": 0.9, "min_p": 0.1}, lambda: nucleus(best(plain(), 8), 0.9)),
    ({"logit_bias": {11: 5.5, 0: -100}}, lambda: normalise({**bias(11, 5.5), 0: 0.0})),
]


def bias(token: int, amount: float) -> Probabilities:
    return {i: math.exp(x + (amount if i == token else 0)) for i, x in enumerate(LOGITS)}


def assert_follows(counts: dict[int, int], expected: Probabilities) -> None:
    impossible = [token for token in counts if expected.get(token, 0.0) == 0.0]
    assert not impossible
    n = sum(counts.values())
    possible = {token: value for token, value in expected.items() if value > 0}
    assert min(possible.values()) * n > 5, "too few draws for chi-square"
    chi_square = sum((counts.get(t, 0) - n * v) ** 2 / (n * v) for t, v in possible.items())
    freedom = len(possible) - 1
    # Wilson-Hilferty at 4 sigma
    bound = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < bound, counts


@pytest.mark.parametrize(("settings", "expected"), CASES, ids=lambda case: str(case) if isinstance(case, dict) else "")
def test_draws_follow_the_exact_distribution(settings: dict[str, Any], expected: Callable[[], Probabilities]) -> None:
    seq = sequence(len(LOGITS), seed=20261, **settings)
    counts: dict[int, int] = {}
    for _ in range(N_DRAWS):
        token, _ = seq.sample(ROW)
        counts[token] = counts.get(token, 0) + 1
    assert_follows(counts, expected())


@pytest.mark.parametrize("over", ["seed", "index"])
def test_first_tokens_over_seeds_and_completions_follow_it_too(over: str) -> None:
    """Neighbouring seeds and indices are as good as unrelated ones."""
    shared = sampler(len(LOGITS))
    counts: dict[int, int] = {}
    for i in range(N_DRAWS):
        params = SamplingParams(seed=i if over == "seed" else 7)
        token, _ = shared.start(params, (0,), i if over == "index" else 0).sample(ROW)
        counts[token] = counts.get(token, 0) + 1
    assert_follows(counts, plain())


def test_mirostat_settles_at_the_surprise_asked_for() -> None:
    """The mean surprise of what is drawn approaches tau (arXiv:2007.14966, section 5)."""
    row = (-1.1 * np.log(np.arange(1, 2001))).astype(np.float32)  # Zipf
    for tau in (2.0, 4.0):
        seq = sequence(2000, seed=3, mirostat=2, mirostat_tau=tau, logprobs=0, logprobs_mode="processed")
        surprises = []
        for _ in range(3000):
            _, entry = seq.sample(row)
            assert entry is not None
            surprises.append(-entry.logprob / math.log(2))
        assert sum(surprises[500:]) / 2500 == pytest.approx(tau, abs=0.1)
