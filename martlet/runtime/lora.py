"""The adapters that are loaded, and the step that uses them (read `models/lora.py` first, then `rank.py`).

A step without adapters runs the program that it always ran. The first adapter captures a second one, the same but for an
update after each product; steps in which some row has an adapter run that. Rows without one get the same bits from both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from martlet.errors import CapacityError
from martlet.models.lora import Adapter, with_adapters
from martlet.models.weights import Model
from martlet.ops.interface import Backend
from martlet.runtime.programs import Programs

__all__ = ["MAX_ADAPTERS", "AdapterBank"]

MAX_ADAPTERS = 64  # a table takes 24 bytes a slot


class AdapterBank:
    """Slots of adapters, by their digests; `capture` makes the programs of a model."""

    def __init__(self, ops: Backend, model: Model, capture: Callable[[Model], Programs]) -> None:
        self._ops = ops
        adapted, self._tables = with_adapters(ops, model, MAX_ADAPTERS)
        self.programs = capture(adapted)
        self._slots: dict[str, int] = {}

    def add(self, adapter: Adapter) -> None:
        """Load an adapter between two steps; one that is there already stays."""
        if adapter.digest in self._slots:
            return
        free = set(range(MAX_ADAPTERS)) - set(self._slots.values())
        if not free:
            raise CapacityError(f"{MAX_ADAPTERS} adapters are loaded, which is the most: unload one.")
        slot = min(free)
        for name, (a, b) in adapter.updates.items():
            self._ops.set_lora(self._tables[name], slot, a, b)
        self._slots[adapter.digest] = slot

    def remove(self, digest: str) -> None:
        """Let go of an adapter that no sequence uses; no-op if it is not there."""
        slot = self._slots.pop(digest, None)
        if slot is not None:
            for table in self._tables.values():
                self._ops.set_lora(table, slot, None, None)

    def slot(self, digest: str) -> int:
        """The slot of an adapter, -1 for none."""
        return self._slots[digest] if digest else -1

    def rows(self, runs: Iterable[tuple[str, int]]) -> NDArray[np.int32] | None:
        """Each row's slot, from (digest, number of rows) of each span; None if no row has an adapter."""
        found = [(self.slot(digest), count) for digest, count in runs]
        if all(slot < 0 for slot, _ in found):
            return None
        slots, counts = zip(*found, strict=True)
        return np.repeat(np.array(slots, np.int32), counts)
