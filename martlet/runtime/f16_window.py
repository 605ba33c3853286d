"""Where the newest positions of each sequence lie in float16, beside pages of 4 bits (read
`flatten.py` next).

The pages of RECENT_TOKENS positions are a group; a row sees its own group in float16. So of a
span's groups the first and the last are kept for later steps (the first may go on if drafted tokens
are refused), those between pass:

    positions   0 … 31     32 … 63    64 … 95    96 … 127
    span                   from 40 ──────────────→ 100
    pages                  kept        passing     kept

A sequence holds at most two groups, and lets go of one when a later span starts beyond it.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from martlet.kv_types import RECENT_TOKENS
from martlet.ops.interface import RecentPages, StepLimits

I32 = NDArray[np.int32]
Held = dict[int, int]  # a sequence's groups and the first recent page of each


def recent_pages(limits: StepLimits, page_size: int) -> RecentPages:
    """Pages for steps within `limits`: two groups a sequence, and a sequence for embeddings."""
    a_group = RECENT_TOKENS // page_size
    return RecentPages(2 * a_group * (limits.max_seqs + 1), -(-limits.max_tokens // page_size))


class F16Window:
    """Hands out recent pages. The lowest free ones come first, so that memory that is not needed is
    never touched.
    """

    def __init__(self, pages: RecentPages, page_size: int) -> None:
        self._pages = pages
        self._size = page_size
        self._a_group = RECENT_TOKENS // page_size
        self._free = list(range(pages.kept - self._a_group, -1, -self._a_group))
        self._passing = pages.kept

    def begin_step(self) -> None:
        """What has passed is free again."""
        self._passing = self._pages.kept

    def place(self, held: Held, start: int, count: int, table: I32, again: bool = False) -> None:
        """Write the recent page of each of a span's pages, from its first group on, to `table`.

        `again`: the span was placed before and goes on through the layers; its groups stay.
        """
        first, last = start // RECENT_TOKENS, (start + count - 1) // RECENT_TOKENS
        if again:
            pass
        elif start % RECENT_TOKENS == 0:
            self.release(held)  # nothing of them is seen again
        else:
            assert first in held, f"a span starts at {start}, inside a group whose float16 positions are gone"
            self.release(held, [group for group in held if group != first])
        for group in range(first, last + 1):
            if group in held:
                page = held[group]
            elif group in (first, last):
                page = held[group] = self._free.pop()
            else:
                page, self._passing = self._passing, self._passing + self._a_group
            place = group * self._a_group
            there = min(place + self._a_group, len(table))
            table[place:there] = range(page, page + there - place)

    def release(self, held: Held, groups: Iterable[int] | None = None) -> None:
        """Take groups back, all of them unless told which."""
        for group in list(held) if groups is None else groups:
            self._free.append(held.pop(group))
        self._free.sort(reverse=True)
