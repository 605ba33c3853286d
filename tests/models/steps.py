"""Runs a model on a backend for tests: one sequence, in chunks of any sizes, its pages in any
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from martlet.formats.checkpoint import open_checkpoint
from martlet.models.decoder import forward, hidden_states
from martlet.models.weights import load_model
from martlet.ops.interface import Backend, StepInputs, StepLimits
from martlet.ops.reference import ReferenceBackend

F32 = NDArray[np.float32]


class Running:
    """A model with a KV cache for one sequence of up to `n_pages` pages, handed out in reverse
    order.
    """

    def __init__(
        self,
        path: Path,
        ops: Backend | None = None,
        *,
        context: int | None = None,
        page_size: int = 4,
        n_pages: int = 24,
        hidden: bool = False,
    ) -> None:
        self.ops: Backend = ReferenceBackend() if ops is None else ops
        self.checkpoint = open_checkpoint(path)
        self.model = load_model(self.checkpoint, self.ops, context=context)
        self.caches = [
            self.ops.kv_cache(n_pages, page_size, x.mixer.n_kv_heads, x.mixer.head_dim, "f32")
            for x in self.model.spec.layers
        ]
        self.n_cached, self._page_size = 0, page_size
        self._pages = np.arange(n_pages, dtype=np.int32)[::-1].copy()
        run = hidden_states if hidden else forward
        limits = StepLimits(n_pages * page_size, 1, n_pages * page_size, n_pages)
        self._program = self.ops.capture(lambda: run(self.ops, self.model, self.caches), limits)

    def step(self, ids: Sequence[int], n_logits: int | None = None) -> F32:
        """Compute the next positions; logits of the last `n_logits` of them, of all by default."""
        count = len(ids)
        positions = np.arange(self.n_cached, self.n_cached + count, dtype=np.int32)
        slots = self._pages[positions // self._page_size] * self._page_size + positions % self._page_size
        rows = np.arange(count - (count if n_logits is None else n_logits), count, dtype=np.int32)
        self.n_cached += count
        return self.ops.download(
            self._program.run(
                StepInputs(
                    ids=np.array(ids, np.int32),
                    positions=positions,
                    slots=slots.astype(np.int32),
                    span_starts=np.array([0, count], np.int32),
                    page_table=self._pages[None],
                    logit_rows=rows,
                )
            )
        )
