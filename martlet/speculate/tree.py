"""Guesses that grow into a tree (EAGLE-2, arXiv:2406.16858), or into a chain, which is a tree of width 1 (read `ngram.py` first).

A guess is worth the chance that it and all before it are right: the product of what is known of their kinds. Level by level
the most valuable guesses of the newest level are gone on from, and of all that were made the most valuable are taken:

    last id ─┬─ the   0.5 ─┬─ cat 0.3 ── sat 0.2           of the four best, three are on one path
             │             └─ dog 0.1
             └─ a     0.2 ─── cat 0.08
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from martlet.speculate.ngram import DraftRequest, Proposal

__all__ = ["BOUNDS", "PRIORS", "GuessTree", "likeliest"]

F32 = NDArray[np.float32]
BOUNDS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # of the likeliest token's probability, between kinds
OTHER_BOUNDS = (0.02, 0.05, 0.1, 0.2, 0.35)  # of another one's
PRIORS = (0.15, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.97, 0.01, 0.03, 0.07, 0.13, 0.25, 0.4)  # how often each kind is right


def likeliest(row: F32, count: int = 1) -> list[tuple[int, int]]:
    """The likeliest tokens of a row of logits, the best first, and the kinds that their probabilities make them."""
    best = int(row.argmax())
    top = row[best]
    total = float(np.exp(row - top).sum())
    found = [(best, bisect_right(BOUNDS, 1.0 / total))]
    if count > 1:
        row = row.copy()
        for _ in range(min(count, row.size) - 1):
            row[best] = -np.inf
            best = int(row.argmax())
            probability = float(np.exp(row[best] - top)) / total
            found.append((best, len(BOUNDS) + 1 + bisect_right(OTHER_BOUNDS, probability)))
    return found


class GuessTree:
    """What is being guessed for a wish. Guesses are numbered as they are made; -1 stands for the last id of the text."""

    def __init__(self, wish: DraftRequest) -> None:
        self._wish = wish
        self._ids: list[int] = []
        self._kinds: list[int] = []
        self._parents: list[int] = []
        self._values: list[float] = []
        self._n_seen = 0  # guesses of all levels but the newest

    def __len__(self) -> int:
        return len(self._ids)

    def id_of(self, place: int) -> int:
        """A guess's token."""
        return self._ids[place]

    def parent_of(self, place: int) -> int:
        """The guess that a guess comes after."""
        return self._parents[place]

    def add(self, parent: int, guesses: Iterable[tuple[int, int]]) -> None:
        """Add what may come after a guess: tokens, which differ, and their kinds."""
        before = 1.0 if parent < 0 else self._values[parent]
        for token, kind in guesses:
            self._ids.append(token)
            self._kinds.append(kind)
            self._parents.append(parent)
            self._values.append(before * self._wish.share(kind))

    def next(self, most: int = 1) -> list[int]:
        """The guesses of the newest level that it is worth going on from, at most so many, the best first; begins a new level."""
        newest, self._n_seen = range(self._n_seen, len(self._ids)), len(self._ids)
        wish, values = self._wish, sorted(self._values, reverse=True)
        if wish.most < 2:
            return []
        least = (
            values[wish.most - 2] if len(values) > wish.most - 2 else 0.0
        )  # or what comes after it is never among them
        worthy = sorted((i for i in newest if self._values[i] >= least), key=lambda i: -self._values[i])[:most]
        return worthy if worthy and self._values[worthy[0]] >= wish.least else []

    def proposal(self) -> Proposal | None:
        """The most valuable guesses, as many as are wished, each path in a row."""
        best = sorted(range(len(self._ids)), key=lambda i: -self._values[i])[: self._wish.most]
        if not best:
            return None
        after: dict[int, list[int]] = {}
        for place in best:
            after.setdefault(self._parents[place], []).append(place)
        order: list[int] = []
        ahead = after.get(-1, [])[::-1]
        while ahead:
            order.append(ahead.pop())
            ahead += after.get(order[-1], [])[::-1]
        number = {place: i for i, place in enumerate(order)} | {-1: -1}
        parents = tuple(number[self._parents[place]] for place in order)
        return Proposal(
            tuple(self._ids[place] for place in order),
            tuple(self._kinds[place] for place in order),
            () if parents == tuple(range(-1, len(order) - 1)) else parents,
        )
