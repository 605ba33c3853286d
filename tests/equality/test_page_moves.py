"""A plan's saves, loads and copies, in this order, on real pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from martlet.ops.reference import ReferenceBackend
from martlet.runtime.disk_file import DiskFile, open_tier
from martlet.runtime.disk_format import Owner
from martlet.runtime.page_moves import Moved, PageMoves, page_bytes
from martlet.types import Copy, Load, PageId, Save, SlotId, StepPlan

PAGE, N_PAGES = 4, 6
EMPTY = StepPlan(1, ())


class Pages:
    """Two layers of different shapes; `fill` makes a page's content its number's, in each layer
    another.
    """

    def __init__(self, tier: DiskFile | None = None) -> None:
        self.ops = ReferenceBackend()
        self.caches = [
            self.ops.kv_cache(N_PAGES, PAGE, 2, 8, "f16"),
            self.ops.kv_cache(N_PAGES, PAGE, 1, 16, "f32"),
        ]
        self.moves = PageMoves(self.ops, self.caches, tier)
        for page in range(N_PAGES):
            self.fill(page, page)

    def fill(self, page: int, number: int) -> None:
        for layer, cache in enumerate(self.caches):
            cache.keys[page * PAGE : (page + 1) * PAGE] = 10 * number + layer
            cache.values[page * PAGE : (page + 1) * PAGE] = -10 * number - layer

    def numbers(self) -> list[int]:
        """Whose content each page has, in all layers."""
        found = [int(self.caches[0].keys[page * PAGE, 0, 0]) // 10 for page in range(N_PAGES)]
        expected = Pages()
        for page, number in enumerate(found):
            expected.fill(page, number)
        for mine, theirs in zip(self.caches, expected.caches, strict=True):
            assert np.array_equal(mine.keys, theirs.keys)
            assert np.array_equal(mine.values, theirs.values)
        return found


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskFile]:
    size = page_bytes(ReferenceBackend(), Pages().caches)
    assert size == 2 * PAGE * 16 * 2 + 2 * PAGE * 16 * 4
    made = open_tier(tmp_path, 1 << 19, Owner("m", "f", "f16", PAGE, size))
    assert made is not None
    yield made
    made.close()


def save(page: int, slot: int) -> Save:
    return Save(PageId(page), SlotId(slot), bytes([slot]) * 32, bytes(32), (1, 2, 3, 4))


def load(slot: int, page: int) -> Load:
    return Load(SlotId(slot), PageId(page), bytes([slot]) * 32)


def copy(source: int, target: int) -> Copy:
    return Copy(PageId(source), PageId(target))


def test_saves_come_before_loads_and_loads_before_copies(tier: DiskFile) -> None:
    pages = Pages(tier)
    moved = pages.moves.run(
        replace(EMPTY, saves=(save(1, 0), save(2, 5)), loads=(load(5, 1), load(0, 3)), copies=(copy(1, 0), copy(3, 4)))
    )
    assert pages.numbers() == [2, 2, 2, 1, 1, 5]
    assert (moved.failed_saves, moved.failed_loads) == ((), ())
    assert moved.load_s > 0.0


def test_what_fails_is_told_and_touches_no_page(tier: DiskFile) -> None:
    pages = Pages(tier)
    moved = pages.moves.run(replace(EMPTY, saves=(save(1, 0), save(1, 200)), loads=(load(3, 2), load(0, 4))))
    assert (moved.failed_saves, moved.failed_loads) == ((SlotId(200),), (SlotId(3),))
    assert pages.numbers() == [0, 1, 2, 3, 1, 5]


def test_without_a_tier_copies_are_done_and_the_rest_fails() -> None:
    pages = Pages()
    moved = pages.moves.run(replace(EMPTY, saves=(save(1, 0),), loads=(load(0, 2),), copies=(copy(5, 0),)))
    assert (moved.failed_saves, moved.failed_loads) == ((SlotId(0),), (SlotId(0),))
    assert pages.numbers() == [5, 1, 2, 3, 4, 5]
    assert pages.moves.run(EMPTY) == Moved()
    assert pages.moves.probe(PageId(0)) is None


def test_the_probe_leaves_nothing_behind(tier: DiskFile) -> None:
    pages = Pages(tier)
    seconds = pages.moves.probe(PageId(3))
    assert seconds is not None
    assert 0.0 < seconds < 5.0
    assert pages.numbers() == [0, 1, 2, 3, 4, 5]
    assert tier.records() == []
    pages.moves.run(replace(EMPTY, saves=(save(1, 7),)))
    assert pages.moves.probe(PageId(0)) is not None
    assert [record.slot for record in tier.records()] == [7]
    assert pages.numbers() == [1, 1, 2, 3, 4, 5]
