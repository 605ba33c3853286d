"""Chains of guesses: the likeliest token, its class, and how far a chain is extended."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from martlet.speculate.drafter import PRIORS, Chain, Draft, DraftRequest, likeliest
from martlet.types import SeqId


def test_a_chain_is_extended_while_it_is_likely_enough() -> None:
    shares = (0.5, 0.9)
    chain = Chain(DraftRequest(SeqId(0), [1], 9, acceptance=shares.__getitem__, min_probability=0.2))
    assert chain.draft() is None
    # 0.225
    assert [chain.add(20 + i, class_) for i, class_ in enumerate((0, 1, 0))] == [True, True, True]
    assert not chain.add(23, 0)
    assert chain.draft() == Draft((20, 21, 22, 23), (0, 1, 0, 0))


def test_a_chain_ends_with_as_many_guesses_as_are_wanted() -> None:
    chain = Chain(DraftRequest(SeqId(0), [1], 2))
    assert [chain.add(7, 0), chain.add(8, 0)] == [True, False]


def test_what_came_is_compared_up_to_the_first_wrong_guess() -> None:
    proposal = Draft((5, 6, 7), (0, 1, 2))
    assert list(proposal.compared([5, 1, 7])) == [(0, True), (1, False)]
    assert list(proposal.compared([5])) == [(0, True)]
    assert list(proposal.values([0.5, 0.5, 0.8])) == pytest.approx([0.5, 0.25, 0.2])


def test_the_likeliest_token_and_its_class() -> None:
    row = np.log(np.array([0.04, 0.6, 0.01, 0.25, 0.1])).astype(np.float32)
    token, class_ = likeliest(row)
    assert (token, PRIORS[class_]) == (1, 0.55)  # 0.5 to 0.65
    assert list(itertools.accumulate(PRIORS, max)) == list(PRIORS)
