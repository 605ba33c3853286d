"""A copy of the engine's state at one moment: sequences, pages and cached prefixes.

`take_snapshot` runs between two steps and only copies; `server/live_frames.py` (read it next) works
out what to show while the engine continues. A snapshot is bounded: at most `MAX_SEQUENCES` waiting
sequences, and `MAX_NODES` pages of cached prefixes, those nearest to the roots.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from martlet.cache.nodes import Ids, Node
from martlet.cache.pages import PagePool
from martlet.sched.scheduler import Scheduler
from martlet.types import PageId, Request, Sequence

MAX_NODES = 1024
MAX_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """One sequence."""

    request: Request
    index: int
    n_ids: int  # prompt and generated
    n_cached: int  # computed positions
    limit: int
    n_preempted: int
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One page of the prefix tree."""

    parent: int | None  # its number in `EngineSnapshot.nodes`; None for the first page of a prefix
    salt: str | bytes
    ids: Ids
    page: PageId | None  # None: it is only on disk
    has_slot: bool


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The state of the whole engine."""

    running: tuple[SequenceSnapshot, ...]
    waiting: tuple[SequenceSnapshot, ...]  # the first MAX_SEQUENCES
    n_waiting: int
    owners: list[int]  # of each page
    cached: list[PageId]  # pages that the prefix tree owns
    nodes: list[NodeSnapshot]


def take_snapshot(scheduler: Scheduler, pages: PagePool) -> EngineSnapshot:
    """Copy the state. Call it in the engine's thread between two steps; it takes 1 ms at most."""
    cache = scheduler.cache
    return EngineSnapshot(
        running=tuple(_sequence(seq) for seq in scheduler.running),
        waiting=tuple(_sequence(seq) for seq in islice(scheduler.waiting, MAX_SEQUENCES)),
        n_waiting=scheduler.n_waiting,
        owners=pages.counts(),
        cached=[] if cache is None else cache.pages(),
        nodes=[] if cache is None else _nodes(cache.roots.values()),
    )


def _sequence(seq: Sequence) -> SequenceSnapshot:
    return SequenceSnapshot(
        seq.request, seq.index, len(seq.ids), seq.n_cached, seq.limit, seq.n_preempted, tuple(seq.pages)
    )


def _nodes(roots: Iterable[Node]) -> list[NodeSnapshot]:
    nodes: list[NodeSnapshot] = []
    queue: deque[tuple[int | None, str | bytes, Node]] = deque()
    for root in roots:
        queue.extend((None, root.name, child) for child in root.children.values())
    while queue and len(nodes) < MAX_NODES:
        parent, salt, node = queue.popleft()
        number = len(nodes)
        nodes.append(NodeSnapshot(parent, salt, node.ids, node.page, node.slot is not None))
        queue.extend((number, salt, child) for child in node.children.values())
    return nodes
