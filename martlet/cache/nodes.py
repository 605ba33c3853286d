"""What the radix tree is made of: nodes, their keys, and a queue of leaves by last use (read `cache/radix.py` first).

A node is one page of tokens. Its children are found in two ways: a dict from their ids answers "is this page cached?"
at the cost of one hash, and a sorted list of the same ids answers "which page begins like this one?": the longest
common prefix of a tuple with a sorted list of tuples is with one of its two neighbours there.
"""

from __future__ import annotations

import heapq
import struct
from bisect import bisect_left
from collections.abc import Callable
from hashlib import blake2b
from itertools import count

from martlet.types import PageId, SlotId

__all__ = [
    "Ids",
    "LeafQueue",
    "Node",
    "Share",
    "common",
    "insert_sorted",
    "is_root_key",
    "neighbours",
    "page_key",
    "remove_sorted",
    "root_key",
]

Ids = tuple[int, ...]

_ROOT, _PAGE = b"\x00", b"\x01"  # how keys begin


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=31).digest()


def root_key(salt: str) -> bytes:
    """The key of what comes before a first page: 32 bytes that no page's key begins like."""
    return _ROOT + _digest(salt.encode())


def page_key(parent: bytes, ids: Ids) -> bytes:
    """The key of a page of tokens after all those that `parent` stands for, 32 bytes."""
    return _PAGE + _digest(parent + struct.pack(f"<{len(ids)}q", *ids))


def is_root_key(key: bytes) -> bool:
    """Whether `key` is the key of some salt."""
    return key[:1] == _ROOT


def common(a: Ids, b: Ids) -> int:
    """How many ids `a` and `b` have in common at their start."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


def neighbours(order: list[Ids], wanted: Ids) -> list[Ids]:
    """The one or two entries of a sorted list beside the place of `wanted`: none has more in common with it."""
    place = bisect_left(order, wanted)
    return order[max(0, place - 1) : place + 1]


def insert_sorted(order: list[Ids], ids: Ids) -> None:
    """Put `ids`, which is not there, in its place."""
    order.insert(bisect_left(order, ids), ids)


def remove_sorted(order: list[Ids], ids: Ids) -> None:
    """Take `ids`, which is there, out."""
    place = bisect_left(order, ids)
    assert order[place] == ids
    del order[place]


class Share:
    """How much memory trees have together: those of a tenant, or one alone."""

    n_pages = 0


class Node:
    """A page of tokens after its parent's: in memory (`page`), in the second tier (`slot`), or both.

    A root stands for a cache salt: it has neither, no ids and no parent.
    """

    __slots__ = (
        "_key",
        "children",
        "held",
        "ids",
        "n_resident",
        "n_slotted",
        "name",
        "order",
        "page",
        "parent",
        "root",
        "share",
        "slot",
        "used",
    )

    def __init__(self, ids: Ids, parent: Node | None, used: int, *, key: bytes | None = None) -> None:
        self.ids = ids
        self.parent = parent
        self.root: Node = self if parent is None else parent.root
        self.used = used  # when it was used last, or a node below it that is gone
        self.children: dict[Ids, Node] = {}
        self.order: list[Ids] = []  # the same ids, sorted; none of them begins like another one entire
        self.page: PageId | None = None
        self.slot: SlotId | None = None
        self.held = 0  # 1 if others own its page too, and 1 for each child that is held
        self.n_resident = 0  # children with a page
        self.n_slotted = 0  # children with a slot
        if parent is None:
            self.share = Share()  # whose pages the tree has
        self.name: str | bytes = b""  # of a root: its salt, or its key as long as nobody has named the salt
        self._key = key

    @property
    def key(self) -> bytes:
        """The digest of its ids and all before them, made when first asked for; its ids are final then."""
        chain = []
        node = self
        while node._key is None:
            chain.append(node)
            assert node.parent is not None
            node = node.parent
        for child in reversed(chain):
            assert child.parent is not None
            assert child.parent._key is not None
            child._key = page_key(child.parent._key, child.ids)
        assert self._key is not None
        return self._key

    def add(self, child: Node) -> None:
        """Put a child in its place."""
        self.children[child.ids] = child
        insert_sorted(self.order, child.ids)

    def remove(self, child: Node) -> None:
        """Take a child out."""
        del self.children[child.ids]
        remove_sorted(self.order, child.ids)

    def nearest(self, wanted: Ids) -> list[tuple[int, Node]]:
        """The at most two children that begin most like `wanted`, with the ids in common; the best and resident first."""
        near = [(common(ids, wanted), self.children[ids]) for ids in neighbours(self.order, wanted)]
        near.sort(key=lambda pair: (pair[0], pair[1].page is not None), reverse=True)
        return near

    def check(self, page_size: int, shared: bool) -> None:
        """Assert what must be true of a node and its children; `shared`: others own its page too."""
        children = list(self.children.values())
        assert self.order == sorted(self.children)
        assert not any(b[: len(a)] == a for a, b in zip(self.order, self.order[1:], strict=False)), "a page twice"
        assert self.n_resident == sum(child.page is not None for child in children)
        assert self.n_slotted == sum(child.slot is not None for child in children)
        assert self.held == shared + sum(child.held > 0 for child in children)
        for ids, child in self.children.items():
            assert child.parent is self
            assert child.ids == ids
            assert 0 < len(ids) <= page_size
            assert len(ids) == page_size or not (child.children or child.slot is not None), "a page in part goes on"
            assert child.page is not None or child.slot is not None, "a node without anything"
            assert child.page is None or self.parent is None or self.page is not None, "a page below none"


class LeafQueue:
    """Leaves in the order of their last use, O(log n) an operation; `is_leaf` says what may be taken.

    A node has one entry at most, with the use it had when it was offered. Who changes a node need not come here: an
    entry is looked at again when it is its turn, and dropped (no leaf any more) or put back (used since). A node that
    becomes a leaf has to be offered.
    """

    def __init__(self, is_leaf: Callable[[Node], bool]) -> None:
        self._is_leaf = is_leaf
        self._heap: list[tuple[int, int, Node]] = []
        self._queued: set[Node] = set()
        self._serial = count()  # of two leaves used at the same time the one offered first goes first

    def offer(self, node: Node) -> None:
        """Take `node` in if it is a leaf."""
        if node not in self._queued and self._is_leaf(node):
            self._queued.add(node)
            heapq.heappush(self._heap, (node.used, next(self._serial), node))

    def pop(self) -> Node | None:
        """Take out the leaf that has not been used for longest, None if there is none."""
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            self._queued.remove(node)
            if used < node.used:
                self.offer(node)
            elif self._is_leaf(node):
                return node
        return None

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()
        self._queued.clear()

    def __contains__(self, node: Node) -> bool:
        return node in self._queued

    def __len__(self) -> int:
        return len(self._heap)
