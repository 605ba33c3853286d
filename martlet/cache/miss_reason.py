"""What the prefix cache remembers of pages that are gone, so that it can say why a match ends (read `radix.py` first)."""

from __future__ import annotations

from collections import OrderedDict

from martlet.cache.nodes import Ids, common, insert_sorted, neighbours, remove_sorted

__all__ = ["Evicted", "FirstPages"]


class Evicted:
    """The ids of the last `most` pages that had to make room, by the key of the page before."""

    def __init__(self, most: int = 2048) -> None:
        self._most = most
        self._recent: OrderedDict[tuple[bytes, Ids], None] = OrderedDict()
        self._below: dict[bytes, list[Ids]] = {}  # sorted

    def add(self, parent: bytes, ids: Ids) -> None:
        """Note an evicted page; the oldest note makes room."""
        if (parent, ids) not in self._recent:
            insert_sorted(self._below.setdefault(parent, []), ids)
        self._recent[parent, ids] = None
        self._recent.move_to_end((parent, ids))
        if len(self._recent) > self._most:
            (parent, ids), _ = self._recent.popitem(last=False)
            remove_sorted(self._below[parent], ids)
            if not self._below[parent]:
                del self._below[parent]

    def agree(self, parent: bytes, wanted: Ids) -> int:
        """How many ids `wanted` has in common with the page below `parent` that was most like it."""
        return max((common(ids, wanted) for ids in neighbours(self._below.get(parent, []), wanted)), default=0)

    def __len__(self) -> int:
        return len(self._recent)


class FirstPages:
    """The ids of the first pages of all salts together.

    That a page is cached under another salt tells that somebody else has sent it: this is for whoever runs the engine,
    and not for those who send requests, from whom salts are to hide just that.
    """

    def __init__(self) -> None:
        self._order: list[Ids] = []  # sorted; as often as there are salts that have it

    def add(self, ids: Ids) -> None:
        """Some salt has it."""
        insert_sorted(self._order, ids)

    def remove(self, ids: Ids) -> None:
        """One salt less has it."""
        remove_sorted(self._order, ids)

    def agree(self, wanted: Ids) -> int:
        """How many ids `wanted` has in common with the first page that is most like it."""
        return max((common(ids, wanted) for ids in neighbours(self._order, wanted)), default=0)

    def check(self, expected: list[Ids]) -> None:
        """Assert that it holds just these."""
        assert self._order == sorted(expected)
