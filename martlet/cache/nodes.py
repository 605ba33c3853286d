"""The radix tree's nodes, their keys, and queues of leaves to evict (read `miss_reason.py` next).

A node is a page of tokens. Its children are found in two ways. A dict from their ids answers "is
this page cached?" at the cost of a hash. A sorted list of the same ids answers "which page begins
like this?": in a sorted list of tuples, a neighbour of a tuple shares the longest prefix with it.
"""

from __future__ import annotations

import heapq
import struct
from bisect import bisect_left
from collections.abc import Callable
from hashlib import blake2b
from itertools import count

from martlet.types import PageId, SlotId

Ids = tuple[int, ...]

_ROOT, _PAGE = b"\x00", b"\x01"  # how keys begin


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=31).digest()


def root_key(salt: str) -> bytes:
    """The key of a salt's root: 32 bytes. No page's key begins like it."""
    return _ROOT + _digest(salt.encode())


def page_key(parent: bytes, ids: Ids) -> bytes:
    """The key of a page, 32 bytes: a digest of its ids and of the key of the page before."""
    return _PAGE + _digest(parent + struct.pack(f"<{len(ids)}q", *ids))


def is_root_key(key: bytes) -> bool:
    """Whether `key` is a salt's root key."""
    return key[:1] == _ROOT


def common(a: Ids, b: Ids) -> int:
    """The length of the longest common prefix of `a` and `b`."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


def neighbours(order: list[Ids], wanted: Ids) -> list[Ids]:
    """A sorted list's entries beside `wanted`: no other shares a longer prefix with it."""
    index = bisect_left(order, wanted)
    return order[max(0, index - 1) : index + 1]


def insert_sorted(order: list[Ids], ids: Ids) -> None:
    """Insert `ids`, which the list does not hold."""
    order.insert(bisect_left(order, ids), ids)


def remove_sorted(order: list[Ids], ids: Ids) -> None:
    """Remove `ids`, which the list holds."""
    index = bisect_left(order, ids)
    assert order[index] == ids
    del order[index]


class MemoryShare:
    """Pages that a tenant's trees own together; a tree without a tenant has a share of its own."""

    n_pages = 0


class Node:
    """A page of tokens after its parent's: in memory (`page`), the second tier (`slot`), or both.

    A root stands for a cache salt: it has no page, slot, ids or parent.
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
        self.used = used  # last use of the node, or of a removed node below it
        self.children: dict[Ids, Node] = {}
        self.order: list[Ids] = []  # the same ids, sorted; no entry is a prefix of another
        self.page: PageId | None = None
        self.slot: SlotId | None = None
        self.held = 0  # 1 if its page has another owner, plus 1 for each child that is held
        self.n_resident = 0  # children with a page
        self.n_slotted = 0  # children with a slot
        if parent is None:
            self.share = MemoryShare()  # counts the tree's pages
        self.name: str | bytes = b""  # of a root: its salt; its key until a request names the salt
        self._key = key

    @property
    def key(self) -> bytes:
        """The digest of its ids and all before them, computed at first use: ids are final then."""
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
        self.children[child.ids] = child
        insert_sorted(self.order, child.ids)

    def remove(self, child: Node) -> None:
        del self.children[child.ids]
        remove_sorted(self.order, child.ids)

    def nearest(self, wanted: Ids) -> list[tuple[int, Node]]:
        """Up to two children with the longest prefix in common with `wanted`, and its length.

        The longest comes first; of equals, a child whose page is in memory.
        """
        near = [(common(ids, wanted), self.children[ids]) for ids in neighbours(self.order, wanted)]
        near.sort(key=lambda pair: (pair[0], pair[1].page is not None), reverse=True)
        return near

    def check(self, page_size: int, shared: bool) -> None:
        """Assert the invariants of a node and its children; `shared`: its page has more owners."""
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
    """Leaves by last use, O(log n) per operation; `is_leaf` says which nodes may be taken.

    A node has at most one entry, with its last use at the time of the offer. A change of the node
    needs no call: `pop` checks each entry again, and drops it (no leaf any more) or puts it back
    (used since). A node that becomes a leaf must be offered.
    """

    def __init__(self, is_leaf: Callable[[Node], bool]) -> None:
        self._is_leaf = is_leaf
        self._heap: list[tuple[int, int, Node]] = []
        self._queued: set[Node] = set()
        self._serial = count()  # of leaves last used together, the first offered goes first

    def offer(self, node: Node) -> None:
        """Add `node` if it is a leaf."""
        if node not in self._queued and self._is_leaf(node):
            self._queued.add(node)
            heapq.heappush(self._heap, (node.used, next(self._serial), node))

    def pop(self) -> Node | None:
        """Remove and return the least recently used leaf; None: there is none."""
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            self._queued.remove(node)
            if used < node.used:
                self.offer(node)
            elif self._is_leaf(node):
                return node
        return None

    def clear(self) -> None:
        self._heap.clear()
        self._queued.clear()

    def __contains__(self, node: Node) -> bool:
        return node in self._queued

    def __len__(self) -> int:
        return len(self._heap)


class FairLeaves:
    """Leaves of many tenants: the tenant with the most pages loses its least recently used leaf.

    So a tenant keeps its pages while another has more (max-min fairness), whatever the other
    requests and under however many salts. Taking a leaf is O(tenants); the rest is as `LeafQueue`.
    """

    def __init__(self, is_leaf: Callable[[Node], bool]) -> None:
        self._is_leaf = is_leaf
        self._queues: dict[MemoryShare, LeafQueue] = {}

    def offer(self, node: Node) -> None:
        """Add `node` if it is a leaf."""
        share = node.root.share
        queue = self._queues.get(share)
        if queue is None:
            queue = self._queues[share] = LeafQueue(self._is_leaf)
        queue.offer(node)

    def pop(self) -> Node | None:
        """Remove and return a leaf; None: there is none."""
        while self._queues:
            share = max(self._queues, key=lambda share: share.n_pages)
            node = self._queues[share].pop()
            if len(self._queues[share]) == 0:
                del self._queues[share]
            if node is not None:
                return node
        return None

    def clear(self) -> None:
        self._queues.clear()

    def __contains__(self, node: Node) -> bool:
        share = node.root.share
        return share in self._queues and node in self._queues[share]

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))
