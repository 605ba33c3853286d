"""How many pages a step may write to the second tier besides its own work (read `cache/disk_slots.py` next).

Every second of steps earns SHARE seconds of writing, at the measured time of a page; what is not used is kept, up to
MOST_S. So a fast disk takes pages as they are computed, and a slow one costs no more than the share. What is left
over is written when nothing runs (`flush_plan`), or when a page has to make room, in which case it is saved at once.
"""

from __future__ import annotations

__all__ = ["WriteBehind"]

SHARE = 0.03
MOST_S = 0.1
MOST_PAGES = 64  # of one plan
WEIGHT = 0.2  # of the newest measurement in the mean


class WriteBehind:
    """An account of seconds."""

    def __init__(self) -> None:
        self._earned_s = 0.0
        self._page_s: float | None = None  # mean time of a page's save

    @property
    def most(self) -> int:
        """Pages that the next plan may save; one, to measure it, before anything is known."""
        if self._page_s is None:
            return 1
        return max(0, min(MOST_PAGES, int(self._earned_s / max(self._page_s, 1e-6))))

    def step(self, seconds: float) -> None:
        """A step took `seconds`."""
        self._earned_s = min(MOST_S, self._earned_s + SHARE * max(0.0, seconds))

    def saved(self, n_pages: int, seconds: float) -> None:
        """A plan's saves took `seconds` in all."""
        if n_pages == 0:
            return
        mean = seconds / n_pages
        self._page_s = mean if self._page_s is None else self._page_s + WEIGHT * (mean - self._page_s)
        self._earned_s = max(-MOST_S, self._earned_s - seconds)
