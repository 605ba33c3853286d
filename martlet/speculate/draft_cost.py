"""How long a drafter that is not free takes to guess, as measured of late: what `judge.py` judges by."""

from __future__ import annotations

__all__ = ["DraftTimes"]

WEIGHT = 0.1  # of the newest measurement in the means


class DraftTimes:
    """Seconds for the first of several guesses and for each further one; zeros until any were made."""

    __slots__ = ("first_s", "known", "more_s")

    def __init__(self) -> None:
        self.first_s = self.more_s = 0.0
        self.known = False

    def of(self, count: int) -> float:
        """What so many guesses take, one after the other."""
        return self.first_s + (count - 1) * self.more_s if count else 0.0

    def learn(self, seconds: float, n_made: int) -> None:
        """So many guesses, one after the other, took so long."""
        if not self.known:
            self.known, self.first_s = True, seconds / n_made
            self.more_s = self.first_s
        elif n_made == 1:
            self.first_s = _blended(self.first_s, seconds)
        else:
            self.more_s = _blended(self.more_s, max(0.0, seconds - self.first_s) / (n_made - 1))

    def forget(self, kept: float) -> None:
        """What was measured once is not true for ever: take it for a little less."""
        self.first_s *= kept
        self.more_s *= kept


def _blended(known: float, newest: float) -> float:
    """A mean time with the newest measurement; one that was interrupted counts as twice the mean."""
    return known + WEIGHT * (min(newest, 2 * known) - known)
