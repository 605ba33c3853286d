"""How many pages to keep free for the growth of running sequences (read `cache/radix.py` next).

The length of an answer is unknown; its limit and the lengths of earlier answers are known. Keeping
all pages that running sequences may ever need wastes most of them. Keeping none makes sequences
preempt each other. So a share of the expected growth is kept: it rises with every preemption and
falls slowly with every end.
"""

from collections.abc import Iterable

from martlet.cache.pages import PagePool
from martlet.types import Sequence

MAX_PREEMPTED = 3  # times, after which a sequence is not preempted again
FIRST_SHARE, LEAST_SHARE = 0.3, 0.1
RISE = 0.2  # at a preemption
FALL = 0.97  # at an end
NEWEST = 0.1  # weight of the newest answer's length in the mean length
FIRST_TYPICAL = 64.0  # tokens of an answer, before any has ended


class PageReserve:
    """The expected length of an answer, and the share of the growth that is kept."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._typical = FIRST_TYPICAL
        self.share = FIRST_SHARE

    def ended(self, seq: Sequence) -> None:
        """Learn from an answer's length."""
        self._typical += NEWEST * (seq.n_generated - self._typical)
        self.share = max(LEAST_SHARE, FALL * self.share)

    def preempted(self) -> None:
        """Keep a larger share."""
        self.share = min(1.0, self.share + RISE)

    def reserve(self, running: Iterable[Sequence], seq: Sequence) -> int:
        """Pages to keep for the growth of `running` and `seq`, beyond the pages of `seq.ids`."""
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
        """Pages that the next token needs: 0 or 1."""
        return self._pool.pages_for(min(len(seq.ids) + 1, seq.limit)) - self._pool.pages_for(len(seq.ids))

    def _growth(self, seq: Sequence, n_pages: int) -> int:
        if seq.n_preempted >= MAX_PREEMPTED:
            end = seq.limit
        else:
            more = max(self._typical - seq.n_generated, self._pool.page_size)
            end = min(seq.limit, len(seq.ids) + int(more))
        return max(0, self._pool.pages_for(end) - n_pages)
