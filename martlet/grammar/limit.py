"""Strings, arrays and objects that a schema does not bound come to an end all the same (read `matcher.py` first).

A model that repeats itself would go on until it has no tokens left, and the answer would be no JSON. So behind a number of
bytes only the shortest way out of a string is allowed; and of an array or object with a number of items no token that goes
beyond a comma, and where it can be closed only its bracket. That is a matter of one sequence's place in its text: the
states and their masks, which all sequences share, know nothing of it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from martlet.grammar.states import MANY, Dfa, State, n_mask_words
from martlet.grammar.vocabulary import Vocabulary

__all__ = ["OUTSIDE", "Nesting", "nested", "tokens_closing", "tokens_out", "without_commas", "written"]

STRUCTURE = re.compile(rb'["\\,\[\]{}]')
IN_STRING = re.compile(rb'["\\]')
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


class Nesting(NamedTuple):
    """Where a text is in JSON: of each open array and object how many commas are behind, and whether it is in a string."""

    commas: tuple[int, ...] = ()
    in_string: bool = False
    escaped: bool = False

    def is_full(self, limit: int) -> bool:
        """Whether an array or object has `limit` items or more."""
        return any(count + 1 >= limit for count in self.commas)


OUTSIDE = Nesting()


def nested(before: State, after: State, text: bytes, place: Nesting) -> Nesting:
    """The place after `text`, which led from one state to another."""
    if not after.is_json:
        return OUTSIDE
    if not before.is_json:
        text, place = _from_json_on(before, text), OUTSIDE
    if not place.escaped and not (IN_STRING if place.in_string else STRUCTURE).search(text):
        return place
    commas, (_, in_string, escaped) = list(place.commas), place
    for byte in text:
        if in_string:
            in_string, escaped = escaped or byte != 0x22, byte == 0x5C and not escaped
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            commas.append(0)
        elif byte in b"]}" and commas:
            commas.pop()
        elif byte == 0x2C and commas:
            commas[-1] += 1
    return Nesting(tuple(commas), in_string, escaped)


def _from_json_on(state: State, text: bytes) -> bytes:
    """The end of a text that is in JSON."""
    for i, byte in enumerate(text):
        after = state.step(byte)
        assert after is not None
        if after.is_json:
            return text[i:]
        state = after
    return b""


def tokens_closing(state: State, place: Nesting, limit: int, vocabulary: Vocabulary) -> list[int]:
    """The tokens of a bracket that closes a full array or object; none where it may not be closed, or is not full."""
    if place.in_string or not place.commas or place.commas[-1] + 1 < limit:
        return []
    nodes = vocabulary.children(0)
    return [
        token
        for byte in b"]}"
        if byte in nodes and state.step(byte) is not None
        for token in vocabulary.tokens_at(nodes[byte])
    ]


def without_commas(vocabulary: Vocabulary) -> NDArray[np.uint32]:
    """The tokens that do not carry a text beyond a comma, which stands in a token alone, as a mask."""
    bits = np.zeros(n_mask_words(len(vocabulary.tokens)) * 32, np.bool_)
    bits[: len(vocabulary.tokens)] = [text == b"," or b"," not in (text or b"") for text in vocabulary.tokens]
    return np.packbits(bits, bitorder="little").view(np.uint32)
