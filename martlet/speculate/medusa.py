"""Medusa heads at work: all guesses of a sequence from the newest hidden state, in one run (read `models/medusa_heads.py` first)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from martlet.models.medusa_heads import Medusa, guess_all
from martlet.ops.interface import Backend, StepInputs, StepLimits
from martlet.runtime.flatten import SequenceRows
from martlet.speculate.certainty import PRIORS, Chain, likeliest
from martlet.speculate.ngram import DraftRequest, Proposal
from martlet.types import SeqId

__all__ = ["MedusaDrafter"]

F32 = NDArray[np.float32]


class MedusaDrafter:
    """Guesses as far as there are heads. It keeps no text: a hidden state says all that they know."""

    free: bool = False
    priors: tuple[float, ...] = PRIORS

    def __init__(self, ops: Backend, medusa: Medusa, hidden: int, limits: StepLimits) -> None:
        self._ops, self._hidden = ops, hidden
        self._ids = None if medusa.ids is None else medusa.ids.tolist()
        self._newest: dict[
            SeqId, tuple[int, F32]
        ] = {}  # how many positions are computed, and the last one's hidden state
        few = replace(limits, max_tokens=limits.max_seqs)
        self._program = ops.capture(lambda: guess_all(ops, medusa, hidden), few)

    def warm(self) -> None:
        """Compute a row, so that the first guess finds everything in place."""
        self._run([np.zeros(self._hidden, np.float32)])

    def follow(self, seq: SeqId, rows: SequenceRows, start: int, features: F32) -> None:
        """The model has computed positions from `start` on, [n, C], and their next ids are known."""
        self._newest[seq] = start + len(features), features[-1].copy()

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        """It reads with the model."""
        return 0

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Proposal | None]:
        """Guess for all together; of each sequence the guesses that are wanted."""
        found = [self._newest.get(wish.seq, (0, None)) for wish in wishes]
        known = [x if count == len(wish.ids) - 1 else None for (count, x), wish in zip(found, wishes, strict=True)]
        rows = [x for x in known if x is not None]
        if not rows:
            return [None] * len(wishes)
        places = iter(zip(*self._run(rows), strict=True))  # of each row, its logits of each head
        return [None if x is None else self._chosen(wish, next(places)) for wish, x in zip(wishes, known, strict=True)]

    def forget(self, seqs: Iterable[SeqId]) -> None:
        """Drop their hidden states."""
        for seq in seqs:
            self._newest.pop(seq, None)

    def _chosen(self, wish: DraftRequest, logits: Sequence[F32]) -> Proposal | None:
        chain = Chain(wish)
        for row in logits[: wish.most]:
            best, class_ = likeliest(row)
            if not chain.add(best if self._ids is None else self._ids[best], class_):
                break
        return chain.proposal()

    def _run(self, rows: Sequence[F32]) -> list[F32]:
        """The logits of each head, [rows, D]."""
        n = len(rows)
        given = np.zeros((n, 3 * self._hidden), np.float32)
        given[:, : self._hidden] = rows
        given[:, 2 * self._hidden :] = 1.0
        none = np.zeros(n, np.int32)
        inputs = StepInputs(
            none, none, none, np.array([0, n], np.int32), np.zeros((1, 1), np.int32), none[:0], feed=given
        )
        return [self._ops.view(logits) for logits in self._program.run(inputs)]
