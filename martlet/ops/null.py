"""A backend that computes nothing: zeros and counters, for measuring the engine itself.

Read `engine/engine.py` next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.kv_types import KV_TYPES
from martlet.ops.interface import Abilities, Ability, Array, RecentPages, Rows, StepInputs, StepLimits, Weight
from martlet.ops.recorded import RecordingBackend
from martlet.quant.table import RawTensor

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
_ZERO = np.zeros((), np.float32)


class _NullProgram:
    def __init__(self, backend: NullBackend, outputs: Any) -> None:
        self._backend, self._outputs = backend, outputs

    def run(self, inputs: StepInputs, first: int = 0, stop: int | None = None) -> Any:
        self._backend.calls["run"] += 1
        self._backend.sizes = {rows: inputs.n_rows(rows) for rows in Rows}
        return self._outputs


def _file_bytes(tensors: Sequence[RawTensor]) -> int:
    return sum(tensor.data.nbytes for tensor in tensors)


class NullBackend(RecordingBackend):
    """`calls` counts the operations captured, the pages moved and the steps run.

    A weight is the number of bytes that `packed_bytes` says; without it, 0.
    """

    name = "null"
    abilities = Abilities(
        name, frozenset(KV_TYPES), _file_bytes, frozenset({Ability.SECTIONS, Ability.LORA, Ability.HEADS})
    )

    def __init__(self, packed_bytes: Callable[[Sequence[RawTensor]], int] | None = None) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sizes = dict.fromkeys(Rows, 0)
        self._packed_bytes = packed_bytes

    def fingerprint(self) -> str:
        return "null"  # there are no bits

    def upload(self, values: NDArray[Any]) -> Array:
        return None

    def download(self, array: Array) -> F32:
        return np.zeros((self.sizes[array.rows], array.width), np.float32)

    def view(self, array: Array) -> F32:
        return np.broadcast_to(_ZERO, (self.sizes[array.rows], array.width))  # takes no memory

    def pack(self, tensors: Sequence[RawTensor]) -> Weight:
        return 0 if self._packed_bytes is None else self._packed_bytes(tensors)

    def weight_bytes(self, weight: Weight) -> int:
        return int(weight)

    def kv_cache(
        self,
        n_pages: int,
        page_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: str,
        recent: RecentPages | None = None,
    ) -> Array:
        return None

    def page_bytes(self, cache: Array) -> int:
        return 0

    def copy_page(self, cache: Array, source: int, target: int) -> None:
        self.calls["copy_page"] += 1

    def read_page(self, cache: Array, page: int, out: U8) -> None:
        self.calls["read_page"] += 1

    def write_page(self, cache: Array, page: int, data: U8) -> None:
        self.calls["write_page"] += 1

    def lora_table(self, n_slots: int, k: int, n: int) -> Array:
        return None

    def set_lora(self, table: Array, slot: int, a: F32 | None, b: F32 | None) -> None:
        self.calls["set_lora"] += 1

    def close(self) -> None:
        pass

    def capture(self, step: Callable[[], Any], limits: StepLimits) -> _NullProgram:
        recording = self.record(step)
        self.calls.update(operation.name for operation in recording.operations)
        self.calls["section"] += len(recording.sections)
        return _NullProgram(self, recording.outputs)
