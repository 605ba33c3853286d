"""A smaller model that drafts for a larger model of the same vocabulary (read `drafter.py` first).

It has pages of its own. It computes the tokens since its last draft in a span, all sequences
together, and then a guess at a time. A guess is the likeliest token; its class is its probability,
so acceptance is known for each degree of certainty.

    ids       | computed earlier, still right     | new text |
    step 1                                        | a span   | → guess 1
    step 2                                                   | guess 1 | → guess 2 …
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from martlet.cache.pages import PagePool
from martlet.models.decoder import forward
from martlet.models.weights import Model
from martlet.ops.interface import Backend, StepLimits
from martlet.runtime.flatten import PageTable, StepBuffers
from martlet.runtime.kv import KvMemory
from martlet.speculate.drafter import PRIORS, Chain, Draft, DraftRequest, likeliest
from martlet.types import PageId, SeqId, Span

F32 = NDArray[np.float32]
FEW = 8  # positions that are computed with the next guess, in one step


class _Text:
    """A sequence as the drafter knows it; the cache is right up to `n_cached` where ids are."""

    __slots__ = ("ids", "n_cached", "n_sent", "n_true", "pages", "table")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.table = PageTable()
        self.pages: list[PageId] = []
        self.n_sent = 0  # pages that a span has handed out
        self.n_cached = 0
        self.n_true = 0  # ids that are not guesses

    @property
    def n_missing(self) -> int:
        """Ids that are not computed yet."""
        return len(self.ids) - self.n_cached

    def take(self, ids: Sequence[int]) -> None:
        """Take over the sequence's ids; the cache of right guesses remains."""
        mine, start = self.ids, self.n_true
        same = next((i for i in range(start, min(len(mine), len(ids))) if mine[i] != ids[i]), min(len(mine), len(ids)))
        self.n_cached = min(self.n_cached, same)
        mine[start:] = ids[start:]
        self.n_true = len(mine)


class ModelDrafter:
    """Drafts by a model. `kv` has as many pages as the pool; ids ≥ `vocab` are never guessed."""

    costless: bool = False
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
        """Compute a row, so that the first draft pays for no first use."""
        text = self._text(SeqId(0), (0,))
        if self._has_room(text, 1):
            self._compute([(SeqId(0), text, 1, 1)])
        self.forget([SeqId(0)])

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        return self._catch_up(seq, self._text(seq, ids), most, FEW)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        texts = [self._text(request.seq, request.ids) for request in requests]
        chains = [Chain(request) for request in requests]
        active = [
            i
            for i, (request, text) in enumerate(zip(requests, texts, strict=True))
            if request.most > 0 and self._has_room(text, len(request.ids) + request.most - 1)
        ]
        each = min(FEW, self._limits.max_tokens // max(1, len(active)))
        for i in active:
            self._catch_up(requests[i].seq, texts[i], len(requests[i].ids), each)
        while active:
            logits = self._compute([(requests[i].seq, texts[i], texts[i].n_missing, 1) for i in active])
            left = []
            for i, row in zip(active, logits, strict=True):
                token, class_ = likeliest(row[: self._vocab])
                texts[i].ids.append(token)
                if chains[i].add(token, class_):
                    left.append(i)
            active = left
        return [chain.draft() for chain in chains]

    def forget(self, seqs: Iterable[SeqId]) -> None:
        for seq in seqs:
            text = self._texts.pop(seq, None)
            if text is not None:
                self._pool.free(text.pages)

    # -- steps -------------------------------------------------------------------------------------
    def _text(self, seq: SeqId, ids: Sequence[int]) -> _Text:
        text = self._texts.setdefault(seq, _Text())
        if text.n_true != len(ids) or len(text.ids) != len(ids):
            text.take(ids)
        return text

    def _catch_up(self, seq: SeqId, text: _Text, most: int, few: int) -> int:
        """Compute ≤ `most` positions but the last; ≤ `few` wait for the last. Return how many."""
        start, stop = text.n_cached, min(len(text.ids) - 1, text.n_cached + most)
        if text.n_missing <= few:
            return 0
        while text.n_cached < stop and self._has_room(text, stop):
            count = min(stop - text.n_cached, self._limits.max_tokens)
            self._compute([(seq, text, count, 0)])
        return text.n_cached - start

    def _has_room(self, text: _Text, n_tokens: int) -> bool:
        """Whether the text has pages for `n_tokens`; allocates the missing ones if possible."""
        missing = self._pool.pages_for(n_tokens) - len(text.pages)
        if missing > self._pool.n_free or n_tokens > self._context:
            return False
        if missing > 0:
            text.pages += self._pool.alloc(missing)
        return True

    def _compute(self, work: list[tuple[SeqId, _Text, int, int]]) -> F32:
        """Compute (sequence, text, positions, logit rows) together; logits are float32 [L, V]."""
        spans = []
        for seq, text, count, n_logits in work:
            new = tuple(text.pages[text.n_sent :])
            ids = tuple(text.ids[text.n_cached : text.n_cached + count])
            spans.append(Span(seq, text.n_cached, count, ids, new, n_logits, text.n_sent))
            text.n_sent = len(text.pages)
            text.n_cached += count
        output = self._program.run(self._buffers.fill(spans, {seq: text.table for seq, text, _, _ in work}))
        return self._ops.view(output)
