"""The prefix cache: a radix tree of pages over token ids (read `nodes.py` next).

The pages of a prompt are kept for later requests that begin with it (RadixAttention,
arXiv:2312.07104). An edge of the tree is a page of tokens. A prefix is looked up page by page in
dicts of id tuples, so tokens are compared, never digests. The last page of a sequence may be a leaf
with fewer tokens.

    salt ── [0 … 31] ──┬── [32 … 63] ── [64 … 95]      full pages are shared: one more owner
                       └── [32 … 40]                   the start of a page is shared by copying

The tree is an owner of each of its pages; sequences are the others (`pages.py`). A page can be
evicted if the tree is the only owner of it and of all pages below it: least recently used leaf
first, or by tenant (`nodes.FairLeaves`). With a second tier an evicted page may stay in the tree,
with a slot instead of a page; pages in memory are always above pages that are only in the tier.
Each salt has a tree of its own. The cache knows integers only: no arrays, no clock, no text but
salts and tenants.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from martlet.cache.miss_reason import Evicted, FirstPages
from martlet.cache.nodes import FairLeaves, Ids, LeafQueue, MemoryShare, Node, root_key
from martlet.cache.pages import PagePool
from martlet.types import CacheUse, MissReason, PageId, Save, SlotId

SlotRecord = tuple[SlotId, bytes, bytes, Ids]  # slot, key, key of the page before, ids


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: full pages in memory, then slots, or the start of a page."""

    pages: tuple[PageId, ...]  # to be shared
    slots: tuple[tuple[SlotId, bytes], ...]  # slot and key, to be loaded into new pages
    # a page to be copied, and how many of its positions agree; never after slots
    tail: tuple[PageId, int] | None
    n_tokens: int  # of all three
    use: CacheUse


class SecondTier(Protocol):
    """A second place for pages, by slots: `disk_slots.py` implements and describes it."""

    on_lost: Callable[[Node], None]  # set by the tree: called for each node that lost its slot

    @property
    def n_used(self) -> int:
        """Slots that have an owner."""

    def owner(self, slot: SlotId) -> Node | None:
        """The node whose page a slot holds."""

    def pin(self, slots: Iterable[SlotId]) -> None:
        """Keep these slots until the plan is made."""

    def adopt(self, records: Iterable[SlotRecord], page_size: int) -> list[Node]:
        """Build trees from records; return the roots."""

    def want(self, node: Node) -> None:
        """Queue a full page for write-behind."""

    def save(self, node: Node) -> bool:
        """Plan to save a page in memory."""

    def drain(self, most: int) -> tuple[Save, ...]:
        """The saves of the plan that is made now."""

    def forget(self, slots: Iterable[SlotId]) -> None:
        """These slots do not hold their pages."""

    def retire(self, slots: Iterable[SlotId]) -> None:
        """These slots cannot be written."""

    def cancel(self) -> None:
        """Forget the saves of the last plan and of the plan in the making."""

    def check(self, slotted: dict[SlotId, Node]) -> None:
        """Assert that `slotted` are the owners."""


