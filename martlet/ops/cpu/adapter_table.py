"""Where the low-rank updates of one product lie, and how they are changed between two steps (read `lora.py` next)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.ops.cpu.threads import aligned

__all__ = ["CpuAdapters"]

F32 = NDArray[np.float32]
SLOT_WORDS = 3  # addresses of a and bᵀ, ranks: `lora.py`


@dataclass(slots=True, eq=False)
class CpuAdapters:
    """Updates of a product [rows, k] → [rows, n], one a slot."""

    k: int
    n: int
    words: NDArray[np.int64] = field(repr=False)
    held: dict[int, tuple[F32, F32]] = field(default_factory=dict, repr=False)

    @classmethod
    def empty(cls, n_slots: int, k: int, n: int) -> CpuAdapters:
        """A table whose slots have no update."""
        return cls(k, n, aligned(n_slots * SLOT_WORDS * 8, np.int64))

    def put(self, slot: int, a: F32 | None, b: F32 | None) -> None:
        """The update of a slot, a [r, k] and b [n, r]; None for none."""
        entry = self.words[slot * SLOT_WORDS : (slot + 1) * SLOT_WORDS]
        if a is None or b is None:
            entry[:] = 0
            self.held.pop(slot, None)
            return
        kept = _padded(a, self.k), _padded(b.T, self.n)
        entry[:] = kept[0].ctypes.data, kept[1].ctypes.data, len(kept[0])
        self.held[slot] = kept

    @property
    def address(self) -> int:
        """Of the table."""
        return int(self.words.ctypes.data)


def _padded(values: Any, width: int) -> F32:
    """[r, width] with zeros up to a multiple of 4 rows and of 16 columns."""
    rows, columns = -(-len(values) // 4) * 4, -(-width // 16) * 16
    out: F32 = aligned(rows * columns * 4, np.float32).reshape(rows, columns)
    out[: len(values), :width] = values
    return out
