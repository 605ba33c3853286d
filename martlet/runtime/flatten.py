"""From spans to arrays: the rows of a step, written into buffers that are allocated once (read
`runtime/page_moves.py` next).

spans      seq 7: start 40, count 1          seq 9: start 0, count 3
ids        | id of position 40 |             | ids of 0, 1, 2 |              [T]
positions  | 40                |             | 0, 1, 2        |              [T]
slots      | page of 40 * P + 40 mod P |     | …              |              [T]
starts     0                   1                              4              [B + 1]
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from martlet.ops.interface import StepInputs, StepLimits
from martlet.types import PageId, SeqId, Span

I32 = NDArray[np.int32]
FEW = 16  # rows that lists are quicker for than arrays


class PageTable:
    """A sequence's page numbers, in order of position. `version` changes with them."""

    __slots__ = ("held", "pages", "version")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.version = 0
        # its float16 pages beside q4 ones, by group (`f16_window.py`)
        self.held: dict[int, int] = {}

    def take_pages(self, first: int, pages: tuple[PageId, ...]) -> None:
        """Put the pages that a span brings from place `first` on; the table ends after them."""
        self.pages[first:] = pages
        self.version += 1


class Window(Protocol):
    """Float16 pages of the newest positions, beside pages of 4 bits (`f16_window.py`). `held` is
    what a sequence has.
    """

    def begin_step(self) -> None:
        """Pages that one step only needs are free again."""

    def place(self, held: dict[int, int], start: int, count: int, table: I32, again: bool = False) -> None:
        """Write the pages of positions start … start + count - 1 to a sequence's table, int32 [n].

        `again`: the span goes on through the layers, on the pages that it has.
        """

    def release(self, held: dict[int, int]) -> None:
        """A sequence lets go of all that it has."""


class StepBuffers:
    """The arrays of a step of up to `limits`; `fill` hands out views that hold until the next call.

    With `recent`, for q4 caches, it also says where the newest positions go.
    """

    def __init__(self, limits: StepLimits, page_size: int, recent: Window | None = None) -> None:
        self._page_size = page_size
        self._recent = recent
        self._ids = np.zeros(limits.max_tokens, dtype=np.int32)
        self._positions = np.zeros(limits.max_tokens, dtype=np.int32)
        self._slots = np.zeros(limits.max_tokens, dtype=np.int32)
        self._starts = np.zeros(limits.max_seqs + 1, dtype=np.int32)
        self._table = np.zeros((limits.max_seqs, limits.max_pages_per_seq), dtype=np.int32)
        # and its version
        self._in_table: list[tuple[PageTable, int] | None] = [None] * limits.max_seqs
        self._logit_rows = np.zeros(limits.max_logits, dtype=np.int32)
        self._recent_slots = np.zeros(limits.max_tokens if recent else 0, dtype=np.int32)
        self._recent_table = np.zeros(self._table.shape if recent else (0, 0), dtype=np.int32)
        self._count_up = np.arange(limits.max_tokens, dtype=np.int32)

    def fill(self, spans: Iterable[Span], tables: Mapping[SeqId, PageTable]) -> StepInputs:
        """Lay the spans out as rows, in their order."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, logit_rows = [0], []
        if self._recent:
            self._recent.begin_step()
        for n_seqs, span in enumerate(spans):
            sequence = tables[span.seq]
            if span.new_pages:
                sequence.take_pages(span.first_page, span.new_pages)
            self._add_rows(sequence, span, (ids, positions, slots))
            in_table = self._in_table[n_seqs]
            if in_table is None or in_table[0] is not sequence or in_table[1] != sequence.version:
                self._table[n_seqs, : len(sequence.pages)] = sequence.pages
                self._in_table[n_seqs] = sequence, sequence.version
            if self._recent:
                self._place_recent(self._recent, sequence, span, n_seqs, len(ids))
            row = len(ids)
            starts.append(row)
            if span.n_logits == 1:
                logit_rows.append(row - 1)
            elif span.n_logits:
                logit_rows += range(row - span.n_logits, row)
        n_seqs, row = len(starts) - 1, len(ids)
        return StepInputs(
            _put(ids, self._ids),
            _put(positions, self._positions),
            _put(slots, self._slots),
            _put(starts, self._starts),
            self._table[:n_seqs],
            _put(logit_rows, self._logit_rows),
            self._recent_slots[:row],
            self._recent_table[:n_seqs],
        )

    def release(self, sequence: PageTable) -> None:
        """A sequence lets go of what it holds of the recent pages."""
        if self._recent:
            self._recent.release(sequence.held)

    def _add_rows(self, sequence: PageTable, span: Span, rows: tuple[list[int], list[int], list[int]]) -> None:
        """Add a span's ids, positions and slots."""
        (ids, positions, slots), size = rows, self._page_size
        start, count = span.start, span.count
        if count == 1:  # decode
            ids.append(span.ids[0])
            positions.append(start)
            slots.append(sequence.pages[start // size] * size + start % size)
            return
        ids += span.ids
        if count <= FEW:
            pages, few = sequence.pages, range(start, start + count)
            positions += few
            slots += [pages[place // size] * size + place % size for place in few]
            return
        places = np.add(self._count_up[:count], start)
        positions += places.tolist()
        slots += (np.array(sequence.pages)[places // size] * size + places % size).tolist()

    def _place_recent(self, recent: Window, sequence: PageTable, span: Span, n_seqs: int, stop_row: int) -> None:
        """Say where a span's newest positions go, which end at row `stop_row`."""
        table, size = self._recent_table[n_seqs], self._page_size
        recent.place(sequence.held, span.start, span.count, table, span.first_layer > 0)
        places = np.add(self._count_up[: span.count], span.start)
        self._recent_slots[stop_row - span.count : stop_row] = table[places // size] * size + places % size


def _put(values: list[int], buffer: I32) -> I32:
    """The values at the buffer's beginning."""
    view = buffer[: len(values)]
    view[:] = values
    return view
