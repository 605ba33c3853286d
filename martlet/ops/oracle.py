"""The oracle: every operation of a step also through the reference, stopping at the first that differs (`--oracle`).

It is a backend around another one. While the decoder is captured it writes the operations down, giving every result an
array of its own, so that after one run of the fast backend all intermediate results are still there. Then it feeds each
operation's inputs, as the fast backend had them, to the reference and compares the outputs: an error is seen where it
arises, not where it has spread to. A product is compared twice, with its input as it is and with its input rounded to
8 bits for each 32 columns, which fast kernels for quantised weights do: every element has to agree with one of the two.
So the bounds can be tight, and rounding hides no bug. Read `reference.py` next, which is the definition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.errors import OracleError, UnsupportedError
from martlet.ops.interface import Array, Backend, Program, RecentPages, Rows, StepInputs, StepLimits, Weight
from martlet.quant.table import RawTensor
from martlet.spec import Activation, Attention, Rope

__all__ = ["BOUNDS", "OracleBackend"]

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
_NOTHING: F32 = np.zeros((0, 0), np.float32)

# Largest difference of an output, as a share of the largest output of its row: the order of sums, and polynomials for
# exp and tanh, make it. Measured on real models: linear 2e-6, attention 5e-5, the others below 4e-7.
BOUNDS = {
    "embed": 1e-6,
    "feed": 0.0,
    "rms_norm": 1e-5,
    "linear": 1e-4,
    "rope": 1e-5,
    "attention": 1e-3,
    "act_mul": 1e-5,
    "add": 1e-6,
    "take_logit_rows": 0.0,
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
class _Slice:
    """Columns [start, stop) of the result number `value`."""

    value: int
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class _Buffer:
    """What the decoder takes for an array: the results written to it, latest last, each with its columns."""

    rows: Rows
    width: int
    writes: list[tuple[int, int, int]] = field(default_factory=list)  # start, stop, value


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """Columns of a buffer."""

    buffer: _Buffer
    start: int
    stop: int

    def read(self) -> _Slice:
        """The result that these columns hold now."""
        for start, stop, value in reversed(self.buffer.writes):
            if start <= self.start and self.stop <= stop:
                return _Slice(value, self.start - start, self.stop - start)
            assert stop <= self.start or self.stop <= start, "an array is read that was written in parts"
        raise AssertionError("an array is read before it is written")


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    arguments: dict[str, Any]  # _Slice, _Pair, or a plain value
    rows: Rows | None  # of the output; None for an operation without one
    width: int
    place: str  # where in the model, in words


class OracleBackend:
    """Runs `fast` and checks it against `reference`. Its arrays are views; its programs return NumPy arrays."""

    def __init__(self, fast: Backend, reference: Backend) -> None:
        self.name = f"oracle({fast.name})"
        self._fast = fast
        self._reference = reference
        self._operations: list[_Operation] = []
        self._layer: int | None = None
        self._n_caches = 0
        self._n_values = 0

    def fingerprint(self) -> str:
        """Both backends', since pages are kept of both."""
        return f"{self._fast.fingerprint()} + {self._reference.fingerprint()}"

    # -- memory ---------------------------------------------------------------------------------------------------
    def upload(self, values: NDArray[Any]) -> Array:
        """Copy a constant to both backends."""
        return _Pair(self._fast.upload(values), self._reference.upload(values))

    def download(self, array: Array) -> F32:
        """Return what the program returned: it is NumPy already."""
        assert isinstance(array, np.ndarray)
        return array

    def view(self, array: Array) -> F32:
        """It is NumPy already."""
        return self.download(array)

    def empty(self, rows: Rows, width: int) -> Array:
        """A name for results to come."""
        return _View(_Buffer(rows, width), 0, width)

    def columns(self, array: Array, start: int, stop: int) -> Array:
        """Columns of an array."""
        return _View(array.buffer, array.start + start, array.start + stop)

    def pack(self, tensors: Sequence[RawTensor]) -> Weight:
        """Pack for both backends."""
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
        """Pages on both backends."""
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
        """Read a page of both backends, the fast one's first."""
        split = self._fast.page_bytes(cache.fast)
        self._fast.read_page(cache.fast, page, out[:split])
        self._reference.read_page(cache.reference, page, out[split:])

    def write_page(self, cache: Array, page: int, data: U8) -> None:
        """Write a page of both backends."""
        split = self._fast.page_bytes(cache.fast)
        self._fast.write_page(cache.fast, page, data[:split])
        self._reference.write_page(cache.reference, page, data[split:])

    def lora_table(self, n_slots: int, k: int, n: int) -> Array:
        """UnsupportedError: an update is made in place, and the oracle keeps every result."""
        raise UnsupportedError("adapters while the oracle checks every operation")

    def set_lora(self, table: Array, slot: int, a: F32 | None, b: F32 | None) -> None:
        """There are no tables."""

    def lora(self, x: Array, table: Array, out: Array) -> None:
        """There are no tables."""

    def weight_bytes(self, weight: Weight) -> int:
        """Bytes that the fast backend needs for it."""
        return self._fast.weight_bytes(weight.fast)

    def close(self) -> None:
        """Close both backends."""
        self._fast.close()
        self._reference.close()

    # -- capture --------------------------------------------------------------------------------------------------
    def capture(self, step: Callable[[], Any], limits: StepLimits) -> Program:
        """Write down the operations of `step`, which returns an array or a tuple of them."""
        self._operations, self._n_values, self._layer = [], 0, None
        found = step()
        results = tuple(array.read() for array in found) if isinstance(found, tuple) else found.read()
        return _OracleProgram(self._fast, self._reference, limits, self._operations, results)

    def section(self) -> None:
        """Nothing: all sections are run and compared together."""

    def _record(self, name: str, out: Array | None, **arguments: Any) -> None:
        """Write down an operation; its arguments are read before its output is written."""
        read = {key: value.read() if isinstance(value, _View) else value for key, value in arguments.items()}
        pairs = [value for value in arguments.values() if isinstance(value, _Pair)]
        for pair in pairs:
            self._layer = pair.layer if pair.layer is not None or pair.name else self._layer
        names = ", ".join(pair.name for pair in pairs if pair.name)
        layer = "outside the layers" if self._layer is None else f"layer {self._layer}"
        place = f"{layer}, {name}" + (f" with {names}" if names else "")
        if out is None:
            self._operations.append(_Operation(name, read, None, 0, place))
            return
        width = out.stop - out.start
        self._operations.append(_Operation(name, read, out.buffer.rows, width, place))
        out.buffer.writes.append((out.start, out.stop, self._n_values))
        self._n_values += 1

    # -- operations -----------------------------------------------------------------------------------------------
    def embed(self, table: Weight, scale: float, out: Array) -> None:
        """Record."""
        self._record("embed", out, table=table, scale=scale)

    def feed(self, out: Array) -> None:
        """Record."""
        self._record("feed", out)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """Record."""
        self._record("rms_norm", out, x=x, weight=weight, eps=eps)

    def linear(
        self, x: Array, weight: Weight, out: Array, bias: Array | None = None, residual: Array | None = None
    ) -> None:
        """Record."""
        self._record("linear", out, x=x, weight=weight, bias=bias, residual=residual)

    def rope(self, x: Array, head_dim: int, rope: Rope, out: Array) -> None:
        """Record."""
        self._record("rope", out, x=x, head_dim=head_dim, rope=rope)

    def kv_write(self, k: Array, v: Array, cache: Array) -> None:
        """Record."""
        self._record("kv_write", None, k=k, v=v, cache=cache)

    def attention(self, q: Array, cache: Array, spec: Attention, out: Array) -> None:
        """Record."""
        self._record("attention", out, q=q, cache=cache, spec=spec)

    def act_mul(self, gate_up: Array, activation: Activation, out: Array) -> None:
        """Record."""
        self._record("act_mul", out, gate_up=gate_up, activation=activation)

    def add(self, x: Array, y: Array, scale: float, out: Array) -> None:
        """Record."""
        self._record("add", out, x=x, y=y, scale=scale)

    def take_logit_rows(self, x: Array, out: Array) -> None:
        """Record."""
        self._record("take_logit_rows", out, x=x)

    def argmax(self, logits: Array, ids: Array, before: Array | None, out: Array) -> None:
        """Refused, as heads are."""
        raise UnsupportedError("draft heads while the oracle checks every operation")

    def advance(self, guesses: Array, x: Array, page_size: int) -> Array:
        """Refused, as heads are."""
        raise UnsupportedError("draft heads while the oracle checks every operation")

    def scale_cap(self, x: Array, scale: float, cap: float | None, out: Array) -> None:
        """Record."""
        self._record("scale_cap", out, x=x, scale=scale, cap=cap)


