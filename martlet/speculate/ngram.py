"""Drafters: who guesses the next tokens, for the model to verify several in one step (read `speculate/judge.py` next).

A guess is never believed. The model computes the rows of all guesses in one span, tokens are sampled from the rows in order,
and the first that is another one than the guess ends it: so a drafter decides how fast an answer comes, and never what it
says. `NgramDrafter` guesses that what followed the end of the text before follows it again, as in prompt lookup decoding;
`speculate/model_drafter.py` asks a smaller model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

from martlet.speculate.suffixes import SuffixAutomaton
from martlet.types import SeqId

__all__ = ["DraftRequest", "Drafter", "NgramDrafter", "Proposal"]

MOST_READ = 1 << 15  # tokens of a text that are remembered
KEPT = 1 << 12  # of them when that is full
SURE = 4  # a match of so many tokens is looked no further for
MOST_COUNTED = 64  # of a match, and of guesses
NEAR = 12  # tokens after the place of the last guess within which the text may go on


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence whose next tokens shall be guessed, at most `most` of them.

    A drafter that is not free asks how often guesses of a kind are right (`share`), and extends a chain of guesses only
    while the chance that all of it is right is at least `least`.
    """

    seq: SeqId
    ids: Sequence[int]
    most: int
    share: Callable[[int], float] = lambda kind: 0.5
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guesses, and of what kind each is: those of a kind are right equally often, if what they come after is."""

    ids: tuple[int, ...]
    kinds: tuple[int, ...]

    def compared(self, came: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """The kinds of the guesses that can be compared with what came, and whether they were right."""
        for guess, kind, token in zip(self.ids, self.kinds, came, strict=False):
            yield kind, guess == token
            if guess != token:
                return

    def values(self, shares: Iterable[float]) -> Iterator[float]:
        """The chance of each guess that it and all before it are right; `shares` are those of the guesses themselves."""
        return accumulate(shares, mul)


class Drafter(Protocol):
    """One of the four plug-in points. `free`: a guess takes no time to speak of, so that it is made to be judged."""

    free: bool
    priors: tuple[float, ...]  # how often guesses of each kind are right, before any was verified

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        """Take in up to `most` more tokens of a text; return how many that were. `propose` needs all of it."""

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Proposal | None]:
        """Guess; None where there is nothing to go by."""

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """These sequences have ended."""


# How many tokens led to the guess: 1, 2 … 3, 4 … 7, 8 … 15, 16 and more; then guesses after a place that was lost and found.
_BY_LENGTH = tuple(min(length.bit_length(), 5) - 1 for length in range(1, 2 * MOST_COUNTED))
_FOUND_AGAIN = (5, 6, 6, *[7] * MOST_COUNTED)


class _Text:
    """What is known of a sequence's text."""

    __slots__ = ("automaton", "base", "n_ids", "n_read", "source")

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.base = 0  # where the automaton's text begins in the sequence's
        self.n_read = 0
        self.source: int | None = None  # the place that is being copied from,
        self.n_ids: int | None = None  # of a text of this length; None while it is lost

    def follow(self, source: int, n_ids: int) -> int:
        """The next token is guessed to be that at `source`."""
        self.source, self.n_ids = source, n_ids
        return source

    def found_again(self, ids: Sequence[int]) -> int | None:
        """Where the text goes on if its last token is one of those near the place where the copy went wrong."""
        if self.source is None:
            return None
        if self.n_ids is not None:
            self.source, self.n_ids = self.source + len(ids) - self.n_ids - 1, None
        start = max(self.source, 0)
        near = ids[start : min(start + NEAR, len(ids) - 1)]
        return start + near.index(ids[-1]) + 1 if ids[-1] in near else None


class NgramDrafter:
    """Guesses that the text goes on as it did after the longest suffix that it has had before.

    Where that is short, because something was changed on the way (a name, a number), it looks for the last token a little
    after the place that was being copied, and goes on from there.
    """

    free: bool = True
    priors: tuple[float, ...] = (0.05, 0.15, 0.35, 0.6, 0.8, 0.25, 0.4, 0.6)

    def __init__(self) -> None:
        self._texts: dict[SeqId, _Text] = {}

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        """Take in up to `most` more tokens."""
        text = self._texts.get(seq)
        if text is None:
            text = self._texts[seq] = _Text()
        start = text.n_read
        if start - text.base >= MOST_READ:  # the newest part remains, and is read anew
            text.automaton, text.source = SuffixAutomaton(), None
            text.base = text.n_read = start = max(0, start - KEPT)
        new = ids[start : start + most]
        for token in new:
            text.automaton.extend(token)
        text.n_read += len(new)
        return len(new)

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Proposal | None]:
        """Guess for those whose text was read."""
        return [self._guess(self._texts.get(wish.seq), wish) for wish in wishes]

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """Drop their automata."""
        for seq in seqs:
            self._texts.pop(seq, None)

    def _guess(self, text: _Text | None, wish: DraftRequest) -> Proposal | None:
        ids = wish.ids
        if text is None or text.n_read < len(ids):
            return None
        length, end = text.automaton.match
        found = text.found_again(ids) if length < SURE else None
        if found is not None:
            source, kinds = text.follow(found, len(ids)), _FOUND_AGAIN
        elif length:
            source, kinds = text.base + end, _BY_LENGTH[min(length, MOST_COUNTED) - 1 :]
            if length >= SURE:
                text.follow(source, len(ids))
        else:
            return None
        guess = tuple(ids[source : source + min(wish.most, MOST_COUNTED)])
        return Proposal(guess, kinds[: len(guess)]) if guess else None
