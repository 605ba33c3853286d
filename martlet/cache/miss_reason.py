"""Memory of evicted pages and of first pages, with which a match explains why it ends.

Read `runtime/executors.py` next: the cache ends here.
"""

from collections import OrderedDict

from martlet.cache.nodes import Ids, common, insert_sorted, neighbours, remove_sorted


class Evicted:
    """The ids of the last `most` evicted pages, by the key of the page before."""

    def __init__(self, most: int = 2048) -> None:
        self._most = most
        self._recent: OrderedDict[tuple[bytes, Ids], None] = OrderedDict()
        self._below: dict[bytes, list[Ids]] = {}  # sorted

    def add(self, parent: bytes, ids: Ids) -> None:
        """Note an evicted page; the oldest note goes where `most` is exceeded."""
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
        """The longest prefix that `wanted` shares with an evicted page below `parent`."""
        return max((common(ids, wanted) for ids in neighbours(self._below.get(parent, []), wanted)), default=0)

    def __len__(self) -> int:
        return len(self._recent)


class FirstPages:
    """The ids of the first pages of all salts.

    A page that is cached under another salt tells that somebody else has sent it. The operator may
    see that; a client must not, since salts exist to hide it.
    """

    def __init__(self) -> None:
        self._order: list[Ids] = []  # sorted; an entry per salt

    def add(self, ids: Ids) -> None:
        """A salt's tree has gained a first page."""
        insert_sorted(self._order, ids)

    def remove(self, ids: Ids) -> None:
        """A salt's tree has lost a first page."""
        remove_sorted(self._order, ids)

    def agree(self, wanted: Ids) -> int:
        """The longest prefix that `wanted` shares with a first page."""
        return max((common(ids, wanted) for ids in neighbours(self._order, wanted)), default=0)

    def check(self, expected: list[Ids]) -> None:
        """Assert that it holds exactly `expected`."""
        assert self._order == sorted(expected)
