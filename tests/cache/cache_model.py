"""Random plans for the prefix cache beside a naive model: what each page and each slot really
holds, and all that was kept.

A cell, the content of one position of a page, is the tuple of all ids up to there: what its keys
and values depend on.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from martlet.cache.disk_slots import DiskSlots
from martlet.cache.pages import PagePool
from martlet.cache.radix import Match, RadixCache
from martlet.types import CacheUse, Copy, Load, PageId, Save, SlotId

SIZE = 4
Cell = tuple[int, ...]


@dataclass(eq=False)
class Seq:
    """A sequence all of whose ids are computed, or will be when the plan has run."""

    salt: str
    ids: list[int]
    pages: list[PageId]
    n_written: int = 0
    loads: tuple[Load, ...] = ()


@dataclass
class Slot:
    """What a slot of the file holds."""

    save: Save
    cells: list[Cell]


@dataclass
class Plan:
    """What is to be done, in this order, but for the saves."""

    loads: list[Load] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    pinned: list[PageId] = field(default_factory=list)


class Model:
    """Sequences begin, grow, fork, are kept and end at random; saves and loads may fail; the
    process may be killed.
    """

    def __init__(
        self, seed: int, n_pages: int, share_granularity: int = 1, n_slots: int | None = None, failures: float = 0.05
    ) -> None:
        self.random, self.fair = random.Random(seed), seed % 2 == 1
        self.n_pages, self.share_granularity, self.n_slots, self.failures = (
            n_pages,
            share_granularity,
            n_slots,
            failures,
        )
        self.kept: dict[str, set[tuple[int, ...]]] = {"": set(), "x": set(), "y": set()}
        self.disk: dict[SlotId, Slot] = {}
        self.past: list[list[int]] = []  # ids of a few sequences kept, for others to begin like
        self.lost = False  # whether anything that was kept may be gone
        self.n_matched = self.n_loaded = self.n_saved = self.n_adopted = self.n_failed = self.n_killed = 0
        self._begin()

    def _begin(self) -> None:
        self.pool = PagePool(self.n_pages, SIZE)
        self.tier = None if self.n_slots is None else DiskSlots(self.n_slots)
        self.cache = RadixCache(self.pool, share_granularity=self.share_granularity, tier=self.tier, fair=self.fair)
        self.cells: dict[PageId, list[Cell]] = {}
        self.live: list[Seq] = []
        self.plan = Plan()

    # -- one plan ----------------------------------------------------------------------------------
    def step(self) -> None:
        """Plan a few things, carry them out as an executor does, and look at all the pages."""
        for _ in range(self.random.randint(1, 4)):
            self.random.choice([self.start, self.start, self.fork, self.grow, self.keep, self.end, self.end])()
        saves = self.cache.drain_saves(self.random.randint(0, 3))
        self.pool.free(self.plan.pinned)
        self.check(planning=False)
        if self.random.random() < self.failures / 5:
            self.fail()
            return
        self.run(saves)
        self.check()

    def run(self, saves: tuple[Save, ...]) -> None:
        """Saves, loads, copies, spans."""
        assert len({save.slot for save in saves}) == len(saves)
        failed_saves = [save.slot for save in saves if not self.save(save)]
        failed_loads = {load.slot for load in self.plan.loads if not self.load(load)}
        for copy in self.plan.copies:
            self.cells[copy.target] = list(self.cells.get(copy.source, []))
        for seq in self.live:
            for index, load in enumerate(seq.loads):
                if load.slot in failed_loads:
                    first = seq.pages.index(load.page)
                    assert index == first - seq.pages.index(seq.loads[0].page)
                    seq.n_written = min(seq.n_written, first * SIZE)
            seq.loads = ()
            self.write(seq)
            for position in range(len(seq.ids)):
                cell = self.cells[seq.pages[position // SIZE]][position % SIZE]
                assert cell == tuple(seq.ids[: position + 1]), "another prefix's page"
        self.plan = Plan()
        self.cache.forget([*failed_saves, *failed_loads])
        self.lost = self.lost or bool(failed_saves or failed_loads)

    def save(self, save: Save) -> bool:
        self.disk.pop(save.slot, None)
        if self.random.random() < self.failures:
            return False
        cells = self.cells[save.page]
        assert len(cells) == SIZE
        assert cells[-1][-SIZE:] == save.ids
        self.disk[save.slot] = Slot(save, list(cells))
        self.n_saved += 1
        return True

    def load(self, load: Load) -> bool:
        slot = self.disk.get(load.slot)
        if slot is None or slot.save.key != load.key:
            assert self.failures, "a slot does not hold what it should"
            return False
        if self.random.random() < self.failures:
            return False
        self.cells[load.page] = list(slot.cells)
        self.n_loaded += 1
        return True

    def write(self, seq: Seq) -> None:
        for position in range(seq.n_written, len(seq.ids)):
            cells = self.cells.setdefault(seq.pages[position // SIZE], [])
            del cells[position % SIZE :]
            cells.append(tuple(seq.ids[: position + 1]))
        seq.n_written = len(seq.ids)

    # -- what a scheduler does ---------------------------------------------------------------------
    def room(self, n: int) -> bool:
        before, evictable = self.pool.n_free, self.cache.n_evictable
        if n > before:
            freed = self.cache.evict(n - before, save=self.failures == 0 or self.random.random() < 0.9)
            assert freed == min(n - before, evictable) == self.pool.n_free - before
            self.lost = self.lost or freed > 0
        return n <= self.pool.n_free

    def start(self) -> None:
        ids = list(self.random.choice(self.past)) if self.past and self.random.random() < 0.8 else []
        ids = ids[: self.random.randint(len(ids) // 2, len(ids))]
        ids += [self.random.randrange(3) for _ in range(self.random.randint(1, 9))]
        salt = self.random.choice(["", "", "x", "y"])  # x and y are of one tenant
        match = self.cache.match(salt, ids, len(ids) - 1)
        naive = self.naive(salt, ids, len(ids) - 1)
        assert match.n_tokens <= naive
        if not self.lost:
            assert match.n_tokens == naive
        if self.lossless:
            assert len(match.pages) + len(match.slots) == naive // SIZE
        self.n_matched += match.n_tokens
        self.admit(salt, ids, match)

    def fork(self) -> None:
        written = [seq for seq in self.live if seq.n_written > 0 and not seq.loads]
        if written:
            parent = self.random.choice(written)
            n = self.random.randint(0, parent.n_written) // self.share_granularity * self.share_granularity
            full, rest = divmod(n, SIZE)
            tail = (parent.pages[full], rest) if rest else None
            match = Match(tuple(parent.pages[:full]), (), tail, n, CacheUse())
            self.admit(parent.salt, [*parent.ids[:n], self.random.randrange(3)], match, forked=True)

    def admit(self, salt: str, ids: list[int], match: Match, forked: bool = False) -> None:
        tail = [] if match.tail is None else [match.tail[0]]
        if forked:
            self.pool.share([*match.pages, *tail])
        else:
            self.cache.acquire(match)
        self.plan.pinned += tail
        need = self.pool.pages_for(len(ids)) - len(match.pages)
        if not self.room(need):
            self.pool.free(match.pages)
            return
        new = self.pool.alloc(need)
        loads = tuple(Load(slot, page, key) for (slot, key), page in zip(match.slots, new, strict=False))
        self.plan.loads += loads
        self.plan.copies += [Copy(page, new[0]) for page in tail]
        self.live.append(Seq(salt, ids, [*match.pages, *new], match.n_tokens, loads))

    def grow(self) -> None:
        if self.live:
            seq = self.random.choice(self.live)
            if len(seq.pages) * SIZE == len(seq.ids):
                if not self.room(1):
                    return
                seq.pages += self.pool.alloc(1)
            seq.ids.append(self.random.randrange(3))

    def keep(self) -> None:
        ready = [seq for seq in self.live if not seq.loads]
        if ready:
            self.insert(self.random.choice(ready))

    def insert(self, seq: Seq) -> None:
        """Keep what a sequence had written before this plan."""
        if seq.pages and any(copy.target in seq.pages for copy in self.plan.copies):
            return
        n = self.random.choice([seq.n_written, seq.n_written, self.random.randint(0, seq.n_written)])
        self.cache.insert(seq.salt, seq.ids[:n], seq.pages, seq.salt and "tenant")
        if len(seq.ids) < 12 * SIZE:
            self.past = [*self.past[-15:], list(seq.ids)]
        n = n // self.share_granularity * self.share_granularity
        self.kept[seq.salt] |= {tuple(seq.ids[:k]) for k in range(1, n + 1)}

    def end(self) -> None:
        ready = [seq for seq in self.live if not seq.loads and not any(c.target in seq.pages for c in self.plan.copies)]
        if ready:
            seq = self.random.choice(ready)
            self.live.remove(seq)
            if self.random.random() < 0.7:
                self.insert(seq)
            self.pool.free(seq.pages)

    # -- what may happen to it ---------------------------------------------------------------------
    def fail(self) -> None:
        """A step has failed: nobody knows what is in the pages."""
        self.live, self.plan, self.lost = [], Plan(), True
        self.n_failed += 1
        self.cache.clear()
        self.pool.reset()
        self.cells.clear()

    def kill(self) -> None:
        """The process is killed and started again."""
        self.lost = True
        self.n_killed += 1
        self._begin()
        slots = self.random.sample(list(self.disk.values()), len(self.disk))
        self.n_adopted += self.cache.adopt([(s.save.slot, s.save.key, s.save.parent, s.save.ids) for s in slots])

    def finish(self) -> None:
        """Everything ends; nothing must be left over."""
        while self.live:
            self.end()
            self.check()
        self.cache.evict(self.n_pages)
        self.check()
        assert self.pool.n_free == self.n_pages
        assert self.cache.n_evictable == 0

    @property
    def lossless(self) -> bool:
        """Whether all full pages must still be somewhere: nothing has failed and there always was a
        free slot.
        """
        tier = self.tier
        quiet = self.failures == 0 and self.n_failed == 0 and self.n_killed == 0 and self.share_granularity == 1
        return tier is not None and tier.n_used < tier.n_slots and quiet

    # -- what must be true -------------------------------------------------------------------------
    def naive(self, salt: str, ids: list[int], limit: int) -> int:
        """The longest prefix of `ids` that begins something kept."""
        for n in range(limit // self.share_granularity * self.share_granularity, 0, -self.share_granularity):
            if tuple(ids[:n]) in self.kept[salt]:
                return n
        return 0

    def check(self, planning: bool = True) -> None:
        """The invariants of the cache, the slots and the pool."""
        self.cache.check()
        self.pool.check([self.cache.pages(), self.plan.pinned if planning else [], *(seq.pages for seq in self.live)])
