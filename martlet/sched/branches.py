"""Pages for drafts that are trees (read `planner.py` first, then `runtime/flatten.py`, which lays their rows out).

A row's attention goes over its sequence's pages in order of position, which is what makes its bits depend on its prefix
only. So each path of a tree has a page table: the first path the sequence's own, and a branch that one up to the page on
which it begins, and from there on pages of its own. What the sequence has on that page is copied layer by layer in the
step, and keys and values of guesses before the branch are written to both pages as they are computed.

    the sequence's pages     | 0 … 31 | 32 … 40   41 42 43 |           the last id at position 40, guesses 41 42 43
    a branch from 41 on      |        | copied 40 41 42'   |           40 and 41 are computed once, 42' is its own

If the branch was right, its page takes the place of the sequence's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from martlet.drafts import Branch, Draft
from martlet.types import PageId, Sequence, Span

__all__ = ["add_branches", "settle"]


def add_branches(
    seq: Sequence, draft: Draft, page_size: int, most: int, take: Callable[[int], tuple[PageId, ...] | None]
) -> tuple[list[Branch], int]:
    """The branches of a draft, as many as there are pages for, and how many guesses that makes with the first path."""
    branches: list[Branch] = []
    places = [seq.n_cached]  # of rows
    for parent in draft.parents:
        places.append(places[parent + 1] + 1)
    rows = [row for row, parent in enumerate(draft.parents, 1) if parent != row - 2]
    for row, stop in pairwise([*rows, len(places)]):
        first = places[row] // page_size
        pages = None if len(branches) == most else take(places[stop - 1] // page_size - first + 1)
        if pages is None:
            return branches, row - 1
        branches.append(Branch(draft.parents[row - 1] + 1, row, places[row], stop - row, first, pages))
    return branches, len(draft.ids)


def settle(span: Span, seq: Sequence | None, row: int) -> list[PageId]:
    """Give a sequence, unless it has ended, the page table of the last row that was right; return the pages that are over."""
    held = [PageId(page) for branch in span.branches for page in branch.pages]
    if seq is None:
        return held
    held += seq.pages
    seq.pages = [PageId(page) for page in span.page_table(seq.pages, row)]
    seq.n_sent = len(seq.pages)
    kept = set(seq.pages)
    return [page for page in held if page not in kept]
