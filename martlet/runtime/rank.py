"""What every rank does: pages moved, ids laid out, the captured program run, logits out (read
`runtime/flatten.py` next).

A rank needs plans and nothing else. It keeps a page table for each sequence between the plan that
adds it and the one that drops it. The decoder is captured once: a step fills input arrays and
replays the program. Sampling is no part of it (`sampling.py`, on rank 0); neither are adapters'
tables, float16 windows and disk files, known by Protocols only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from martlet.models.decoder import Features, forward, hidden_states
from martlet.models.lora import Adapter
from martlet.models.weights import Model
from martlet.ops.interface import Array, Backend, Program, StepInputs, StepLimits
from martlet.runtime.flatten import PageTable, StepBuffers, Window
from martlet.runtime.page_moves import Moved, PageMoves
from martlet.types import PageId, SeqId, Span, StepPlan

F32 = NDArray[np.float32]
_ALONE = SeqId(0)  # a sequence in a table of its own, which never meets those that generate


class AdapterTables(Protocol):
    """The adapters that are loaded, and the programs that apply them (`runtime/lora.py`)."""

    def add(self, adapter: Adapter) -> None:
        """Load an adapter, between two steps."""

    def remove(self, digest: str) -> None:
        """Let go of an adapter that no sequence uses."""

    def slots(self, runs: Iterable[tuple[str, int]]) -> NDArray[np.int32] | None:
        """Each row's slot, int32 [T], from (digest, rows) of each span; None: no adapters."""

    @property
    def programs(self) -> Programs:
        """The programs of steps in which `slots` gave some."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a program's run gave for its spans. Arrays are views, valid until the next run."""

    spans: tuple[Span, ...]
    logits: F32  # [L, V], of the spans' logit rows
    features: F32 | None  # [T, W], of all rows, if the model has any


@dataclass(frozen=True, slots=True)
class Programs:
    """A model's captured steps. Each returns the logits, and the features if the model has any.

    `layered` is for one chunk that goes through some layers a step: its activations wait in the
    program for the next.
    """

    whole: Program
    layered: Program | None

    @classmethod
    def capture(cls, ops: Backend, model: Model, caches: Sequence[Array], limits: StepLimits) -> Programs:
        """Capture them; `caches` has one KV cache a layer."""

        def step() -> tuple[Array, ...]:
            if not model.features:
                return (forward(ops, model, caches),)
            features = Features(ops, model.features, model.spec.hidden)
            return forward(ops, model, caches, features), features.out

        layered = ops.capture(step, _layered(limits)) if limits.layered_rows else None
        return cls(ops.capture(step, limits), layered)


def _layered(limits: StepLimits) -> StepLimits:
    """The largest step of a chunk that goes through the layers in parts."""
    return StepLimits(limits.layered_rows, 1, 1, limits.max_pages_per_seq)


class Rank:
    """Runs plans on one backend. `limits` bounds every step; `caches` has one KV cache a layer."""

    def __init__(
        self,
        ops: Backend,
        model: Model,
        caches: Sequence[Array],
        limits: StepLimits,
        page_size: int,
        moves: PageMoves,
        adapters: AdapterTables,
        window: Window | None = None,
    ) -> None:
        self._ops = ops
        self._model = model
        self._caches = caches
        self._limits = limits
        self._moves = moves
        self._buffers = StepBuffers(limits, page_size, window)
        self._layered_buffers = StepBuffers(_layered(limits), page_size, window)
        self._tables: dict[SeqId, PageTable] = {}
        self._digests: dict[SeqId, str] = {}  # of adapters; of sequences without one there is none
        self.adapters = adapters
        self._programs = Programs.capture(ops, model, caches, limits)
        self._hidden: Program | None = None

    def begin(self, plan: StepPlan) -> Moved:
        """Take in which sequences come and go, and move the plan's pages."""
        for seq_id in (*plan.dropped, *plan.preempted):
            if seq_id in self._tables:
                self._buffers.release(self._tables[seq_id])
        for seq_id in plan.dropped:
            self._tables.pop(seq_id, None)
            self._digests.pop(seq_id, None)
        for added in plan.added:
            self._tables[added.seq] = PageTable()
            if added.adapter:
                self._digests[added.seq] = added.adapter
        return self._moves.run(plan)

    def compute(self, plan: StepPlan) -> Iterator[Computed]:
        """Compute the chunks that go through some layers only, each alone, and all else together.

        Take each result in before the next is asked for. A chunk with layers to come gives none.
        """
        whole = plan.spans
        if any(span.is_layered for span in whole):
            for span in whole:
                if span.is_layered:
                    computed = self._run((span,), layered=True)
                    if span.stop_layer is None:
                        yield computed
            whole = tuple(span for span in whole if not span.is_layered)
        if whole:
            yield self._run(whole)

    def _run(self, spans: tuple[Span, ...], layered: bool = False) -> Computed:
        """Run a program on the spans."""
        buffers = self._layered_buffers if layered else self._buffers
        inputs, programs = buffers.fill(spans, self._tables), self._programs
        if self._digests:
            inputs, programs = self._adapted(inputs, spans)
        program, first, stop = programs.whole, 0, None
        if layered:
            assert programs.layered is not None, "a step within the limits has no such span"
            program, first, stop = programs.layered, spans[0].first_layer, spans[0].stop_layer
        logits, *features = program.run(inputs, first, stop)
        view = self._ops.view
        return Computed(spans, view(logits), view(features[0]) if features else None)

    def _adapted(self, inputs: StepInputs, spans: tuple[Span, ...]) -> tuple[StepInputs, Programs]:
        """The inputs and the programs of a step that may have adapters."""
        slots = self.adapters.slots((self._digests.get(span.seq, ""), span.count) for span in spans)
        if slots is None:
            return inputs, self._programs
        return replace(inputs, lora_slots=slots), self.adapters.programs

    def pages(self, seq: SeqId) -> list[int]:
        """A sequence's page numbers, in order of position: the list that later steps change."""
        return self._tables[seq].pages

    def embed(self, ids: Sequence[int], pages: tuple[PageId, ...]) -> F32:
        """Return the prompt's mean of the final norm's output, float32 [C], summed in float64."""
        if self._hidden is None:
            self._hidden = self._ops.capture(lambda: hidden_states(self._ops, self._model, self._caches), self._limits)
        tables = {_ALONE: PageTable()}
        total = np.zeros(self._model.spec.hidden, dtype=np.float64)
        for start in range(0, len(ids), self._limits.max_tokens):
            chunk = tuple(ids[start : start + self._limits.max_tokens])
            span = Span(_ALONE, start, len(chunk), chunk, pages if start == 0 else (), 0)
            output = self._hidden.run(self._buffers.fill((span,), tables))
            total += self._ops.download(output).sum(axis=0, dtype=np.float64)
        self._buffers.release(tables[_ALONE])
        return (total / len(ids)).astype(np.float32)

    def warm(self) -> None:
        """Run a step of one row, so that the first request waits for nothing. Keeps nothing."""
        span = Span(_ALONE, 0, 1, (0,), (PageId(0),), 1)
        tables = {_ALONE: PageTable()}
        self._ops.download(self._programs.whole.run(self._buffers.fill((span,), tables))[0])
        self._buffers.release(tables[_ALONE])

    def probe_load(self) -> float | None:
        """Seconds that loading a second tier's page takes, by trying before anything else runs."""
        return self._moves.probe(PageId(0))

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._tables.clear()
        self._digests.clear()
        self._ops.close()
