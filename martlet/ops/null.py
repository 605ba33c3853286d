"""A backend that computes nothing: zeros and counters, for measuring the engine itself (read `engine/engine.py` next)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.ops.interface import Array, RecentPages, Rows, StepInputs, StepLimits, Weight
from martlet.quant.table import RawTensor
from martlet.spec import Activation, Attention, Rope

__all__ = ["NullBackend"]

F32 = NDArray[np.float32]
_ZERO = np.zeros((), np.float32)
U8 = NDArray[np.uint8]


class _Shape:
    """Stands for an activation: its rows and width."""

    def __init__(self, rows: Rows, width: int) -> None:
        self.rows, self.width = rows, width


class _NullProgram:
    def __init__(self, backend: NullBackend, outputs: Any) -> None:
        self._backend, self._outputs = backend, outputs

    def run(self, inputs: StepInputs, first: int = 0, stop: int | None = None) -> Any:
        self._backend.calls["run"] += 1
        self._backend.sizes = {Rows.TOKENS: inputs.ids.size, Rows.LOGITS: inputs.logit_rows.size}
        return self._outputs


class NullBackend:
    """`calls` counts the operations captured and the steps run."""

    name = "null"

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sizes = {Rows.TOKENS: 0, Rows.LOGITS: 0}

    def fingerprint(self) -> str:
        """There are no bits."""
        return "null"

    def upload(self, values: NDArray[Any]) -> Array:
        """Nothing is kept."""

    def download(self, array: Array) -> F32:
        """Zeros."""
        return np.zeros((self.sizes[array.rows], array.width), np.float32)

    def view(self, array: Array) -> F32:
        """Zeros that take no memory."""
        return np.broadcast_to(_ZERO, (self.sizes[array.rows], array.width))

    def empty(self, rows: Rows, width: int) -> Array:
        """A shape."""
        return _Shape(rows, width)

    def columns(self, array: Array, start: int, stop: int) -> Array:
        """A narrower shape."""
        return _Shape(array.rows, stop - start)

    def pack(self, tensors: Sequence[RawTensor]) -> Weight:
        """Nothing is kept."""

    def kv_cache(
        self,
        n_pages: int,
        page_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: str,
        recent: RecentPages | None = None,
    ) -> Array:
        """Nothing is kept."""

    def page_bytes(self, cache: Array) -> int:
        """0."""
        return 0

    def copy_page(self, cache: Array, source: int, target: int) -> None:
        """Counted."""
        self.calls["copy_page"] += 1

    def read_page(self, cache: Array, page: int, out: U8) -> None:
        """Counted."""
        self.calls["read_page"] += 1

    def write_page(self, cache: Array, page: int, data: U8) -> None:
        """Counted."""
        self.calls["write_page"] += 1

    def lora_table(self, n_slots: int, k: int, n: int) -> Array:
        """Nothing is kept."""

    def set_lora(self, table: Array, slot: int, a: F32 | None, b: F32 | None) -> None:
        """Counted."""
        self.calls["set_lora"] += 1

    def weight_bytes(self, weight: Weight) -> int:
        """0."""
        return 0

    def close(self) -> None:
        """Nothing to free."""

    def capture(self, step: Callable[[], Any], limits: StepLimits) -> _NullProgram:
        """Count the operations of `step`."""
        return _NullProgram(self, step())

    def section(self) -> None:
        """Counted."""
        self.calls["section"] += 1

    def embed(self, table: Weight, scale: float, out: Array) -> None:
        """Counted."""
        self.calls["embed"] += 1

    def feed(self, out: Array) -> None:
        """Counted."""
        self.calls["feed"] += 1

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """Counted."""
        self.calls["rms_norm"] += 1

    def linear(
        self, x: Array, weight: Weight, out: Array, bias: Array | None = None, residual: Array | None = None
    ) -> None:
        """Counted."""
        self.calls["linear"] += 1

    def lora(self, x: Array, table: Array, out: Array) -> None:
        """Counted."""
        self.calls["lora"] += 1

    def rope(self, x: Array, head_dim: int, rope: Rope, out: Array) -> None:
        """Counted."""
        self.calls["rope"] += 1

    def kv_write(self, k: Array, v: Array, cache: Array) -> None:
        """Counted."""
        self.calls["kv_write"] += 1

    def attention(self, q: Array, cache: Array, spec: Attention, out: Array) -> None:
        """Counted."""
        self.calls["attention"] += 1

    def act_mul(self, gate_up: Array, activation: Activation, out: Array) -> None:
        """Counted."""
        self.calls["act_mul"] += 1

    def add(self, x: Array, y: Array, scale: float, out: Array) -> None:
        """Counted."""
        self.calls["add"] += 1

    def take_logit_rows(self, x: Array, out: Array) -> None:
        """Counted."""
        self.calls["take_logit_rows"] += 1

    def argmax(self, logits: Array, ids: Array, before: Array | None, out: Array) -> None:
        """Counted."""
        self.calls["argmax"] += 1

    def advance(self, guesses: Array, x: Array, page_size: int) -> Array:
        """Counted."""
        self.calls["advance"] += 1
        return _Shape(Rows.TOKENS, x.width)

    def scale_cap(self, x: Array, scale: float, cap: float | None, out: Array) -> None:
        """Counted."""
        self.calls["scale_cap"] += 1
