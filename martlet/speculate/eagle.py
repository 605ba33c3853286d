"""An EAGLE head at work: it drafts from the model's hidden states (read `models/eagle_head.py`
first).

The head's keys and values are a further layer of the model's pages, under the same page numbers, so
they are shared, copied, evicted and kept on disk with them. The rank hands over the features of
every position that it computes (`follow`). When a draft is requested, the head computes the
positions that it is behind, and then goes on from its own x:

    position   | … computed | positions that it is behind      | guesses
    id         |            | each position's next id          | guess 1 | guess 2 …
    from       |            | the model's features, fused      | x       | x …
    written to |            | the sequence's pages             | its last page, then a spare page

A draft is a single run of a program in which each guess is the next guess's input
(`Backend.advance`).

Where many sequences run, positions for which no draft was requested for long are left out:
computing all would take a twentieth of the model's own time. The likeliest token is guessed; its
class is its probability. Only the speed of an answer depends on all this.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from martlet.models.eagle_head import Head, guess, guess_on
from martlet.models.weights import Model
from martlet.ops.interface import Array, Backend, Program, StepInputs, StepLimits
from martlet.speculate.drafter import BOUNDS, PRIORS, Draft, DraftRequest
from martlet.types import SeqId

F32 = NDArray[np.float32]
FEW = 8  # positions of a sequence that are computed together with its next guess
MANY, MOST = 32, 512  # positions that it may be behind: while few sequences run, and while many do
A_FEW = 4  # sequences
USUAL = 3  # guesses that fill a tile of four rows


@dataclass(slots=True)
class _Text:
    """A sequence, with the features of positions start … stop - 1, not computed by the head yet."""

    ids: list[int]  # the sequence's own list, which grows
    pages: list[int]
    start: int
    stop: int
    features: list[F32] = field(default_factory=list)

    def take(self, count: int) -> F32:
        """Take out the features, float32 [count, W], of the next positions."""
        features = self.features[0] if len(self.features) == 1 else np.concatenate(self.features)
        self.features = [features[count:]] if count < len(features) else []
        self.start += count
        return features[:count]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A sequence's rows of a step: ids[i] is at position start + i; logits are the last row's."""

    start: int
    ids: Sequence[int]
    pages: Sequence[int]
    wants_logits: bool = True


