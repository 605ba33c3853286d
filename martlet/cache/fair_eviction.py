"""Whose pages make room, where tenants share the memory fairly (read `cache/nodes.py` first: one queue, by last use)."""

from __future__ import annotations

from collections.abc import Callable

from martlet.cache.nodes import LeafQueue, Node, Share

__all__ = ["FairLeaves"]


class FairLeaves:
    """Leaves of many tenants: the one with the most pages gives first, its least recently used leaf.

    So a tenant keeps its pages as long as another one has more (max-min fairness), whatever that one asks for, and under
    however many salts. O(tenants) to take a leaf; otherwise as `LeafQueue`.
    """

    def __init__(self, is_leaf: Callable[[Node], bool]) -> None:
        self._is_leaf = is_leaf
        self._queues: dict[Share, LeafQueue] = {}

    def offer(self, node: Node) -> None:
        """Take `node` in if it is a leaf."""
        share = node.root.share
        queue = self._queues.get(share)
        if queue is None:
            queue = self._queues[share] = LeafQueue(self._is_leaf)
        queue.offer(node)

    def pop(self) -> Node | None:
        """Take a leaf out, None if there is none."""
        while self._queues:
            share = max(self._queues, key=lambda share: share.n_pages)
            node = self._queues[share].pop()
            if len(self._queues[share]) == 0:
                del self._queues[share]
            if node is not None:
                return node
        return None

    def clear(self) -> None:
        """Forget all."""
        self._queues.clear()

    def __contains__(self, node: Node) -> bool:
        share = node.root.share
        return share in self._queues and node in self._queues[share]

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))
