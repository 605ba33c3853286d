"""Chains of guesses by a model or a head: the likeliest token each time, classed by its probability (read `acceptance.py` next)."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from martlet.speculate.ngram import DraftRequest, Proposal

__all__ = ["BOUNDS", "PRIORS", "Chain", "likeliest"]

BOUNDS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # of the likeliest token's probability, between classes
PRIORS = (0.15, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.97)  # how often a draft of each class is right, before any was seen


def likeliest(row: NDArray[np.float32]) -> tuple[int, int]:
    """The likeliest token of a row of logits [V], and the class of its probability."""
    best = int(row.argmax())
    return best, bisect_right(BOUNDS, 1.0 / float(np.exp(row - row[best]).sum()))


class Chain:
    """A chain of guesses that is being made for a request."""

    def __init__(self, request: DraftRequest) -> None:
        self._request = request
        self._ids: list[int] = []
        self._classes: list[int] = []
        self._chance = 1.0  # that all are right

    def add(self, token: int, class_: int) -> bool:
        """Add a guess; return whether a further one is worth making."""
        self._ids.append(token)
        self._classes.append(class_)
        self._chance *= self._request.share(class_)
        return len(self._ids) < self._request.most and self._chance >= self._request.least

    def proposal(self) -> Proposal | None:
        """The guesses, None if there are none."""
        return Proposal(tuple(self._ids), tuple(self._classes)) if self._ids else None
