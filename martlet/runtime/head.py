"""A head that guesses from what the model has computed for a sequence anyway (read `models/heads.py` first, then `sample/draft.py`).

Its keys and values are one more layer of the model's pages, under the same page numbers: what is shared, copied, evicted or
kept on disk has them too. The runner hands over the features of every position that it computes (`follow`); the
head computes those positions when a guess is wanted, with the ids that have come since, and then goes on from its own x:

    position   | … computed | those that it is behind          | guesses
    id         |            | each position's next one         | guess 1 | guess 2 …
    from       |            | the model's features, fused      | x       | x …
    written to |            | the sequence's pages             | its last page, and then a spare one

Positions for which no guess was wanted for long are left out where many sequences run: computing them all would take a
twentieth of the model's own time. The likeliest token is guessed, of a kind that its probability says. Only how fast an answer
comes depends on all this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from martlet.models.heads import Head, guess
from martlet.models.load import Model
from martlet.ops.interface import Array, Backend, Program, StepInputs, StepLimits
from martlet.runtime.draft_model import likeliest
from martlet.runtime.flatten import SequenceRows
from martlet.sample.draft import Proposal, Wish
from martlet.types import SeqId

__all__ = ["HeadDrafter"]

F32 = NDArray[np.float32]
FEW = 8  # positions of a sequence that are computed with its next guess, in one step
MANY, MOST = 32, 512  # positions that it may be behind: of a few sequences, and of many, for which it is seldom asked
A_FEW = 4  # sequences


@dataclass(slots=True)
class _Text:
    """A sequence: the features of its newest positions, start … stop - 1, which the head has not computed."""

    rows: SequenceRows
    start: int
    stop: int
    features: list[F32] = field(default_factory=list)

    def take(self, count: int) -> F32:
        """The features of the next `count` positions, which are computed now."""
        found = self.features[0] if len(self.features) == 1 else np.concatenate(self.features)
        self.features = [found[count:]] if count < len(found) else []
        self.start += count
        return found[:count]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A sequence's part of a step: ids[i] stands at position start + i. Logits are those of its last row, if any."""

    start: int
    ids: Sequence[int]
    pages: Sequence[int]
    wants_logits: bool = True


@dataclass(slots=True)
class _Guesses:
    """What is being guessed for a wish: position `end` is the next that the head computes."""

    wish: Wish
    pages: list[int]
    end: int
    most: int
    ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def take(self, token: int, kind: int) -> bool:
        """Take a guess in; whether one more is wanted."""
        wants_more = self.wish.wants(kind)
        if wants_more is None:
            return False  # not even this one
        self.ids.append(token)
        self.kinds.append(kind)
        return wants_more and len(self.ids) < self.most

    def next_row(self) -> _Rows:
        """The row of the newest guess."""
        self.end += 1
        return _Rows(self.end - 1, self.ids[-1:], self.pages)


