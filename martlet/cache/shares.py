"""Whose pages make room, where tenants share the memory fairly (read `cache/nodes.py` first: one queue, by last use)."""

from __future__ import annotations

from collections.abc import Callable

from martlet.cache.nodes import LeafQueue, Node

__all__ = ["FairLeaves"]


class FairLeaves:
    """Leaves of many trees: the tree with the most pages gives first, its least recently used leaf.

    So a tree keeps its pages as long as another one has more (max-min fairness), whatever that one asks for.
    O(trees) to take a leaf; otherwise as `LeafQueue`.
    """

    def __init__(self, is_leaf: Callable[[Node], bool]) -> None:
        self._is_leaf = is_leaf
        self._queues: dict[Node, LeafQueue] = {}  # by root

    def offer(self, node: Node) -> None:
        """Take `node` in if it is a leaf."""
        queue = self._queues.get(node.root)
        if queue is None:
            queue = self._queues[node.root] = LeafQueue(self._is_leaf)
        queue.offer(node)

    def pop(self) -> Node | None:
        """Take a leaf out, None if there is none."""
        while self._queues:
            root = max(self._queues, key=lambda root: root.n_pages)
            node = self._queues[root].pop()
            if len(self._queues[root]) == 0:
                del self._queues[root]
            if node is not None:
                return node
        return None

    def clear(self) -> None:
        """Forget all."""
        self._queues.clear()

    def __contains__(self, node: Node) -> bool:
        return node.root in self._queues and node in self._queues[node.root]

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))
