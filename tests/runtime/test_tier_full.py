"""Slots of the second tier that cannot be written: a disk that is full, or fails."""

from __future__ import annotations

from martlet.cache.disk_slots import DiskSlots
from martlet.cache.pages import PagePool
from martlet.cache.radix import RadixCache
from martlet.types import SlotId

SIZE = 4


def test_a_full_disk_still_takes_new_pages_for_old_ones() -> None:
    """Of 8 slots the disk has room for 3: later pages take the place of older ones there, and the
    others stay unused.
    """
    pool = PagePool(40, SIZE)
    cache = RadixCache(pool, tier=DiskSlots(8))
    disk: dict[SlotId, tuple[int, ...]] = {}
    n_failed = 0
    for number in range(20):
        ids = [number] * SIZE
        pages = pool.alloc(1)
        cache.insert("", ids, pages)
        pool.free(pages)
        failed = []
        for save in cache.drain_saves(9):
            if save.slot < 3:
                disk[save.slot] = save.ids
            else:
                failed.append(save.slot)
        n_failed += len(failed)
        cache.retire(failed)
        cache.check()
    assert n_failed == 5  # each bad slot is tried once
    assert sorted(disk.values()) == [(number,) * SIZE for number in (17, 18, 19)]
    pages = pool.alloc(1)
    cache.evict(19)
    assert cache.match("", [18] * SIZE + [1], SIZE).slots
    assert not cache.match("", [2] * SIZE + [1], SIZE).n_tokens
    cache.check()


def test_a_disk_that_takes_nothing_leaves_no_slot() -> None:
    pool = PagePool(40, SIZE)
    cache = RadixCache(pool, tier=DiskSlots(3))
    n_saves = 0
    for number in range(9):
        pages = pool.alloc(2)
        cache.insert("", [number] * 2 * SIZE, pages)
        pool.free(pages)
        saves = cache.drain_saves(9)
        n_saves += len(saves)
        cache.retire([save.slot for save in saves])
        cache.check()
    assert n_saves == 3
    assert cache.evict(18) == 18
    assert pool.n_free == 40
    cache.check()
