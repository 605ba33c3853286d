"""The spine: the files that a request passes through from `Request` to `Event`.

docs/architecture.md lists them in their reading order; each names the next. None imports a wing
(HTTP, grammars' compilers, drafters, recorders, disk files): those plug in through Protocols, and
can be deleted with their tests and one line of wiring.
"""

from __future__ import annotations

import ast
import re
from itertools import pairwise

from tests.test_layering import ROOT, TREES, imported

PAGE = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
SPINE = re.findall(r"^\| \d+ \| `([\w/]+)\.py` \|", PAGE, re.MULTILINE)  # in the order of reading
BESIDE = ("sched/limits", "cache/pages")  # read where they are used
MOST_LINES = 6000
WINGS = {"speculate", "observe", "server", "commands", "llm", "bench", "hub", "disagg"}
WING_FILES = ("runtime.lora", "runtime.f16_window", "runtime.disk_file", "runtime.plan_codec", "engine.assemble")


def test_the_page_lists_the_spine() -> None:
    assert SPINE[0] == "types"
    assert SPINE[-1] == "sample/random"
    assert len(set(SPINE)) == len(SPINE) > 20


def test_each_file_names_the_next() -> None:
    for name, following in pairwise(SPINE):
        text = ast.get_docstring(TREES[ROOT / f"{name}.py"]) or ""
        assert re.findall(r"[Rr]ead\s`([^`]+)`\snext", text) in (
            [f"{following}.py"],
            [f"{following.rpartition('/')[2]}.py"],
        ), name


def test_it_is_read_in_an_afternoon() -> None:
    lines = sum(len((ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines()) for name in (*SPINE, *BESIDE))
    assert lines <= MOST_LINES, lines


def test_it_imports_no_wing() -> None:
    for name in SPINE:
        path = ROOT / f"{name}.py"
        assert not imported(TREES[path]) & WINGS, name
        text = path.read_text(encoding="utf-8")
        assert not [wing for wing in WING_FILES if f"from martlet.{wing} import" in text], name
        # the Protocol's file
        assert set(re.findall(r"from martlet\.grammar\.(\w+)", text)) <= {"states"}, name
