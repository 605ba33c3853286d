"""What a plan does with whole pages: to the second tier, from it, and from page to page (read
`models/decoder.py` next).

The order is the plan's: saves, then loads, then copies, all before the spans. Nothing here fails:
what the tier could not do is in the result, and the scheduler has it computed again.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from martlet.ops.interface import Array, Backend
from martlet.types import Copy, Load, PageId, Save, SlotId, StepPlan


class StoredPage(Protocol):
    """What a slot holds."""

    @property
    def slot(self) -> SlotId:
        """Its number."""

    @property
    def key(self) -> bytes:
        """The key of its page."""


class PageStore(Protocol):
    """A second tier for whole pages (`disk_file.py`): slots 0 … n_slots - 1. Nothing raises."""

    n_slots: int

    def records(self) -> Sequence[StoredPage]:
        """What the slots held when it was opened."""

    def save(self, save: Save, page: memoryview) -> bool:
        """Write a page's bytes; return whether that worked."""

    def load(self, load: Load, out: memoryview) -> bool:
        """Read a page's bytes; return whether the slot held the key's, unharmed."""

    def forget(self, slot: SlotId) -> None:
        """Make a slot as if it had never been used."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What failed, and the seconds that all loads and all saves took."""

    failed_saves: tuple[SlotId, ...] = ()
    failed_loads: tuple[SlotId, ...] = ()
    load_s: float = 0.0
    save_s: float = 0.0


_NOTHING = Moved()


def page_bytes(ops: Backend, caches: Sequence[Array]) -> int:
    """Bytes of a page of all layers."""
    return sum(ops.page_bytes(cache) for cache in caches)


class PageMoves:
    """Moves pages of all layers; without a tier every save and load fails."""

    def __init__(self, ops: Backend, caches: Sequence[Array], tier: PageStore | None = None) -> None:
        self._ops = ops
        self._tier = tier
        self._staged: NDArray[np.uint8] = np.empty(0 if tier is None else page_bytes(ops, caches), np.uint8)
        # with each layer's part of the staged page
        self._layers: list[tuple[Array, NDArray[np.uint8]]] = []
        start = 0
        for cache in caches:
            stop = start + (0 if tier is None else ops.page_bytes(cache))
            self._layers.append((cache, self._staged[start:stop]))
            start = stop

    def run(self, plan: StepPlan) -> Moved:
        """Do a plan's saves, loads and copies."""
        if not (plan.saves or plan.loads or plan.copies):
            return _NOTHING
        failed_saves, save_s = self._save(plan.saves) if plan.saves else ((), 0.0)
        failed_loads, load_s = self._load(plan.loads) if plan.loads else ((), 0.0)
        for copy in plan.copies:
            self._copy(copy)
        return Moved(failed_saves, failed_loads, load_s, save_s)

    def _save(self, saves: Sequence[Save]) -> tuple[tuple[SlotId, ...], float]:
        start = time.perf_counter()
        failed = tuple(save.slot for save in saves if not self._save_one(save))
        return failed, time.perf_counter() - start

    def _save_one(self, save: Save) -> bool:
        if self._tier is None:
            return False
        for cache, part in self._layers:
            self._ops.read_page(cache, save.page, part)
        return self._tier.save(save, self._staged.data)

    def _load(self, loads: Sequence[Load]) -> tuple[tuple[SlotId, ...], float]:
        start = time.perf_counter()
        failed = tuple(load.slot for load in loads if not self._load_one(load))
        return failed, time.perf_counter() - start

    def _load_one(self, load: Load) -> bool:
        if self._tier is None or not self._tier.load(load, self._staged.data):
            return False
        for cache, part in self._layers:
            self._ops.write_page(cache, load.page, part)
        return True

    def _copy(self, copy: Copy) -> None:
        for cache, _ in self._layers:
            self._ops.copy_page(cache, copy.source, copy.target)

    def probe(self, page: PageId) -> float | None:
        """Seconds that loading a page takes, by loading one to `page`, which is free; None if that
        cannot be told.

        Where the file is empty, a page is written first, to a slot that then is as if it had never
        been used.
        """
        tier = self._tier
        if tier is None or tier.n_slots == 0:
            return None
        kept = tier.records()[-2:]
        if kept:
            loads = [Load(record.slot, page, record.key) for record in kept]
        else:
            trial = Save(page, SlotId(0), bytes(32), bytes(32), (0,))
            self._save((trial,))
            loads = [Load(SlotId(0), page, trial.key)] * 2
        failed, seconds = self._load(loads)
        if not kept:
            tier.forget(SlotId(0))
        return None if failed else seconds / len(loads)
