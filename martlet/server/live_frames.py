"""A look at the engine as JSON for the page that draws it (read `live_view.py` first; `static/engine.js` reads what is made here).

Sequences get short names of their own, 1, 2, 3 …, in the order in which they are seen: ids of requests can be used to
abort them, and cache salts may name people, so neither is shown. Text is shown only if `decode` is given.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from martlet.metrics import EngineTotals, StepRecord
from martlet.observe.snapshot import Look, NodeLook, SequenceLook
from martlet.types import PageId

__all__ = ["MAX_CELLS", "Names", "counts_of", "frame"]

MAX_CELLS = 4096  # of the map of pages; of more pages each cell is the same number of neighbours
MAX_SPANS = 64  # of a step
MAX_TEXT = 120  # characters of a prompt, or of a stretch of the tree
MAX_NAMES = 4096  # requests whose names are kept
_TOKENS_OF_TEXT = 48  # that are decoded for it


class Names:
    """A short name for each sequence."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._next = 1

    def of(self, request_id: str, index: int) -> str:
        """The name: a number, and ".1" and so on for a request's further answers."""
        number = self._numbers.get(request_id)
        if number is None:
            number = self._numbers[request_id] = self._next
            self._next += 1
            if len(self._numbers) > MAX_NAMES:
                self._numbers.popitem(last=False)
        return f"{number}.{index}" if index else str(number)


def frame(
    look: Look,
    steps: Iterable[StepRecord],
    totals: EngineTotals,
    names: Names,
    decode: Callable[[Sequence[int]], str] | None,
) -> dict[str, Any]:
    """What the page shows of this moment, and the steps since the last one."""
    running = [_sequence(seq, names, decode) for seq in look.running]
    owners = _owners(look.running)
    return {
        "totals": {name.removeprefix("n_"): count for name, count in asdict(totals).items()},
        "running": running,
        "waiting": [_sequence(seq, names, decode) for seq in look.waiting],
        "n_waiting": look.n_waiting,
        "pages": _pages(look, owners, [seq["name"] for seq in running]),
        "tree": _tree(look, owners, [seq["name"] for seq in running], decode),
        "steps": [_step(step, names) for step in steps],
    }


def counts_of(ended: Sequence[int], bounds: Sequence[float], open_: Iterable[float | array[float] | None]) -> list[int]:
    """A histogram's counts: those of requests that have ended, with what the open ones have seen so far."""
    counts = np.array(ended, dtype=np.int64)
    for values in open_:
        if values is None:
            continue
        # A copy of an array is taken at once, and what NumPy sees never grows under it.
        seen = np.array([values]) if isinstance(values, float) else np.frombuffer(values[:], dtype=np.float64)
        counts += np.bincount(np.searchsorted(bounds, seen), minlength=len(counts))
    found: list[int] = counts.tolist()
    return found


def _sequence(seq: SequenceLook, names: Names, decode: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
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


def _owners(running: Sequence[SequenceLook]) -> dict[PageId, tuple[int, ...]]:
    """The running sequences, by their places, that own each page."""
    owners: dict[PageId, tuple[int, ...]] = {}
    for place, seq in enumerate(running):
        for page in seq.pages:
            owners[page] = (*owners.get(page, ()), place)
    return owners


# -- the map of pages ---------------------------------------------------------------------------------------------
def _pages(look: Look, owners: dict[PageId, tuple[int, ...]], names: list[str]) -> dict[str, Any]:
    """A letter a page: free, cached (the tree's alone), one sequence's own, shared by several, or held otherwise."""
    letters = ["f" if count == 0 else "h" for count in look.owners]
    for page in look.cached:
        letters[page] = "c"
    for page, places in owners.items():
        letters[page] = "o" if len(places) == 1 else "s"
    counts = Counter(letters)
    each = -(-len(letters) // MAX_CELLS)
    whose = {page: names[places[0]] for page, places in owners.items() if len(places) == 1}
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


# -- the tree of prefixes -----------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Stretch:
    """Pages one after another without a fork, that the same sequences use."""

    parent: int | None
    start: int  # tokens before it
    kind: str
    users: tuple[int, ...]
    n_tokens: int = 0
    n_pages: int = 0
    ids: list[int] = field(default_factory=list)


def _tree(
    look: Look,
    owners: dict[PageId, tuple[int, ...]],
    names: list[str],
    decode: Callable[[Sequence[int]], str] | None,
) -> dict[str, Any]:
    n_children = Counter(node.parent for node in look.nodes)
    stretches: list[_Stretch] = []
    where: list[int] = []  # the stretch of each node
    for node in look.nodes:
        kind, users = _kind(node, owners)
        before = None if node.parent is None else where[node.parent]
        last = None if before is None else stretches[before]
        if last is None or n_children[node.parent] > 1 or (last.kind, last.users) != (kind, users):
            start = 0 if last is None else last.start + last.n_tokens
            last = _Stretch(before, start, kind, users)
            before = len(stretches)
            stretches.append(last)
        assert before is not None
        where.append(before)
        last.n_tokens += len(node.ids)
        last.n_pages += 1
        if decode is not None and len(last.ids) < _TOKENS_OF_TEXT:
            last.ids.extend(node.ids)
    salts = list(dict.fromkeys(node.salt for node in look.nodes if node.parent is None))
    roots = {where[number]: node.salt for number, node in enumerate(look.nodes) if node.parent is None}
    shown = []
    for number, part in enumerate(stretches):
        entry: dict[str, Any] = {
            "parent": part.parent,
            "start": part.start,
            "tokens": part.n_tokens,
            "pages": part.n_pages,
            "kind": part.kind,
            "users": [names[place] for place in part.users],
        }
        if part.parent is None:
            entry["salt"] = 0 if roots[number] == "" else 1 + salts.index(roots[number])  # 0: everybody's
        if decode is not None:
            entry["text"] = decode(part.ids[:_TOKENS_OF_TEXT])[:MAX_TEXT]
        shown.append(entry)
    n_pages = len(look.cached)
    resident = sum(node.page is not None for node in look.nodes)
    return {"stretches": shown, "n_pages": n_pages, "n_hidden": max(0, n_pages - resident)}


def _kind(node: NodeLook, owners: dict[PageId, tuple[int, ...]]) -> tuple[str, tuple[int, ...]]:
    """As the letters of the map, and "t" for what is in the second tier only; and who uses it."""
    if node.page is None:
        return "t", ()
    users = owners.get(node.page, ())
    return ("c", "o", "s")[min(len(users), 2)], users


# -- steps --------------------------------------------------------------------------------------------------------
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
    for what in ("saves", "loads", "copies"):
        if moved := len(getattr(record.plan, what)):
            shown[what] = moved
    return shown


def _spans(record: StepRecord, names: Names) -> list[list[str | int | bool]]:
    """Name, first position, count, whether it decodes; where guesses were verified, how many of them were right."""
    shown: list[list[str | int | bool]] = [
        [names.of(span.request_id, span.index), span.start, span.count, span.decode]
        for span in record.spans[:MAX_SPANS]
    ]
    planned = record.plan.spans
    if any(span.draft for span in planned) and len(planned) == len(record.spans):
        right = {sampled.seq: len(sampled.more) for sampled in record.result.sampled}
        for entry, span in zip(shown, planned, strict=False):
            if span.draft:
                entry.append(right.get(span.seq, 0))
    return shown
