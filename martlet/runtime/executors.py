"""Who runs a plan: one of the four plug-in points (read `runtime/rank.py` next).

A plan is numbers and names only, a few hundred bytes, so that it can be sent to other processes
(`plan_codec.py`). What sampling needs of a sequence is a record of its own, `Started`, and stays on
rank 0.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from martlet.models.lora import Adapter
from martlet.runtime.rank import Rank
from martlet.runtime.sampling import Sampling
from martlet.types import PageId, Sampled, SeqId, Span, Started, StepPlan, StepResult

F32 = NDArray[np.float32]


class Executor(Protocol):
    """Computes what a plan says and samples."""

    def run(self, plan: StepPlan, started: Sequence[Started] = ()) -> StepResult:
        """Run one step; `started` has the sequences of `plan.added`."""

    def embed(self, ids: Sequence[int], pages: tuple[PageId, ...]) -> F32:
        """Return the mean over the prompt of the final norm's output, float32 [C]; `pages` are lent
        for the call.
        """

    def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter, between two steps."""

    def remove_adapter(self, digest: str) -> None:
        """Let go of an adapter that no sequence uses."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class HiddenReader(Protocol):
    """Reads the features that the model computes: a draft head."""

    def follow(self, seq: SeqId, ids: list[int], pages: list[int], start: int, features: F32) -> None:
        """Features [n, W] of positions from `start` on, whose next ids are known. They hold for the
        call only.

        `ids` and `pages` are the sequence's, the same lists at every call, and grow.
        """


class LocalExecutor:
    """Rank and sampling in the calling thread. `reader` reads the features of the model, which then
    must have some.
    """

    def __init__(self, rank: Rank, sampling: Sampling, reader: HiddenReader | None = None) -> None:
        self._rank, self._sampling, self._reader = rank, sampling, reader

    def run(self, plan: StepPlan, started: Sequence[Started] = ()) -> StepResult:
        self._sampling.begin(plan.dropped, started)
        moved = self._rank.begin(plan)
        self._sampling.prepare(plan.spans)
        sampled: list[Sampled] = []
        for computed in self._rank.compute(plan):
            sampled += self._sampling.sample(computed.spans, computed.logits)
            if self._reader is not None and computed.features is not None:
                self._tell(self._reader, computed.spans, computed.features)
        return StepResult(plan.step, tuple(sampled), moved.failed_saves, moved.failed_loads, moved.load_s, moved.save_s)

    def _tell(self, reader: HiddenReader, spans: tuple[Span, ...], features: F32) -> None:
        """Give the reader features [T, W] of rows with known next ids: none of a wrong guess."""
        row = 0
        for span in spans:
            ids = self._sampling.ids(span.seq)
            count = min(span.count, len(ids) - 1 - span.start)
            if count > 0:
                pages = self._rank.pages(span.seq)
                reader.follow(span.seq, ids, pages, span.start, features[row : row + count])
            row += span.count

    def embed(self, ids: Sequence[int], pages: tuple[PageId, ...]) -> F32:
        return self._rank.embed(ids, pages)

    def add_adapter(self, adapter: Adapter) -> None:
        self._rank.adapters.add(adapter)

    def remove_adapter(self, digest: str) -> None:
        self._rank.adapters.remove(digest)

    def close(self) -> None:
        self._sampling.close()
        self._rank.close()
