"""Turns a snapshot of the engine into JSON for `static/engine.js` (read `live_view.py` first).

Sequences get short names, 1, 2, 3 …, in the order of their first frame. Request ids are not shown,
since they can be used to abort a request, nor cache salts, which may name people. Text is shown
only with `decode`.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from martlet.metrics import EngineTotals, StepRecord
from martlet.observe.snapshot import EngineSnapshot, NodeSnapshot, SequenceSnapshot
from martlet.types import PageId

MAX_CELLS = 4096  # of the page map; with more pages each cell stands for several neighbours
MAX_SPANS = 64  # of a step
MAX_TEXT = 120  # characters of a prompt, or of a stretch of the tree
MAX_NAMES = 4096  # requests with a short name
_TOKENS_OF_TEXT = 48  # decoded for MAX_TEXT characters


class Names:
    """A short name for each sequence."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._next = 1

    def of(self, request_id: str, index: int) -> str:
        """The name: a number, with ".1", ".2" … for the further answers of a request."""
        number = self._numbers.get(request_id)
        if number is None:
            number = self._numbers[request_id] = self._next
            self._next += 1
            if len(self._numbers) > MAX_NAMES:
                self._numbers.popitem(last=False)
        return f"{number}.{index}" if index else str(number)


def frame(
    snapshot: EngineSnapshot,
    steps: Iterable[StepRecord],
    totals: EngineTotals,
    names: Names,
    decode: Callable[[Sequence[int]], str] | None,
) -> dict[str, Any]:
    """The page's view of this moment, and the steps since the last frame."""
    running = [_sequence(seq, names, decode) for seq in snapshot.running]
    owners = _owners(snapshot.running)
    return {
        "totals": {name.removeprefix("n_"): count for name, count in asdict(totals).items()},
        "running": running,
        "waiting": [_sequence(seq, names, decode) for seq in snapshot.waiting],
        "n_waiting": snapshot.n_waiting,
        "pages": _pages(snapshot, owners, [seq["name"] for seq in running]),
        "tree": _tree(snapshot, owners, [seq["name"] for seq in running], decode),
        "steps": [_step(step, names) for step in steps],
    }


def counts_of(ended: Sequence[int], bounds: Sequence[float], open_: Iterable[float | array[float] | None]) -> list[int]:
    """A histogram's counts: `ended`, plus the values of the open requests so far."""
    counts = np.array(ended, dtype=np.int64)
    for values in open_:
        if values is None:
            continue
        # The engine's thread appends to the array: count a copy, whose buffer stays as it is.
        seen = np.array([values]) if isinstance(values, float) else np.frombuffer(values[:], dtype=np.float64)
        counts += np.bincount(np.searchsorted(bounds, seen), minlength=len(counts))
    result: list[int] = counts.tolist()
    return result


