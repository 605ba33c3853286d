"""A smaller model that guesses for a larger one of the same vocabulary (read `speculate/ngram.py` first).

It has pages of its own, and computes each sequence's text as the larger model has it: what came since its last guesses in
one span, all sequences together, and then a guess at a time. A guess is the likeliest token, of a kind that its
probability says: so it is known how often those that the model is so sure of are right.

    ids       | computed earlier, and still right | new text |
    step 1                                        | a span   | → guess 1
    step 2                                                   | guess 1 | → guess 2 …
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from martlet.cache.pages import PagePool
from martlet.models.decoder import forward
from martlet.models.weights import Model
from martlet.ops.interface import Backend, StepLimits
from martlet.runtime.flatten import SequenceRows, StepBuffers
from martlet.runtime.kv import KvMemory
from martlet.speculate.certainty import PRIORS, Chain, likeliest
from martlet.speculate.ngram import DraftRequest, Proposal
from martlet.types import PageId, SeqId, Span

__all__ = ["ModelDrafter"]

F32 = NDArray[np.float32]
FEW = 8  # positions that are computed with the next guess, in one step


class _Text:
    """A sequence as the drafter has it. Its rows are right up to `n_cached`, if their ids are."""

    __slots__ = ("n_cached", "n_sent", "n_true", "pages", "rows")

    def __init__(self) -> None:
        self.rows = SequenceRows(())
        self.pages: list[PageId] = []
        self.n_sent = 0  # of its pages, those that a span has handed out
        self.n_cached = 0
        self.n_true = 0  # ids that are no guesses

    @property
    def n_missing(self) -> int:
        """Ids that are not computed."""
        return len(self.rows.ids) - self.n_cached

    def take(self, ids: Sequence[int]) -> None:
        """Make the ids those of the sequence; what was computed for guesses that were right remains."""
        mine, start = self.rows.ids, self.n_true
        same = next((i for i in range(start, min(len(mine), len(ids))) if mine[i] != ids[i]), min(len(mine), len(ids)))
        self.n_cached = min(self.n_cached, same)
        mine[start:] = ids[start:]
        self.n_true = len(mine)


class ModelDrafter:
    """Guesses by a model. `kv` is its memory, of as many pages as the pool has; ids from `vocab` on are never guessed."""

    free: bool = False
    priors: tuple[float, ...] = PRIORS

    def __init__(
        self, ops: Backend, model: Model, kv: KvMemory, limits: StepLimits, pages: PagePool, vocab: int
    ) -> None:
        self._ops = ops
        self._limits = limits
        self._pool = pages
        self._vocab = vocab
        self._context = limits.max_pages_per_seq * pages.page_size
        self._buffers = StepBuffers(limits, pages.page_size)
        self._texts: dict[SeqId, _Text] = {}
        self._program = ops.capture(lambda: forward(ops, model, kv.caches), limits)

    def warm(self) -> None:
        """Compute a row, so that the first guess finds everything in place."""
        text = self._text(SeqId(0), (0,))
        if self._has_room(text, 1):
            self._compute([(SeqId(0), text, 1, 1)])
        self.forget([SeqId(0)])

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        """Compute what is not computed yet of a text, all but its last token; `most` bounds it."""
        return self._catch_up(seq, self._text(seq, ids), most, FEW)

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Proposal | None]:
        """Guess for all together, until each has as many guesses as it wants."""
        texts = [self._text(wish.seq, wish.ids) for wish in wishes]
        chains = [Chain(wish) for wish in wishes]
        active = [
            i
            for i, (wish, text) in enumerate(zip(wishes, texts, strict=True))
            if wish.most > 0 and self._has_room(text, len(wish.ids) + wish.most - 1)
        ]
        each = min(FEW, self._limits.max_tokens // max(1, len(active)))
        for i in active:
            self._catch_up(wishes[i].seq, texts[i], len(wishes[i].ids), each)
        while active:
            logits = self._compute([(wishes[i].seq, texts[i], texts[i].n_missing, 1) for i in active])
            left = []
            for i, row in zip(active, logits, strict=True):
                token, class_ = likeliest(row[: self._vocab])
                texts[i].rows.ids.append(token)
                if chains[i].add(token, class_):
                    left.append(i)
            active = left
        return [chain.proposal() for chain in chains]

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """Free their pages."""
        for seq in seqs:
            text = self._texts.pop(seq, None)
            if text is not None:
                self._pool.free(text.pages)

    # -- parts ----------------------------------------------------------------------------------------------------
    def _text(self, seq: SeqId, ids: Sequence[int]) -> _Text:
        text = self._texts.setdefault(seq, _Text())
        if text.n_true != len(ids) or len(text.rows.ids) != len(ids):
            text.take(ids)
        return text

    def _catch_up(self, seq: SeqId, text: _Text, most: int, few: int) -> int:
        """Compute up to `most` positions of a text, but for its last; `few` wait until the last is computed."""
        start, stop = text.n_cached, min(len(text.rows.ids) - 1, text.n_cached + most)
        if text.n_missing <= few:
            return 0
        while text.n_cached < stop and self._has_room(text, stop):
            count = min(stop - text.n_cached, self._limits.max_tokens)
            self._compute([(seq, text, count, 0)])
        return text.n_cached - start

    def _has_room(self, text: _Text, n_tokens: int) -> bool:
        """Whether it has pages for so many tokens, by now."""
        missing = self._pool.pages_for(n_tokens) - len(text.pages)
        if missing > self._pool.n_free or n_tokens > self._context:
            return False
        if missing > 0:
            text.pages += self._pool.alloc(missing)
        return True

    def _compute(self, parts: list[tuple[SeqId, _Text, int, int]]) -> F32:
        """Compute the next positions of some texts together: (sequence, text, positions, rows of logits)."""
        spans = []
        for seq, text, count, n_logits in parts:
            new = tuple(text.pages[text.n_sent :])
            spans.append(Span(seq, text.n_cached, count, new, n_logits, text.n_sent))
            text.n_sent = len(text.pages)
            text.n_cached += count
        output = self._program.run(self._buffers.fill(spans, {seq: text.rows for seq, text, _, _ in parts}))
        return self._ops.view(output)
