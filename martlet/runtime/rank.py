"""The runner: one plan in, sampled tokens out (read `models/decoder.py` next, then `sample/sampler.py`).

It keeps, for every sequence that runs, its ids, its page numbers and its sampler's state. The decoder is captured once;
every step then only fills the input arrays and replays the program.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from martlet.errors import SampleError
from martlet.models.decoder import hidden_states
from martlet.models.lora import Adapter
from martlet.models.weights import Model
from martlet.ops.interface import Backend, Program, StepInputs, StepLimits
from martlet.runtime.disk_file import DiskFile
from martlet.runtime.f16_window import F16Window
from martlet.runtime.flatten import SequenceRows, StepBuffers
from martlet.runtime.kv import KvMemory
from martlet.runtime.lora import AdapterBank
from martlet.runtime.page_moves import PageMoves
from martlet.runtime.programs import Programs, layered_limits
from martlet.sample.sampler import Sampler, SequenceSampler, token_logprobs
from martlet.sample.verify import verify
from martlet.types import GRAMMAR_LIMIT, PageId, Sampled, SeqId, Sequence, Span, StepPlan, StepResult, TokenLogprobs

__all__ = ["HiddenReader", "Rank"]

F32 = NDArray[np.float32]
_ALONE = SeqId(0)  # a sequence in a table of its own, which never meets those that generate


class HiddenReader(Protocol):
    """Reads the features that the model computes: a draft head."""

    def follow(self, seq: SeqId, rows: SequenceRows, start: int, features: F32) -> None:
        """Features [n, W] of positions from `start` on, whose next ids are known. They hold for the call only."""


class _Running:
    """What the runner keeps of a sequence."""

    __slots__ = ("adapter", "min_tokens", "n_prompt", "prompt_logprobs", "rows", "sampler", "stop_ids")

    def __init__(self, seq: Sequence, shared: Sampler) -> None:
        params = seq.request.params
        self.rows = SequenceRows(seq.ids)
        self.adapter = seq.request.adapter
        self.n_prompt = seq.n_prompt
        self.prompt_logprobs = params.prompt_logprobs
        # Before min_tokens no end is sampled, unless a grammar's text is complete and nothing else can follow.
        self.stop_ids, self.min_tokens = seq.stop_ids, 0 if params.structured is not None else params.min_tokens
        self.sampler: SequenceSampler | None = None  # of a request that wants no token, only its prompt's logprobs
        if params.max_tokens != 0:
            self.sampler = shared.start(params, seq.request.prompt_ids, seq.index, seq.request.n_answered)


class Rank:
    """Runs plans on one backend. `limits` bounds every step."""

    def __init__(
        self,
        ops: Backend,
        model: Model,
        kv: KvMemory,
        limits: StepLimits,
        page_size: int,
        sampler: Sampler,
        tier: DiskFile | None = None,
    ) -> None:
        self._ops = ops
        self._model = model
        self._caches = kv.caches
        self._limits = limits
        self._page_size = page_size
        self._sampler = sampler
        recent = F16Window(kv.recent, page_size) if kv.recent else None
        self._buffers = StepBuffers(limits, page_size, recent)
        self._layered = StepBuffers(layered_limits(limits), page_size, recent)
        self._sequences: dict[SeqId, _Running] = {}
        self._rows: dict[SeqId, SequenceRows] = {}
        self._programs = self._capture(model)
        self._hidden: Program | None = None
        self._bank: AdapterBank | None = None  # once there is an adapter
        self._moves = PageMoves(ops, kv.all, tier)
        self._masks: ThreadPoolExecutor | None = None
        self.head: HiddenReader | None = None  # of the model's `features`

    def run(self, plan: StepPlan) -> StepResult:
        """Move a plan's pages, compute its spans together and sample for those that ask for it."""
        for seq_id in (*plan.dropped, *plan.preempted):
            if seq_id in self._rows:
                self._buffers.release(self._rows[seq_id])
        for seq_id in plan.dropped:
            self._sequences.pop(seq_id, None)
            self._rows.pop(seq_id, None)
        for seq in plan.added:
            running = _Running(seq, self._sampler)
            self._sequences[seq.seq_id] = running
            self._rows[seq.seq_id] = running.rows
        moved = self._moves.run(plan)
        sampled = self._compute(plan.spans) if plan.spans else ()
        return StepResult(plan.step, sampled, moved.failed_saves, moved.failed_loads, moved.load_s, moved.save_s)

    def _compute(self, spans: tuple[Span, ...]) -> tuple[Sampled, ...]:
        """Compute the chunks that go through some layers only, each by itself, and all else together."""
        layered = [span for span in spans if span.is_layered]
        if not layered:
            return self._run_program(spans, self._buffers)
        parts = [self._run_program((span,), self._layered) for span in layered]
        whole = tuple(span for span in spans if not span.is_layered)
        parts.append(self._run_program(whole, self._buffers) if whole else ())
        return tuple(chain.from_iterable(parts))

    def _run_program(self, spans: tuple[Span, ...], buffers: StepBuffers) -> tuple[Sampled, ...]:
        inputs, programs = buffers.fill(spans, self._rows), self._programs
        if self._bank is not None:
            inputs, programs = self._adapted(self._bank, inputs, spans)
        program, first, stop = programs.whole, 0, None
        if buffers is self._layered:
            assert programs.layered is not None, "a step within the limits has no such span"
            program, first, stop = programs.layered, spans[0].first_layer, spans[0].stop_layer
        masks = self._begin_masks(spans)
        found = program.run(inputs, first, stop)
        if stop is not None:
            return ()
        output, *features = found
        if masks is not None:
            masks.result()
        sampled = self._sample_all(spans, self._ops.view(output)) if len(inputs.logit_rows) else ()
        if self.head is not None:
            self._tell(self.head, spans, self._ops.view(features[0]))
        return sampled

    def _capture(self, model: Model) -> Programs:
        return Programs.capture(self._ops, model, self._caches, self._limits)

    def _tell(
        self,
        head: HiddenReader,
        spans: tuple[Span, ...],
        features: F32,
    ) -> None:
        """Give the head the features [T, W] of the rows whose next ids are known: no guess that was wrong is among them."""
        row = 0
        for span in spans:
            rows, of_span = self._rows[span.seq], features[row : row + span.count]
            count = min(len(of_span), len(rows.ids) - 1 - span.start)
            if count > 0:
                head.follow(span.seq, rows, span.start, of_span[:count])
            row += span.count

    def _sample_all(self, spans: tuple[Span, ...], logits: F32) -> tuple[Sampled, ...]:
        """Sample for the spans that have rows of logits [L, V]."""
        sampled: list[Sampled] = []
        row = 0
        for span in spans:
            if span.n_logits:
                sampled.append(self._sample(span, logits[row : row + span.n_logits]))
                row += span.n_logits
        return tuple(sampled)

    def _adapted(self, bank: AdapterBank, inputs: StepInputs, spans: tuple[Span, ...]) -> tuple[StepInputs, Programs]:
        """The inputs and the programs of a step that may have adapters."""
        slots = bank.rows((self._sequences[span.seq].adapter, span.count) for span in spans)
        return (inputs, self._programs) if slots is None else (replace(inputs, lora_slots=slots), bank.programs)

    def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter, between two steps."""
        if self._bank is None:
            self._bank = AdapterBank(self._ops, self._model, self._capture)
        self._bank.add(adapter)

    def remove_adapter(self, digest: str) -> None:
        """Let go of an adapter that no sequence uses."""
        if self._bank is not None:
            self._bank.remove(digest)

    def _begin_masks(self, spans: tuple[Span, ...]) -> Future[None] | None:
        """Compute what grammars allow while the layers run, in a thread of its own; None if there is nothing to do.

        Only for sequences that will sample, and whose mask is not one that was kept: copying that takes microseconds.
        """
        new = [
            sampler
            for span in spans
            if span.n_logits
            and (sampler := self._sequences[span.seq].sampler) is not None
            and sampler.needs_mask
            and span.start + span.count - len(span.draft) == len(self._sequences[span.seq].rows.ids)
        ]
        if not new:
            return None
        if self._masks is None:
            self._masks = ThreadPoolExecutor(1, thread_name_prefix="martlet-masks")
        return self._masks.submit(_prepare, new)

    def embed(self, ids: Seq[int], pages: tuple[PageId, ...]) -> F32:
        """Return the mean over the prompt of what the final norm gives, [C], summed in float64."""
        if self._hidden is None:
            self._hidden = self._ops.capture(lambda: hidden_states(self._ops, self._model, self._caches), self._limits)
        rows = {_ALONE: SequenceRows(ids)}
        total = np.zeros(self._model.spec.hidden, dtype=np.float64)
        for start in range(0, len(ids), self._limits.max_tokens):
            count = min(self._limits.max_tokens, len(ids) - start)
            span = Span(_ALONE, start, count, pages if start == 0 else (), 0)
            output = self._hidden.run(self._buffers.fill((span,), rows))
            total += self._ops.download(output).sum(axis=0, dtype=np.float64)
        self._buffers.release(rows[_ALONE])
        return (total / len(ids)).astype(np.float32)

    def warm(self) -> None:
        """Run a step of one row, so that the first request finds everything in place; nothing of it is kept."""
        span = Span(_ALONE, 0, 1, (PageId(0),), 1)
        rows = {_ALONE: SequenceRows((0,))}
        self._ops.download(self._programs.whole.run(self._buffers.fill((span,), rows))[0])
        self._buffers.release(rows[_ALONE])

    def probe_load(self) -> float | None:
        """Seconds that a page's way back from the second tier takes, by trying; before anything else runs."""
        return self._moves.probe(PageId(0))

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._sequences.clear()
        self._rows.clear()
        if self._masks is not None:
            self._masks.shutdown()
        self._ops.close()

    def _sample(self, span: Span, logits: F32) -> Sampled:
        """Read the logits of a span's last rows: first what they say of the prompt, then the next token."""
        running = self._sequences[span.seq]
        end = span.start + span.count
        scored: tuple[TokenLogprobs, ...] = ()
        try:
            if running.prompt_logprobs is not None and end - span.n_logits < running.n_prompt - 1:
                scored = self._score(running, end - span.n_logits, logits)
            if end < len(running.rows.ids) or running.sampler is None:
                return Sampled(span.seq, None, prompt_logprobs=scored)
            token_id, logprobs = running.sampler.sample(logits[0 if span.draft else -1])
        except SampleError as error:  # it ends this sequence only
            return Sampled(span.seq, None, error=str(error))
        running.rows.ids.append(token_id)
        more = self._verify(running, span, logits) if span.draft else ()
        constraint = running.sampler.constraint
        forced = running.sampler.forced_ids() if constraint is not None else ()
        limit = GRAMMAR_LIMIT if constraint is not None and constraint.is_limited() else None
        return Sampled(span.seq, token_id, logprobs, scored, more=more, forced=forced, limit=limit)

    def _verify(self, running: _Running, span: Span, logits: F32) -> tuple[tuple[int, TokenLogprobs | None], ...]:
        """Go on sampling after the first row as long as the draft has guessed what was sampled.

        A row is good if all ids before it are: then it is the row that decoding alone would have had, to the bit, and the
        sampler, whose random numbers depend on the position only, chooses from it as it would have then.
        """
        sampler, ids, found = running.sampler, running.rows.ids, []
        assert sampler is not None

        def draw(row: int) -> int | None:
            if self._ends(running):
                return None
            try:
                token_id, logprobs = sampler.sample(logits[row])
            except SampleError:  # the next step meets it again, and says so
                return None
            ids.append(token_id)
            found.append((token_id, logprobs))
            return token_id

        verify(span, ids[-1], draw)
        return tuple(found)

    def _ends(self, running: _Running) -> bool:
        """Whether the last id ends the sequence: nothing is sampled after it."""
        ids = running.rows.ids
        return ids[-1] in running.stop_ids and len(ids) - running.n_prompt >= running.min_tokens

    def _score(self, running: _Running, start: int, logits: F32) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt's tokens from start + 1 on: row i is about position start + i + 1."""
        assert running.prompt_logprobs is not None
        stop = min(start + len(logits), running.n_prompt - 1)
        return tuple(
            token_logprobs(logits[position - start], running.rows.ids[position + 1], running.prompt_logprobs)
            for position in range(start, stop)
        )


def _prepare(samplers: Seq[SequenceSampler]) -> None:
    for sampler in samplers:
        sampler.prepare()