class _OracleProgram:
    """A step, as its operations."""

    def __init__(
        self,
        fast: Backend,
        reference: Backend,
        limits: StepLimits,
        operations: list[_Operation],
        results: _Slice | tuple[_Slice, ...],
    ) -> None:
        self._fast = fast
        self._reference = reference
        self._limits = limits
        self._operations = operations
        self._results = results
        self._program = fast.capture(self._all_results, limits)

    def run(self, inputs: StepInputs, first: int = 0, stop: int | None = None) -> F32 | tuple[F32, ...]:
        """Run the step on the fast backend, check every operation, and return what the step did; sections all together."""
        if stop is not None:
            return ()
        results = [self._fast.download(array) for array in self._program.run(inputs)]
        value = 0
        for operation in self._operations:
            expected = [self._reference_result(operation, results, inputs)]
            if operation.name == "linear":
                rounded = _with_rounded_input(operation, results)
                expected.append(self._reference_result(operation, rounded, inputs))
            if operation.rows is not None:
                _compare(operation, results[value], expected)
                value += 1
        if isinstance(self._results, tuple):
            return tuple(results[part.value][:, part.start : part.stop] for part in self._results)
        return results[self._results.value][:, self._results.start : self._results.stop]

    def _all_results(self) -> list[Array]:
        """The step on the fast backend, every result in an array of its own."""
        arrays: list[Array] = []

        def own(value: Any) -> Any:
            if isinstance(value, _Slice):
                return self._fast.columns(arrays[value.value], value.start, value.stop)
            return value.fast if isinstance(value, _Pair) else value

        for operation in self._operations:
            arguments = {key: own(value) for key, value in operation.arguments.items()}
            if operation.rows is not None:
                arguments["out"] = self._fast.empty(operation.rows, operation.width)
                arrays.append(arguments["out"])
            getattr(self._fast, operation.name)(**arguments)
        return arrays

    def _reference_result(self, operation: _Operation, results: list[F32], inputs: StepInputs) -> F32:
        """One operation on the reference, with the fast backend's inputs."""
        ops = self._reference

        def theirs(value: Any) -> Any:
            if isinstance(value, _Slice):
                return ops.upload(results[value.value][:, value.start : value.stop])
            return value.reference if isinstance(value, _Pair) else value

        arguments = {key: theirs(value) for key, value in operation.arguments.items()}

        def step() -> Any:
            if operation.rows is not None:
                arguments["out"] = ops.empty(operation.rows, operation.width)
            getattr(ops, operation.name)(**arguments)
            return arguments.get("out")

        output = ops.capture(step, self._limits).run(inputs)
        return _NOTHING if operation.rows is None else ops.download(output)