class RadixCache:
    """Prefixes by salt and token ids, and the pages of their keys and values.

    `share_granularity`: prefixes are kept and found in multiples of it. It is 1, or a multiple of
    the page size where the keys and values of so many positions depend on one another (q4).
    `fair`: the tenant with the most pages loses pages first.
    """

    def __init__(
        self, pool: PagePool, *, share_granularity: int = 1, tier: SecondTier | None = None, fair: bool = False
    ) -> None:
        assert share_granularity == 1 or share_granularity % pool.page_size == 0
        self._pool = pool
        self._size = pool.page_size
        self._granularity = share_granularity
        self._tier = tier
        self.roots: dict[str | bytes, Node] = {}  # by salt; by key until a request names the salt
        self._nodes: dict[PageId, Node] = {}  # which node has a page
        self._shares: WeakValueDictionary[str, MemoryShare] = WeakValueDictionary()  # of tenants
        self._leaves = (FairLeaves if fair else LeafQueue)(self._is_free_leaf)
        self._now = 0  # a count of uses
        self._n_evictable = 0
        self._evicted = Evicted()
        self._firsts = FirstPages()
        pool.watch = self._watch
        if tier is not None:
            tier.on_lost = self._remove_if_empty

    @property
    def n_evictable(self) -> int:
        """Pages that `evict` could free: the tree is the only owner of them and of all below."""
        return self._n_evictable

    def pages(self) -> list[PageId]:
        """The pages that the tree owns, for the pool's `check`."""
        return list(self._nodes)

    # -- finding -----------------------------------------------------------------------------------
    def match(self, salt: str, ids: Sequence[int], limit: int) -> Match:
        """Find the longest cached prefix of `ids` of at most `limit` tokens, without side effects.

        `limit` is less than len(ids) where the last token's logits are needed.
        """
        assert 0 <= limit <= len(ids)
        wanted, size = tuple(ids), self._size
        path: list[Node] = []
        node = self._root(salt)
        position = 0
        while node is not None and position + size <= limit:
            child = node.children.get(wanted[position : position + size])
            if child is None:
                break
            path.append(child)
            node = child
            position += size
        rest = wanted[position : position + size]
        near = [] if node is None else node.nearest(rest)
        reason, differs_at, cached_id = self._explain(salt, path, near, rest, limit)
        if self._granularity > 1:
            del path[len(path) // (self._granularity // size) * (self._granularity // size) :]
        pages = tuple([child.page for child in path if child.page is not None])
        slots = tuple([(child.slot, child.key) for child in path[len(pages) :] if child.slot is not None])
        tail = self._tail(near, limit - position) if self._granularity == 1 else None
        n_tokens = len(path) * size + (0 if tail is None else tail[1])
        return Match(pages, slots, tail, n_tokens, CacheUse(n_tokens, len(slots) * size, reason, cached_id, differs_at))

    def acquire(self, match: Match) -> None:
        """Make the caller an owner of a fresh match's pages and of its tail's page.

        Call it before evicting pages for the rest. The caller frees the tail's page once the plan
        with the copy is made; slots are kept until then (`drain_saves`).
        """
        self._now += 1
        tail = () if match.tail is None else match.tail[:1]
        for page in (*match.pages[-1:], *tail):
            self._nodes[page].used = self._now
        self._pool.share((*match.pages, *tail))
        if self._tier is not None and match.slots:
            self._tier.pin([slot for slot, _ in match.slots])
            node = self._tier.owner(match.slots[-1][0])
            assert node is not None
            node.used = self._now

    def _tail(self, near: list[tuple[int, Node]], most: int) -> tuple[PageId, int] | None:
        for n, child in near:
            if child.page is not None and min(n, most) > 0:
                return child.page, min(n, most)
        return None

    def _explain(
        self, salt: str, path: list[Node], near: list[tuple[int, Node]], rest: Ids, limit: int
    ) -> tuple[MissReason, int | None, int | None]:
        """Why a match ends after `path` and `near`'s share of `rest`: reason, position, cached id.

        Position and id are those of the token in the cache that differs, if there is such a token.
        """
        agree, child = near[0] if near else (0, None)
        reach = len(path) * self._size + agree
        if reach >= limit:
            return MissReason.END, None, None
        if len(self._evicted):
            parent = path[-1].key if path else root_key(salt)
            if self._evicted.agree(parent, rest) > agree:
                return MissReason.EVICTED, None, None
        if not path and self._firsts.agree(rest) > agree:
            return MissReason.SALT, None, None
        if child is not None and agree < len(child.ids):
            return MissReason.DIFFERS, reach, child.ids[agree]
        return MissReason.EMPTY, None, None

    def _root(self, salt: str) -> Node | None:
        root = self.roots.get(salt)
        if root is None and self._tier is not None:
            root = self.roots.pop(root_key(salt), None)  # an adopted tree
            if root is not None:
                root.name = salt
                self.roots[salt] = root
        return root

    # -- keeping -----------------------------------------------------------------------------------
    def insert(self, salt: str, ids: Sequence[int], pages: Sequence[PageId], tenant: str = "") -> None:
        """Keep computed pages: `ids` are the computed positions' tokens, `pages` the caller's.

        The tree becomes an owner of the pages whose tokens it does not hold yet. A last page that
        is not full becomes a leaf: its owner goes on writing behind the leaf's tokens, and may
        insert it again with more of them. All trees of a `tenant` count together.
        """
        size = self._size
        n_tokens = len(ids) // self._granularity * self._granularity
        if n_tokens == 0:
            return
        self._now += 1
        node, first = self._deepest(salt, ids, pages, n_tokens // size)
        if tenant and node.root.share.n_pages == 0:
            node.root.share = self._shares.setdefault(tenant, node.root.share)
        for index in range(first, self._pool.pages_for(n_tokens)):
            node = self._keep(node, tuple(ids[index * size : min((index + 1) * size, n_tokens)]), pages[index])
        node.used = self._now
        if self._tier is not None and (full := node if len(node.ids) == size else node.parent) is not None:
            self._tier.want(full)

    def _deepest(self, salt: str, ids: Sequence[int], pages: Sequence[PageId], n_full: int) -> tuple[Node, int]:
        """Where to begin: below the caller's deepest full page in the tree, else at the root.

        If the tree owns that very page, it holds the caller's prefix up to there.
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
            self.roots[salt] = root
        return root, 0

    def _keep(self, parent: Node, chunk: Ids, page: PageId) -> Node:
        """The node of `chunk` below `parent`, or of a longer chunk that begins with it.

        A missing node is made; a node without a page gets `page`.
        """
        node = parent.children.get(chunk)
        if node is None:
            agree, near = next(iter(parent.nearest(chunk)), (0, None))
            if near is not None and agree == len(chunk):
                return near  # a fuller page exists
            if near is not None and agree == len(near.ids):
                self._extend(near, chunk, page)
                return near
            node = Node(chunk, parent, self._now)
            self._link(node, parent)
        if node.page is None:
            self._attach(node, page)
        return node

    def _extend(self, leaf: Node, chunk: Ids, page: PageId) -> None:
        """Give a leaf more tokens and the page that holds them."""
        assert leaf.parent is not None
        assert not leaf.children
        parent = leaf.parent
        self._unlink(leaf, parent)
        leaf.ids = chunk
        self._link(leaf, parent)
        if leaf.page != page:
            self._detach(leaf)
            self._attach(leaf, page)

    def _link(self, node: Node, parent: Node) -> None:
        parent.add(node)
        if parent.parent is None:
            self._firsts.add(node.ids)

    def _unlink(self, node: Node, parent: Node) -> None:
        parent.remove(node)
        if parent.parent is None:
            self._firsts.remove(node.ids)

    # -- making room -------------------------------------------------------------------------------
    def evict(self, n_pages: int, *, save: bool = True) -> int:
        """Free up to n_pages pages that only the tree owns, leaves first; return how many.

        With a second tier full pages are saved first, unless `save` is False or they have a slot.
        A plan's saves run before anything is written to the freed pages.
        """
        freed = 0
        while freed < n_pages:
            node = self._leaves.pop()
            if node is None:
                break
            if self._tier is not None and save and len(node.ids) == self._size:
                self._tier.save(node)
            self._detach(node)
            self._remove_if_empty(node)
            freed += 1
        return freed

    def _remove_if_empty(self, node: Node) -> None:
        """Remove a node that has neither page nor slot, and a root that lost its last child."""
        if node.page is None and node.slot is None and (parent := node.parent) is not None:
            assert not node.children
            self._unlink(node, parent)
            self._evicted.add(parent.key, node.ids)
            if parent.parent is None and not parent.children:
                del self.roots[parent.name]

    def clear(self) -> None:
        """Give up all pages, whose content is unknown. Call it before the pool's `reset`.

        Slots of the second tier stay: a load checks what it reads.
        """
        if self._tier is not None:
            self._tier.cancel()
        nodes, self._nodes = self._nodes, {}
        self._leaves.clear()
        self._n_evictable = 0
        self._pool.free(nodes)
        for node in [*nodes.values(), *self.roots.values()]:
            node.page = None
            node.held = node.n_resident = node.root.share.n_pages = 0
        for node in nodes.values():
            if node.slot is None and node.parent is not None:
                self._unlink(node, node.parent)
        self.roots = {name: root for name, root in self.roots.items() if root.children}

    # -- the second tier ---------------------------------------------------------------------------
    def drain_saves(self, most: int) -> tuple[Save, ...]:
        """The saves of the plan that is made now: evicted pages, then others up to `most`."""
        return () if self._tier is None else self._tier.drain(most)

    def forget(self, slots: Iterable[SlotId]) -> None:
        """These slots could not be loaded: they and all slots below them are lost."""
        if self._tier is not None:
            self._tier.forget(slots)

    def retire(self, slots: Iterable[SlotId]) -> None:
        """These slots could not be written: they are lost and never used again."""
        if self._tier is not None:
            self._tier.retire(slots)

    def adopt(self, records: Iterable[SlotRecord]) -> int:
        """Take over a tier's file, into an empty cache; return how many slots it has.

        A record is (slot, key, key of the page before, ids), least recently used first; the tier
        refuses records that are not sound.
        """
        assert not self.roots
        assert self._tier is not None
        roots = self._tier.adopt(records, self._size)
        for root in roots:
            self.roots[root.name] = root
            for ids in root.order:
                self._firsts.add(ids)
        self._now = self._tier.n_used
        return self._tier.n_used

    # -- whose is which page -----------------------------------------------------------------------
    def _attach(self, node: Node, page: PageId) -> None:
        """Give `page` to the node and make the tree an owner of it, beside the caller."""
        assert page not in self._nodes
        assert node.parent is not None
        self._pool.share((page,))
        self._nodes[page] = node
        node.page = page
        node.used = self._now
        node.parent.n_resident += 1
        node.root.share.n_pages += 1
        self._n_evictable += 1
        self._hold(node)

    def _detach(self, node: Node) -> None:
        """Give up the page of a node whose children have none."""
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
        node.root.share.n_pages -= 1
        parent.used = max(parent.used, node.used)
        self._leaves.offer(parent)

    def _watch(self, page: PageId, shared: bool) -> None:
        """A page has gained a second owner, or is left with a single owner."""
        node = self._nodes.get(page)
        if node is not None:
            (self._hold if shared else self._unhold)(node)

    def _hold(self, node: Node | None) -> None:
        """Count a reason why `node` and all nodes above it must stay.

        A sequence owns all pages above its own, except where another sequence computed them first.
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

    # -- invariants --------------------------------------------------------------------------------
    def check(self) -> None:
        """Assert the tree's invariants; O(nodes)."""
        resident: dict[PageId, Node] = {}
        slotted: dict[SlotId, Node] = {}
        todo = list(self.roots.values())
        assert all(root.name == name and root.children for name, root in self.roots.items())
        self._firsts.check([ids for root in todo for ids in root.order])
        for node in todo:
            shared = node.page is not None and self._pool.refs(node.page) > 1
            node.check(self._size, shared)
            assert node in self._leaves or not self._is_free_leaf(node), "a page that can never be evicted"
            if node.page is not None:
                resident[node.page] = node
            if node.slot is not None:
                slotted[node.slot] = node
            todo += node.children.values()
        assert resident == self._nodes
        assert sum(share.n_pages for share in {root.share for root in self.roots.values()}) == len(resident)
        assert self._n_evictable == sum(node.held == 0 for node in resident.values())
        if self._tier is not None:
            self._tier.check(slotted)
