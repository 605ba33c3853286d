"""A plan as plain data, and back with every number checked (read `executors.py` first, which says
what a plan is for).

    plan   {"step": 7, "spans": [span, …], "added": [[seq, request, index, adapter], …],
            "dropped": [seq, …], "preempted": [seq, …], "copies": [[source, target], …],
            "saves": [[page, slot, key, parent, [id, …]], …], "loads": [[slot, page, key], …]}
    span   [seq, start, count, n_logits,
            [id, …], n_draft, first_page, [page, …], first_layer, stop_layer]

Empty lists of a plan are left out, and a span's last entries where they are the defaults.

A wrong number in a plan would make compiled code touch memory that is not its own, so `PlanReader`
believes nothing: pages and ids are in range, a span's positions have pages, and a step is within
the limits of the rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from martlet.errors import MartletError, RequestError
from martlet.ops.interface import StepLimits
from martlet.runtime.disk_format import KEY_BYTES
from martlet.types import Added, Copy, Load, PageId, Save, SeqId, SlotId, Span, StepPlan

Row = dict[str, Any]
_MOST = 1 << 40
_MOST_NAME = 1024  # characters
_LISTS = ("spans", "added", "dropped", "preempted", "saves", "loads", "copies")
# what a span's row ends with, if that is left out
_SPAN_END: tuple[Any, ...] = ([], 0, 0, [], 0, None)
_SPAN_START = 4


def plan_row(plan: StepPlan, *, with_ids: bool = True) -> Row:
    """A plan as JSON takes it. Without ids only guesses are written, for a reader that has the
    sequences' texts.
    """
    row: Row = {
        "step": plan.step,
        "spans": [_span_row(span, with_ids) for span in plan.spans],
        "added": [[new.seq, new.request_id, new.index, new.adapter] for new in plan.added],
        "dropped": list(plan.dropped),
        "preempted": list(plan.preempted),
        "saves": [[s.page, s.slot, s.key.hex(), s.parent.hex(), list(s.ids)] for s in plan.saves],
        "loads": [[load.slot, load.page, load.key.hex()] for load in plan.loads],
        "copies": [[copy.source, copy.target] for copy in plan.copies],
    }
    return {name: value for name, value in row.items() if value != []}


def _span_row(span: Span, with_ids: bool) -> list[Any]:
    ids, first = list(span.ids if with_ids else span.draft), span.first_page if span.new_pages else 0
    row: list[Any] = [span.seq, span.start, span.count, span.n_logits]
    row += [ids, span.n_draft, first, list(span.new_pages), span.first_layer, span.stop_layer]
    while len(row) > _SPAN_START and row[-1] == _SPAN_END[len(row) - 1 - _SPAN_START]:
        row.pop()
    return row


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a rank can hold."""

    step: StepLimits
    vocab: int
    context: int
    n_pages: int
    page_size: int
    n_layers: int
    adapters: frozenset[str] = frozenset()  # digests of those that are loaded
    # positions that 4-bit pages take together, after having been kept in float16; 1: no such pages
    group: int = 1


@dataclass(slots=True)
class _Held:
    """What a rank holds of a sequence."""

    n_pages: int = 0
    groups: tuple[int, ...] = ()  # whose positions are in float16 still
    # a chunk with layers to come: its start and count, and the next layer
    begun: tuple[int, int, int] = (0, 0, 0)


