"""The prefix cache with a second tier: which pages get a slot, which come back, and what is lost
with a slot.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from cache_model import SIZE, Model

from martlet.cache import nodes
from martlet.cache.disk_slots import DiskSlots
from martlet.cache.nodes import page_key, root_key
from martlet.cache.pages import PagePool
from martlet.cache.radix import RadixCache
from martlet.types import MissReason, PageId, Save, SlotId

A, B, C = (1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)
ABC = [*A, *B, *C]
Record = tuple[SlotId, bytes, bytes, tuple[int, ...]]


class Cache:
    """A pool, its tree and its slots, checked after each operation."""

    def __init__(self, n_pages: int = 16, n_slots: int = 16, share_granularity: int = 1) -> None:
        self.pool = PagePool(n_pages, SIZE)
        self.slots = DiskSlots(n_slots)
        self.tree = RadixCache(self.pool, share_granularity=share_granularity, tier=self.slots)

    def put(self, ids: Sequence[int], salt: str = "") -> tuple[PageId, ...]:
        """The pages of a sequence that has computed all of `ids` by itself and has ended."""
        pages = self.pool.alloc(self.pool.pages_for(len(ids)))
        self.tree.insert(salt, ids, pages)
        self.pool.free(pages)
        self.check()
        return pages

    def drain(self, most: int = 100) -> tuple[Save, ...]:
        saves = self.tree.drain_saves(most)
        self.check()
        return saves

    def evict(self, n_pages: int = 100, *, save: bool = True) -> int:
        freed = self.tree.evict(n_pages, save=save)
        self.check()
        return freed

    def found(self, ids: Sequence[int], salt: str = "") -> tuple[int, int, int]:
        """Pages, slots and positions of a tail that a prompt finds that goes on after `ids`."""
        match = self.tree.match(salt, [*ids, 0], len(ids))
        return len(match.pages), len(match.slots), 0 if match.tail is None else match.tail[1]

    def check(self) -> None:
        self.tree.check()
        self.pool.check([self.tree.pages()])


# -- saving ----------------------------------------------------------------------------------------
def test_write_behind_saves_full_pages_in_order() -> None:
    cache = Cache()
    a, b, c, _ = cache.put([*ABC, 13])
    first, second = cache.drain(2)
    (third,) = cache.drain(2)
    keys = [root_key("")]
    for ids in (A, B, C):
        keys.append(page_key(keys[-1], ids))
    assert first == Save(a, SlotId(0), keys[1], keys[0], A)
    assert second == Save(b, SlotId(1), keys[2], keys[1], B)
    assert third == Save(c, SlotId(2), keys[3], keys[2], C)
    assert cache.drain() == ()
    assert cache.slots.n_used == 3


def test_without_a_tier_nothing_is_saved() -> None:
    pool = PagePool(4, SIZE)
    tree = RadixCache(pool)
    tree.insert("", ABC, pool.alloc(3))
    assert tree.drain_saves(9) == ()


def test_an_evicted_page_is_saved_first_with_those_above_it() -> None:
    cache = Cache()
    a, b, c = cache.put(ABC)
    assert cache.evict(1) == 1
    saves = cache.drain(0)
    assert [save.page for save in saves] == [a, b, c]
    assert cache.pool.refs(c) == 0
    assert cache.found(ABC) == (2, 1, 0)
    assert cache.evict(2) == 2
    assert cache.drain() == (), "they are there already"
    assert cache.found(ABC) == (0, 3, 0)
    assert cache.pool.n_free == 16


def test_a_page_in_part_has_no_slot() -> None:
    cache = Cache()
    cache.put(ABC[:10])
    assert cache.evict() == 3
    assert [save.ids for save in cache.drain()] == [A, B]
    assert cache.found(ABC) == (0, 2, 0)


def test_eviction_without_saving() -> None:
    cache = Cache()
    cache.put(ABC)
    assert len(cache.drain(1)) == 1
    assert cache.evict(save=False) == 3
    assert cache.drain() == ()
    assert cache.found(ABC) == (0, 1, 0)
    assert cache.tree.match("", ABC, 11).use.reason is MissReason.EVICTED


def test_slots_are_bounded_and_the_oldest_leaf_goes_first() -> None:
    cache = Cache(n_slots=3)
    cache.put([*A, *B])
    cache.put(C)
    cache.drain()
    cache.evict()
    cache.put([13, 14, 15, 16])
    assert [save.slot for save in cache.drain()] == [1], "B's: A is not a leaf, C was used later"
    assert cache.found([*A, *B]) == (0, 1, 0)
    assert cache.found(C) == (0, 1, 0)


def test_a_page_never_takes_the_slot_of_the_page_above_it() -> None:
    cache = Cache(n_slots=2)
    cache.put(ABC)
    assert [save.ids for save in cache.drain()] == [A, B]
    assert cache.evict() == 3
    assert cache.drain() == ()
    assert cache.found(ABC) == (0, 2, 0)


def test_the_page_above_a_new_one_was_used_as_late_as_that() -> None:
    cache = Cache(n_slots=2)
    cache.put(A)
    cache.put(C)
    cache.drain()
    cache.put([*A, *B])
    assert [(save.slot, save.ids) for save in cache.drain()] == [(1, B)]


def test_a_slot_was_used_when_what_was_below_it_was() -> None:
    cache = Cache(n_slots=3)
    cache.put([*A, *B])
    cache.put(C)
    cache.put([*A, *B])
    slot_of = {save.ids: save.slot for save in cache.drain()}
    cache.tree.forget([slot_of[B]])
    for ids, slot in (((13, 14, 15, 16), slot_of[B]), ((17, 18, 19, 20), slot_of[C])):
        cache.put(ids)
        assert [(save.ids, save.slot) for save in cache.drain()] == [(ids, slot)]


def test_an_old_page_does_not_take_the_slot_of_a_newer_one() -> None:
    cache = Cache(n_slots=1)
    pages = cache.pool.alloc(1)
    cache.tree.insert("", A, pages)  # waits for write-behind, and its owner keeps it in memory
    cache.tree.insert("", B, cache.pool.alloc(1))
    cache.pool.free(cache.tree.match("", B, 4).pages)
    assert cache.tree.evict(1) == 1
    assert [save.ids for save in cache.tree.drain_saves(100)] == [B]
    cache.pool.free(pages)
    assert cache.evict() == 1
    assert cache.found(A) == (0, 0, 0)
    assert cache.found(B) == (0, 1, 0)


# -- coming back -----------------------------------------------------------------------------------
def test_loaded_pages_are_resident_again_when_they_are_inserted() -> None:
    cache = Cache()
    cache.put(ABC)
    cache.evict()
    saves = cache.drain()
    match = cache.tree.match("", [*ABC, 0], 12)
    assert match.slots == tuple((save.slot, save.key) for save in saves)
    assert (match.pages, match.tail, match.n_tokens, match.use.n_loaded) == ((), None, 12, 12)
    cache.tree.acquire(match)
    pages = cache.pool.alloc(4)
    cache.tree.insert("", ABC, pages)
    assert cache.tree.match("", [*ABC, 0], 12).pages == pages[:3]
    cache.pool.free(pages)
    cache.check()
    assert cache.evict() == 3
    assert cache.drain() == ()


def test_slots_follow_pages_and_no_tail_follows_slots() -> None:
    cache = Cache()
    cache.put(ABC)
    cache.evict(1)
    cache.drain()
    assert cache.found(ABC) == (2, 1, 0)
    assert cache.found(ABC[:10]) == (2, 0, 0), "part of a page that is in the tier only"
    cache.evict(1)
    assert cache.found(ABC) == (1, 2, 0)
    use = cache.tree.match("", [*A, *B, 9, 10, 0, 0, 0], 12).use
    assert (use.n_tokens, use.n_loaded, use.reason, use.differs_at, use.cached_id) == (8, 4, MissReason.DIFFERS, 10, 11)


def test_a_slot_that_is_to_be_loaded_keeps_its_page_while_the_plan_is_made() -> None:
    cache = Cache(n_slots=1)
    cache.put(A)
    cache.evict()
    cache.drain()
    match = cache.tree.match("", [*A, 0], 4)
    cache.tree.acquire(match)
    cache.put(B)
    assert cache.evict() == 1
    assert cache.drain() == (), "B would have taken A's slot, and saves come before loads"
    assert cache.found(A) == (0, 1, 0)
    cache.put(C)
    assert [save.ids for save in cache.drain()] == [C], "the next plan may have it"
    assert cache.found(A) == (0, 0, 0)


# -- losing ----------------------------------------------------------------------------------------
def test_what_is_below_a_failed_load_is_lost() -> None:
    cache = Cache()
    cache.put(ABC)
    cache.put([*A, 0, 0, 0, 0])
    cache.evict()
    slot_of = {save.ids: save.slot for save in cache.drain()}
    cache.tree.forget([slot_of[B]])
    cache.check()
    assert cache.found(ABC) == (0, 1, 0)
    assert cache.found([*A, 0, 0, 0, 0]) == (0, 2, 0)
    cache.tree.forget([slot_of[B], slot_of[C], SlotId(15)])  # nobody's by now
    cache.tree.forget([slot_of[A]])
    cache.check()
    assert cache.slots.n_used == 0
    assert cache.found(A) == (0, 0, 0)


def test_a_page_whose_save_failed_stays_in_memory() -> None:
    cache = Cache()
    cache.put(ABC)
    saves = cache.drain()
    cache.tree.forget([saves[1].slot])
    cache.check()
    assert cache.found(ABC) == (3, 0, 0)
    assert cache.slots.n_used == 1
    cache.put(ABC)  # used again: it is worth another attempt
    assert [save.ids for save in cache.drain()] == [B, C]


def test_clear_keeps_what_is_saved_and_nothing_else() -> None:
    cache = Cache()
    cache.put(ABC)
    cache.drain(1)
    cache.drain(1)  # the plan that fails: nobody knows whether it has saved B
    cache.evict(1)  # and C would have been saved by the next one
    cache.tree.clear()
    cache.check()
    assert cache.pool.n_free == 16
    assert cache.found(ABC) == (0, 1, 0)
    assert cache.slots.n_used == 1
    assert cache.drain() == ()


def test_clear_forgets_what_a_plan_that_was_never_made_would_have_saved() -> None:
    cache = Cache()
    cache.put(A)
    cache.drain()
    cache.drain()
    cache.put([*A, *B])
    cache.evict(1)
    cache.tree.clear()
    cache.check()
    assert cache.found([*A, *B]) == (0, 1, 0)


# -- starting --------------------------------------------------------------------------------------
def records_of(cache: Cache) -> list[Record]:
    return [(save.slot, save.key, save.parent, save.ids) for save in cache.drain()]


def kept() -> list[Record]:
    """Of A B C, and of A under the salt x."""
    cache = Cache()
    cache.put(ABC)
    cache.put(A, "x")
    return records_of(cache)


@pytest.mark.parametrize("seed", range(4))
def test_what_a_file_holds_is_found_after_a_restart(seed: int) -> None:
    records = kept()
    random.Random(seed).shuffle(records)
    cache = Cache()
    assert cache.tree.adopt(records) == 4
    cache.check()
    assert cache.found(ABC, "y") == (0, 0, 0)
    assert cache.found(ABC, "x") == (0, 1, 0)
    assert cache.found(ABC) == (0, 3, 0)
    assert [slot for slot, _ in cache.tree.match("", ABC, 12).slots] == [0, 1, 2]
    cache.put(ABC)
    assert cache.found(ABC) == (3, 0, 0)
    assert cache.drain() == ()
    cache.tree.forget([SlotId(3)])
    assert set(cache.tree.roots) == {""}


def test_records_that_nobody_can_vouch_for_are_refused() -> None:
    a, b, c, x = kept()
    for records, adopted in (
        ([], 0),
        ([b, c, x], 1),  # no page before B
        ([a, c, x], 2),  # nor before C
        ([a, (b[0], b[1], b[2], C), c], 1),  # other ids than its key's
        ([a, (b[0], b[1], bytes(32), b[3]), c], 1),  # another page before it
        ([a, (b[0], page_key(a[1], B[:3]), a[1], B[:3])], 1),  # not a whole page
        ([a, (SlotId(16), *b[1:]), c], 1),  # no such slot
        ([a, (a[0], *b[1:]), c], 1),  # another record's slot
        ([a, (SlotId(9), *a[1:]), b], 2),  # the same page twice: the later one
    ):
        cache = Cache()
        assert cache.tree.adopt(records) == adopted
        cache.check()
        assert sorted([*cache.slots._free, *cache.slots._owners]) == list(range(16))
    assert cache.tree.match("", A, 4).slots == ((SlotId(9), a[1]),)


def test_records_with_one_key_and_different_ids_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """fault KVC-03: with a digest that is the same for everything, pages of a file are not taken
    for one another.
    """
    monkeypatch.setattr(nodes, "_digest", lambda data: bytes(31))
    cache = Cache()
    assert cache.tree.adopt(kept()) == 0
    model = Model(1, 30, n_slots=20)
    for step in range(300):
        model.step()
        if step % 30 == 0:
            model.kill()
    assert model.n_matched > 0


def test_the_least_recently_written_page_of_a_file_goes_first() -> None:
    records = kept()
    cache = Cache(n_slots=4)
    assert cache.tree.adopt(records[3:] + records[:3]) == 4
    cache.put([20, 21, 22, 23])
    assert [save.slot for save in cache.drain()] == [3]
    assert cache.found(ABC) == (0, 3, 0)


# -- at random -------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("n_pages", "n_slots", "share_granularity"), [(12, 1, 1), (12, 8, 1), (12, 60, 1), (40, 20, 1), (30, 30, 8)]
)
def test_random_sequences(seed: int, n_pages: int, n_slots: int, share_granularity: int) -> None:
    model = Model(seed, n_pages, share_granularity, n_slots)
    for _ in range(1000):
        model.step()
        if model.random.random() < 0.01:
            model.kill()
    model.finish()
    assert min(model.n_matched, model.n_saved, model.n_loaded, model.n_adopted) > 0


def test_nothing_is_lost_while_there_are_slots() -> None:
    """All full pages that were ever computed come back, though the pool is far too small for
    them.
    """
    model = Model(7, 12, n_slots=4000, failures=0.0)
    for _ in range(1000):
        model.step()
        assert model.lossless
    assert model.lost
    assert model.n_loaded > 100
