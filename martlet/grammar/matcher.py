"""One answer's position in a language: the Constraint that every language shares.

States and their masks are shared. What belongs to one sequence alone is the path of states behind
it, and how much it has written of what its schema does not bound (`limit.py`). Read
`json_schema.py` next. Read `masks.py` first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from martlet.grammar.limit import OUTSIDE, nested, tokens_closing, tokens_out, written
from martlet.grammar.masks import Masks
from martlet.grammar.states import State, some_bytes

U32 = NDArray[np.uint32]
MOST_FORCED = 4096  # bytes told at once


class Grammar(Masks):
    """A compiled language over one vocabulary, shared by all sequences."""

    def matcher(self) -> Matcher:
        """A constraint at the beginning of a text."""
        return Matcher(self, self.start)


class Matcher:
    """One sequence's position in a language: implements `Constraint`."""

    __slots__ = ("_counts", "_ended", "_limited", "_nestings", "_states", "grammar")

    def __init__(self, grammar: Grammar, state: State) -> None:
        self.grammar = grammar
        self._states = [state]  # after each token
        self._counts = [0]  # bytes written of the endless string that each state is in
        self._nestings = [OUTSIDE]  # of each state in JSON
        self._limited = 0  # the number of the first state at a limit
        self._ended = False

    def mask(self, out: U32) -> None:
        only = self.grammar.vocabulary.eos_ids if self._ended else self._ways_out()
        if self._ended or only:
            out.fill(0)
            for token in only:
                out[token >> 5] |= np.uint32(1 << (token & 31))
            return
        vocabulary = self.grammar.vocabulary
        vocabulary.walker.fill(out, self.grammar.mask_of(self._states[-1]))
        if self._is_full:
            few = self.grammar.without_commas
            if (out[: len(few)] & few).any():  # else only a comma leads on, in a token with more
                out[: len(few)] &= few
        if len(out) > vocabulary.n_words:
            out[vocabulary.n_words :] = 0

    def has_mask(self) -> bool:
        return self._ended or self._states[-1] in self.grammar._masks

    def _ways_out(self) -> list[int]:
        """The only tokens allowed at a limit; empty where there is no limit, or no such token."""
        grammar, state = self.grammar, self._states[-1]
        if 0 < grammar.string_limit <= self._counts[-1]:
            return tokens_out(state, grammar.vocabulary)
        if self._is_full:
            return tokens_closing(state, self._nestings[-1], grammar.item_limit, grammar.vocabulary)
        return []

    @property
    def _is_full(self) -> bool:
        """Whether an open array or object has as many elements as it may."""
        limit = self.grammar.item_limit
        return limit > 0 and self._nestings[-1].is_full(limit)

    def _after(self, token_id: int) -> State | None:
        tokens = self.grammar.vocabulary.tokens
        text = tokens[token_id] if 0 <= token_id < len(tokens) else None
        state = self._states[-1]
        if not text or self._ended:
            return None
        only = self._ways_out()
        if only and token_id not in only:
            return None
        for byte in text:
            after = state.step(byte)
            if after is None:
                return None
            state = after
        return state

    def allows(self, token_id: int) -> bool:
        if token_id in self.grammar.vocabulary.eos_ids:
            return self.may_end()
        if self._is_full:
            words = np.zeros(self.grammar.vocabulary.n_words, np.uint32)
            self.mask(words)
            return 0 <= token_id < 32 * len(words) and bool(words[token_id >> 5] >> (token_id & 31) & 1)
        return self._after(token_id) is not None

    def advance(self, token_id: int) -> bool:
        if token_id in self.grammar.vocabulary.eos_ids:
            if not self.may_end():
                return False
            self._states.append(self._states[-1])
            self._counts.append(0)
            self._nestings.append(OUTSIDE)
            self._ended = True
            return True
        state = self._after(token_id)
        if state is None:
            return False
        grammar, before, count, nesting = self.grammar, self._states[-1], 0, OUTSIDE
        text = grammar.vocabulary.tokens[token_id] or b""
        if grammar.string_limit and state.lexeme is not None:
            count = written(before, text, self._counts[-1])
        if grammar.item_limit:
            nesting = nested(before, state, text, self._nestings[-1])
        self._states.append(state)
        self._counts.append(count)
        self._nestings.append(nesting)
        if not self._limited and (0 < grammar.string_limit <= count or self._is_full):
            self._limited = len(self._states) - 1
        return True

    def rollback(self, n_tokens: int) -> None:
        if not 0 <= n_tokens < len(self._states):
            raise ValueError(f"{n_tokens} tokens to take back of {len(self._states) - 1}.")
        if n_tokens:
            del self._states[-n_tokens:], self._counts[-n_tokens:], self._nestings[-n_tokens:]
            if self._limited >= len(self._states):
                self._limited = 0
            self._ended = False

    def may_end(self) -> bool:
        return self._ended or self._states[-1].accepts

    def is_done(self) -> bool:
        return self._ended or (self._states[-1].accepts and not some_bytes(self._states[-1], 1))

    def is_limited(self) -> bool:
        return self._limited > 0

    def forced(self) -> bytes:
        state, out = self._states[-1], bytearray()
        while not self._ended and not state.accepts and len(out) < MOST_FORCED:
            ahead = some_bytes(state, 2)
            if len(ahead) != 1:
                break
            after = state.step(ahead[0])
            assert after is not None
            state = after
            out += ahead
        return bytes(out)
