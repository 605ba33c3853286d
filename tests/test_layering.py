"""The rules of docs/architecture.md that can be read off the source: import ranks, sizes, names,
the environment.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "martlet"
RANKS = {
    name: rank
    for rank, names in enumerate(
        (
            "types errors options config spec kv_types sampling_params structured metrics machine offline saved_measurements",
            "quant tokenizer",
            "formats",
            "ops",
            "grammar",
            "models cache sample",
            "sched runtime",
            "speculate observe",
            "engine",
            "disagg",
            "toy server llm cli commands hub wheels bench __init__ __main__",
        )
    )
    for name in names.split()
}
TOP = RANKS["llm"]
MODULES = sorted(ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}
every_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))


def part_of(path: Path) -> str:
    """The folder or module directly under martlet/."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> set[str]:
    """Every martlet.X that a module imports, wherever in the module, but for typing only."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "martlet":
                names |= {alias.name for alias in node.names}
            elif node.module.startswith("martlet."):
                names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("martlet.")}
    return names


@every_module
def test_imports_point_downwards(path: Path) -> None:
    own = part_of(path)
    for name in imported(TREES[path]) - {"LLM", "SamplingParams", "__version__"}:
        assert name in RANKS, f"{name} has no rank: give it one here and in docs/architecture.md"
        same_folder = name == own or RANKS[own] == RANKS[name] in (0, TOP)
        assert RANKS[name] < RANKS[own] or same_folder, f"{own} (rank {RANKS[own]}) imports {name} ({RANKS[name]})"


@every_module
def test_no_relative_imports(path: Path) -> None:
    assert not [n for n in ast.walk(TREES[path]) if isinstance(n, ast.ImportFrom) and n.level]


def test_sizes_of_tests() -> None:
    """A stranger reads tests too."""
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.with_name("tests").rglob("*.py")}
    assert [str(path) for path, count in lines.items() if count > 500] == []


@every_module
def test_sizes(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500
    limit = 100 if path.is_relative_to(ROOT / "ops" / "cpu") else 60
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= limit, f"{node.name} has more than {limit} lines"


@every_module
def test_docstring(path: Path) -> None:
    assert ast.get_docstring(TREES[path]), "the module has no docstring"


@every_module
def test_only_what_is_offered_from_elsewhere_is_listed(path: Path) -> None:
    """A name without an underscore is public; `__all__` is for names that a module passes on."""
    tree = TREES[path]
    lists = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]
    ]
    if lists:
        own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert set(lists[0]) - own, "__all__ passes nothing on: leave it out"


@every_module
def test_environment_is_read_in_config_only(path: Path) -> None:
    if path == ROOT / "config.py":
        return
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("environ", "getenv"), f"line {node.lineno} reads the environment"
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            assert not {"environ", "getenv"} & {alias.name for alias in node.names}


@pytest.mark.parametrize("folder", ["sched", "cache"])
def test_scheduler_and_cache_know_integers_only(folder: str) -> None:
    for path in (ROOT / folder).glob("*.py"):
        for node in ast.walk(TREES[path]):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"numpy", "numba", "time", "os", "io", "socket"}


def test_asyncio_meets_threads_in_one_file() -> None:
    """Only server/ knows asyncio, and only bridge.py knows both it and the engine's thread."""
    users = {path.relative_to(ROOT) for path, tree in TREES.items() if "asyncio" in modules(tree)}
    # which asks servers, and knows no engine
    client = {Path("bench/http_stream.py"), Path("bench/load_generator.py")}
    assert {path.parts[0] for path in users - client} == {"server"}
    both = [path for path in users if "threading" in modules(TREES[ROOT / path])]
    # lifecycle: signals
    assert [str(path) for path in both if path.name != "lifecycle.py"] == ["server/bridge.py"]


def modules(tree: ast.AST) -> set[str]:
    """Top names of all that a module imports."""
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in found}