class PlanReader:
    """Reads the plans of a rank, in their order. `text` gives the ids of a sequence, where rows
    leave them out.
    """

    def __init__(self, limits: PlanLimits, text: Callable[[Added], Sequence[int]] | None = None) -> None:
        self._limits = limits
        self._text = text
        self._held: dict[SeqId, _Held] = {}
        self.added: dict[SeqId, Added] = {}  # and not dropped
        self._step = 0

    def read(self, row: Any) -> StepPlan:
        """The plan. Raises RequestError, naming the step, for one that the rank cannot run."""
        if not isinstance(row, dict):
            raise self.wrong(f"{row!r:.60}", "an object")
        self._step = self._whole(row.get("step"), 1, _MOST, "a step's number")
        if unknown := set(row) - {"step", *_LISTS}:
            raise self.wrong(f"{sorted(map(str, unknown))}", f"entries among {list(_LISTS)}")
        lists = {name: row.get(name, []) for name in _LISTS}
        for name, entries in lists.items():
            if not isinstance(entries, list):
                raise self.wrong(f"{name} {entries!r:.60}", "a list")
        dropped = tuple(self._seq(number) for number in lists["dropped"])
        for seq in dropped:
            self._held.pop(seq, None)
            self.added.pop(seq, None)
        added = tuple(self._added(entry) for entry in lists["added"])
        saves = tuple(self._save(entry) for entry in lists["saves"])
        loads = tuple(self._load(entry) for entry in lists["loads"])
        copies = tuple(Copy(*(self._page(page) for page in self._row(entry, 2))) for entry in lists["copies"])
        preempted = tuple(self._seq(number) for number in lists["preempted"])
        for held in map(self._held.get, preempted):
            if held is not None:
                held.begun, held.groups = (0, 0, 0), ()
        spans = tuple(self._span(entry) for entry in lists["spans"])
        self._check_step(spans)
        return StepPlan(self._step, spans, added, dropped, preempted, saves, loads, copies)

    def _added(self, entry: Any) -> Added:
        number, name, index, adapter = self._row(entry, 4)
        seq = self._seq(number)
        if seq in self._held:
            raise self.wrong(f"sequence {seq} twice", "each once")
        if not isinstance(name, str) or len(name) > _MOST_NAME:
            raise self.wrong(f"the request {name!r:.60}", f"a name of up to {_MOST_NAME} characters")
        if not isinstance(adapter, str) or (adapter and adapter not in self._limits.adapters):
            raise self.wrong(f"the adapter {adapter!r:.80}", "one that is loaded here")
        self._held[seq] = _Held()
        self.added[seq] = Added(seq, name, self._whole(index, 0, _MOST, "an index"), adapter)
        return self.added[seq]

    # -- spans -------------------------------------------------------------------------------------
    def _span(self, entry: Any) -> Span:
        if not isinstance(entry, list) or not _SPAN_START <= len(entry) <= _SPAN_START + len(_SPAN_END):
            raise self.wrong(f"the span {entry!r:.60}", "four numbers, and up to six entries after these")
        seq, start, count, n_logits = (self._whole(value, 0, _MOST, "a number of a span") for value in entry[:4])
        ids, n_draft, first, pages, first_layer, stop = [*entry[4:], *_SPAN_END[len(entry) - _SPAN_START :]]
        held = self._held.get(SeqId(seq))
        if held is None:
            raise self.wrong(f"a span of sequence {seq}", "one that was added")
        n_draft = self._whole(n_draft, 0, max(0, count - 1), "a number of guesses")
        if n_draft and not count == n_logits == n_draft + 1:
            raise self.wrong(f"{n_draft} guesses in a span of {count}", "a row of logits for each, and one more")
        first = self._whole(first, 0, held.n_pages, "a first page")
        taken = tuple(self._page(page) for page in self._list(pages, "pages"))
        if taken:
            held.n_pages = first + len(taken)
            if held.n_pages > self._limits.step.max_pages_per_seq:
                raise self.wrong(f"{held.n_pages} pages of a sequence", f"{self._limits.step.max_pages_per_seq}")
        room = min(self._limits.context, held.n_pages * self._limits.page_size)
        if count < 1 or start + count > room or n_logits > count:
            raise self.wrong(f"the span {start}+{count} of sequence {seq}", f"positions below {room}")
        first_layer = self._whole(first_layer, 0, self._limits.n_layers - 1, "a span's first layer")
        if stop is not None:
            stop = self._whole(stop, first_layer + 1, self._limits.n_layers - 1, "a layer")
        known = self._ids(ids, "a span")
        ids = known
        if n_draft <= len(known) < count:
            ids = (*self._left_out(SeqId(seq), start, count - len(known), n_draft), *known)
        if len(ids) != count:
            raise self.wrong(f"{len(known)} ids in the span {start}+{count} of sequence {seq}", f"{count}")
        span = Span(SeqId(seq), start, count, ids, taken, n_logits, first, n_draft, first_layer, stop)
        self._check_layers(span, held)
        self._check_groups(span, held)
        return span

    def _left_out(self, seq: SeqId, start: int, count: int, n_draft: int) -> tuple[int, ...]:
        """The first `count` ids of a span, if its row omits them. Guesses follow a text's end."""
        if self._text is None:
            return ()
        text = self._text(self.added[seq])
        if start + count > len(text) or (n_draft and start + count != len(text)):
            raise self.wrong(f"the span {start}+{count + n_draft} of sequence {seq}", f"positions below {len(text)}")
        return tuple(text[start : start + count])

    def _check_step(self, spans: tuple[Span, ...]) -> None:
        step = self._limits.step
        whole = [span for span in spans if not span.is_layered]
        rows, logits = sum(s.count for s in whole), sum(s.n_logits for s in whole)
        if len(spans) > step.max_seqs or rows > step.max_tokens or logits > step.max_logits:
            raise self.wrong(f"{len(spans)} spans, {rows} rows, {logits} logits", f"at most what {step} says")
        if len({span.seq for span in spans}) != len(spans):
            raise self.wrong("a sequence with two spans", "one")

    def _check_layers(self, span: Span, held: _Held) -> None:
        """A chunk goes through the layers in order, no other chunk of its sequence in between, and
        has logits at the end.
        """
        step, this = self._limits.step, (span.start, span.count, span.first_layer)
        if span.is_layered and span.count > step.layered_rows:
            raise self.wrong(f"{span.count} rows for some layers", f"at most {step.layered_rows}")
        if this != held.begun and (span.first_layer > 0 or held.begun[2] > 0):
            raise self.wrong(f"the span {span.place} of sequence {span.seq}", f"layer {held.begun[2]} of what is begun")
        if span.n_logits > (1 if span.is_layered else span.count) or (span.n_logits and span.stop_layer is not None):
            raise self.wrong(f"{span.n_logits} logits of the span {span.place}", "one, after the last layer")
        held.begun = (0, 0, 0) if span.stop_layer is None else (span.start, span.count, span.stop_layer)

    def _check_groups(self, span: Span, held: _Held) -> None:
        """Beside 4-bit pages a span begins with a group, or in a group that its sequence holds: few
        sequences hold any.
        """
        size = self._limits.group
        first, last = span.start // size, (span.start + span.count - 1) // size
        if span.start % size and first not in held.groups:
            raise self.wrong(f"the span {span.place} of sequence {span.seq}", f"a start at a multiple of {size}")
        held.groups = first, last
        holding = sum(bool(other.groups) for other in self._held.values())
        if size > 1 and holding > self._limits.step.max_seqs:
            raise self.wrong(f"{holding} sequences that run", f"at most {self._limits.step.max_seqs}")

    # -- pages -------------------------------------------------------------------------------------
    def _save(self, entry: Any) -> Save:
        page, slot, key, parent, ids = self._row(entry, 5)
        where = self._page(page), self._slot(slot)
        save = Save(*where, self._key(key), self._key(parent), self._ids(ids, "a saved page"))
        if len(save.ids) != self._limits.page_size:
            raise self.wrong(f"a saved page of {len(save.ids)} tokens", str(self._limits.page_size))
        return save

    def _load(self, entry: Any) -> Load:
        slot, page, key = self._row(entry, 3)
        return Load(self._slot(slot), self._page(page), self._key(key))

    # -- numbers -----------------------------------------------------------------------------------
    def _row(self, entry: Any, size: int) -> list[Any]:
        if not isinstance(entry, list) or len(entry) != size:
            raise self.wrong(f"{entry!r:.60}", f"a list of {size}")
        return entry

    def _list(self, values: Any, what: str) -> list[Any]:
        if not isinstance(values, list):
            raise self.wrong(f"the {what} {values!r:.60}", "a list")
        return values

    def _seq(self, value: Any) -> SeqId:
        return SeqId(self._whole(value, 0, _MOST, "a sequence"))

    def _page(self, value: Any) -> PageId:
        return PageId(self._whole(value, 0, self._limits.n_pages - 1, "a page"))

    def _slot(self, value: Any) -> SlotId:
        return SlotId(self._whole(value, 0, _MOST, "a slot"))

    def _key(self, value: Any) -> bytes:
        try:
            key = bytes.fromhex(value)
        except (TypeError, ValueError):
            key = b""
        if len(key) != KEY_BYTES:
            raise self.wrong(f"the key {value!r:.80}", f"{2 * KEY_BYTES} hexadecimal digits")
        return key

    def _ids(self, values: Any, where: str) -> tuple[int, ...]:
        most = self._limits.vocab - 1
        return tuple(self._whole(value, 0, most, "a token id") for value in self._list(values, f"ids of {where}"))

    def _whole(self, value: Any, least: int, most: int, what: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(f"{what} {value!r:.60}", f"a whole number from {least} to {most}")
        return value

    def wrong(self, value: str, expected: str) -> MartletError:
        """The error of a plan that cannot be run."""
        return RequestError(f"The plan of step {self._step} has {value}; expected {expected}.", param="plan")
