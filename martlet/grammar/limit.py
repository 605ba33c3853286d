"""Strings that a schema does not bound come to an end all the same (read `matcher.py` first).

A model that repeats itself inside a string would go on until it has no tokens left, and the answer would be no JSON. So
behind a number of bytes only the shortest way out of such a string is allowed. That is a matter of one sequence's place in
its text: the states and their masks, which all sequences share, know nothing of it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from martlet.grammar.types import MANY, Dfa, State
from martlet.grammar.vocabulary import Vocabulary

__all__ = ["tokens_out", "written"]

FAR = np.iinfo(np.int32).max


def written(state: State, text: bytes, count: int) -> int:
    """How many bytes of an endless string the state after `text` is behind, if `state` is behind `count` of one; or 0."""
    inside = _is_endless(state)
    if b'"' not in text:  # nothing else begins or ends a string
        return count + len(text) if inside else 0
    for byte in text:
        after = state.step(byte)
        assert after is not None
        state, before = after, inside
        inside = _is_endless(state)
        count = count + 1 if before and inside else 0
    return count


def tokens_out(state: State, vocabulary: Vocabulary) -> list[int]:
    """The tokens of one byte that lead nearer to the end of an endless string; none where there is no choice anyway."""
    if not _is_endless(state):
        return []
    assert state.lexeme is not None
    lexeme, at = state.lexeme
    far, table = _distances(lexeme.dfa), lexeme.dfa.table
    ahead = [byte for byte in np.nonzero(table[at])[0].tolist() if state.step(byte) is not None]
    if len(ahead) < 2:
        return []
    nodes = vocabulary.children(0)
    nearer = [nodes[byte] for byte in ahead if byte in nodes and far[table[at, byte]] < far[at]]
    return [token for node in nearer for token in vocabulary.tokens_at(node)]


def _is_endless(state: State) -> bool:
    place, budget = state.lexeme, state.budget
    return place is not None and place[0].endless and (budget is None or budget[1] == MANY)


@lru_cache(maxsize=16)
def _distances(dfa: Dfa) -> NDArray[np.int32]:
    """Of each state how many bytes it is from the end of a text."""
    far = np.where(dfa.accept > 0, 0, FAR).astype(np.int32)
    far[0] = FAR
    for distance in range(1, len(far)):
        nearer = (far == FAR) & (far[dfa.table] == distance - 1).any(axis=1)
        if not nearer.any():
            break
        far[nearer] = distance
    return far
