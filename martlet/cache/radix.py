"""The prefix cache: a radix tree of pages over token ids (read `cache/nodes.py` next).

What is computed for a prefix is kept for the next request that begins with it (RadixAttention, arXiv:2312.07104). One
edge of the tree is one page of tokens; a prefix is looked up a page at a time in dicts of id tuples, so that tokens are
compared and never digests. The last page of a sequence may be a leaf with fewer tokens.

    salt ── [0 … 31] ──┬── [32 … 63] ── [64 … 95]      full pages are shared: one more owner
                       └── [32 … 40]                   a page in part, full or not, is shared by copying it

The tree is one owner of each of its pages, sequences are the others (`cache/pages.py`). A page that only the tree owns,
and all below it too, can be evicted: least recently used leaf first. Each salt has a tree of its own: nothing is shared
between two salts.

It knows integers only: no arrays, no clock, no text but the salt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from martlet.cache.nodes import Ids, LeafQueue, Node, root_key
from martlet.cache.pages import PagePool
from martlet.types import CacheUse, MissReason, PageId, SlotId

__all__ = ["Match", "RadixCache"]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of some ids: full pages in memory, then in the second tier, or a page in part."""

    pages: tuple[PageId, ...]  # to be shared
    slots: tuple[tuple[SlotId, bytes], ...]  # with their keys, to be loaded into new pages
    tail: tuple[PageId, int] | None  # a page to be copied, and how many of its positions are good; never after slots
    n_tokens: int  # of all three
    limit: int  # tokens that were asked for
    use: CacheUse