def _with_rounded_input(operation: _Operation, results: list[F32]) -> list[F32]:
    """The results with the columns that `operation` multiplies rounded to 8 bits, as `quantize.py` does it."""
    source: _Slice = operation.arguments["x"]
    x = results[source.value][:, source.start : source.stop]
    if x.size == 0 or x.shape[1] % ROUNDED_COLUMNS:
        return results
    blocks = x.reshape(len(x), -1, ROUNDED_COLUMNS)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    whole = results[source.value].copy()
    whole[:, source.start : source.stop] = (np.rint(blocks * inverse) * scale).reshape(x.shape)
    return [whole if number == source.value else result for number, result in enumerate(results)]


def _compare(operation: _Operation, found: F32, references: list[F32]) -> None:
    """Raise OracleError if an element differs from every reference by more than its operation's bound."""
    expected = references[0]
    if expected.size == 0:
        return
    # Where `found` is NaN the error is NaN, and below no error that is not small counts as right.
    error = np.min([np.abs(found.astype(np.float64) - reference) for reference in references], axis=0)
    scale = np.maximum(np.abs(expected).max(axis=1, keepdims=True), 1e-30)
    bound = BOUNDS[operation.name] * scale
    wrong = ~(error <= bound)
    if not wrong.any():
        return
    row, column = np.unravel_index(
        np.argmax(np.where(wrong, np.nan_to_num(error / scale, nan=np.inf), -1.0)), error.shape
    )
    raise OracleError(
        f"The fast and the reference results differ first at {operation.place}: at row {row}, column {column} found"
        f" {found[row, column]:.6g}, expected {expected[row, column]:.6g} (error {error[row, column]:.3g}, allowed"
        f" {bound[row, 0]:.3g}; {int(wrong.sum()):,} of {wrong.size:,} values are wrong)."
    )
