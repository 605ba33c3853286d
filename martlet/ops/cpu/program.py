"""Recording operations and replaying them: the captured step of the CPU backend.

Read `team.py` for who walks it.

While a step is captured each operation becomes a record. Two records need a barrier between them
only if one touches memory that the other writes; the recorder knows what each reads and writes and
asks for no more meetings than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.ops.cpu.kernels.fields import (
    ARGS,
    BARRIER,
    BYTES,
    COUNTER,
    GATHER_ROWS,
    KERNEL,
    LINE_WORDS,
    ORDER_HEAD,
    ORDER_WORDS,
    QUANTIZE,
    RECORD_FIELDS,
    ROWS,
    ROWS_PER_TILE,
    SEGMENT_PAGES,
    SORT_CHOICES,
    STEP_ENDED,
    STEP_IDS,
    STEP_LEAST,
    STEP_LOGIT_ROWS,
    STEP_LOGITS,
    STEP_LORA_SLOTS,
    STEP_PAGE_STRIDE,
    STEP_PAGE_TABLE,
    STEP_POSITIONS,
    STEP_RECENT_SLOTS,
    STEP_RECENT_TABLE,
    STEP_SEQS,
    STEP_SLOTS,
    STEP_SPAN_STARTS,
    STEP_TOKENS,
    SUMS_PER_BLOCK,
    float_bits,
    state_floats,
)
from martlet.ops.cpu.kernels.layout import BLOCK
from martlet.ops.cpu.store import KernelStore
from martlet.ops.cpu.threads import Team, aligned
from martlet.ops.interface import Rows, StepInputs, StepLimits
from martlet.spec import Rope

ROW_FIELDS = {Rows.TOKENS: STEP_TOKENS, Rows.LOGITS: STEP_LOGITS}


@dataclass(frozen=True, slots=True)
class Region:
    """Columns start … stop of a buffer, for telling what an operation touches."""

    buffer: int  # address
    start: int
    stop: int

    def overlaps(self, other: Region) -> bool:
        """Whether the two share memory."""
        return self.buffer == other.buffer and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class CpuArray:
    """An activation, float32 [rows, width]: columns of `buffer`, rows `stride` floats apart."""

    rows: Rows
    width: int
    stride: int
    buffer: NDArray[np.float32] = field(repr=False)
    start: int = 0

    @property
    def address(self) -> int:
        return int(self.buffer.ctypes.data) + self.start * 4

    @property
    def region(self) -> Region:
        """What reading or writing it touches."""
        return Region(int(self.buffer.ctypes.data), self.start, self.start + self.width)


@dataclass(frozen=True, slots=True, eq=False)
class ByteRows:
    """An activation as bytes (`quantize.py`), for [rows, width]."""

    width: int
    q: NDArray[np.int8] = field(repr=False)
    scales: NDArray[np.float32] = field(repr=False)
    sums: NDArray[np.int32] = field(repr=False)
    mins: NDArray[np.float32] = field(repr=False)

    @classmethod
    def empty(cls, n_rows: int, width: int) -> ByteRows:
        """Room for n_rows, whole tiles of them."""
        count, sums = n_rows * width, n_rows * width // BLOCK * SUMS_PER_BLOCK
        return cls(
            width,
            aligned(count, np.int8),
            aligned(count // BLOCK * 4, np.float32),
            aligned(sums * 4, np.int32),
            aligned(sums * 4, np.float32),
        )

    @property
    def region(self) -> Region:
        """What reading or writing it touches."""
        return Region(int(self.q.ctypes.data), 0, 1)

    @property
    def fields(self) -> dict[str, int]:
        """The fields of a product that reads it: the four arrays' addresses."""
        arrays = {"X": self.q, "X_SCALES": self.scales, "X_SUMS": self.sums, "X_MINS": self.mins}
        return {name: int(array.ctypes.data) for name, array in arrays.items()}


