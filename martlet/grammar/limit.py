"""Strings, arrays and objects that a schema does not bound come to an end all the same.

A model that repeats itself would write until it has no tokens left, and the answer would be no
JSON. So beyond a number of bytes only the shortest way out of a string is allowed. In an array or
object with a number of elements, no token may go beyond a comma; where it can be closed, only its
bracket is allowed. This concerns one sequence's position: the shared states and masks know nothing
of it. Read `matcher.py` first.
"""

import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from martlet.grammar.states import MANY, Dfa, State, n_mask_words
from martlet.grammar.vocabulary import Vocabulary

STRUCTURE = re.compile(rb'["\\,\[\]{}]')
IN_STRING = re.compile(rb'["\\]')
FAR = np.iinfo(np.int32).max


def written(state: State, text: bytes, count: int) -> int:
    """How many bytes of an endless string are written after `text`; 0 outside of one.

    `state` is the state before the text, `count` the number of bytes before it.
    """
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
    """The one-byte tokens that lead nearer to an endless string's end; empty without a choice."""
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
    inside, budget = state.lexeme, state.budget
    return inside is not None and inside[0].endless and (budget is None or budget[1] == MANY)


@lru_cache(maxsize=16)
def _distances(dfa: Dfa) -> NDArray[np.int32]:
    """Each state's distance in bytes from the end of a text, int32 [states]."""
    far = np.where(dfa.accept > 0, 0, FAR).astype(np.int32)
    far[0] = FAR
    for distance in range(1, len(far)):
        nearer = (far == FAR) & (far[dfa.table] == distance - 1).any(axis=1)
        if not nearer.any():
            break
        far[nearer] = distance
    return far


class Nesting(NamedTuple):
    """A position in JSON: commas behind it in each open container; whether it is in a string."""

    commas: tuple[int, ...] = ()
    in_string: bool = False
    escaped: bool = False

    def is_full(self, limit: int) -> bool:
        """Whether an open array or object has `limit` elements or more."""
        return any(count + 1 >= limit for count in self.commas)


OUTSIDE = Nesting()


def nested(before: State, after: State, text: bytes, nesting: Nesting) -> Nesting:
    """The nesting after `text`, which led from state `before` to state `after`."""
    if not after.is_json:
        return OUTSIDE
    if not before.is_json:
        text, nesting = _from_json_on(before, text), OUTSIDE
    if not nesting.escaped and not (IN_STRING if nesting.in_string else STRUCTURE).search(text):
        return nesting
    commas, (_, in_string, escaped) = list(nesting.commas), nesting
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
    """The end of a text from where JSON begins."""
    for i, byte in enumerate(text):
        after = state.step(byte)
        assert after is not None
        if after.is_json:
            return text[i:]
        state = after
    return b""


def tokens_closing(state: State, nesting: Nesting, limit: int, vocabulary: Vocabulary) -> list[int]:
    """The tokens of the bracket that closes a full container.

    Empty where the container is not full, or may not close.
    """
    if nesting.in_string or not nesting.commas or nesting.commas[-1] + 1 < limit:
        return []
    nodes = vocabulary.children(0)
    return [
        token
        for byte in b"]}"
        if byte in nodes and state.step(byte) is not None
        for token in vocabulary.tokens_at(nodes[byte])
    ]


def without_commas(vocabulary: Vocabulary) -> NDArray[np.uint32]:
    """The mask, uint32 [words], of tokens with no comma, or with nothing but a comma."""
    bits = np.zeros(n_mask_words(len(vocabulary.tokens)) * 32, np.bool_)
    bits[: len(vocabulary.tokens)] = [text == b"," or b"," not in (text or b"") for text in vocabulary.tokens]
    return np.packbits(bits, bitorder="little").view(np.uint32)
