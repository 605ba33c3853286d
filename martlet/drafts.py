"""Guesses of a sequence's next tokens: a chain, or a tree with branches (read `types.py` next, whose spans verify them)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Branch", "Draft", "first_path"]


class Draft(NamedTuple):
    """Guesses of the ids after a sequence's last one: a chain, or a tree.

    In a tree guess i comes after guess parents[i], or right after the last id if that is -1; parents come before their
    children, and a guess's first child right after it. Children of one parent are different ids.
    """

    ids: tuple[int, ...]
    parents: tuple[int, ...] = ()  # of a chain: none

    @property
    def depth(self) -> int:
        """How many guesses come one after the other."""
        if not self.parents:
            return len(self.ids)
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return max(depths)

    def first(self, count: int) -> Draft:
        """The first guesses."""
        return Draft(self.ids[:count], self.parents[:count])


@dataclass(frozen=True, slots=True)
class Branch:
    """Rows of a span that go on after its row `parent` instead of the row behind that, on pages of their own.

    These take the places from `first_page` on of the page table that the parent's row has.
    """

    parent: int
    row: int  # the first of them
    start: int  # its position
    count: int
    first_page: int
    pages: tuple[int, ...]


def first_path(parents: tuple[int, ...]) -> int:
    """How many guesses of a tree come one after the other before its first branch."""
    return next((i for i, parent in enumerate(parents) if parent != i - 1), len(parents))