class RadixCache:
    """Prefixes by salt and token ids, and the pages where their keys and values are.

    `share_tokens` is where a sequence may leave what it shares: 1 for anywhere; a multiple of the page size when the
    keys and values of a group of so many positions depend on one another, then only whole groups are kept and found.
    """

    def __init__(self, pool: PagePool, *, share_tokens: int = 1) -> None:
        assert share_tokens == 1 or share_tokens % pool.page_size == 0
        self._pool = pool
        self._size = pool.page_size
        self._share_tokens = share_tokens
        self._roots: dict[str | bytes, Node] = {}
        self._nodes: dict[PageId, Node] = {}  # who has which page
        self._leaves = LeafQueue(self._is_free_leaf)
        self._now = 0  # a count of uses
        self._n_evictable = 0
        self.hit_tokens = 0
        self.asked_tokens = 0
        pool.watch = self._watch

    @property
    def n_evictable(self) -> int:
        """Pages that `evict` could free: neither they nor any below them have another owner."""
        return self._n_evictable

    def pages(self) -> list[PageId]:
        """The pages that the tree owns, for the pool's `check`."""
        return list(self._nodes)

    # -- finding --------------------------------------------------------------------------------------------------
    def match(self, salt: str, ids: Sequence[int], limit: int) -> Match:
        """Find the longest cached prefix of `ids` of at most `limit` tokens; it changes nothing and locks nothing.

        `limit` is less than len(ids) where the last token's logits are wanted: that one is always computed.
        """
        assert 0 <= limit <= len(ids)
        wanted, size = tuple(ids), self._size
        path: list[Node] = []
        near: list[tuple[int, Node]] = []
        node = self._root(salt)
        position = 0
        if node is not None:
            while position + size <= limit:
                child = node.children.get(wanted[position : position + size])
                if child is None:
                    break
                path.append(child)
                node = child
                position += size
            near = node.nearest(wanted[position : position + size])
        group = max(1, self._share_tokens // size)
        del path[len(path) // group * group :]
        pages = tuple([child.page for child in path if child.page is not None])
        slots = tuple([(child.slot, child.key) for child in path[len(pages) :] if child.slot is not None])
        tail = self._tail(near, limit - position) if self._share_tokens == 1 and not slots else None
        n_tokens = len(path) * size + (0 if tail is None else tail[1])
        use = self._explain(n_tokens, len(slots) * size, position, near, limit)
        return Match(pages, slots, tail, n_tokens, limit, use)

    def acquire(self, match: Match) -> None:
        """Take part in a match just made: the caller becomes one more owner of its pages and of its tail's page.

        It frees the tail's page again as soon as the plan with the copy is made: nothing can take its place before.
        """
        self._now += 1
        self.hit_tokens += match.n_tokens
        self.asked_tokens += match.limit
        for page in match.pages[-1:]:
            self._nodes[page].used = self._now
        self._pool.share(match.pages)
        if match.tail is not None:
            self._nodes[match.tail[0]].used = self._now
            self._pool.share(match.tail[:1])

    def _tail(self, near: list[tuple[int, Node]], most: int) -> tuple[PageId, int] | None:
        for n, child in near:
            if child.page is not None and min(n, most) > 0:
                return child.page, min(n, most)
        return None

    def _explain(
        self, n_tokens: int, n_loaded: int, position: int, near: list[tuple[int, Node]], limit: int
    ) -> CacheUse:
        """Why a match ends where it ends."""
        agree, child = near[0] if near else (0, None)
        if position + agree >= limit:
            return CacheUse(n_tokens, n_loaded, MissReason.END)
        if child is not None and agree < len(child.ids):
            return CacheUse(n_tokens, n_loaded, MissReason.DIFFERS, child.ids[agree])
        return CacheUse(n_tokens, n_loaded, MissReason.EMPTY)

    def _root(self, salt: str) -> Node | None:
        return self._roots.get(salt)

    # -- keeping --------------------------------------------------------------------------------------------------
    def insert(self, salt: str, ids: Sequence[int], pages: Sequence[PageId]) -> None:
        """Keep what is computed: `ids` are exactly the computed positions, `pages` the caller's, first to last.

        The tree becomes one more owner of the pages whose tokens it does not hold yet. A last page that is not full is
        kept as a leaf: its owner goes on writing behind the leaf's tokens and may insert it again with more of them.
        """
        size = self._size
        n_tokens = len(ids) // self._share_tokens * self._share_tokens
        if n_tokens == 0:
            return
        self._now += 1
        node, first = self._deepest(salt, ids, pages, n_tokens // size)
        for index in range(first, self._pool.pages_for(n_tokens)):
            chunk = tuple(ids[index * size : min((index + 1) * size, n_tokens)])
            node = self._keep(node, chunk, pages[index])
        node.used = self._now

    def _deepest(self, salt: str, ids: Sequence[int], pages: Sequence[PageId], n_full: int) -> tuple[Node, int]:
        """Where to begin: below the caller's deepest full page that the tree holds, else at the root.

        If the tree has that very page, it has the caller's prefix up to there.
        """
        size = self._size
        for index in reversed(range(n_full)):
            node = self._nodes.get(pages[index])
            if node is not None and len(node.ids) == size:
                assert node.ids == tuple(ids[index * size : (index + 1) * size]), "a page with other tokens"
                return node, index + 1
        root = self._root(salt)
        if root is None:
            root = Node((), None, self._now, key=root_key(salt))
            root.name = salt
            self._roots[salt] = root
        return root, 0

    def _keep(self, parent: Node, chunk: Ids, page: PageId) -> Node:
        """The node of `chunk` below `parent`, or one that begins like it; made and given the page where need be."""
        node = parent.children.get(chunk)
        if node is None:
            agree, near = next(iter(parent.nearest(chunk)), (0, None))
            if near is not None and agree == len(chunk):
                return near  # a fuller page is there
            if near is not None and agree == len(near.ids):
                self._extend(near, chunk, page)
                return near
            node = Node(chunk, parent, self._now)
            parent.add(node)
        if node.page is None:
            self._attach(node, page)
        return node

    def _extend(self, leaf: Node, chunk: Ids, page: PageId) -> None:
        """Give a leaf more tokens, and the page that holds them."""
        assert leaf.parent is not None
        assert not leaf.children
        leaf.parent.remove(leaf)
        leaf.ids = chunk
        leaf.parent.add(leaf)
        if leaf.page != page:
            self._detach(leaf)
            self._attach(leaf, page)

    # -- making room ----------------------------------------------------------------------------------------------
    def evict(self, n_pages: int) -> int:
        """Free up to n_pages pages that only the tree owns, least recently used leaf first; return how many."""
        freed = 0
        while freed < n_pages:
            node = self._leaves.pop()
            if node is None:
                break
            self._detach(node)
            self._remove_if_empty(node)
            freed += 1
        return freed

    def clear(self) -> None:
        """Give up all pages. To be called before the pool's `reset`."""
        for page in list(self._nodes):
            self._pool.free((page,))
        self._nodes.clear()
        self._roots.clear()
        self._leaves.clear()
        self._n_evictable = 0

    def _remove_if_empty(self, node: Node) -> None:
        """Take a node without page and slot out of the tree, and a root without children."""
        parent = node.parent
        if node.page is None and node.slot is None and parent is not None:
            assert not node.children
            parent.remove(node)
            if parent.parent is None and not parent.children:
                del self._roots[parent.name]

    # -- whose is which page --------------------------------------------------------------------------------------
    def _attach(self, node: Node, page: PageId) -> None:
        """Make the tree one more owner of `page`, which is the node's from now on; the caller owns it too."""
        assert page not in self._nodes
        assert node.parent is not None
        self._pool.share((page,))
        self._nodes[page] = node
        node.page = page
        node.used = self._now
        node.parent.n_resident += 1
        self._n_evictable += 1
        self._hold(node)

    def _detach(self, node: Node) -> None:
        """Give up the page of a node that has none below it."""
        page, parent = node.page, node.parent
        assert page is not None
        assert parent is not None
        assert node.n_resident == 0
        del self._nodes[page]
        node.page = None
        if self._pool.refs(page) > 1:
            self._unhold(node)
        self._n_evictable -= 1
        self._pool.free((page,))
        parent.n_resident -= 1
        parent.used = max(parent.used, node.used)
        self._leaves.offer(parent)

    def _watch(self, page: PageId, shared: bool) -> None:
        """A page has got a second owner, or is left with one, which is the tree if the tree has it."""
        node = self._nodes.get(page)
        if node is not None:
            if shared:
                self._hold(node)
            else:
                self._unhold(node)

    def _hold(self, node: Node | None) -> None:
        """Count a reason why `node` and all above it must stay.

        A sequence mostly owns all pages above its own, but not where another one had computed the same before.
        """
        while node is not None:
            node.held += 1
            if node.held > 1:
                return
            if node.parent is not None:
                self._n_evictable -= 1
            node = node.parent

    def _unhold(self, node: Node | None) -> None:
        while node is not None:
            node.held -= 1
            if node.held > 0:
                return
            if node.parent is not None:
                self._n_evictable += 1
                self._leaves.offer(node)
            node = node.parent

    def _is_free_leaf(self, node: Node) -> bool:
        return node.page is not None and node.held == 0 and node.n_resident == 0

    # -- invariants -----------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Assert all that the tree promises; O(nodes)."""
        todo = list(self._roots.values())
        resident: dict[PageId, Node] = {}
        n_evictable = 0
        assert all(root.name == name and root.children for name, root in self._roots.items())
        while todo:
            node = todo.pop()
            children = [node.children[ids] for ids in node.order]
            assert node.order == sorted(node.children)
            assert all(common_is_shorter(a, b) for a, b in zip(node.order, node.order[1:], strict=False))
            assert node.n_resident == sum(child.page is not None for child in children)
            own = node.page is not None and self._pool.refs(node.page) > 1
            assert node.held == own + sum(child.held > 0 for child in children)
            for child in children:
                assert child.parent is node
                assert 0 < len(child.ids) <= self._size
                assert len(child.ids) == self._size or not child.children, "a page that is not full has one below it"
                assert child.page is None or node.parent is None or node.page is not None, "a page below none"
                assert child.page is not None or child.slot is not None
            if node.page is not None:
                resident[node.page] = node
                n_evictable += node.held == 0
            if self._is_free_leaf(node):
                assert node in self._leaves
            todo += children
        assert resident == self._nodes
        assert n_evictable == self._n_evictable


def common_is_shorter(a: Ids, b: Ids) -> bool:
    """Whether neither begins like the other one entire; for neighbours in a sorted list."""
    return b[: len(a)] != a
