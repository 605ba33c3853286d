"""How often guesses are right, by their kind: what `judge.py` judges by."""

from __future__ import annotations

from collections.abc import Sequence as Seq

__all__ = ["AcceptanceRates"]

SURE = 0.98  # nothing is more certain
OWN_WEIGHT = 3.0  # guesses after which what was seen in a request counts as much as what was seen in all others
MEMORY, OWN_MEMORY = 2000.0, 60.0  # guesses of a kind after which older ones count half


class AcceptanceRates:
    """How often guesses of each kind are right, in all requests together and in each."""

    def __init__(self, priors: Seq[float]) -> None:
        self.right = [8.0 * prior for prior in priors]
        self.seen = [8.0] * len(priors)

    def own(self) -> AcceptanceRates:
        """Counts of a request's own."""
        found = AcceptanceRates(())
        found.right, found.seen = [0.0] * len(self.right), [0.0] * len(self.right)
        return found

    def share(self, own: AcceptanceRates, kind: int) -> float:
        """The probability that a guess is right, if those before it are."""
        mean = self.right[kind] / self.seen[kind]
        return min(SURE, (OWN_WEIGHT * mean + own.right[kind]) / (OWN_WEIGHT + own.seen[kind]))

    def learn(self, own: AcceptanceRates, kind: int, right: bool) -> None:
        """One more guess, of the request whose counts are `own`, was compared with what came."""
        self._note(kind, right, MEMORY)
        own._note(kind, right, OWN_MEMORY)

    def _note(self, kind: int, right: bool, memory: float) -> None:
        self.right[kind] += right
        self.seen[kind] += 1
        if self.seen[kind] > memory:
            self.right[kind] /= 2
            self.seen[kind] /= 2
