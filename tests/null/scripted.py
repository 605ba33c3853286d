"""A stand-in for the model: an executor that answers with scripted tokens and checks every plan it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from martlet.types import PageId, Sampled, SeqId, Span, StepPlan, StepResult, TokenLogprobs
from martlet.types import Sequence as EngineSequence

Script = Callable[[EngineSequence, int], int | str]  # sequence, number of the token → its id, or an error


class ScriptedExecutor:
    """Runs no model: token number i of a sequence is `script(sequence, i)`.

    It keeps its own record of which positions are in the cache, as a worker in another process would, and asserts that
    plans are consistent with it.
    """

    def __init__(self, script: Script, page_size: int) -> None:
        self._script = script
        self._page_size = page_size
        self._sequences: dict[SeqId, EngineSequence] = {}
        self._n_ids: dict[SeqId, int] = {}
        self._cached: dict[SeqId, int] = {}
        self._pages: dict[SeqId, list[PageId]] = {}
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for seq_id in plan.dropped:
            del self._sequences[seq_id], self._n_ids[seq_id], self._cached[seq_id], self._pages[seq_id]
        for seq in plan.added:
            assert seq.seq_id not in self._sequences
            self._sequences[seq.seq_id] = seq
            self._n_ids[seq.seq_id] = len(seq.ids)
            self._cached[seq.seq_id] = 0
            self._pages[seq.seq_id] = []
        sampled = [self._span(span) for span in plan.spans]
        return StepResult(plan.step, tuple(entry for entry in sampled if entry is not None))

    def _span(self, span: Span) -> Sampled | None:
        if span.start == 0:
            self._cached[span.seq], self._pages[span.seq] = 0, []
        self._pages[span.seq] += span.new_pages
        end = span.start + span.count
        assert span.start == self._cached[span.seq], "a position is computed twice or left out"
        assert span.count >= 1
        assert end <= self._n_ids[span.seq]
        assert len(self._pages[span.seq]) * self._page_size >= end, "a position has no page"
        assert 0 <= span.n_logits <= span.count
        self._cached[span.seq] = end
        if span.n_logits == 0:
            assert end < self._n_ids[span.seq], "a finished prompt asks for no token"
            return None
        seq = self._sequences[span.seq]
        scored = tuple(
            TokenLogprobs(seq.ids[position + 1], -1.0, 1)
            for position in range(end - span.n_logits, end)
            if seq.request.params.prompt_logprobs is not None and seq.index == 0 and position + 1 < seq.n_prompt
        )
        if end < self._n_ids[span.seq] or seq.request.params.max_tokens == 0:
            return Sampled(span.seq, None, prompt_logprobs=scored)
        token = self._script(seq, self._n_ids[span.seq] - seq.n_prompt)
        if isinstance(token, str):
            return Sampled(span.seq, None, error=token)
        self._n_ids[span.seq] += 1
        return Sampled(span.seq, token, prompt_logprobs=scored)

    def embed(self, ids: Sequence[int], pages: tuple[PageId, ...]) -> NDArray[np.float32]:
        assert len(pages) * self._page_size >= len(ids)
        return np.array([len(ids), 0.0], dtype=np.float32)

    def close(self) -> None:
        self._sequences.clear()
