"""The oracle: checks every operation of a step against the reference (`--oracle`).

It stops at the first that differs.

It is a backend around another one. While the decoder is captured it writes the operations down,
giving every result an array of its own, so that after one run of the fast backend all intermediate
results are still there. Then it feeds each operation's inputs, as the fast backend had them, to the
reference and compares the outputs: an error is seen where it arises, not where it has spread to. A
product is compared twice, with its input as it is and with its input rounded to 8 bits for each 32
columns, which fast kernels for quantised weights do: each element has to agree with either. So the
bounds can be tight, and rounding hides no bug. Read `reference.py` next, which is the definition.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.errors import OracleError
from martlet.ops.interface import (
    Abilities,
    Ability,
    Array,
    Backend,
    Program,
    RecentPages,
    StepInputs,
    StepLimits,
    Weight,
)
from martlet.ops.recorded import Operation, RecordingBackend, Slice, each, numbered
from martlet.quant.table import RawTensor

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
_NOTHING: F32 = np.zeros((0, 0), np.float32)

# Largest difference of an output, as a share of the largest output of its row: the order of sums,
# and polynomials for exp and tanh, make it. Measured on real models: linear 2e-6, attention 5e-5,
# the others below 4e-7.
BOUNDS = {
    "embed": 1e-6,
    "feed": 0.0,
    "rms_norm": 1e-5,
    "linear": 1e-4,
    "rope": 1e-5,
    "attention": 1e-3,
    "act_mul": 1e-5,
    "route": 1e-6,  # experts' numbers are the largest outputs, and exact
    "expert_linear": 1e-4,
    "combine": 1e-5,
    "gate": 1e-5,
    "add": 1e-6,
    "take_logit_rows": 0.0,
    "choose": 0.0,
    "scale_cap": 1e-5,
}
ROUNDED_COLUMNS = 32


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """A weight, a constant or a cache on both backends."""

    fast: Any
    reference: Any
    name: str = ""
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class _Checked:
    """An operation, and where in the model it is, in words."""

    operation: Operation  # numbered: what it reads are slices of results
    place: str


def oracle_abilities(fast: Abilities, reference: Abilities) -> Abilities:
    """Both backends' at once.

    It keeps every result, and adapters work in place; it runs steps one by one.
    """
    return Abilities(
        f"oracle({fast.name})",
        fast.kv_types & reference.kv_types,
        lambda tensors: fast.packed_bytes(tensors) + reference.packed_bytes(tensors),
        (fast.features & reference.features) - {Ability.LORA, Ability.HEADS, Ability.PACKED},
        fast.value_bytes + reference.value_bytes,
        fast.row_tile,
        fast.memory_available,
    )


class OracleBackend(RecordingBackend):
    """Runs `fast` and checks it against `reference`.

    Its arrays are views; its programs return NumPy arrays.
    """

    def __init__(self, fast: Backend, reference: Backend) -> None:
        super().__init__()
        self.abilities = oracle_abilities(fast.abilities, reference.abilities)
        self.name = self.abilities.name
        self._fast = fast
        self._reference = reference
        self._n_caches = 0

    def fingerprint(self) -> str:
        """Both backends', since pages are kept of both."""
        return f"{self._fast.fingerprint()} + {self._reference.fingerprint()}"

    # -- memory ------------------------------------------------------------------------------------
    def upload(self, values: NDArray[Any]) -> Array:
        return _Pair(self._fast.upload(values), self._reference.upload(values))

    def download(self, array: Array) -> F32:
        assert isinstance(array, np.ndarray)
        return array

    def view(self, array: Array) -> F32:
        return self.download(array)

    def pack(self, tensors: Sequence[RawTensor]) -> Weight:
        name = " + ".join(tensor.name for tensor in tensors)
        layer = re.match(r"blk\.(\d+)\.", name)
        return _Pair(
            self._fast.pack(tensors), self._reference.pack(tensors), name, None if layer is None else int(layer[1])
        )

    def kv_cache(
        self,
        n_pages: int,
        page_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: str,
        recent: RecentPages | None = None,
    ) -> Array:
        sizes = (n_pages, page_size, n_kv_heads, head_dim, dtype, recent)
        layer, self._n_caches = self._n_caches, self._n_caches + 1
        return _Pair(self._fast.kv_cache(*sizes), self._reference.kv_cache(*sizes), "KV cache", layer)

    def page_bytes(self, cache: Array) -> int:
        """Bytes of a page on both backends."""
        return self._fast.page_bytes(cache.fast) + self._reference.page_bytes(cache.reference)

    def copy_page(self, cache: Array, source: int, target: int) -> None:
        """Copy a page on both backends."""
        self._fast.copy_page(cache.fast, source, target)
        self._reference.copy_page(cache.reference, source, target)

    def read_page(self, cache: Array, page: int, out: U8) -> None:
        split = self._fast.page_bytes(cache.fast)
        self._fast.read_page(cache.fast, page, out[:split])
        self._reference.read_page(cache.reference, page, out[split:])

    def write_page(self, cache: Array, page: int, data: U8) -> None:
        split = self._fast.page_bytes(cache.fast)
        self._fast.write_page(cache.fast, page, data[:split])
        self._reference.write_page(cache.reference, page, data[split:])

    def lora_table(self, n_slots: int, k: int, n: int) -> Array:
        self.abilities.require(Ability.LORA)

    def set_lora(self, table: Array, slot: int, a: F32 | None, b: F32 | None) -> None:
        """Nothing: there are no tables, a [r, k], b [n, r]."""

    def weight_bytes(self, weight: Weight) -> int:
        """Bytes that the fast backend needs for it."""
        return self._fast.weight_bytes(weight.fast)

    def close(self) -> None:
        self._fast.close()
        self._reference.close()

    # -- capture -----------------------------------------------------------------------------------
    def capture(self, step: Callable[[], Any], limits: StepLimits) -> Program:
        operations, results = numbered(self.record(step))
        return _OracleProgram(self._fast, self._reference, limits, _placed(operations), results)

    def _record(self, name: str, arguments: dict[str, Any]) -> Any:
        if name == "advance":
            self.abilities.require(Ability.HEADS)
        return super()._record(name, arguments)


