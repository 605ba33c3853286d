"""Measurements of drafters: acceptance rates by class, and the time that drafts take (read
`judge.py` next).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

SURE = 0.98  # the highest rate that is believed
# guesses after which a request's own rate counts as much as the rate of all requests
OWN_WEIGHT = 3.0
MEMORY, OWN_MEMORY = 2000.0, 60.0  # guesses of a class after which older guesses count half
WEIGHT = 0.1  # of the newest time in the mean


class AcceptanceRates:
    """How often guesses of each class are right, in all requests together and in each."""

    def __init__(self, priors: Seq[float]) -> None:
        self.n_right = [8.0 * prior for prior in priors]
        self.n_seen = [8.0] * len(priors)

    def own(self) -> AcceptanceRates:
        """Empty counts for a request of its own."""
        rates = AcceptanceRates(())
        rates.n_right, rates.n_seen = [0.0] * len(self.n_right), [0.0] * len(self.n_right)
        return rates

    def rate(self, own: AcceptanceRates, class_: int) -> float:
        """The probability that a guess is right if all before are; `own`: the request's counts."""
        mean = self.n_right[class_] / self.n_seen[class_]
        return min(SURE, (OWN_WEIGHT * mean + own.n_right[class_]) / (OWN_WEIGHT + own.n_seen[class_]))

    def learn(self, own: AcceptanceRates, class_: int, right: bool) -> None:
        """Count a guess of the request whose counts are `own`."""
        self._count(class_, right, MEMORY)
        own._count(class_, right, OWN_MEMORY)

    def _count(self, class_: int, right: bool, memory: float) -> None:
        self.n_right[class_] += right
        self.n_seen[class_] += 1
        if self.n_seen[class_] > memory:
            self.n_right[class_] /= 2
            self.n_seen[class_] /= 2


class DraftTimes:
    """Seconds for the first guess of a draft and for each further guess; 0 until any was made."""

    __slots__ = ("first_s", "known", "more_s")

    def __init__(self) -> None:
        self.first_s = self.more_s = 0.0
        self.known = False

    def of(self, count: int) -> float:
        """Seconds for a draft of `count` guesses."""
        return self.first_s + (count - 1) * self.more_s if count else 0.0

    def learn(self, seconds: float, n_made: int) -> None:
        """A draft of `n_made` guesses took `seconds`."""
        if not self.known:
            self.known, self.first_s = True, seconds / n_made
            self.more_s = self.first_s
        elif n_made == 1:
            self.first_s = _blended(self.first_s, seconds)
        else:
            self.more_s = _blended(self.more_s, max(0.0, seconds - self.first_s) / (n_made - 1))

    def forget(self, kept: float) -> None:
        """Shrink the times by a factor, so that a drafter that once was slow is asked again."""
        self.first_s *= kept
        self.more_s *= kept


def _blended(mean: float, newest: float) -> float:
    """The mean with the newest time; an interrupted measurement counts at most twice the mean."""
    return mean + WEIGHT * (min(newest, 2 * mean) - mean)