@dataclass(frozen=True, slots=True, eq=False)
class ExpertOrder:
    """The pairs of rows and experts of a choice, sorted by expert (`kernels/route.py`)."""

    n_tiles: int  # at most
    order: NDArray[np.int32] = field(repr=False)
    pairs: NDArray[np.int32] = field(repr=False)
    tiles: NDArray[np.int32] = field(repr=False)

    @classmethod
    def empty(cls, n_pairs: int, n_experts: int) -> ExpertOrder:
        """Room for so many pairs."""
        n_tiles = n_pairs // ROWS_PER_TILE + min(n_pairs, n_experts)
        words = ORDER_HEAD + n_experts * (ORDER_WORDS + 1)
        return cls(n_tiles, *(aligned(4 * n, np.int32) for n in (words, 3 * n_pairs, 2 * n_tiles)))

    @property
    def region(self) -> Region:
        """What reading or writing it touches."""
        return Region(int(self.order.ctypes.data), 0, 1)

    @property
    def fields(self) -> dict[str, int]:
        """The fields of records that read it."""
        return {"ORDER": int(self.order.ctypes.data), "PAIRS": int(self.pairs.ctypes.data)}


class Recorder:
    """Collects the records of one captured step."""

    def __init__(self, store: KernelStore, limits: StepLimits) -> None:
        self.limits = limits
        self._store = store
        self._records: list[list[int]] = []
        self._sections: list[int] = []  # the first record of each but the first
        self._reads: list[Region] = []  # since the last barrier
        self._writes: list[Region] = []
        self._bytes: dict[Region, ByteRows] = {}  # activations of which a byte form is current
        self._spare: list[ByteRows] = []
        self._orders: dict[Region, ExpertOrder] = {}  # of choices of experts
        self._sorted: set[Region] = set()  # choices whose order is current
        self._gathered: dict[tuple[str, int, int], ByteRows | NDArray[np.float32]] = {}
        self._held: list[Any] = []  # the buffers that records point to
        self._producer: Region | None = None  # the last record's output, if it can make bytes too
        self._states: NDArray[np.float32] | None = None
        self.angles: dict[Rope, CpuArray] = {}  # the tables of `rope`
        self.feed: CpuArray | None = None  # what comes from outside with each step
        self._meets = 0  # BARRIER of the next operation, if nothing else asks for one

    def capacity(self, rows: Rows) -> int:
        """Rows that a buffer needs, whole tiles of them."""
        return -(-self.limits.most(rows) // ROWS_PER_TILE) * ROWS_PER_TILE

    def keep(self, held: Any) -> None:
        """Keep something alive as long as the program."""
        self._held.append(held)

    def empty(self, rows: Rows, width: int, filled: bool = True) -> CpuArray:
        """A zeroed activation, its rows filled up to whole registers unless told not to."""
        stride = -(-width // 16) * 16 if filled else width
        buffer = aligned(self.capacity(rows) * stride * 4, np.float32)
        self.keep(buffer)
        return CpuArray(rows, width, stride, buffer)

    def emit(
        self,
        kernel: str,
        rows: Rows,
        args: Sequence[int],
        reads: list[Region],
        writes: list[Region],
        makes_bytes: bool = False,
    ) -> list[int]:
        """Append an operation; `args` are its own fields.

        `makes_bytes`: it can make its output's byte form as well.
        """
        touched = [(r, self._writes) for r in reads] + [(w, self._writes + self._reads) for w in writes]
        overlaps = any(region.overlaps(other) for region, others in touched for other in others)
        barrier, self._meets = max(self._meets, int(overlaps)), 0
        if barrier:
            self._reads, self._writes = [], []
        self._reads += reads
        self._writes += writes
        for stale in [known for known in self._bytes if any(known.overlaps(w) for w in writes)]:
            self._spare.append(self._bytes.pop(stale))
        self._sorted = {known for known in self._sorted if not any(known.overlaps(w) for w in writes)}
        record = [self._store.address(kernel), barrier, 0, ROW_FIELDS[rows], *args]
        assert (KERNEL, BARRIER, COUNTER, ROWS, ARGS) == (0, 1, 2, 3, 4)
        record += [0] * (RECORD_FIELDS - len(record))
        assert len(record) == RECORD_FIELDS
        self._records.append(record)
        self._producer = writes[0] if makes_bytes else None
        return record

    def meet(self, may_end: bool = False) -> None:
        """The next operation starts when all before it have ended.

        Or the program ends, if `advance` said so.
        """
        self._meets = 2 if may_end else 1

    def as_bytes(self, x: CpuArray) -> ByteRows:
        """The current byte form of x; else the operation that wrote x makes it, or a new one."""
        if x.region in self._bytes:
            return self._bytes[x.region]
        form = self._new_bytes(x)
        fields = [*form.fields.values(), x.width // BLOCK]
        if self._producer == x.region:
            record = self._records[-1]
            record[BYTES : BYTES + len(fields)] = fields
            if any(form.region.overlaps(other) for other in self._reads + self._writes):
                record[BARRIER], self._reads, self._writes = max(record[BARRIER], 1), [], [x.region]
            self._writes.append(form.region)
        else:
            args = QUANTIZE(IN=x.address, IN_STRIDE=x.stride, N_COLUMNS=x.width)
            record = self.emit("quantize", x.rows, args, [x.region], [form.region])
            record[BYTES : BYTES + len(fields)] = fields
        self._bytes[x.region] = form
        return form

    def order_of(self, choice: CpuArray, n_experts: int) -> ExpertOrder:
        """The pairs of `choice` [rows, 2S], sorted by expert."""
        chosen = choice.width // 2
        if choice.region not in self._orders:
            self._orders[choice.region] = ExpertOrder.empty(self.capacity(choice.rows) * chosen, n_experts)
            self.keep(self._orders[choice.region])
        order = self._orders[choice.region]
        if choice.region not in self._sorted:
            sizes = {
                "CHOICE": choice.address,
                "CHOICE_STRIDE": choice.stride,
                "N_CHOSEN": chosen,
                "N_EXPERTS": n_experts,
            }
            args = SORT_CHOICES(**sizes, **order.fields, TILES=order.tiles.ctypes.data)
            self.emit("sort_choices", choice.rows, args, [choice.region], [order.region])
            self._sorted.add(choice.region)
        return order

    def gathered(self, x: CpuArray, order: ExpertOrder, k: int, as_bytes: bool) -> tuple[dict[str, int], Region]:
        """The rows of x for each pair, k columns each, in tiles: a product's fields, the region.

        x is [rows, k], or [rows, S * k] where each slot reads its own columns.
        """
        slots = {"N_COLUMNS": k, "SLOT_COLUMNS": 0 if x.width == k else k, "X_COLUMNS": x.width}
        n_rows = order.n_tiles * ROWS_PER_TILE
        if as_bytes:
            form = self.as_bytes(x)
            to = self._held_gathered("bytes", n_rows, k, lambda: ByteRows.empty(n_rows, k))
            source, reads, fields, region = form.fields, form.region, to.fields, to.region
        else:
            to = self._held_gathered("floats", n_rows, k, lambda: aligned(n_rows * k * 4, np.float32))
            source, reads = {"X": x.address, "X_SCALES": 0, "X_SUMS": 0, "X_MINS": 0}, x.region
            fields, region = {**source, "X": int(to.ctypes.data)}, Region(int(to.ctypes.data), 0, 1)
        args = GATHER_ROWS(
            **source,
            X_STRIDE=x.stride,
            **{name.replace("X", "TO", 1): address for name, address in fields.items()},
            **slots,
            **order.fields,
            TILES=order.tiles.ctypes.data,
        )
        self.emit("gather_bytes" if as_bytes else "gather_floats", x.rows, args, [reads, order.region], [region])
        return fields, region

    def _held_gathered(self, kind: str, n_rows: int, k: int, make: Callable[[], Any]) -> Any:
        """Memory for gathered rows: all products of a kind take turns."""
        if (kind, n_rows, k) not in self._gathered:
            self._gathered[kind, n_rows, k] = make()
            self.keep(self._gathered[kind, n_rows, k])
        return self._gathered[kind, n_rows, k]

    def attention_states(self, n_kv_heads: int, head_dim: int) -> list[int]:
        """Address and number of the states by which threads share a token's segments.

        There are enough for the longest sequence of a step, or for shorter ones as long together.
        """
        n_states = -(-self.limits.max_pages_per_seq // SEGMENT_PAGES) * n_kv_heads
        n_floats = n_states * state_floats(head_dim)
        if self._states is None or self._states.size < n_floats:
            self._states = aligned(n_floats * 4, np.float32)
            self.keep(self._states)
        return [int(self._states.ctypes.data), n_states]

    def _new_bytes(self, x: CpuArray) -> ByteRows:
        """A spare byte form that fits x, or a new one."""
        n_rows = self.capacity(x.rows)
        for spare in self._spare:
            if spare.width == x.width and spare.q.size == n_rows * x.width:
                self._spare.remove(spare)
                return spare
        made = ByteRows.empty(n_rows, x.width)
        self.keep(made)
        return made

    def section(self) -> None:
        """What is recorded from here on belongs to the next section."""
        self._sections.append(len(self._records))

    def finish(self, team: Team, step: NDArray[np.int64], outputs: Any) -> CpuProgram:
        """The program, which writes its inputs' addresses and sizes to the header `step`."""
        return CpuProgram(team, step, (self._records, self._sections), self.limits, (outputs, self._held), self.feed)


class CpuProgram:
    """A captured step, ready to replay."""

    def __init__(
        self,
        team: Team,
        step: NDArray[np.int64],
        recorded: tuple[list[list[int]], list[int]],
        limits: StepLimits,
        held: tuple[Any, list[Any]],
        feed: CpuArray | None = None,
    ) -> None:
        self._team, self._step, self._outputs, self._held = team, step, held[0], held
        self._feed = feed
        records, sections = recorded
        n = len(records)
        self._records = aligned(max(n, 1) * RECORD_FIELDS * 8, np.int64).reshape(-1, RECORD_FIELDS)
        self._counters = aligned(max(n, 1) * LINE_WORDS * 8, np.int64)
        if n:
            self._records[:] = records
            self._records[:, COUNTER] = self._counters.ctypes.data + np.arange(n) * LINE_WORDS * 8
        self.n_records = n
        self._sections = [0, *sections, n]
        shapes = {
            STEP_IDS: limits.max_tokens,
            STEP_POSITIONS: limits.max_tokens,
            STEP_SLOTS: limits.max_tokens,
            STEP_SPAN_STARTS: limits.max_seqs + 1,
            STEP_PAGE_TABLE: limits.max_seqs * limits.max_pages_per_seq,
            STEP_LOGIT_ROWS: max(limits.max_logits, 1),
            STEP_RECENT_SLOTS: limits.max_tokens,
            STEP_LORA_SLOTS: limits.max_tokens,
            STEP_RECENT_TABLE: limits.max_seqs * limits.max_pages_per_seq,
        }
        self._inputs = {name: np.zeros(size, np.int32) for name, size in shapes.items()}
        self._places = np.array(list(self._inputs))
        self._addresses = np.array([array.ctypes.data for array in self._inputs.values()])
        self._record_address, self._step_address = self._records.ctypes.data, step.ctypes.data

    def run(self, inputs: StepInputs, first: int = 0, stop: int | None = None) -> Any:
        """Replay the step's sections first … stop - 1 on `inputs`.

        Returns the outputs of the captured function.
        """
        step, buffers = self._step, self._inputs
        step[self._places] = self._addresses
        arrays = (
            (STEP_IDS, inputs.ids),
            (STEP_POSITIONS, inputs.positions),
            (STEP_SLOTS, inputs.slots),
            (STEP_SPAN_STARTS, inputs.span_starts),
            (STEP_LOGIT_ROWS, inputs.logit_rows),
            (STEP_RECENT_SLOTS, inputs.recent_slots),
            (STEP_RECENT_TABLE, inputs.recent_table),
            (STEP_LORA_SLOTS, inputs.lora_slots),
        )
        for name, array in arrays:
            size = array.size
            if size:
                buffers[name][:size] = array.reshape(-1)
        if self._feed is not None:
            rows = self._feed.buffer.reshape(-1, self._feed.stride)[: inputs.ids.size]
            rows[:, self._feed.start : self._feed.start + self._feed.width] = inputs.feed
        table = inputs.page_table
        buffers[STEP_PAGE_TABLE][: table.size] = table.reshape(-1)
        step[STEP_TOKENS], step[STEP_LOGITS] = inputs.ids.size, inputs.logit_rows.size
        step[STEP_SEQS], step[STEP_PAGE_STRIDE] = table.shape
        step[STEP_LEAST] = float_bits(inputs.least) if inputs.least else 0
        self.replay(self._sections[first], self.n_records if stop is None else self._sections[stop])
        # `advance` may have changed these, which say how much of an output there is, and set the
        # last.
        step[STEP_TOKENS], step[STEP_LOGITS], step[STEP_ENDED] = inputs.ids.size, inputs.logit_rows.size, 0
        return self._outputs

    def replay(self, start: int = 0, end: int | None = None) -> None:
        """Walk the records start … end - 1 (None: to the last) with the step's header as it is."""
        end = self.n_records if end is None else end
        self._counters.fill(0)
        address = self._record_address + start * self._records.strides[0]
        self._team.run(address, end - start, self._step_address)