def _placed(operations: list[Operation]) -> list[_Checked]:
    """Each operation with its place: the layer is that of the weight or cache before or in it."""
    checked: list[_Checked] = []
    layer: int | None = None
    for operation in operations:
        members = chain.from_iterable(v if isinstance(v, tuple) else (v,) for v in operation.arguments.values())
        pairs = [value for value in members if isinstance(value, _Pair) and value.name]
        for pair in pairs:
            layer = pair.layer
        names = ", ".join(pair.name for pair in pairs[:2]) + (" …" if len(pairs) > 2 else "")  # experts are many
        where = "outside the layers" if layer is None else f"layer {layer}"
        checked.append(_Checked(operation, f"{where}, {operation.name}" + (f" with {names}" if names else "")))
    return checked


class _OracleProgram:
    """A step, as its operations."""

    def __init__(
        self,
        fast: Backend,
        reference: Backend,
        limits: StepLimits,
        checked: list[_Checked],
        results: Slice | tuple[Slice, ...],
    ) -> None:
        self._fast = fast
        self._reference = reference
        self._limits = limits
        self._checked = checked
        self._results = results
        self._program = fast.capture(self._all_results, limits)

    def run(self, inputs: StepInputs, first: int = 0, stop: int | None = None) -> F32 | tuple[F32, ...]:
        """Run the step on the fast backend, check every operation, and return the step's outputs.

        Sections all together.
        """
        if stop is not None:
            return ()
        results = [self._fast.download(array) for array in self._program.run(inputs)]
        number = 0
        for checked in self._checked:
            operation = checked.operation
            expected = [self._reference_result(operation, results, inputs)]
            if operation.name in ("linear", "expert_linear"):
                rounded = _with_rounded_input(operation, results)
                expected.append(self._reference_result(operation, rounded, inputs))
            if operation.out is not None:
                _compare(checked, results[number], expected)
                number += 1
        if isinstance(self._results, tuple):
            return tuple(_columns(results, output) for output in self._results)
        return _columns(results, self._results)

    def _all_results(self) -> list[Array]:
        """The step on the fast backend, every result in an array of its own."""
        arrays: list[Array] = []

        def own(value: Any) -> Any:
            if isinstance(value, Slice):
                return self._fast.columns(arrays[value.number], value.start, value.stop)
            return value.fast if isinstance(value, _Pair) else value

        for operation in (checked.operation for checked in self._checked):
            arguments = {name: each(own, value) for name, value in operation.arguments.items()}
            if operation.out is not None:
                arguments["out"] = self._fast.empty(operation.out.rows, operation.out.width)
                arrays.append(arguments["out"])
            getattr(self._fast, operation.name)(**arguments)
        return arrays

    def _reference_result(self, operation: Operation, results: list[F32], inputs: StepInputs) -> F32:
        """One operation on the reference, with the fast backend's inputs: float32 [rows, width]."""
        ops, out = self._reference, operation.out

        def theirs(value: Any) -> Any:
            if isinstance(value, Slice):
                return ops.upload(_columns(results, value))
            return value.reference if isinstance(value, _Pair) else value

        arguments = {name: each(theirs, value) for name, value in operation.arguments.items()}

        def step() -> Any:
            if out is not None:
                arguments["out"] = ops.empty(out.rows, out.width)
            getattr(ops, operation.name)(**arguments)
            return arguments.get("out")

        output = ops.capture(step, self._limits).run(inputs)
        return _NOTHING if out is None else ops.download(output)


