"""Each step against values worked by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from martlet.sample import logits as steps
from martlet.sample.logits import Candidates

LOG2 = math.log(2)


def of(*probabilities: float) -> Candidates:
    """Candidates 0, 1, … with these probabilities."""
    return Candidates(np.arange(len(probabilities)), np.log(np.array(probabilities)))


def at(*logits: float) -> Candidates:
    return Candidates(np.arange(len(logits)), np.array(logits, np.float64))


def ids(c: Candidates) -> list[int]:
    return c.ids.tolist()


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# -- penalties


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    c = steps.repetition_penalty(at(3.0, -2.0, 0.0, 5.0), array(0, 1, 2), 2.0)
    assert c.logits.tolist() == [1.5, -4.0, 0.0, 5.0]


def test_presence_and_frequency() -> None:
    c = steps.presence_frequency_penalty(at(1.0, 1.0, 1.0), array(0, 2), array(1, 3), 0.5, 0.25)
    assert c.logits.tolist() == [1 - 0.5 - 0.25, 1.0, 1 - 0.5 - 0.75]


def test_penalties_skip_tokens_that_are_no_candidates() -> None:
    c = Candidates(array(2, 5), np.array([1.0, 1.0]))
    c = steps.presence_frequency_penalty(c, array(1, 5, 9), array(7, 2, 7), 0.0, 0.25)
    assert c.logits.tolist() == [1.0, 0.5]
    c = steps.repetition_penalty(c, array(0, 2, 9), 2.0)
    assert c.logits.tolist() == [0.5, 0.5]


# -- DRY. Letters are tokens; the last tokens of each text repeat something.

V = 26


def dried(text: str, *, allowed: int = 2, base: float = 2.0, breakers: str = "") -> dict[str, float]:
    """What DRY with multiplier 1 takes off which letter."""
    mask = np.zeros(V, np.bool_)
    mask[[ord(b) - 97 for b in breakers]] = True
    c = Candidates(np.arange(V), np.zeros(V))
    c = steps.dry(c, np.array([ord(x) - 97 for x in text], np.int64), mask, 1.0, base, allowed)
    return {chr(97 + i): -x for i, x in enumerate(c.logits.tolist()) if x}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcxab", {"c": 1.0}),  # "ab" again: c would make it 3; n = 2 = allowed, 2^0
        ("abcdyabc", {"d": 2.0}),  # n = 3: 2^1
        ("abcdyzabcd", {"y": 4.0}),
        # "abc" → c (3); "bc" → y (2); "c" → b is below allowed
        ("abccbcyabc", {"c": 2.0, "y": 1.0}),
        ("abcxabdyab", {"c": 1.0, "d": 1.0}),
        ("qabcxabcdyzqabc", {"x": 4.0, "d": 2.0}),  # the longer of two repetitions: qabc → x
        ("aaaa", {"a": 2.0}),  # overlapping with itself: aaa
        ("abab", {"a": 1.0}),
        ("abc", {}),
        ("a", {}),
    ],
)
def test_dry_by_hand(text: str, expected: dict[str, float]) -> None:
    assert dried(text) == expected


def test_dry_repetitions_end_at_a_breaker() -> None:
    assert dried("xabcdyxabc") == {"d": 4.0}
    assert dried("xabcdyxabc", breakers="a") == {"d": 1.0}  # only "bc" counts
    assert dried("xabcdyxabc", breakers="b") == {}  # "c" alone is shorter than allowed
    assert dried("xabcdyxabc", breakers="c") == {}
    assert dried("xabcdyxabc", breakers="d") == {}  # d itself is never penalised


def test_dry_allowed_length() -> None:
    assert dried("abcxab", allowed=1) == {"c": 2.0}
    assert dried("abcxab", allowed=3) == {}


def test_dry_takes_the_longest_repetition_of_a_token() -> None:
    assert dried("bczabczabc", allowed=1) == {"z": 2.0**5}


def test_dry_long_repetition_stays_finite() -> None:
    text = "ab" * 3000
    assert dried(text, base=2.0) == {"a": 2.0**127}  # where float32 ends
    assert dried(text, base=1.0) == {"a": 1.0}


def test_ngram_followers() -> None:
    text = array(1, 2, 3, 1, 2, 4, 1, 2)
    assert steps.ngram_followers(text, 3).tolist() == [3, 4]
    assert steps.ngram_followers(text, 1).tolist() == [1, 2, 3, 4]
    assert steps.ngram_followers(text, 4).tolist() == []
    assert steps.ngram_followers(array(1), 2).tolist() == []


# -- temperature


def test_temperature_divides() -> None:
    assert steps.temperature(at(4.0, 2.0, -6.0), 2.0).logits.tolist() == [0.0, -1.0, -5.0]


def test_temperature_zero_keeps_the_best_with_the_lowest_id() -> None:
    assert ids(steps.temperature(at(1.0, 3.0, 3.0), 0.0)) == [1]


@pytest.mark.parametrize("value", [1e-4, 1e-8, 1e-30, 1e-300, 5e-324])
def test_tiny_temperature(value: float) -> None:
    """Fault SMP-01."""
    c = steps.temperature(at(1, 2, 400, -400), value)
    assert ids(c) == [2]


def test_huge_temperature_is_uniform() -> None:
    c = steps.temperature(at(1, 2, 400, -400), 1e30)
    assert np.exp(steps.log_softmax(c.logits)).tolist() == pytest.approx([0.25] * 4)


def test_dynamic_temperature_by_hand() -> None:
    flat = steps.temperature(at(1.0, 1.0), 1.0, 0.5)  # entropy = its maximum: T = 1.5
    assert flat.logits.tolist() == [0.0, 0.0]
    # p = (1/2, 1/4, 1/4): entropy = 1.5 bits of log2(3); exponent 2
    c = steps.temperature(of(0.5, 0.25, 0.25), 1.0, 0.5, 2.0)
    t = 0.5 + 1.0 * (1.5 / math.log2(3)) ** 2
    assert c.logits.tolist() == pytest.approx([0.0, -LOG2 / t, -LOG2 / t])


def test_dynamic_temperature_reaches_zero_on_certainty() -> None:
    assert ids(steps.temperature(at(1000.0, 0.0), 0.5, 0.5)) == [0]


# -- truncation


@pytest.mark.parametrize(
    ("k", "kept"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (4, [0, 1, 2, 4]), (9, [0, 1, 2, 3, 4])]
)
def test_top_k_ties_go_to_the_lowest_id(k: int, kept: list[int]) -> None:
    assert ids(steps.top_k(at(1.0, 5.0, 3.0, 1.0, 3.0), k)) == kept


def test_top_k_of_many_is_what_sorting_gives() -> None:
    x = np.random.default_rng(5).integers(-40, 40, 30_011).astype(np.float64)  # many ties
    for k in (1, 7, 100, 5000):
        expected = np.sort(np.argsort(-x, kind="stable")[:k])
        assert ids(steps.top_k(Candidates(np.arange(len(x)), x), k)) == expected.tolist()


@pytest.mark.parametrize(
    ("share", "kept"),
    [(0.0, [1]), (1e-9, [1]), (0.5, [1]), (0.51, [1, 3]), (0.75, [1, 3]), (0.76, [0, 1, 3]), (0.99, [0, 1, 2, 3])],
)
def test_top_p_by_hand(share: float, kept: list[int]) -> None:
    """Fault SMP-03: top_p 0 and nearly 0 keep the best token."""
    assert ids(steps.top_p(of(0.125, 0.5, 0.125, 0.25), share)) == kept


@pytest.mark.parametrize(("share", "n"), [(0.0, 1), (1e-9, 1), (0.1, 1), (0.3, 3), (0.35, 4), (0.95, 10)])
def test_top_p_of_flat_logits_keeps_the_lowest_ids(share: float, n: int) -> None:
    """Fault SMP-03."""
    assert ids(steps.top_p(at(*[2.0] * 10), share)) == list(range(n))


def test_top_p_of_certainty() -> None:
    """Fault SMP-03: one token with probability 1."""
    assert ids(steps.top_p(at(0.0, 2000.0, 0.0), 0.9)) == [1]


def test_typical_p_prefers_what_is_as_surprising_as_usual() -> None:
    # p = 1/2, 1/4, 1/8, 1/8: entropy 1.75 bits; |surprise - entropy| = 0.75, 0.25, 1.25, 1.25
    p = (0.5, 0.25, 0.125, 0.125)
    assert ids(steps.typical_p(of(*p), 0.2)) == [1]  # not the most probable
    assert ids(steps.typical_p(of(*p), 0.7)) == [0, 1]
    assert ids(steps.typical_p(of(*p), 0.8)) == [0, 1, 2]
    assert ids(steps.typical_p(of(*p), 0.0)) == [1]


def test_min_p_by_hand() -> None:
    p = (0.5, 0.26, 0.15, 0.09)
    assert ids(steps.min_p(of(*p), 0.5)) == [0, 1]  # ≥ 0.25
    assert ids(steps.min_p(of(*p), 0.2)) == [0, 1, 2]  # ≥ 0.1
    assert ids(steps.min_p(of(*p), 1.0)) == [0]


def test_top_n_sigma_by_hand() -> None:
    x = (8.0, 4.0, 2.0, 2.0)  # mean 4, variance (16 + 0 + 4 + 4) / 4 = 6, sigma 2.449
    assert ids(steps.top_n_sigma(at(*x), 1.0)) == [0]  # ≥ 5.55
    assert ids(steps.top_n_sigma(at(*x), 2.0)) == [0, 1]  # ≥ 3.1
    assert ids(steps.top_n_sigma(at(*x), 2.5)) == [0, 1, 2, 3]  # ≥ 1.88
    assert ids(steps.top_n_sigma(at(1.0, 1.0), 1.0)) == [0, 1]


@pytest.mark.parametrize(
    ("threshold", "u", "kept"),
    [
        (0.1, 0.49, [2, 3]),  # 0.4, 0.3 and 0.25 are top choices: 0.25 stays, and what is below
        (0.1, 0.5, [0, 1, 2, 3]),  # the die says no
        (0.3, 0.0, [1, 2, 3]),
        (0.35, 0.0, [0, 1, 2, 3]),  # only one top choice
        (0.01, 0.0, [3]),
    ],
)
def test_xtc_by_hand(threshold: float, u: float, kept: list[int]) -> None:
    assert ids(steps.xtc(of(0.4, 0.301, 0.249, 0.05), 0.5, threshold, u)) == kept


def test_xtc_of_equals_keeps_the_highest_id() -> None:
    assert ids(steps.xtc(of(0.25, 0.25, 0.25, 0.25), 1.0, 0.1, 0.0)) == [3]


def test_mirostat_by_hand() -> None:
    c = of(0.5, 0.25, 0.125, 0.125)  # surprise 1, 2, 3, 3 bits
    assert ids(steps.mirostat_keep(c, 2.5)) == [0, 1]
    assert ids(steps.mirostat_keep(c, 0.5)) == [0]  # at least the best
    kept = steps.mirostat_keep(c, 2.5)  # of them 1 has p = 1/3
    assert steps.mirostat_mu(kept, 1, 2.5, 1.0, 0.1) == pytest.approx(2.5 - 0.1 * (math.log2(3) - 1.0))


# -- drawing


@pytest.mark.parametrize(("u", "token"), [(0.0, 0), (0.2499, 0), (0.25, 1), (0.7499, 1), (0.75, 2), (1 - 2**-53, 2)])
def test_draw_cumulates_in_order_of_id(u: float, token: int) -> None:
    assert steps.draw(Candidates(array(0, 1, 2), np.array([0.0, LOG2, 0.0])), u) == token


def test_draw_never_takes_probability_zero() -> None:
    x = np.full(40_000, -1e6)
    x[12_345] = 0.0
    c = Candidates(np.arange(len(x)), x)
    assert {steps.draw(c, u) for u in (0.0, 0.5, 1 - 2**-53)} == {12_345}


def test_draw_over_many_blocks_is_what_one_sum_gives() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(0, 3, 50_000)
    cumulated = np.cumsum(np.exp(x) / np.exp(x).sum())
    c = Candidates(np.arange(len(x)), x)
    for u in rng.random(200):
        assert steps.draw(c, u) == int(np.searchsorted(cumulated, u, side="right"))


def by_sorting(scores: Sequence[float], weights: Sequence[float], target: float) -> list[int]:
    total, kept = 0.0, []
    for i in sorted(range(len(scores)), key=lambda i: (scores[i], i)):
        kept.append(i)
        total += weights[i]
        if total >= target:
            break
    return sorted(kept)


@pytest.mark.parametrize("target", [0.0, 1.0, 17.0, 500.0, 2000.0])
def test_smallest_set_is_what_sorting_gives(target: float) -> None:
    rng = np.random.default_rng(11)
    scores = rng.choice([0.0, 0.01, 0.5, 3.0, 63.9, 64.5, 900.0], 3000)
    # whole numbers: sums are exact in any order
    weights = rng.integers(1, 4, 3000).astype(np.float64)
    assert steps.smallest_set(scores, weights, target).tolist() == by_sorting(scores, weights, target)
