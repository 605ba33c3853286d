"""A stand-in for the model: an executor that answers with scripted tokens and checks every plan it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from martlet.models.lora import Adapter
from martlet.types import Load, PageId, Sampled, SeqId, SlotId, Span, StepPlan, StepResult, TokenLogprobs
from martlet.types import Sequence as EngineSequence

Script = Callable[[EngineSequence, int], int | str]  # sequence, number of the token → its id, or an error


def rows_of(plan: StepPlan, n_layers: int) -> float:
    """The rows of a step; one that goes through a third of the layers is a third."""
    return sum(
        s.count * ((n_layers if s.stop_layer is None else s.stop_layer) - s.first_layer) / n_layers for s in plan.spans
    )


class _Rows:
    """What a worker keeps of a sequence: its ids and its page table."""

    def __init__(self, seq: EngineSequence) -> None:
        self.seq = seq
        self.ids = list(seq.ids)
        self.pages: list[PageId] = []
        self.histories: list[int] = []  # of each position: the number of the prefix that ends there


class ScriptedExecutor:
    """Runs no model: token number i of a sequence is `script(sequence, i)`.

    It keeps its own record, as a worker in another process would, and of every position of every page the prefix that was
    computed there. A span may only be computed where all positions before it hold the sequence's own prefix: so
    whatever is shared, copied, loaded or evicted wrongly is seen at once.
    """

    def __init__(self, script: Script, page_size: int, fails: Callable[[Load], bool] | None = None) -> None:
        self._script = script
        self._page_size = page_size
        self._fails = fails
        self._sequences: dict[SeqId, _Rows] = {}
        self._prefixes: dict[tuple[int, int], int] = {}  # number of a prefix and the next id → number of both together
        self._contents: dict[PageId, list[int]] = {}
        self._tier: dict[SlotId, tuple[bytes, list[int]]] = {}
        self._begun: tuple[SeqId, int, int, int] | None = None  # a chunk between two layers: whose, start, count, layer
        self.adapters: set[str] = set()
        self.plans: list[StepPlan] = []
        self.keep_plans = True

    def run(self, plan: StepPlan) -> StepResult:
        if self.keep_plans:
            self.plans.append(plan)
        for seq_id in plan.dropped:
            self._sequences.pop(seq_id, None)  # it may have been added by a plan that nobody ran
        if self._begun is not None and self._begun[0] in (*plan.dropped, *plan.preempted):
            self._begun = None
        for seq in plan.added:
            assert seq.seq_id not in self._sequences
            assert seq.request.adapter in ("", *self.adapters)
            self._sequences[seq.seq_id] = _Rows(seq)
        for save in plan.saves:
            self._tier[save.slot] = save.key, list(self._page(save.page))
        failed = []
        for load in plan.loads:
            key, contents = self._tier.get(load.slot, (b"", []))
            if key != load.key or (self._fails is not None and self._fails(load)):
                failed.append(load.slot)
                self._contents[load.page] = [-2] * self._page_size  # whatever was read
            else:
                self._contents[load.page] = list(contents)
        for copy in plan.copies:
            self._contents[copy.target] = list(self._page(copy.source))
        sampled = [self._span(span) for span in plan.spans]
        found = tuple(entry for entry in sampled if entry is not None)
        return StepResult(plan.step, found, failed_loads=tuple(failed), load_s=1e-4 * len(plan.loads))

    def _page(self, page: PageId) -> list[int]:
        return self._contents.setdefault(page, [-1] * self._page_size)

    def _span(self, span: Span) -> Sampled | None:
        rows, size = self._sequences[span.seq], self._page_size
        if span.new_pages:
            assert span.first_page <= len(rows.pages)
            rows.pages[span.first_page :] = span.new_pages
        end = span.start + span.count
        assert span.count >= 1
        ids = [*rows.ids, *span.draft] if span.draft else rows.ids
        assert end <= len(ids)
        if span.draft:
            assert end == len(ids)
            assert span.count == span.n_logits == len(span.draft) + 1
        assert len(rows.pages) * size >= end, "a position has no page"
        assert 0 <= span.n_logits <= span.count
        for position in range(len(rows.histories), end):
            before = rows.histories[-1] if rows.histories else 0
            prefix = before, ids[position]
            rows.histories.append(self._prefixes.setdefault(prefix, len(self._prefixes) + 1))
        if self._goes_on(span):
            return None
        for first in range(0, span.start, size):
            count = min(size, span.start - first)
            found = self._page(rows.pages[first // size])[:count]
            assert found == rows.histories[first : first + count], "a page does not hold the sequence's prefix"
        for position in range(span.start, end):
            self._page(rows.pages[position // size])[position % size] = rows.histories[position]
        if span.n_logits == 0:
            assert end < len(rows.ids), "a finished prompt asks for no token"
            return None
        seq = rows.seq
        scored = tuple(
            TokenLogprobs(seq.ids[position + 1], -1.0, 1)
            for position in range(end - span.n_logits, end)
            if seq.request.params.prompt_logprobs is not None and seq.index == 0 and position + 1 < seq.n_prompt
        )
        if end < len(rows.ids) or seq.request.params.max_tokens == 0:
            return Sampled(span.seq, None, prompt_logprobs=scored)
        token = self._script(seq, len(rows.ids) - seq.n_prompt)
        if isinstance(token, str):
            return Sampled(span.seq, None, error=token)
        rows.ids.append(token)
        more = self._verify(rows, span)
        del rows.histories[len(rows.ids) - 1 :]  # of wrong guesses
        return Sampled(span.seq, token, prompt_logprobs=scored, more=more)

    def _goes_on(self, span: Span) -> bool:
        """Whether layers are to come. What is begun is taken further in order, and nobody else's is before it ends."""
        if span.is_layered and span.first_layer == 0:
            assert self._begun is None, "two chunks are between layers"
        elif span.first_layer > 0 or (self._begun is not None and self._begun[0] == span.seq):
            assert self._begun == (span.seq, span.start, span.count, span.first_layer)
        else:
            return False
        rows, size = self._sequences[span.seq], self._page_size
        for position in range(span.start, span.start + span.count):
            self._page(rows.pages[position // size])[position % size] = -4  # not to be read yet
        if span.stop_layer is None:
            self._begun = None
            return False
        assert span.n_logits == 0
        self._begun = span.seq, span.start, span.count, span.stop_layer
        return True

    def _verify(self, rows: _Rows, span: Span) -> tuple[tuple[int, None], ...]:
        """The tokens after the first, as long as the guess before each was right."""
        seq, found = rows.seq, []
        for guess in span.draft:
            ends = rows.ids[-1] in seq.stop_ids and len(rows.ids) - seq.n_prompt >= seq.request.params.min_tokens
            token = self._script(seq, len(rows.ids) - seq.n_prompt)
            if rows.ids[-1] != guess or ends or isinstance(token, str):
                break
            rows.ids.append(token)
            found.append((token, None))
        return tuple(found)

    def embed(self, ids: Sequence[int], pages: tuple[PageId, ...]) -> NDArray[np.float32]:
        assert len(pages) * self._page_size >= len(ids)
        for page in pages:
            self._contents[page] = [-3] * self._page_size
        return np.array([len(ids), 0.0], dtype=np.float32)

    def add_adapter(self, adapter: Adapter) -> None:
        self.adapters.add(adapter.digest)

    def remove_adapter(self, digest: str) -> None:
        self.adapters.remove(digest)

    def close(self) -> None:
        self._sequences.clear()
