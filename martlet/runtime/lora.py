"""The adapters that are loaded, and the step that uses them (read `models/lora.py` first; `rank.py`
uses it).

A step without adapters runs the program that it always ran. The first adapter captures a second
one, the same but for an update after each product; steps in which some row has an adapter run that.
Rows without one get the same bits from both.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from martlet.errors import CapacityError
from martlet.models.lora import Adapter, with_adapters
from martlet.models.weights import Model
from martlet.ops.interface import Array, Backend, StepLimits
from martlet.runtime.rank import Programs

MAX_ADAPTERS = 64  # a table takes 24 bytes a slot


@dataclass(frozen=True, slots=True)
class _Captured:
    """The model's tables of updates, by its products' names, and the programs that apply them."""

    tables: dict[str, Array]
    programs: Programs


class AdapterBank:
    """Slots of adapters, by their digests; `caches` has one KV cache a layer."""

    def __init__(self, ops: Backend, model: Model, caches: Sequence[Array], limits: StepLimits) -> None:
        self._ops, self._model, self._caches, self._limits = ops, model, caches, limits
        self._captured: _Captured | None = None  # once there was an adapter
        self._slots: dict[str, int] = {}

    @property
    def programs(self) -> Programs:
        """Those of steps with adapters; the first call captures them."""
        return self._capture().programs

    def add(self, adapter: Adapter) -> None:
        """Load an adapter between two steps; one that is there already stays. Raises CapacityError
        if there are too many.
        """
        if adapter.digest in self._slots:
            return
        free = set(range(MAX_ADAPTERS)) - set(self._slots.values())
        if not free:
            raise CapacityError(f"{MAX_ADAPTERS} adapters are loaded, which is the most: unload one.")
        slot, tables = min(free), self._capture().tables
        for name, (a, b) in adapter.updates.items():
            self._ops.set_lora(tables[name], slot, a, b)
        self._slots[adapter.digest] = slot

    def remove(self, digest: str) -> None:
        """Let go of an adapter that no sequence uses; no-op if it is not there."""
        slot = self._slots.pop(digest, None)
        if slot is not None:
            for table in self._capture().tables.values():
                self._ops.set_lora(table, slot, None, None)

    def slots(self, runs: Iterable[tuple[str, int]]) -> NDArray[np.int32] | None:
        """Each row's slot, int32 [T], from (digest, number of rows) of each span; None if no row
        has an adapter.
        """
        slotted = [(self._slots[digest] if digest else -1, count) for digest, count in runs]
        if all(slot < 0 for slot, _ in slotted):
            return None
        slots, counts = zip(*slotted, strict=True)
        return np.repeat(np.array(slots, np.int32), counts)

    def _capture(self) -> _Captured:
        if self._captured is None:
            adapted, tables = with_adapters(self._ops, self._model, MAX_ADAPTERS)
            programs = Programs.capture(self._ops, adapted, self._caches, self._limits)
            self._captured = _Captured(tables, programs)
        return self._captured
