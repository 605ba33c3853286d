"""What an engine holds at one moment: its sequences, its pages, its prefixes (read `server/live_frames.py` next, which shows it).

`look` is called between two steps and only copies; what the copies mean is worked out elsewhere, while the engine goes
on. It is bounded: at most `MAX_SEQUENCES` that wait and `MAX_NODES` pages of prefixes, those nearest to the roots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from martlet.cache.nodes import Ids, Node
from martlet.cache.pages import PagePool
from martlet.sched.scheduler import Scheduler
from martlet.types import PageId, Request, Sequence

__all__ = ["MAX_NODES", "MAX_SEQUENCES", "Look", "NodeLook", "SequenceLook", "look"]

MAX_NODES = 1024
MAX_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class SequenceLook:
    """One sequence."""

    request: Request
    index: int
    n_ids: int  # prompt and generated
    n_cached: int  # positions that are computed
    limit: int
    n_preempted: int
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class NodeLook:
    """One page of the tree of prefixes; `parent` is its number in the list, None: it is a first page."""

    parent: int | None
    salt: str | bytes
    ids: Ids
    page: PageId | None  # None: it is in the second tier only
    has_slot: bool


@dataclass(frozen=True, slots=True)
class Look:
    """All of it."""

    running: tuple[SequenceLook, ...]
    waiting: tuple[SequenceLook, ...]  # the first of them
    n_waiting: int
    owners: list[int]  # of each page
    cached: list[PageId]  # pages that the tree of prefixes owns
    nodes: list[NodeLook]


def look(scheduler: Scheduler, pages: PagePool) -> Look:
    """Copy what is there now. In the engine's thread, between two steps; about a millisecond at most."""
    cache = scheduler.cache
    return Look(
        running=tuple(_sequence(seq) for seq in scheduler.running),
        waiting=tuple(_sequence(seq) for seq in islice(scheduler.waiting, MAX_SEQUENCES)),
        n_waiting=scheduler.n_waiting,
        owners=pages.counts(),
        cached=[] if cache is None else cache.pages(),
        nodes=[] if cache is None else _nodes(cache.roots.values()),
    )


def _sequence(seq: Sequence) -> SequenceLook:
    return SequenceLook(
        seq.request, seq.index, len(seq.ids), seq.n_cached, seq.limit, seq.n_preempted, tuple(seq.pages)
    )


def _nodes(roots: Iterable[Node]) -> list[NodeLook]:
    found: list[NodeLook] = []
    todo: deque[tuple[int | None, str | bytes, Node]] = deque()
    for root in roots:
        todo.extend((None, root.name, child) for child in root.children.values())
    while todo and len(found) < MAX_NODES:
        parent, salt, node = todo.popleft()
        number = len(found)
        found.append(NodeLook(parent, salt, node.ids, node.page, node.slot is not None))
        todo.extend((number, salt, child) for child in node.children.values())
    return found
