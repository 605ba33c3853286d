"""From spans to arrays: the rows of a step, written into buffers that are allocated once (read `runner.py` next).

spans      seq 7: start 40, count 1          seq 9: start 0, count 3
ids        | id of position 40 |             | ids of 0, 1, 2 |              [T]
positions  | 40                |             | 0, 1, 2        |              [T]
slots      | page of 40 * P + 40 mod P |     | …              |              [T]
starts     0                   1                              4              [B + 1]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from martlet.ops.interface import StepInputs, StepLimits
from martlet.runtime.recent import RecentGroups
from martlet.types import PageId, SeqId, Span

__all__ = ["SequenceRows", "StepBuffers"]

I32 = NDArray[np.int32]


class SequenceRows:
    """A sequence's ids and page numbers, in arrays as long as they can get."""

    def __init__(self, ids: Iterable[int], limit: int, page_size: int) -> None:
        self.ids: I32 = np.empty(limit, dtype=np.int32)
        self.n_ids = 0
        self.pages: I32 = np.empty(-(-limit // page_size), dtype=np.int32)
        self.n_pages = 0
        self.recent: dict[int, int] = {}  # what it holds of the float16 pages beside q4 ones (`recent.py`)
        for token_id in ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Add the id of the next position."""
        self.ids[self.n_ids] = token_id
        self.n_ids += 1

    def take_pages(self, first: int, pages: tuple[PageId, ...]) -> None:
        """Note the pages that a span brings: they take the places from `first` on, and the table ends after them."""
        self.n_pages = first + len(pages)
        self.pages[first : self.n_pages] = pages


class StepBuffers:
    """The arrays of a step of up to `limits`; `fill` hands out views that hold until the next call.

    With `recent`, for q4 caches, it also says where the newest positions go.
    """

    def __init__(self, limits: StepLimits, page_size: int, recent: RecentGroups | None = None) -> None:
        self._page_size = page_size
        self._recent = recent
        self._ids = np.zeros(limits.max_tokens, dtype=np.int32)
        self._positions = np.zeros(limits.max_tokens, dtype=np.int32)
        self._slots = np.zeros(limits.max_tokens, dtype=np.int32)
        self._starts = np.zeros(limits.max_seqs + 1, dtype=np.int32)
        self._table = np.zeros((limits.max_seqs, limits.max_pages_per_seq), dtype=np.int32)
        self._logit_rows = np.zeros(limits.max_logits, dtype=np.int32)
        self._recent_slots = np.zeros(limits.max_tokens if recent else 0, dtype=np.int32)
        self._recent_table = np.zeros(self._table.shape if recent else (0, 0), dtype=np.int32)
        self._count_up = np.arange(max(limits.max_tokens, limits.max_logits), dtype=np.int32)

    def fill(self, spans: Iterable[Span], sequences: Mapping[SeqId, SequenceRows]) -> StepInputs:
        """Lay the spans out as rows, in their order."""
        row = n_seqs = n_logits = 0
        if self._recent:
            self._recent.begin_step()
        for span in spans:
            sequence = sequences[span.seq]
            if span.new_pages:
                sequence.take_pages(span.first_page, span.new_pages)
            self._rows(sequence, span.start, span.count, row)
            self._table[n_seqs, : sequence.n_pages] = sequence.pages[: sequence.n_pages]
            if self._recent:
                table = self._recent_table[n_seqs]
                self._recent.place(sequence.recent, span.start, span.count, table)
                positions = self._positions[row : row + span.count]
                slots = table[positions // self._page_size] * self._page_size + positions % self._page_size
                self._recent_slots[row : row + span.count] = slots
            row += span.count
            n_seqs += 1
            self._starts[n_seqs] = row
            if span.n_logits == 1:
                self._logit_rows[n_logits] = row - 1
            elif span.n_logits:
                rows = self._logit_rows[n_logits : n_logits + span.n_logits]
                np.add(self._count_up[: span.n_logits], row - span.n_logits, out=rows)
            n_logits += span.n_logits
        return StepInputs(
            self._ids[:row],
            self._positions[:row],
            self._slots[:row],
            self._starts[: n_seqs + 1],
            self._table[:n_seqs],
            self._logit_rows[:n_logits],
            self._recent_slots[:row],
            self._recent_table[:n_seqs],
        )

    def release(self, sequence: SequenceRows) -> None:
        """A sequence lets go of what it holds of the recent pages."""
        if self._recent:
            self._recent.release(sequence.recent)

    def _rows(self, sequence: SequenceRows, start: int, count: int, row: int) -> None:
        size = self._page_size
        if count == 1:  # decode: scalars are quicker than arrays of one
            self._ids[row] = sequence.ids[start]
            self._positions[row] = start
            self._slots[row] = sequence.pages[start // size] * size + start % size
            return
        positions = self._positions[row : row + count]
        np.add(self._count_up[:count], start, out=positions)
        self._ids[row : row + count] = sequence.ids[start : start + count]
        self._slots[row : row + count] = sequence.pages[positions // size] * size + positions % size
