"""What picolm/ is allowed to be: small, of NumPy and the standard library alone, independent of the
big engine.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FILES = sorted((Path(__file__).parents[2] / "picolm").glob("*.py"))


def test_files_are_short() -> None:
    """Every line counts, comments and blank ones too."""
    sizes = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert max(sizes.values()) <= 200, sizes
    assert sum(sizes.values()) <= 1600, sizes


def test_nothing_but_numpy_is_imported() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                assert name.split(".")[0] in {"numpy", "picolm", *sys.stdlib_module_names}, (path.name, name)


def test_each_file_tells_its_differences() -> None:
    for path in FILES:
        if path.name not in ("__init__.py", "__main__.py"):
            assert "ifferences from the C" in (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""), (
                path.name
            )
