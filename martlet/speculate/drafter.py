"""The plug-in point of speculation: a drafter guesses a sequence's next tokens (read `ngram.py`
next).

A guess is never believed. The model computes the rows of all guesses in one span, tokens are
sampled from the rows in order, and the first token that differs from its guess ends the draft. So a
drafter decides how fast an answer comes, and never what it says (arXiv:2211.17192).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from martlet.types import SeqId

# Bounds of the likeliest token's probability between classes, and how often a guess of each class
# is right before any was verified.
BOUNDS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
PRIORS = (0.15, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.97)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence that wants a draft of at most `most` tokens.

    `acceptance` gives the rate at which guesses of a class are right. A drafter that costs time
    extends a draft while its cumulative acceptance probability is at least `min_probability`.
    """

    seq: SeqId
    ids: Sequence[int]
    most: int
    acceptance: Callable[[int], float] = lambda class_: 0.5
    min_probability: float = 0.0


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed ids, and each guess's class: guesses of one class are right equally often."""

    ids: tuple[int, ...]
    classes: tuple[int, ...]

    def compared(self, ids: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """(class, right) of each guess up to the first wrong one; `ids` are the actual tokens."""
        for guess, class_, token in zip(self.ids, self.classes, ids, strict=False):
            yield class_, guess == token
            if guess != token:
                return

    def values(self, rates: Iterable[float]) -> Iterator[float]:
        """Each guess's probability that it and all before it are right, from their own `rates`."""
        return accumulate(rates, mul)


class Drafter(Protocol):
    """Makes drafts. `costless`: a guess takes next to no time, so a draft is always made."""

    costless: bool
    priors: tuple[float, ...]  # acceptance rate of each class before any guess was verified

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        """Read up to `most` more tokens of a text; return how many. `propose` needs all of it."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        """Make drafts; None where the drafter has no guess."""

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """These sequences have ended."""


def likeliest(row: NDArray[np.float32]) -> tuple[int, int]:
    """The likeliest token of a row of logits, float32 [V], and the class of its probability."""
    best = int(row.argmax())
    return best, bisect_right(BOUNDS, 1.0 / float(np.exp(row - row[best]).sum()))


class Chain:
    """A draft in the making."""

    def __init__(self, request: DraftRequest) -> None:
        self._request = request
        self._ids: list[int] = []
        self._classes: list[int] = []
        self._probability = 1.0  # that all guesses are right

    def add(self, token: int, class_: int) -> bool:
        """Add a guess; return whether a further guess is worth making."""
        self._ids.append(token)
        self._classes.append(class_)
        self._probability *= self._request.acceptance(class_)
        return len(self._ids) < self._request.most and self._probability >= self._request.min_probability

    def draft(self) -> Draft | None:
        """The draft; None if it is empty."""
        return Draft(tuple(self._ids), tuple(self._classes)) if self._ids else None
