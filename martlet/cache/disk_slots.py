"""Slots of pages on disk, the prefix cache's second tier (read `runtime/disk_file.py` for bytes).

A slot is room for one page in a file. Full pages are copied to slots some time after they were
computed (write-behind), or when they are evicted before that. A page that has a slot is simply
dropped at its eviction. A page has a slot only if the page before it has one. So a file holds whole
prefixes, and losing a slot loses all slots below it.

Slots are bounded: a new page takes the slot of the least recently used leaf, unless that leaf is
newer than the page.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from martlet.cache.nodes import Ids, LeafQueue, Node, is_root_key, page_key
from martlet.types import Save, SlotId


class DiskSlots:
    """Slots 0 … n_slots - 1: each is free, or holds (or is about to hold) a node's page."""

    def __init__(self, n_slots: int) -> None:
        assert n_slots >= 1
        self.n_slots = n_slots
        self.on_lost: Callable[[Node], None] = lambda node: (
            None
        )  # set by the tree: called for each node that lost its slot
        # a dict, for its fixed order
        self._free: dict[SlotId, None] = {SlotId(slot): None for slot in range(n_slots)}
        self._owners: dict[SlotId, Node] = {}
        self._pinned: set[SlotId] = set()
        self._retired: set[SlotId] = set()
        self._leaves = LeafQueue(lambda node: node.slot is not None and not node.n_slotted)
        self._wanted: OrderedDict[Node, None] = OrderedDict()  # for write-behind, oldest first
        self._saves: list[tuple[Node, Save]] = []  # of the plan in the making
        self._drained: list[tuple[Node, Save]] = []  # of the last plan

    @property
    def n_used(self) -> int:
        return len(self._owners)

    def owner(self, slot: SlotId) -> Node | None:
        return self._owners.get(slot)

    def pin(self, slots: Iterable[SlotId]) -> None:
        """Keep these slots until the plan is made: it loads from them, after its saves."""
        self._pinned.update(slots)

    # -- starting ----------------------------------------------------------------------------------
    def adopt(self, records: Iterable[tuple[SlotId, bytes, bytes, Ids]], page_size: int) -> list[Node]:
        """Build trees from records (slot, key, key of the page before, ids); return the roots.

        A record is refused, and its slot stays free, if its key is not the digest of the rest, if
        a record with other ids has the same key, if the page before it is missing, or if its slot
        does not exist or belongs to another record.
        """
        assert not self._owners
        below: dict[bytes, list[tuple[SlotId, bytes, Ids, int]]] = {}
        for used, (slot, key, parent, ids) in enumerate(_sound(records, page_size)):
            below.setdefault(parent, []).append((slot, key, ids, used))
        roots = [Node((), None, 0, key=key) for key in below if is_root_key(key)]
        todo = list(roots)
        for node in todo:
            for slot, key, ids, used in below.get(node.key, ()):
                if slot in self._free:
                    del self._free[slot]
                    child = Node(ids, node, used, key=key)
                    node.add(child)
                    self._give(child, slot)
                    todo.append(child)
        for root in roots:
            root.name = root.key
        return [root for root in roots if root.children]

    # -- saving ------------------------------------------------------------------------------------
    def want(self, node: Node) -> None:
        """Queue a full page and all pages above it for write-behind; a root is ignored."""
        if node.slot is None and node.parent is not None:
            self._wanted[node] = None

    def save(self, node: Node, most: int | None = None) -> bool:
        """Plan to save a page in memory, after the pages above it that have no slot; `most` in all.

        Returns False if all slots hold newer pages; then as many as possible were planned.
        """
        missing = []
        above: Node | None = node
        while above is not None and above.parent is not None and above.slot is None:
            missing.append(above)
            above = above.parent
        missing.reverse()
        return all(self._assign(unsaved) for unsaved in missing[:most])

    def drain(self, most: int) -> tuple[Save, ...]:
        """The saves of the plan that is made now: evicted pages, then write-behind up to `most`."""
        while self._wanted and len(self._saves) < most:
            node, _ = self._wanted.popitem(last=False)
            if node.page is None or node.slot is not None:
                continue
            if self.save(node, most - len(self._saves)) and node.slot is None:
                self._wanted[node] = None  # pages before it were first
                self._wanted.move_to_end(node, last=False)
        self._drained = [(node, save) for node, save in self._saves if node.slot == save.slot]
        self._saves.clear()
        pinned = [self._owners[slot] for slot in self._pinned if slot in self._owners]
        self._pinned.clear()
        for node in pinned:
            self._leaves.offer(node)
        return tuple([save for _, save in self._drained])

    def _assign(self, node: Node) -> bool:
        """Find a slot for a node and plan its save."""
        parent = node.parent
        assert parent is not None
        assert node.page is not None
        slot = self._take(node, parent)
        if slot is None:
            return False
        self._give(node, slot)
        self._saves.append((node, Save(node.page, slot, node.key, parent.key, node.ids)))
        self._wanted.pop(node, None)
        return True

    def _take(self, node: Node, parent: Node) -> SlotId | None:
        """A free slot, or the least recently used leaf's if it is older and not `node`'s parent."""
        if not self._free:
            parent.used = max(parent.used, node.used)
            victim = self._oldest()
            if victim is None:
                return None
            if victim is parent or victim.used > node.used:
                self._leaves.offer(victim)
                return None
            self._lose(victim)
        slot = next(iter(self._free))
        del self._free[slot]
        return slot

    def _oldest(self) -> Node | None:
        """The least recently used unpinned leaf; pinned leaves return when the plan is made."""
        node = self._leaves.pop()
        while node is not None and node.slot in self._pinned:
            node = self._leaves.pop()
        return node

    # -- losing ------------------------------------------------------------------------------------
    def forget(self, slots: Iterable[SlotId]) -> None:
        """These slots do not hold their pages: their nodes and all nodes below lose their slots."""
        for slot in slots:
            node = self._owners.get(slot)
            if node is not None:
                self._lose_tree(node)

    def retire(self, slots: Iterable[SlotId]) -> None:
        slots = list(slots)
        self.forget(slots)
        for slot in slots:
            if slot in self._free:
                del self._free[slot]
                self._retired.add(slot)

    def cancel(self) -> None:
        self.forget([save.slot for node, save in [*self._drained, *self._saves] if node.slot == save.slot])
        self._drained.clear()
        self._saves.clear()
        self._wanted.clear()
        self._pinned.clear()
        for node in self._owners.values():
            self._leaves.offer(node)

    def _lose_tree(self, node: Node) -> None:
        below = [node]
        for ancestor in below:
            below += [child for child in ancestor.children.values() if child.slot is not None]
        for lost in reversed(below):
            self._lose(lost)

    def _give(self, node: Node, slot: SlotId) -> None:
        assert node.slot is None
        assert node.parent is not None
        self._owners[slot] = node
        node.slot = slot
        node.parent.n_slotted += 1
        self._leaves.offer(node)

    def _lose(self, node: Node) -> None:
        slot, parent = node.slot, node.parent
        assert slot is not None
        assert parent is not None
        assert node.n_slotted == 0
        del self._owners[slot]
        self._free[slot] = None
        self._pinned.discard(slot)
        node.slot = None
        parent.n_slotted -= 1
        parent.used = max(parent.used, node.used)
        self._leaves.offer(parent)
        self.on_lost(node)

    def check(self, slotted: dict[SlotId, Node]) -> None:
        assert self._owners == slotted, "slots differ from the tree's"
        assert sorted([*self._free, *self._owners, *self._retired]) == list(range(self.n_slots)), (
            "a slot is lost or used twice"
        )
        assert self._pinned <= self._owners.keys()
        for slot, node in slotted.items():
            assert node.slot == slot
            assert node.parent is not None
            assert node.parent.parent is None or node.parent.slot is not None, "a slot below a page that has none"
            assert node.n_slotted or slot in self._pinned or node in self._leaves, "a slot that nobody can ever take"
        for node, save in self._saves:
            assert node.slot != save.slot or save.key == node.key
        assert all(node.slot is None for node in self._wanted)


def _sound(
    records: Iterable[tuple[SlotId, bytes, bytes, Ids]], page_size: int
) -> list[tuple[SlotId, bytes, bytes, Ids]]:
    """The records whose keys are right; of records of the same page, the last."""
    sound: dict[bytes, tuple[SlotId, bytes, bytes, Ids]] = {}
    ambiguous: set[bytes] = set()
    for slot, key, parent, ids in records:
        if len(ids) == page_size and page_key(parent, ids) == key:
            same = sound.pop(key, None)
            if same is not None and same[2:] != (parent, ids):
                ambiguous.add(key)
            sound[key] = (slot, key, parent, ids)
    return [record for key, record in sound.items() if key not in ambiguous]
