"""Guessing by the text itself: the automaton against a search of all substrings, and what is
guessed from it.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.speculate.drafter import DraftRequest
from martlet.speculate.ngram import KEPT, MOST_READ, NgramDrafter
from martlet.speculate.suffixes import SuffixAutomaton
from martlet.types import SeqId

A = SeqId(1)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5).flatmap(lambda v: st.lists(st.integers(0, v), min_size=1, max_size=60)))
def test_the_match_is_the_longest_suffix_that_was_there_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for n, token in enumerate(text, 1):
        automaton.extend(token)
        before = [
            length
            for length in range(1, n)
            if any(text[end - length : end] == text[n - length : n] for end in range(length, n))
        ]
        length, end = automaton.match
        assert length == max(before, default=0)
        if length:
            assert end < n
            assert text[end - length : end] == text[n - length : n]


def test_of_several_places_the_latest_is_followed() -> None:
    automaton = SuffixAutomaton()
    for token in (1, 2, 7, 1, 2, 8, 1, 2):
        automaton.extend(token)
    assert automaton.match == (2, 5)


def test_memory_grows_with_the_text_only() -> None:
    automaton = SuffixAutomaton()
    for token in range(4000):
        automaton.extend(token * 7919 % 1000)
    assert automaton.n_bytes < 4000 * 200


def guess(ids: list[int], most: int = 4) -> tuple[int, ...] | None:
    drafter = NgramDrafter()
    drafter.read(A, ids, len(ids))
    [proposal] = drafter.propose([DraftRequest(A, ids, most)])
    return None if proposal is None else proposal.ids


def test_what_followed_is_guessed() -> None:
    assert guess([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]) == (5, 6, 7, 1)
    assert guess([1, 2, 3]) is None
    assert guess([9, 9], most=3) == (9,)  # no more is there to be copied


def test_nothing_is_guessed_from_a_text_that_was_not_read_to_its_end() -> None:
    drafter = NgramDrafter()
    assert drafter.read(A, [1, 2, 1, 2], 3) == 3
    assert drafter.propose([DraftRequest(A, [1, 2, 1, 2], 3)]) == [None]
    assert drafter.read(A, [1, 2, 1, 2], 3) == 1
    assert drafter.propose([DraftRequest(A, [1, 2, 1, 2], 3)]) != [None]


def test_a_copy_goes_on_after_a_changed_place() -> None:
    """`a b c d X e f g` is copied with X changed to Y Z: after Y Z e, f g is guessed, although
    nothing as long matches.
    """
    source = [1, 2, 3, 4, 50, 5, 6, 7, 8, 5, 30, 31, 5, 40, 41]  # a later "5" goes on otherwise
    drafter, ids = NgramDrafter(), [*source, 1, 2, 3, 4]
    for came in (60, 61, 5):
        drafter.read(A, ids, 100)
        drafter.propose([DraftRequest(A, ids, 3)])
        ids.append(came)
    drafter.read(A, ids, 100)
    [proposal] = drafter.propose([DraftRequest(A, ids, 3)])
    assert proposal is not None
    assert proposal.ids == (6, 7, 8)


def test_a_very_long_text_is_forgotten_but_for_its_end() -> None:
    drafter = NgramDrafter()
    ids = [*range(MOST_READ), 5, 6, 7, 8]
    drafter.read(A, ids[:MOST_READ], MOST_READ)
    drafter.read(A, ids, MOST_READ)
    assert drafter.propose([DraftRequest(A, ids, 2)]) == [None], "the beginning is not remembered"
    ids += list(range(MOST_READ - KEPT // 2, MOST_READ - KEPT // 2 + 6))
    drafter.read(A, ids, MOST_READ)
    [proposal] = drafter.propose([DraftRequest(A, ids, 2)])
    assert proposal is not None
    assert proposal.ids == (MOST_READ - KEPT // 2 + 6, MOST_READ - KEPT // 2 + 7)


def test_what_has_ended_is_forgotten() -> None:
    drafter = NgramDrafter()
    drafter.read(A, [1, 1, 1], 3)
    drafter.forget([A, SeqId(7)])
    assert drafter.propose([DraftRequest(A, [1, 1, 1], 2)]) == [None]
