"""How many pages running sequences will still take, and how many of them to keep for them (read `scheduler.py` next).

Nobody knows how long an answer will be. What is known is the most that it may be, and how long others were. Keeping all
pages that running sequences may ever need wastes most of them; keeping none makes sequences push each other out. So a
share of what is expected is kept: it rises with every preemption, and falls slowly while all goes well.
"""

from __future__ import annotations

from collections.abc import Iterable

from martlet.cache.pages import PagePool
from martlet.types import Sequence

__all__ = ["MAX_PREEMPTED", "PageReserve"]

MAX_PREEMPTED = 3  # whoever lost its pages so often does not lose them again
FIRST_SHARE, LEAST_SHARE = 0.3, 0.1
RISE = 0.2  # at a preemption
FALL = 0.97  # at an end
NEWEST = 0.1  # weight of the newest answer's length in the mean
FIRST_TYPICAL = 64.0  # tokens of an answer, before any has ended


class PageReserve:
    """The expectation and the share."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._typical = FIRST_TYPICAL
        self.share = FIRST_SHARE

    def ended(self, seq: Sequence) -> None:
        """Learn from an answer's length."""
        self._typical += NEWEST * (seq.n_generated - self._typical)
        self.share = max(LEAST_SHARE, FALL * self.share)

    def preempted(self) -> None:
        """Be more careful."""
        self.share = min(1.0, self.share + RISE)

    def reserve(self, running: Iterable[Sequence], seq: Sequence) -> int:
        """Pages to keep for the growth of those that run and of `seq`, beyond those of its ids: one each at least."""
        expected, certain, count = self._growth(seq, self._pool.pages_for(len(seq.ids))), 0, self._next(seq)
        if seq.n_preempted >= MAX_PREEMPTED:
            expected, certain = 0, expected
        for other in running:
            more = self._growth(other, len(other.pages))
            if other.n_preempted >= MAX_PREEMPTED:
                certain += more
            else:
                expected += more
            count += 1
        return max(count, certain + int(self.share * expected))

    def _next(self, seq: Sequence) -> int:
        """Whether its next token needs a page."""
        return self._pool.pages_for(min(len(seq.ids) + 1, seq.limit)) - self._pool.pages_for(len(seq.ids))

    def _growth(self, seq: Sequence, n_pages: int) -> int:
        if seq.n_preempted >= MAX_PREEMPTED:
            end = seq.limit
        else:
            more = max(self._typical - seq.n_generated, self._pool.page_size)
            end = min(seq.limit, len(seq.ids) + int(more))
        return max(0, self._pool.pages_for(end) - n_pages)
