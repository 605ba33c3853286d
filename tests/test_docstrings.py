"""Docstrings say what a signature cannot: the shapes of arrays, and what is raised."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import martlet

ROOT = Path(martlet.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
ARRAY = re.compile(r"\b(NDArray|ndarray|Array|Weight|[FIU](?:8|16|32|64))\b")
SHAPE = re.compile(r"\[[^\]]+\]")
HANDLES = {"cache", "caches", "table", "weight", "step"}  # opaque things of a backend, without a shape
every_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))


def public_functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Public functions and methods of public classes: name, node, docstring of the class."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node, ""
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                    yield f"{node.name}.{item.name}", item, ast.get_docstring(node) or ""


def arrays_of(function: ast.FunctionDef) -> list[str]:
    """Names of parameters, and `return`, whose annotation is an array's."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    named = [(a.arg, a.annotation) for a in arguments] + [("return", function.returns)]
    return [n for n, note in named if note is not None and n not in HANDLES and ARRAY.search(ast.unparse(note))]


@every_module
def test_functions_of_arrays_give_shapes(path: Path) -> None:
    """A public function that takes or returns an array gives a shape in brackets.

    A method that implements a Protocol may have no docstring: the Protocol gives the shape.
    """
    lacking = []
    for name, function, of_class in public_functions(path):
        text = ast.get_docstring(function)
        arrays = arrays_of(function)
        if arrays and not (text is None and "." in name) and not SHAPE.search((text or "") + of_class):
            lacking.append(f"line {function.lineno}: {name} ({', '.join(arrays)})")
    assert not lacking, "; ".join(lacking)


@every_module
def test_functions_that_raise_say_what(path: Path) -> None:
    """A public function whose own body raises an error says so.

    A command's `execute` needs no word: whatever it raises is printed by `cli.py`.
    """
    lacking = []
    for name, function, of_class in public_functions(path):
        text = ast.get_docstring(function)
        errors = {
            node.exc.func.id
            for node in ast.walk(function)
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
        }
        errors = {error for error in errors if error.endswith("Error") and error != "AssertionError"}
        if (
            errors
            and text is not None
            and not name.startswith("execute")
            and not re.search(r"[Rr]aise|[Rr]efuse|Error\b", text + of_class)
        ):
            lacking.append(f"line {function.lineno}: {name} ({', '.join(sorted(errors))})")
    assert not lacking, "; ".join(lacking)
