"""A head that guesses from what the model has computed for a sequence anyway (read `models/eagle_head.py` first, then `speculate/ngram.py`).

Its keys and values are one more layer of the model's pages, under the same page numbers: what is shared, copied, evicted or
kept on disk has them too. The runner hands over the features of every position that it computes (`follow`); the
head computes those positions when a guess is wanted, with the ids that have come since, and then goes on from its own x:

    position   | … computed | those that it is behind          | guesses
    id         |            | each position's next one         | guess 1 | guess 2 …
    from       |            | the model's features, fused      | x       | x …
    written to |            | the sequence's pages             | its last page, and then a spare one

A chain is one run of one program, in which each guess is the next one's input (`Backend.advance`).

Positions for which no guess was wanted for long are left out where many sequences run: computing them all would take a
twentieth of the model's own time. The likeliest token is guessed, of a kind that its probability says. Only how fast an answer
comes depends on all this.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from martlet.models.eagle_head import Head, guess, guess_on
from martlet.models.weights import Model
from martlet.ops.interface import Array, Backend, Program, StepInputs, StepLimits
from martlet.runtime.flatten import SequenceRows
from martlet.speculate.certainty import BOUNDS, PRIORS
from martlet.speculate.ngram import DraftRequest, Proposal
from martlet.types import SeqId

__all__ = ["HeadDrafter"]

F32 = NDArray[np.float32]
FEW = 8  # positions of a sequence that are computed with its next guess, in one step
MANY, MOST = 32, 512  # positions that it may be behind: of a few sequences, and of many, for which it is seldom asked
A_FEW = 4  # sequences
USUAL = 3  # guesses: as many as fill a tile of four rows


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


class HeadDrafter:
    """Guesses by a head. `cache` has the pages of the model's, 0 … n_pages - 1, and one more a sequence."""

    free: bool = False
    priors: tuple[float, ...] = PRIORS

    def __init__(
        self, ops: Backend, model: Model, head: Head, cache: Array, limits: StepLimits, page_size: int, n_pages: int
    ) -> None:
        self._ops, self._model, self._head, self._cache = ops, model, head, cache
        self._ids = head.ids.tolist()
        self._size, self._n_pages = page_size, n_pages
        self._limits = replace(limits, max_logits=limits.max_seqs, max_pages_per_seq=limits.max_pages_per_seq + 1)
        self._texts: dict[SeqId, _Text] = {}
        self._chains: dict[int, Program] = {}  # by how many guesses are made
        self._width = head.n_features * model.spec.hidden
        self._first: Program | None = None  # computes position 0, where it differs
        if head.is_mtp:
            one_row = replace(self._limits, max_tokens=1, max_seqs=1, max_logits=1)
            self._first = ops.capture(lambda: guess(ops, model, head, cache, is_first=True), one_row)

    def warm(self) -> None:
        """Compute a row of each kind, so that the first guess finds everything in place."""
        rows = [_Rows(0, (0,), (self._n_pages,))]
        for program in (self._first, self._chain(1), self._chain(USUAL)):
            if program is not None:
                self._run(program, rows, np.zeros((1, self._width), np.float32))

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

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Proposal | None]:
        """Guess for all together, until each has as many guesses as it wants."""
        ready = [self._is_ready(wish) for wish in wishes]
        asked = [wish for wish, is_ready in zip(wishes, ready, strict=True) if is_ready]
        if not asked:
            return [None] * len(wishes)
        each = min(FEW, self._limits.max_tokens // len(asked))
        rows, given = [], []
        for number, wish in enumerate(asked):
            text = self._texts[wish.seq]
            if text.stop - text.start > each:
                self._catch_up(text)
            pages = [*text.rows.pages[: -(-text.stop // self._size)], self._n_pages + number]
            rows.append(_Rows(text.start, text.rows.ids[text.start + 1 : text.stop + 1], pages))
            given.append(text.take(text.stop - text.start))
        features = given[0] if len(given) == 1 else np.concatenate(given)
        found = iter(self._guess_chains(asked, rows, features))
        return [next(found) if is_ready else None for is_ready in ready]

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """Let go of what was handed over."""
        for seq in seqs:
            self._texts.pop(seq, None)

    # -- parts ----------------------------------------------------------------------------------------------------
    def _chain(self, most: int) -> Program:
        """The program that makes at least so many guesses of each sequence."""
        depth = (1 << most.bit_length()) - 1
        if depth not in self._chains:
            ops, parts = self._ops, (self._model, self._head, self._cache, self._size)
            self._chains[depth] = ops.capture(lambda: guess_on(ops, *parts, depth), self._limits)
        return self._chains[depth]

    def _is_ready(self, wish: DraftRequest) -> bool:
        """Whether there is something to go by: the model has just computed the position before the last id."""
        text = self._texts.get(wish.seq)
        if text is None or not text.start < text.stop == len(wish.ids) - 1 or wish.most < 1:
            return False
        self._begin(text)
        return text.start < text.stop

    def _guess_chains(self, wishes: list[DraftRequest], rows: list[_Rows], features: F32) -> Iterable[Proposal]:
        """A chain of guesses for each, as far as any is worth going on from."""
        most, least = max(wish.most for wish in wishes), float(np.float32(min(wish.least for wish in wishes)))
        most = min(most, self._size)
        _, _, *made = self._run(self._chain(most), rows, features, least)
        levels: list[list[list[float]]] = []  # a sequence's token, its probability, the chance of it and all before
        for guesses in made[:most]:
            levels.append(self._ops.view(guesses).tolist())
            if not any(chance >= least for _, _, chance in levels[-1]):
                break
        for wish, chain in zip(wishes, zip(*levels, strict=True), strict=True):
            chain = chain[: wish.most]
            kinds = tuple([bisect_right(BOUNDS, probability) for _, probability, _ in chain])
            yield Proposal(tuple([int(token) for token, _, _ in chain]), kinds)

    def _begin(self, text: _Text) -> None:
        """Compute position 0 if it needs a program of its own."""
        if self._first is not None and text.start == 0:
            rows = _Rows(0, text.rows.ids[1:2], text.rows.pages, wants_logits=False)
            self._run(self._first, [rows], text.take(1))

    def _catch_up(self, text: _Text) -> None:
        """Compute the positions that a text is behind, all but its last."""
        self._begin(text)
        while (count := min(text.stop - text.start - 1, self._limits.max_tokens)) > 0:
            ids = text.rows.ids[text.start + 1 : text.start + 1 + count]
            self._run(self._chain(1), [_Rows(text.start, ids, text.rows.pages, wants_logits=False)], text.take(count))

    def _run(self, program: Program, parts: Sequence[_Rows], given: F32, least: float = 0.0) -> tuple[Array, ...]:
        """What a program gives for the parts' last rows; it holds until the next run."""
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
            feed=given,
            least=least,
        )
        found: tuple[Array, ...] = program.run(inputs)
        return found
