"""The log of operations: what is written down, what each input holds, and the memory that it
takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from martlet.errors import OracleError, UnsupportedError
from martlet.ops.interface import Array, Rows, StepInputs, StepLimits
from martlet.ops.null import NullBackend
from martlet.ops.oracle import OracleBackend
from martlet.ops.recorded import RecordingBackend, Slice, numbered
from martlet.ops.reference import ReferenceBackend
from martlet.quant.table import BlockType, RawTensor

LIMITS = StepLimits(4, 1, 2, 1)


def step(ops: RecordingBackend) -> tuple[Array, Array]:
    """Two products into halves of one array, their product with it, and a row of logits."""
    x, halves = ops.empty(Rows.TOKENS, 8), ops.empty(Rows.TOKENS, 12)
    y, out = ops.empty(Rows.TOKENS, 6), ops.empty(Rows.LOGITS, 3)
    ops.embed("table", 1.0, x)
    ops.linear(x, "a", ops.columns(halves, 0, 6))
    ops.linear(x, "b", ops.columns(halves, 6, 12), residual=ops.columns(halves, 0, 6))
    ops.section()
    ops.add(ops.columns(halves, 6, 12), ops.columns(halves, 0, 6), 2.0, y)
    ops.take_logit_rows(ops.columns(y, 1, 4), out)
    return out, ops.columns(y, 0, 2)


def test_arguments_have_the_names_of_the_protocol() -> None:
    ops = NullBackend()
    recording = ops.record(lambda: step(ops))
    assert [operation.name for operation in recording.operations] == [
        "embed", "linear", "linear", "add", "take_logit_rows"
    ]  # fmt: skip
    embed, first, *_ = recording.operations
    assert embed.arguments == {"table": "table", "scale": 1.0}
    assert embed.out == first.arguments["x"]
    assert {name: first.arguments[name] for name in ("weight", "bias", "residual")} == {
        "weight": "a", "bias": None, "residual": None
    }  # fmt: skip
    assert recording.sections == [3]
    assert (recording.width(Rows.TOKENS), recording.width(Rows.LOGITS)) == (8 + 12 + 6, 3)
    with pytest.raises(TypeError, match="scal"):
        ops.record(lambda: ops.embed("table", scal=1.0))


def test_inputs_are_columns_of_results() -> None:
    ops = NullBackend()
    operations, outputs = numbered(ops.record(lambda: step(ops)))
    assert operations[2].arguments["residual"] == Slice(1, 0, 6)
    assert (operations[3].arguments["x"], operations[3].arguments["y"]) == (Slice(2, 0, 6), Slice(1, 0, 6))
    assert operations[4].arguments["x"] == Slice(3, 1, 4)
    assert outputs == (Slice(4, 0, 3), Slice(3, 0, 2))


def test_an_array_is_read_whole_and_after_it_is_written() -> None:
    ops = NullBackend()

    def mixed() -> Array:
        made, out = ops.empty(Rows.TOKENS, 4), ops.empty(Rows.TOKENS, 4)
        ops.feed(ops.columns(made, 0, 2))
        ops.feed(ops.columns(made, 2, 4))
        ops.add(made, made, 1.0, out)
        return out

    with pytest.raises(AssertionError, match="in parts"):
        numbered(ops.record(mixed))
    with pytest.raises(AssertionError, match="before it is written"):
        numbered(ops.record(lambda: ops.empty(Rows.TOKENS, 4)))


class Summed(ReferenceBackend):
    """Its `linear` adds up the products of several weights."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def linear(self, x: Any, weight: Any, out: Any, bias: Any = None, residual: Any = None) -> None:
        out[:] = sum(x @ matrix.T for matrix in weight) * np.float32(self._factor)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_an_operation_may_have_a_tuple_of_weights(factor: float) -> None:
    """The oracle hands both backends the weights that are theirs, and names each in its error."""
    matrices = [np.eye(4, dtype=np.float32) * value for value in (1, 2)]
    ops = OracleBackend(Summed(factor), Summed(1.0))
    weights = tuple(
        ops.pack([RawTensor(f"blk.2.{name}.weight", (4, 4), BlockType.F32, matrix.reshape(-1).view(np.uint8))])
        for name, matrix in zip("ab", matrices, strict=True)
    )

    def product() -> Array:
        x, out = ops.empty(Rows.TOKENS, 4), ops.empty(Rows.TOKENS, 4)
        ops.feed(x)
        ops.linear(x, weights, out)
        return out

    program = ops.capture(product, LIMITS)
    row = np.zeros(1, np.int32)
    feed = np.arange(4, dtype=np.float32)[None]
    inputs = StepInputs(row, row, row, np.array([0, 1], np.int32), row[None], row, feed=feed)
    if factor == 1.0:
        np.testing.assert_array_equal(program.run(inputs), 3 * feed)
        return
    with pytest.raises(OracleError, match=r"layer 2, linear with blk.2.a.weight, blk.2.b.weight"):
        program.run(inputs)


def test_the_null_backend_counts_operations_and_packed_bytes() -> None:
    ops = NullBackend(lambda tensors: 10 * len(tensors))
    ops.capture(lambda: step(ops), LIMITS)
    assert ops.calls == {"embed": 1, "linear": 2, "add": 1, "take_logit_rows": 1, "section": 1}
    assert ops.weight_bytes(ops.pack([])) == 0


def test_the_oracle_refuses_what_it_cannot_check() -> None:
    ops = OracleBackend(ReferenceBackend(), ReferenceBackend())
    with pytest.raises(UnsupportedError, match="oracle"):
        ops.record(lambda: ops.advance(ops.empty(Rows.LOGITS, 3), ops.empty(Rows.LOGITS, 4), 32))
    with pytest.raises(UnsupportedError, match="oracle"):
        ops.lora_table(1, 4, 4)