class HeadDrafter:
    """Drafts by a head. `cache` has the model's `n_pages` pages, then a spare page per sequence."""

    costless: bool = False
    priors: tuple[float, ...] = PRIORS

    def __init__(
        self, ops: Backend, model: Model, head: Head, cache: Array, limits: StepLimits, page_size: int, n_pages: int
    ) -> None:
        self._ops, self._model, self._head, self._cache = ops, model, head, cache
        self._ids = head.ids.tolist()
        self._size, self._n_pages = page_size, n_pages
        self._limits = replace(limits, max_logits=limits.max_seqs, max_pages_per_seq=limits.max_pages_per_seq + 1)
        self._texts: dict[SeqId, _Text] = {}
        self._chains: dict[int, Program] = {}  # by length of the draft
        self._width = head.n_features * model.spec.hidden
        self._first: Program | None = None  # computes position 0 where that differs
        if head.is_mtp:
            one_row = replace(self._limits, max_tokens=1, max_seqs=1, max_logits=1)
            self._first = ops.capture(lambda: guess(ops, model, head, cache, is_first=True), one_row)

    def warm(self) -> None:
        """Run each program once, so that the first draft pays for no first use."""
        rows = [_Rows(0, (0,), (self._n_pages,))]
        for program in (self._first, self._chain(1), self._chain(USUAL)):
            if program is not None:
                self._run(program, rows, np.zeros((1, self._width), np.float32))

    def follow(self, seq: SeqId, ids: list[int], pages: list[int], start: int, features: F32) -> None:
        """Copy features, float32 [n, W], of positions from `start` on, whose next ids are known."""
        text = self._texts.get(seq)
        if text is None or text.ids is not ids or text.stop != start:
            text = self._texts[seq] = _Text(ids, pages, start, start)
        text.features.append(features.copy())
        text.stop += len(features)
        if len(self._texts) <= A_FEW:
            if text.stop - text.start > MANY:
                self._catch_up(text)
        elif text.stop - text.start > MOST:
            # without these keys its drafts are worse, and are judged by their acceptance
            text.take(text.stop - text.start - MANY)

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        return 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        ready = [self._is_ready(request) for request in requests]
        asked = [request for request, is_ready in zip(requests, ready, strict=True) if is_ready]
        if not asked:
            return [None] * len(requests)
        each = min(FEW, self._limits.max_tokens // len(asked))
        rows, given = [], []
        for number, request in enumerate(asked):
            text = self._texts[request.seq]
            if text.stop - text.start > each:
                self._catch_up(text)
            pages = [*text.pages[: -(-text.stop // self._size)], self._n_pages + number]
            rows.append(_Rows(text.start, text.ids[text.start + 1 : text.stop + 1], pages))
            given.append(text.take(text.stop - text.start))
        features = given[0] if len(given) == 1 else np.concatenate(given)
        drafts = iter(self._draft(asked, rows, features))
        return [next(drafts) if is_ready else None for is_ready in ready]

    def forget(self, seqs: Iterable[SeqId]) -> None:
        for seq in seqs:
            self._texts.pop(seq, None)

    # -- steps -------------------------------------------------------------------------------------
    def _chain(self, most: int) -> Program:
        """The program that makes at least `most` guesses for each sequence."""
        depth = (1 << most.bit_length()) - 1
        if depth not in self._chains:
            ops, parts = self._ops, (self._model, self._head, self._cache, self._size)
            self._chains[depth] = ops.capture(lambda: guess_on(ops, *parts, depth), self._limits)
        return self._chains[depth]

    def _is_ready(self, request: DraftRequest) -> bool:
        """Whether the model has just computed the position before the last id."""
        text = self._texts.get(request.seq)
        if text is None or not text.start < text.stop == len(request.ids) - 1 or request.most < 1:
            return False
        self._begin(text)
        return text.start < text.stop

    def _draft(self, requests: list[DraftRequest], rows: list[_Rows], features: F32) -> Iterable[Draft]:
        """A draft for each request, while any is likely enough; features float32 [T, W]."""
        most = max(request.most for request in requests)
        least = float(np.float32(min(request.min_probability for request in requests)))
        most = min(most, self._size)
        _, _, *made = self._run(self._chain(most), rows, features, least)
        # per guess and sequence: the token, its probability, the probability of all up to it
        levels: list[list[list[float]]] = []
        for guesses in made[:most]:
            levels.append(self._ops.view(guesses).tolist())
            if not any(joint >= least for _, _, joint in levels[-1]):
                break
        for request, guesses in zip(requests, zip(*levels, strict=True), strict=True):
            guesses = guesses[: request.most]
            classes = tuple([bisect_right(BOUNDS, probability) for _, probability, _ in guesses])
            yield Draft(tuple([int(token) for token, _, _ in guesses]), classes)

    def _begin(self, text: _Text) -> None:
        """Compute position 0 where it needs a program of its own."""
        if self._first is not None and text.start == 0:
            rows = _Rows(0, text.ids[1:2], text.pages, wants_logits=False)
            self._run(self._first, [rows], text.take(1))

    def _catch_up(self, text: _Text) -> None:
        """Compute the positions that the head is behind, all but the last."""
        self._begin(text)
        while (count := min(text.stop - text.start - 1, self._limits.max_tokens)) > 0:
            ids = text.ids[text.start + 1 : text.start + 1 + count]
            self._run(self._chain(1), [_Rows(text.start, ids, text.pages, wants_logits=False)], text.take(count))

    def _run(self, program: Program, parts: Sequence[_Rows], given: F32, least: float = 0.0) -> tuple[Array, ...]:
        """Run a program on features, float32 [T, W]; its outputs hold until the next run."""
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
        outputs: tuple[Array, ...] = program.run(inputs)
        return outputs
