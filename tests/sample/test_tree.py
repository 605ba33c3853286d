"""Trees of guesses: which are made, which are taken, and what is learned from them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.drafts import Draft, first_path
from martlet.speculate.ngram import DraftRequest, Proposal
from martlet.speculate.tree import PRIORS, GuessTree, likeliest
from martlet.types import SeqId

SHARES = (0.5, 0.3, 0.1, 0.05)


def wish(most: int, width: int = 3) -> DraftRequest:
    return DraftRequest(SeqId(0), [1], most, width, share=lambda kind: SHARES[kind])


def test_the_drawing_of_the_docstring() -> None:
    """the 0.5 → cat 0.3 → sat 0.2, dog 0.1; a 0.2 → cat 0.08: of the four best, three are on one path."""
    shares = dict(enumerate((0.5, 0.2, 0.6, 0.2, 0.4, 2 / 3)))
    tree = GuessTree(DraftRequest(SeqId(0), [1], 4, 2, share=shares.__getitem__))
    the, a, cat, dog, sat = 10, 11, 12, 13, 14
    tree.add(-1, [(the, 0), (a, 1)])
    assert tree.next(2) == [0, 1]
    tree.add(0, [(cat, 2), (dog, 3)])
    tree.add(1, [(cat, 4)])
    assert tree.next(2) == [2]  # after dog there is never one of the four best, nor after the cat of 0.08
    tree.add(2, [(sat, 5)])
    found = tree.proposal()
    assert found is not None
    assert found.ids == (the, cat, sat, a)
    assert found.parents == (-1, 0, 1, -1)
    assert first_path(found.parents) == 3
    assert Draft(found.ids, found.parents).depth == 3


def test_width_1_is_a_chain() -> None:
    tree = GuessTree(wish(4, 1))
    for place in range(-1, 4):
        tree.add(place, [(20 + place, 0)])
        if not tree.next():
            break
    assert tree.proposal() == Proposal((19, 20, 21, 22), (0, 0, 0, 0))


def grown(most: int, levels: list[list[list[int]]]) -> tuple[GuessTree, dict[tuple[int, ...], float]]:
    """A tree, and each path of it with its value, worked out here anew; a kind stands for its token."""
    tree, values, paths = GuessTree(wish(most)), {(): 1.0}, [()]
    places, known = [-1], {-1: ()}
    for level in levels:
        for place, kinds in zip(places, level, strict=False):
            tree.add(place, [(kind, kind) for kind in dict.fromkeys(kinds)])
            for kind in dict.fromkeys(kinds):
                path = (*known[place], kind)
                known[len(paths) - 1] = path
                values[path] = values[known[place]] * SHARES[kind]
                paths.append(path)
        places = tree.next(3)
    del values[()]
    return tree, values


kinds = st.lists(st.integers(0, 3), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.lists(st.lists(kinds, min_size=1, max_size=3), min_size=1, max_size=5))
def test_the_most_valuable_guesses_are_taken_with_all_before_them(most: int, levels: list[list[list[int]]]) -> None:
    tree, values = grown(most, levels)
    found = tree.proposal()
    assert found is not None
    paths: list[tuple[int, ...]] = []
    for i, token in enumerate(found.ids):
        parent = found.parents[i] if found.parents else i - 1
        assert parent < i
        paths.append((token,) if parent < 0 else (*paths[parent], token))
    assert len(set(paths)) == len(paths) == min(most, len(values))
    left = [value for path, value in values.items() if path not in paths]
    assert min(values[path] for path in paths) >= max(left, default=0.0)
    for i, path in enumerate(paths):
        assert len(path) == 1 or path[:-1] in paths[:i]
        after = [other for other in paths[i + 1 :] if other[:-1] == path]
        assert not after or paths[i + 1] == after[0], "a guess's first child is right after it"
    assert list(found.values(SHARES[kind] for kind in found.kinds)) == pytest.approx([values[path] for path in paths])


def test_what_came_is_compared_with_every_guess_of_its_place() -> None:
    proposal = Proposal((5, 6, 7, 8, 6), (0, 1, 2, 3, 4), (-1, 0, 0, -1, 3))
    assert list(proposal.compared([5, 7, 9])) == [(0, True), (3, False), (1, False), (2, True)]
    assert list(proposal.compared([8, 6])) == [(0, False), (3, True), (4, True)]
    assert list(proposal.compared([1, 1])) == [(0, False), (3, False)]
    assert list(Proposal((5, 6, 7), (0, 1, 2)).compared([5, 1, 7])) == [(0, True), (1, False)]


def test_some_of_the_guesses_make_a_draft() -> None:
    proposal = Proposal((5, 6, 7, 8, 6), (0,) * 5, (-1, 0, 0, -1, 3))
    assert proposal.draft([0, 2, 3]) == Draft((5, 7, 8), (-1, 0, -1))
    assert proposal.draft([0, 2]) == Draft((5, 7))  # a chain has no parents
    assert proposal.draft([3, 4]) == Draft((8, 6))


def test_the_likeliest_tokens_and_their_kinds() -> None:
    p = np.array([0.04, 0.6, 0.01, 0.25, 0.1])
    row = np.log(p).astype(np.float32)
    before = row.copy()
    found = likeliest(row, 4)
    assert [token for token, _ in found] == [1, 3, 4, 0]
    assert [PRIORS[kind] for _, kind in found] == [
        0.55,
        0.25,
        0.13,
        0.03,
    ]  # 0.5 to 0.65; 0.2 to 0.35, 0.1 to 0.2, 0.02 to 0.05
    assert likeliest(row) == found[:1]
    assert np.array_equal(row, before)
    assert len(likeliest(row, 9)) == 5
    assert list(itertools.accumulate(PRIORS[:8], max)) == list(PRIORS[:8])