class HeadDrafter:
    """Guesses by a head. `cache` has the pages of the model's, 0 … n_pages - 1, and one more for each sequence of a step."""

    free: bool = False
    priors: tuple[float, ...] = (0.15, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.97)

    def __init__(
        self, ops: Backend, model: Model, head: Head, cache: Array, limits: StepLimits, page_size: int, n_pages: int
    ) -> None:
        self._ops, self._ids = ops, head.ids.tolist()
        self._size, self._n_pages = page_size, n_pages
        self._limits = replace(limits, max_logits=limits.max_seqs, max_pages_per_seq=limits.max_pages_per_seq + 1)
        self._texts: dict[SeqId, _Text] = {}
        single = replace(self._limits, max_tokens=limits.max_seqs)
        self._first: Program = ops.capture(lambda: guess(ops, model, head, cache, fuses=True), self._limits)
        self._next: Program = ops.capture(lambda: guess(ops, model, head, cache, fuses=False), single)
        self._width = head.n_features * model.spec.hidden

    def warm(self) -> None:
        """Compute a row of each kind, so that the first guess finds everything in place."""
        rows = [_Rows(0, (0,), (self._n_pages,))]
        _, x = self._run(self._first, rows, np.zeros((1, self._width), np.float32))
        self._run(self._next, rows, x)

    def follow(self, seq: SeqId, rows: SequenceRows, start: int, features: F32) -> None:
        """The model has computed positions from `start` on, [n, W], and their next ids are known. Copies the features."""
        text = self._texts.get(seq)
        if text is None or text.rows is not rows or text.stop != start:
            text = self._texts[seq] = _Text(rows, start, start)
        text.features.append(features.copy())
        text.stop += len(features)
        if len(self._texts) <= A_FEW:
            if text.stop - text.start > MANY:
                self._catch_up(text)
        elif text.stop - text.start > MOST:
            text.take(
                text.stop - text.start - MANY
            )  # without their keys its guesses are worse, and are judged as they are

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        """It reads with the model."""
        return 0

    def propose(self, wishes: Sequence[Wish]) -> list[Proposal | None]:
        """Guess for all together, until each has as many guesses as it wants."""
        made = [self._begin(number, wish) for number, wish in enumerate(wishes)]
        ongoing = [guesses for guesses in made if guesses is not None]
        each = min(FEW, self._limits.max_tokens // max(1, len(ongoing)))
        rows, given, program = [], [], self._first
        for guesses in ongoing:
            text = self._texts[guesses.wish.seq]
            if text.stop - text.start > each:
                self._catch_up(text)
            rows.append(_Rows(text.start, text.rows.ids[text.start + 1 : text.stop + 1], guesses.pages))
            given.append(text.take(text.stop - text.start))
        features = np.concatenate(given) if given else np.empty((0, 0), np.float32)
        while ongoing:
            logits, x = self._run(program, rows, features)
            best = [likeliest(row) for row in logits]
            left = [i for i, (id_, kind) in enumerate(best) if ongoing[i].take(self._ids[id_], kind)]
            ongoing = [ongoing[i] for i in left]
            rows, features, program = [guesses.next_row() for guesses in ongoing], x[left], self._next
        return [Proposal(tuple(one.ids), tuple(one.kinds)) if one is not None and one.ids else None for one in made]

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """Let go of what was handed over."""
        for seq in seqs:
            self._texts.pop(seq, None)

    # -- parts ----------------------------------------------------------------------------------------------------
    def _begin(self, number: int, wish: Wish) -> _Guesses | None:
        """None where there is nothing to go by: the model has just computed the position before the last id."""
        text = self._texts.get(wish.seq)
        if text is None or text.stop != len(wish.ids) - 1 or text.start == text.stop or wish.most < 1:
            return None
        own = text.rows.pages[: -(-text.stop // self._size)]
        return _Guesses(wish, [*own, self._n_pages + number], text.stop, min(wish.most, self._size))

    def _catch_up(self, text: _Text) -> None:
        """Compute the positions that a text is behind, all but its last."""
        while (count := min(text.stop - text.start - 1, self._limits.max_tokens)) > 0:
            ids = text.rows.ids[text.start + 1 : text.start + 1 + count]
            self._run(self._first, [_Rows(text.start, ids, text.rows.pages, wants_logits=False)], text.take(count))

    def _run(self, program: Program, parts: Sequence[_Rows], given: F32) -> tuple[F32, F32]:
        """The logits and x of the parts' last rows; they hold until the next run."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, size = [0], self._size
        table = np.zeros((len(parts), max(len(part.pages) for part in parts)), np.int32)
        for row, part in zip(table, parts, strict=True):
            pages, places = part.pages, range(part.start, part.start + len(part.ids))
            row[: len(pages)] = pages
            ids += part.ids
            positions += places
            slots += [pages[place // size] * size + place % size for place in places]
            starts.append(len(ids))
        logit_rows = [stop - 1 for stop, part in zip(starts[1:], parts, strict=True) if part.wants_logits]
        inputs = StepInputs(
            np.array(ids, np.int32),
            np.array(positions, np.int32),
            np.array(slots, np.int32),
            np.array(starts, np.int32),
            table,
            np.array(logit_rows, np.int32),
            given=given,
        )
        logits, x = program.run(inputs)
        return self._ops.view(logits), self._ops.view(x)