def _columns(results: list[F32], part: Slice) -> F32:
    return results[part.number][:, part.start : part.stop]


def _with_rounded_input(operation: Operation, results: list[F32]) -> list[F32]:
    """The results, with the input of `operation` rounded to 8 bits as `quantize.py` does it."""
    source: Slice = operation.arguments["x"]
    x = _columns(results, source)
    if x.size == 0 or x.shape[1] % ROUNDED_COLUMNS:
        return results
    blocks = x.reshape(len(x), -1, ROUNDED_COLUMNS)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    whole = results[source.number].copy()
    whole[:, source.start : source.stop] = (np.rint(blocks * inverse) * scale).reshape(x.shape)
    return [whole if number == source.number else result for number, result in enumerate(results)]


def _compare(checked: _Checked, actual: F32, references: list[F32]) -> None:
    """Raise OracleError if an element differs from all references by more than the bound."""
    expected = references[0]
    if expected.size == 0:
        return
    # Where `actual` is NaN the error is NaN, and below no error that is not small counts as right.
    error = np.min([np.abs(actual.astype(np.float64) - reference) for reference in references], axis=0)
    scale = np.maximum(np.abs(expected).max(axis=1, keepdims=True), 1e-30)
    bound = BOUNDS[checked.operation.name] * scale
    wrong = ~(error <= bound)
    if not wrong.any():
        return
    row, column = np.unravel_index(
        np.argmax(np.where(wrong, np.nan_to_num(error / scale, nan=np.inf), -1.0)), error.shape
    )
    raise OracleError(
        f"The fast and the reference results differ first at {checked.place}: at row {row}, column {column} found"
        f" {actual[row, column]:.6g}, expected {expected[row, column]:.6g} (error {error[row, column]:.3g}, allowed"
        f" {bound[row, 0]:.3g}; {int(wrong.sum()):,} of {wrong.size:,} values are wrong)."
    )