def _sequence(seq: SequenceSnapshot, names: Names, decode: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    n_prompt = len(seq.request.prompt_ids)
    shown = {
        "name": names.of(seq.request.request_id, seq.index),
        "prompt": n_prompt,
        "generated": seq.n_ids - n_prompt,
        "computed": seq.n_cached,
        "limit": seq.limit,
        "pages": len(seq.pages),
        "preempted": seq.n_preempted,
    }
    if decode is not None:
        shown["text"] = decode(seq.request.prompt_ids[-_TOKENS_OF_TEXT:])[-MAX_TEXT:]
    return shown


def _owners(running: Sequence[SequenceSnapshot]) -> dict[PageId, tuple[int, ...]]:
    """The running sequences that own each page, as indices."""
    owners: dict[PageId, tuple[int, ...]] = {}
    for index, seq in enumerate(running):
        for page in seq.pages:
            owners[page] = (*owners.get(page, ()), index)
    return owners


# -- the map of pages ------------------------------------------------------------------------------
def _pages(snapshot: EngineSnapshot, owners: dict[PageId, tuple[int, ...]], names: list[str]) -> dict[str, Any]:
    """One letter per page.

    f: free; c: only the prefix tree owns it; o: one sequence; s: several; h: other owners.
    """
    letters = ["f" if count == 0 else "h" for count in snapshot.owners]
    for page in snapshot.cached:
        letters[page] = "c"
    for page, users in owners.items():
        letters[page] = "o" if len(users) == 1 else "s"
    counts = Counter(letters)
    each = -(-len(letters) // MAX_CELLS)
    whose = {page: names[users[0]] for page, users in owners.items() if len(users) == 1}
    if each > 1:
        groups = [letters[start : start + each] for start in range(0, len(letters), each)]
        letters = [Counter(group).most_common(1)[0][0] for group in groups]
        whose = {PageId(page // each): name for page, name in whose.items()}
    return {
        "cells": "".join(letters),
        "each": each,
        "whose": [whose.get(PageId(cell), "") for cell, letter in enumerate(letters) if letter == "o"],
        "counts": {letter: counts.get(letter, 0) for letter in "fcosh"},
    }


# -- the tree of prefixes --------------------------------------------------------------------------
@dataclass(slots=True)
class _Stretch:
    """Consecutive pages without a fork that the same sequences use."""

    parent: int | None
    start: int  # tokens before it
    letter: str
    users: tuple[int, ...]
    n_tokens: int = 0
    n_pages: int = 0
    ids: list[int] = field(default_factory=list)


def _tree(
    snapshot: EngineSnapshot,
    owners: dict[PageId, tuple[int, ...]],
    names: list[str],
    decode: Callable[[Sequence[int]], str] | None,
) -> dict[str, Any]:
    n_children = Counter(node.parent for node in snapshot.nodes)
    stretches: list[_Stretch] = []
    where: list[int] = []  # the stretch of each node
    for node in snapshot.nodes:
        letter, users = _use_of(node, owners)
        before = None if node.parent is None else where[node.parent]
        last = None if before is None else stretches[before]
        if last is None or n_children[node.parent] > 1 or (last.letter, last.users) != (letter, users):
            start = 0 if last is None else last.start + last.n_tokens
            last = _Stretch(before, start, letter, users)
            before = len(stretches)
            stretches.append(last)
        assert before is not None
        where.append(before)
        last.n_tokens += len(node.ids)
        last.n_pages += 1
        if decode is not None and len(last.ids) < _TOKENS_OF_TEXT:
            last.ids.extend(node.ids)
    salts = list(dict.fromkeys(node.salt for node in snapshot.nodes if node.parent is None))
    roots = {where[number]: node.salt for number, node in enumerate(snapshot.nodes) if node.parent is None}
    shown = []
    for number, stretch in enumerate(stretches):
        entry: dict[str, Any] = {
            "parent": stretch.parent,
            "start": stretch.start,
            "tokens": stretch.n_tokens,
            "pages": stretch.n_pages,
            "kind": stretch.letter,
            "users": [names[index] for index in stretch.users],
        }
        if stretch.parent is None:
            entry["salt"] = 0 if roots[number] == "" else 1 + salts.index(roots[number])  # 0: no salt
        if decode is not None:
            entry["text"] = decode(stretch.ids[:_TOKENS_OF_TEXT])[:MAX_TEXT]
        shown.append(entry)
    n_pages = len(snapshot.cached)
    resident = sum(node.page is not None for node in snapshot.nodes)
    return {"stretches": shown, "n_pages": n_pages, "n_hidden": max(0, n_pages - resident)}


def _use_of(node: NodeSnapshot, owners: dict[PageId, tuple[int, ...]]) -> tuple[str, tuple[int, ...]]:
    """A letter of the page map, or "t" for a page only on disk; and the sequences that use it."""
    if node.page is None:
        return "t", ()
    users = owners.get(node.page, ())
    return ("c", "o", "s")[min(len(users), 2)], users


# -- steps -----------------------------------------------------------------------------------------
def _step(record: StepRecord, names: Names) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "step": record.step,
        "start": record.start_s,
        "ms": [round(1000 * seconds, 3) for seconds in (record.plan_s, record.run_s, record.commit_s)],
        "tokens": record.plan.n_tokens,
        "running": record.n_running,
        "waiting": record.n_waiting,
        "spans": _spans(record, names),
    }
    if record.preempted:
        shown["preempted"] = [names.of(*key) for key in record.preempted]
    for move in ("saves", "loads", "copies"):
        if count := len(getattr(record.plan, move)):
            shown[move] = count
    return shown


def _spans(record: StepRecord, names: Names) -> list[list[str | int | bool]]:
    """Name, first position, count, whether it decodes; and the accepted draft tokens, if any."""
    shown: list[list[str | int | bool]] = [
        [names.of(span.request_id, span.index), span.start, span.count, span.decode]
        for span in record.spans[:MAX_SPANS]
    ]
    planned = record.plan.spans
    if any(span.draft for span in planned) and len(planned) == len(record.spans):
        accepted = {sampled.seq: len(sampled.more) for sampled in record.result.sampled}
        for entry, span in zip(shown, planned, strict=False):
            if span.draft:
                entry.append(accepted.get(span.seq, 0))
    return shown
