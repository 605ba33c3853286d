"""A request's texts as token ids: bad words, and the sequence breakers of DRY.

Read `sampler.py` next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from martlet.errors import RequestError
from martlet.tokenizer.tokenizer import Tokenizer

__all__ = ["bad_word_ids", "breaker_mask"]


def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell each word, with a leading space and without.

    A word can be cut into tokens in more ways; sequences from other ways are not included.
    """
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        bare, spaced = word.lstrip(" ") or word, " " + word.lstrip(" ")
        for text in (bare, spaced):
            spellings[tuple(tokenizer.encode(text, add_special=False))] = None
        # After a line break such a tokenizer puts no space before a word.
        if tokenizer.strips_space:
            line = tokenizer.encode("\n", add_special=False)
            after = tokenizer.encode("\n" + bare, add_special=False)
            if after[: len(line)] == line:
                spellings[tuple(after[len(line) :])] = None
    return tuple(ids for ids in spellings if ids)


def breaker_mask(tokenizer: Tokenizer, breakers: tuple[str, ...]) -> NDArray[np.bool_]:
    """Which tokens hold one of the breakers in their text, bool [V].

    RequestError for a breaker that no token holds: it could never break a repetition.
    """
    mask = np.zeros(tokenizer.vocab_size, np.bool_)
    if not breakers:
        return mask
    texts = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    for breaker in dict.fromkeys(breakers):
        sought = breaker.encode()
        holds = np.fromiter((sought in text for text in texts), np.bool_, len(texts))
        if not holds.any():
            raise RequestError(
                f"dry_sequence_breakers: no token of this model holds {breaker!r}; use a shorter text, which fits in one"
                " token.",
                param="dry_sequence_breakers",
            )
        mask |= holds
    return mask
