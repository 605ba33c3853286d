"""A log of operations: what a step does, as records.

Read `oracle.py` and `null.py` next, which are made of it.

`RecordingBackend` has every operation of the `Backend` Protocol, by one mechanism: a call becomes
an `Operation` with its arguments by name, checked against the Protocol's signature. Arrays are
names of memory and hold no numbers. What needs to know an operation's inputs and outputs is derived
from the log: a check of every result, a count of memory, the inputs of every product.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from martlet.ops.interface import Array, Backend, Rows


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Memory for an activation: float32 [rows, width]."""

    rows: Rows
    width: int


@dataclass(frozen=True, slots=True)
class RecordedArray:
    """Columns start … stop - 1 of a buffer."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def rows(self) -> Rows:
        """The domain of its rows."""
        return self.buffer.rows

    @property
    def width(self) -> int:
        """How many columns it has."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Operation:
    """One call: its arguments by the Protocol's names, defaults included, without the output."""

    name: str
    # RecordedArrays, what the backend handed out (weights, caches, …), and plain values.
    arguments: dict[str, Any]
    out: RecordedArray | None  # None: it writes no activation


@dataclass(slots=True)
class Recording:
    """A step's operations in order, their buffers, and where each section but the first begins."""

    operations: list[Operation] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    sections: list[int] = field(default_factory=list)
    outputs: Any = None  # what the recorded function returned

    def width(self, rows: Rows) -> int:
        """Columns of all buffers with these rows: float32 values that a row of the step needs."""
        return sum(buffer.width for buffer in self.buffers if buffer.rows is rows)


def _recorded(name: str) -> Callable[..., Any]:
    signature = inspect.signature(getattr(Backend, name))

    def operation(self: RecordingBackend, *args: Any, **keywords: Any) -> Any:
        bound = signature.bind(self, *args, **keywords)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        del arguments["self"]
        return self._record(name, arguments)

    return operation


class RecordingBackend:
    """The operations of a backend, written down. Memory is the subclass's."""

    def __init__(self) -> None:
        self._recording = Recording()

    def record(self, step: Callable[[], Any]) -> Recording:
        """The operations that `step` calls, and what it returns."""
        recording = self._recording = Recording()
        recording.outputs = step()
        return recording

    def empty(self, rows: Rows, width: int) -> Array:
        self._recording.buffers.append(Buffer(rows, width))
        return RecordedArray(self._recording.buffers[-1], 0, width)

    def columns(self, array: Array, start: int, stop: int) -> Array:
        return RecordedArray(array.buffer, array.start + start, array.start + stop)

    def section(self) -> None:
        self._recording.sections.append(len(self._recording.operations))

    def _record(self, name: str, arguments: dict[str, Any]) -> Any:
        """Write an operation down; subclasses may refuse it. Returns what the operation returns."""
        if name == "advance":  # its result is an input under the rows of the next step
            out = self.empty(Rows.TOKENS, arguments["x"].width)
            self._recording.operations.append(Operation(name, arguments, out))
            return out
        self._recording.operations.append(Operation(name, arguments, arguments.pop("out", None)))
        return None

    embed = _recorded("embed")
    feed = _recorded("feed")
    rms_norm = _recorded("rms_norm")
    linear = _recorded("linear")
    lora = _recorded("lora")
    rope = _recorded("rope")
    kv_write = _recorded("kv_write")
    attention = _recorded("attention")
    act_mul = _recorded("act_mul")
    route = _recorded("route")
    expert_linear = _recorded("expert_linear")
    combine = _recorded("combine")
    gate = _recorded("gate")
    add = _recorded("add")
    take_logit_rows = _recorded("take_logit_rows")
    choose = _recorded("choose")
    argmax = _recorded("argmax")
    advance = _recorded("advance")
    scale_cap = _recorded("scale_cap")


@dataclass(frozen=True, slots=True)
class Slice:
    """Columns start … stop - 1 of the result with this number."""

    number: int
    start: int
    stop: int


class Results:
    """Which result an array holds at a point of a recording. Every output is a numbered result."""

    def __init__(self) -> None:
        # (start, stop, number of the result), the newest last.
        self._writes: dict[Buffer, list[tuple[int, int, int]]] = {}
        self._n_results = 0

    def read(self, array: RecordedArray) -> Slice:
        """The result that the array's columns hold now; they must be of one result."""
        for start, stop, number in reversed(self._writes.get(array.buffer, [])):
            if start <= array.start and array.stop <= stop:
                return Slice(number, array.start - start, array.stop - start)
            assert stop <= array.start or array.stop <= start, "an array is read that was written in parts"
        raise AssertionError("an array is read before it is written")

    def write(self, array: RecordedArray) -> None:
        """The array's columns hold the next result from here on."""
        self._writes.setdefault(array.buffer, []).append((array.start, array.stop, self._n_results))
        self._n_results += 1


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """function(value); of a tuple (an operation's several weights), a tuple of the results."""
    return tuple(map(function, value)) if isinstance(value, tuple) else function(value)


def numbered(recording: Recording) -> tuple[list[Operation], Any]:
    """The operations, with a `Slice` for each array that they read; and the outputs as slices.

    Results are numbered in the order of the operations that have an output. So a step can be run
    with an array for each result, and all of them be looked at afterwards.
    """
    results, operations = Results(), []

    def read(value: Any) -> Any:
        return results.read(value) if isinstance(value, RecordedArray) else value

    for operation in recording.operations:
        arguments = {name: each(read, value) for name, value in operation.arguments.items()}
        operations.append(Operation(operation.name, arguments, operation.out))
        if operation.out is not None:
            results.write(operation.out)
    return operations, each(read, recording.outputs)
