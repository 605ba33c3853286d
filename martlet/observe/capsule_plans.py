"""The schedule of a capsule as plans again, every number of it checked (read `capsule_replay.py` next, which runs them).

A wrong number in a plan would make compiled code read or write memory that is not its own, so nothing is believed: pages
and ids are in range, a span's positions have pages and tokens, and a step is within the limits that the engine has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from martlet.errors import MartletError, RequestError
from martlet.ops.interface import StepLimits
from martlet.runtime.disk_format import KEY_BYTES
from martlet.sampling_params import SamplingParams, validate_for_vocab
from martlet.types import Copy, Load, PageId, Request, Save, SeqId, Sequence, SlotId, Span, StepPlan, stop_ids

__all__ = ["Schedule", "ScheduleLimits"]

_MOST = 1 << 40
_STEP_PARTS = {"spans", "added", "dropped", "preempted", "saves", "loads", "copies", "failed"}


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    """What the engine that replays can hold."""

    step: StepLimits
    vocab: int
    context: int
    n_pages: int
    page_size: int
    n_layers: int
    eos_ids: frozenset[int] = frozenset()
    adapters: frozenset[str] = frozenset()  # digests of those that are loaded
    group: int = 1  # positions that 4-bit pages take together, after having been kept in float16; 1: no such pages


@dataclass(slots=True)
class _Known:
    """What the runner holds of a sequence."""

    place: tuple[int, int]  # its request's number, and its index in it
    limit: int
    n_ids: int
    n_pages: int = 0
    groups: tuple[int, ...] = ()  # whose positions are in float16 still
    begun: tuple[int, int, int] = (0, 0, 0)  # a chunk with layers to come: its start and count, and the next layer


class Schedule:
    """The plans of a capsule. Raises RequestError, naming the step, for what cannot be."""

    def __init__(self, capsule: Mapping[str, Any], limits: ScheduleLimits) -> None:
        self._limits = limits
        self._steps = capsule["steps"]
        self.requests: list[Request] = []
        self.outputs: list[list[list[int]]] = []
        self.sequences: dict[SeqId, _Known] = {}  # those that the runner holds now
        self._slots: dict[SlotId, bytes] = {}  # written by this schedule, and the keys that they hold
        self._step = 0
        for row in capsule["requests"]:
            self._read_request(row)

    def name_of(self, seq: SeqId) -> tuple[str, int]:
        """A sequence's request id and index."""
        number, index = self.sequences[seq].place
        return self.requests[number].request_id, index

    def grow(self, seq: SeqId, count: int) -> None:
        """Tokens were sampled for a sequence."""
        self.sequences[seq].n_ids += count

    def plans(self) -> Iterator[tuple[StepPlan, bool]]:
        """The plans in order, each with whether its step failed; the one before must have run."""
        previous: tuple[Span, ...] = ()
        for row in self._steps:
            if isinstance(row, dict):
                self._step += 1
                plan = self._plan(row)
                yield plan, bool(row.get("failed"))
                previous = plan.spans
                continue
            for _ in range(self._whole(row, 1, _MOST, "a repetition")):
                self._step += 1
                previous = tuple(Span(s.seq, s.start + s.count, 1, (), 1) for s in previous)
                self._check_spans(previous)
                yield StepPlan(self._step, previous), False

    # -- requests -------------------------------------------------------------------------------------------------
    def _read_request(self, row: Any) -> None:
        where = f"request {len(self.requests)}"
        if not isinstance(row, dict) or not isinstance(row.get("params"), dict) or not isinstance(row.get("id"), str):
            raise self._wrong(where, "an object with id, prompt_ids, params and outputs")
        params = SamplingParams.from_dict(row["params"])
        validate_for_vocab(params, self._limits.vocab)
        prompt = self._ids(row.get("prompt_ids"), where)
        outputs = row.get("outputs")
        if not isinstance(outputs, list) or len(outputs) != params.n or not prompt:
            raise self._wrong(where, f"a prompt and {params.n} outputs")
        n_answered = self._whole(row.get("answered", 0), 0, len(prompt), "an answer's ids in a prompt")
        adapter = row.get("adapter", "")
        if adapter and adapter not in self._limits.adapters:
            raise self._wrong(f"{where} with the adapter {adapter!r:.80}", "one that is loaded here")
        self.requests.append(Request(row["id"], prompt, params, adapter=adapter, n_answered=n_answered))
        self.outputs.append([list(self._ids(answer, where)) for answer in outputs])

    # -- steps ----------------------------------------------------------------------------------------------------
    def _plan(self, row: dict[str, Any]) -> StepPlan:
        if unknown := set(row) - _STEP_PARTS:
            raise self._wrong(f"a step with {sorted(unknown)}", f"parts among {sorted(_STEP_PARTS)}")
        parts = {name: row.get(name, []) for name in _STEP_PARTS - {"failed"}}
        for name, part in parts.items():
            if not isinstance(part, list):
                raise self._wrong(f"{name} {part!r}", "a list")
        dropped = tuple(self._seq(number) for number in parts["dropped"])
        for seq in dropped:
            self.sequences.pop(seq, None)
        added = tuple(self._added(entry) for entry in parts["added"])
        saves = tuple(self._save(entry) for entry in parts["saves"])
        loads = tuple(self._load(entry) for entry in parts["loads"])
        copies = tuple(Copy(*(self._page(page) for page in self._row(entry, 2))) for entry in parts["copies"])
        preempted = tuple(self._seq(number) for number in parts["preempted"])
        for known in map(self.sequences.get, preempted):
            if known is not None:
                known.begun, known.groups = (0, 0, 0), ()
        spans = tuple(self._span(entry) for entry in parts["spans"])
        self._check_spans(spans)
        return StepPlan(self._step, spans, added, dropped, preempted, saves, loads, copies)

    def _added(self, entry: Any) -> Sequence:
        number, request, index, limit, beyond = self._row(entry, 5)
        seq = self._seq(number)
        place = self._whole(request, 0, len(self.requests) - 1, "a request")
        asked = self.requests[place]
        index = self._whole(index, 0, asked.params.n - 1, "an index")
        ids = [*asked.prompt_ids, *self._ids(beyond, "a sequence")]
        limit = self._whole(limit, len(ids), self._limits.context, "a limit")
        if seq in self.sequences:
            raise self._wrong(f"sequence {seq} twice", "each once")
        self.sequences[seq] = _Known((place, index), limit, len(ids))
        return Sequence(seq, asked, index, ids, limit, stop_ids(asked.params, self._limits.eos_ids))

    def _span(self, entry: Any) -> Span:
        if not isinstance(entry, list) or len(entry) not in (4, 6, 7, 8):
            raise self._wrong(
                f"the span {entry!r}",
                "four numbers, or five and a list of pages, or a draft and layers after these",
            )
        seq, start, count, n_logits = (self._whole(value, 0, _MOST, "a number of a span") for value in entry[:4])
        first, pages = (entry[4], entry[5]) if len(entry) > 4 else (0, [])
        known = self.sequences.get(SeqId(seq))
        if known is None:
            raise self._wrong(f"a span of sequence {seq}", "one that was added")
        first = self._whole(first, 0, known.n_pages, "a first page")
        if not isinstance(pages, list):
            raise self._wrong(f"the pages {pages!r}", "a list")
        taken = tuple(self._page(page) for page in pages)
        if taken:
            known.n_pages = first + len(taken)
            if known.n_pages > -(-known.limit // self._limits.page_size):
                raise self._wrong(f"{known.n_pages} pages of a sequence", f"what {known.limit} tokens take")
        draft = self._ids(entry[6], "a draft") if len(entry) > 6 else ()
        if draft and not count == n_logits == len(draft) + 1:
            raise self._wrong(f"a draft of {len(draft)} in a span of {count}", "a row of logits for each, and one more")
        layers = self._layers(entry[7]) if len(entry) > 7 else (0, None)
        return Span(SeqId(seq), start, count, taken, n_logits, first, draft, *layers)

    def _layers(self, entry: Any) -> tuple[int, int | None]:
        """The layers that a span computes: the first, and where it stops, None for nowhere."""
        first, stop = self._row(entry, 2)
        first = self._whole(first, 0, self._limits.n_layers - 1, "a span's first layer")
        return first, None if stop is None else self._whole(stop, first + 1, self._limits.n_layers - 1, "a layer")

    def _check_spans(self, spans: tuple[Span, ...]) -> None:
        step = self._limits.step
        whole = [span for span in spans if not span.is_layered]
        rows, logits = sum(s.count for s in whole), sum(s.n_logits for s in whole)
        if len(spans) > step.max_seqs or rows > step.max_tokens or logits > step.max_logits:
            raise self._wrong(f"{len(spans)} spans, {rows} rows, {logits} logits", f"at most what {step} says")
        if len({span.seq for span in spans}) != len(spans):
            raise self._wrong("a sequence with two spans", "one")
        for span in spans:
            known = self.sequences[span.seq]
            end, n_ids = span.start + span.count, known.n_ids + max(0, span.count - 1 if span.draft else 0)
            room = min(known.n_pages * self._limits.page_size, n_ids)
            if span.count < 1 or end > room or span.n_logits > span.count or (span.draft and end != n_ids):
                raise self._wrong(
                    f"the span {span.start}+{span.count} of sequence {span.seq}", f"positions below {room}"
                )
            if span.n_logits and end == n_ids >= known.limit and self._samples(span.seq):
                raise self._wrong(f"a token after the last of sequence {span.seq}", f"at most {known.limit}")
            self._check_layers(span, known)
            self._check_groups(span, known)

    def _check_layers(self, span: Span, known: _Known) -> None:
        """A chunk goes through the layers in order, no other one of its sequence in between, and asks for logits at the end."""
        found = span.start, span.count, span.first_layer
        if span.is_layered and span.count > self._limits.step.layered_rows:
            raise self._wrong(f"{span.count} rows for some layers", f"at most {self._limits.step.layered_rows}")
        if found != known.begun and (span.first_layer > 0 or known.begun[2] > 0):
            raise self._wrong(
                f"the span {span.place} of sequence {span.seq}", f"layer {known.begun[2]} of what is begun"
            )
        if span.n_logits > (1 if span.is_layered else span.count) or (span.n_logits and span.stop_layer is not None):
            raise self._wrong(f"{span.n_logits} logits of the span {span.place}", "one, after the last layer")
        known.begun = (0, 0, 0) if span.stop_layer is None else (span.start, span.count, span.stop_layer)

    def _check_groups(self, span: Span, known: _Known) -> None:
        """Beside 4-bit pages a span begins with a group or in one of those that its sequence holds, few of which there are."""
        size = self._limits.group
        first, last = span.start // size, (span.start + span.count - 1) // size
        if span.start % size and first not in known.groups:
            raise self._wrong(f"the span {span.place} of sequence {span.seq}", f"a start at a multiple of {size}")
        known.groups = first, last
        holding = sum(bool(other.groups) for other in self.sequences.values())
        if size > 1 and holding > self._limits.step.max_seqs:
            raise self._wrong(f"{holding} sequences that run", f"at most {self._limits.step.max_seqs}")

    def _samples(self, seq: SeqId) -> bool:
        return self.requests[self.sequences[seq].place[0]].params.max_tokens != 0

    def _save(self, entry: Any) -> Save:
        page, slot, key, parent, ids = self._row(entry, 5)
        save = Save(
            self._page(page), self._slot(slot), self._key(key), self._key(parent), self._ids(ids, "a saved page")
        )
        if len(save.ids) != self._limits.page_size:
            raise self._wrong(f"a saved page of {len(save.ids)} tokens", str(self._limits.page_size))
        self._slots[save.slot] = save.key
        return save

    def _load(self, entry: Any) -> Load:
        slot, page, key = self._row(entry, 3)
        load = Load(self._slot(slot), self._page(page), self._key(key))
        if self._slots.get(load.slot) != load.key:
            raise self._wrong(
                f"a page from disk that an earlier engine had written (slot {load.slot})",
                "pages of this one: record with an empty kv_disk",
            )
        return load

    # -- numbers --------------------------------------------------------------------------------------------------
    def _row(self, entry: Any, size: int) -> list[Any]:
        if not isinstance(entry, list) or len(entry) != size:
            raise self._wrong(repr(entry)[:60], f"a list of {size}")
        return entry

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
            raise self._wrong(f"the key {str(value)[:80]!r}", f"{2 * KEY_BYTES} hexadecimal digits")
        return key

    def _ids(self, values: Any, where: str) -> tuple[int, ...]:
        if not isinstance(values, list):
            raise self._wrong(f"the ids {values!r} of {where}", "a list")
        return tuple(self._whole(value, 0, self._limits.vocab - 1, "a token id") for value in values)

    def _whole(self, value: Any, least: int, most: int, what: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(f"{what} {value!r}", f"a whole number from {least} to {most}")
        return value

    def _wrong(self, found: str, expected: str) -> MartletError:
        return RequestError(f"Step {self._step} of the capsule has {found}; expected {expected}.", param="capsule")
