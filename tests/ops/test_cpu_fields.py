"""The fields of records: named once, and named alike by the kernels that read them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from martlet.ops.cpu.kernels import fields
from martlet.ops.cpu.kernels.fields import ARGS, Fields

KERNELS = Path(fields.__file__).parent


def test_values_are_named_and_none_is_missing() -> None:
    record = Fields("FIRST SECOND")
    assert list(record) == [ARGS, ARGS + 1]
    assert record(SECOND=2, FIRST=1) == [1, 2]
    with pytest.raises(AssertionError, match="SECOND"):
        record(FIRST=1)
    with pytest.raises(AssertionError, match="THIRD"):
        record(FIRST=1, SECOND=2, THIRD=3)


def test_every_kernel_calls_a_field_by_its_name() -> None:
    """`*_, A, B = RECORD` in a kernel's file gives the last two, `A, B, *_ = RECORD` the first
    two.
    """
    n_records = 0
    for path in sorted(KERNELS.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)):
                continue
            record = getattr(fields, node.value.id, None)
            if not isinstance(record, Fields):
                continue
            n_records += 1
            assert isinstance(node.targets[0], ast.Tuple)
            names = [element.id if isinstance(element, ast.Name) else "*" for element in node.targets[0].elts]
            expected = list(record.names)
            if names[0] == "*":
                names, expected = names[1:], expected[1 - len(names) :]
            elif names[-1] == "*":
                names, expected = names[:-1], expected[: len(names) - 1]
            assert [name for name in names if name != "_"] == [
                e for n, e in zip(names, expected, strict=True) if n != "_"
            ]
    assert n_records >= 20
