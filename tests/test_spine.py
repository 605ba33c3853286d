"""The spine: the files that one request passes through from `Request` to `Event`, in their reading
order.

Each names the next one at the beginning of its docstring. None imports a wing (HTTP, grammars'
compilers, drafters, recorders, disk files): those plug in through Protocols, and can be deleted
with their tests and one line of wiring.
"""

from __future__ import annotations

import ast
import re
from itertools import pairwise

from tests.test_layering import ROOT, TREES, imported

SPINE = (
    "types",
    "engine/engine",
    "sched/scheduler",
    "sched/planner",
    "sched/admission",
    "sched/budget",
    "sched/cost",
    "sched/queue",
    "sched/policy",
    "sched/page_reserve",
    "cache/radix",
    "cache/nodes",
    "cache/miss_reason",
    "runtime/executors",
    "runtime/rank",
    "runtime/flatten",
    "runtime/page_moves",
    "models/decoder",
    "models/layer",
    "ops/interface",
    "runtime/sampling",
    "sample/sampler",
    "sample/logits",
    "sample/random",
)
BESIDE = ("sched/limits", "cache/pages")  # read where they are used
MOST_LINES = 5600
WINGS = {"speculate", "observe", "server", "commands", "llm", "bench", "hub", "disagg"}
WING_FILES = ("runtime.lora", "runtime.f16_window", "runtime.disk_file", "runtime.plan_codec", "engine.assemble")


def test_each_file_names_the_next() -> None:
    for name, following in pairwise(SPINE):
        if not name.startswith(("models/", "sample/", "ops/")):
            start = (ast.get_docstring(TREES[ROOT / f"{name}.py"]) or "")[:400]
            [named] = re.findall(r"[Rr]ead\s`([^`]+)`\snext", start)
            assert f"{following}.py".endswith(named), name


def test_it_is_read_in_an_afternoon() -> None:
    lines = sum(len((ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines()) for name in (*SPINE, *BESIDE))
    assert lines <= MOST_LINES, lines


def test_it_imports_no_wing() -> None:
    for name in SPINE:
        path = ROOT / f"{name}.py"
        assert not imported(TREES[path]) & WINGS, name
        text = path.read_text(encoding="utf-8")
        assert not [wing for wing in WING_FILES if f"from martlet.{wing} import" in text], name
