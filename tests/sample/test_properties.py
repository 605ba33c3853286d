"""What holds for all logits and settings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.sample import logits as steps
from martlet.sample.logits import Candidates
from martlet.sampling_params import DEFAULT_ORDER
from tests.sample.toy import sequence

numbers = st.floats(-60, 60, width=32)
rows = st.lists(st.one_of(numbers, st.integers(-3, 3).map(float)), min_size=1, max_size=40)
shares = st.floats(0, 1, allow_subnormal=False)


def of(row: list[float]) -> Candidates:
    return Candidates(np.arange(len(row)), np.array(row, np.float64))


def truncations(draw: Any) -> list[tuple[str, Any]]:
    share, k, u = draw(shares), draw(st.integers(1, 50)), draw(st.floats(0, 1, exclude_max=True))
    return [
        ("top_k", lambda c: steps.top_k(c, k)),
        ("top_p", lambda c: steps.top_p(c, share)),
        ("typical_p", lambda c: steps.typical_p(c, share)),
        ("min_p", lambda c: steps.min_p(c, max(share, 1e-6))),
        ("top_n_sigma", lambda c: steps.top_n_sigma(c, 3 * share)),
        ("xtc", lambda c: steps.xtc(c, 1.0, share / 2, u)),
        ("mirostat", lambda c: steps.mirostat_keep(c, 10 * share)),
        ("temperature", lambda c: steps.temperature(c, share)),
    ]


@given(rows, st.data())
def test_truncation_keeps_a_subset_in_order_and_never_nothing(row: list[float], data: st.DataObject) -> None:
    for name, step in truncations(data.draw):
        kept = step(of(row))
        assert 1 <= len(kept.ids) <= len(row), name
        assert (np.diff(kept.ids) > 0).all(), name
        assert kept.ids[0] >= 0
        assert kept.ids[-1] < len(row)
        if name != "temperature":
            assert kept.logits.tolist() == [row[i] for i in kept.ids], name
        if name not in ("xtc", "typical_p"):
            assert max(row) in [row[i] for i in kept.ids], name
        p = np.exp(steps.log_softmax(kept.logits))
        assert math.isclose(p.sum(), 1.0, rel_tol=1e-12), name


@given(rows, shares, shares)
def test_more_share_keeps_more(row: list[float], one: float, other: float) -> None:
    low, high = sorted((one, other))
    for step in (steps.top_p, steps.typical_p):
        assert set(step(of(row), low).ids) <= set(step(of(row), high).ids)


@given(rows, shares)
def test_top_p_holds_its_share_and_not_a_token_more(row: list[float], share: float) -> None:
    weights = [math.exp(x - max(row)) for x in row]
    kept = steps.top_p(of(row), share).ids.tolist()
    held = math.fsum(weights[i] for i in kept) / math.fsum(weights)
    assert held >= share - 1e-12
    if len(kept) > 1:
        assert held - min(weights[i] for i in kept) / math.fsum(weights) < share + 1e-12
    assert min(weights[i] for i in kept) >= max((w for i, w in enumerate(weights) if i not in kept), default=0)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=60), st.integers(1, 60))
def test_highest_is_a_stable_sort(row: list[float], k: int) -> None:
    expected = sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k])
    assert steps.highest(np.array(row), k).tolist() == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 4))
def test_dry_counts_what_looking_at_every_place_counts(text: list[int], allowed: int) -> None:
    c = steps.dry(Candidates(np.arange(4), np.zeros(4)), np.array(text), np.zeros(4, np.bool_), 1.0, 2.0, allowed)
    expected = [0.0] * 4
    # the token here follows text[:index]; how much of the end does that repeat?
    for index in range(1, len(text)):
        n = 0
        while n < index and text[index - 1 - n] == text[-1 - n]:
            n += 1
        if n >= allowed:
            expected[text[index]] = min(expected[text[index]], -(2.0 ** (n - allowed)))
    assert c.logits.tolist() == expected


chosen = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 1e-30, 0.7, 1.0, 5.0, 1e30]),
        "top_k": st.integers(0, 20),
        "top_p": shares,
        "min_p": shares,
        "typical_p": shares,
        "top_n_sigma": st.floats(0, 4),
        "xtc_probability": shares,
        "xtc_threshold": shares,
        "repetition_penalty": st.floats(0.5, 3),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "dry_multiplier": st.floats(0, 5),
        "dynatemp_range": st.floats(0, 2),
        "mirostat": st.sampled_from([0, 2]),
        "mirostat_tau": st.floats(0, 10),
        "penalty_last_n": st.integers(-1, 5),
        "samplers": st.permutations(DEFAULT_ORDER),
    },
)


@settings(max_examples=200)
@given(st.lists(numbers, min_size=4, max_size=4), chosen, st.integers(-(2**63), 2**63))
def test_any_settings_sample_a_token_and_report_it(row: list[float], given_: dict[str, Any], seed: int) -> None:
    seq = sequence(
        4, (0, 1, 0), seed=seed % 2**63, logprobs=4, logprobs_mode="processed", dry_sequence_breakers=[], **given_
    )
    for _ in range(6):
        token, entry = seq.sample(np.array(row, np.float32))
        assert entry is not None
        listed = dict(entry.top)
        assert listed[token] == entry.logprob
        assert math.isclose(math.fsum(math.exp(logp) for logp in listed.values()), 1.0, rel_tol=1e-9)
        assert [t for t, _ in entry.top][entry.rank - 1] == token


@given(st.lists(numbers, min_size=2, max_size=300), st.integers(0, 2**63))
def test_a_sample_is_the_same_on_every_call(row: list[float], seed: int) -> None:
    x = np.array(row, np.float32)
    assert sequence(len(row), seed=seed).sample(x) == sequence(len(row), seed=seed).sample(x)
