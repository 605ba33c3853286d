"""Medusa heads at work: a draft from the newest hidden state, in one run.

Read `models/medusa_heads.py` first, then `drafter.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from martlet.models.medusa_heads import Medusa, guess_all
from martlet.ops.interface import Backend, StepInputs, StepLimits
from martlet.speculate.drafter import PRIORS, Chain, Draft, DraftRequest, likeliest
from martlet.types import SeqId

F32 = NDArray[np.float32]


class MedusaDrafter:
    """Drafts a token per head. It keeps no text: the hidden state is all that heads read."""

    costless: bool = False
    priors: tuple[float, ...] = PRIORS

    def __init__(self, ops: Backend, medusa: Medusa, hidden: int, limits: StepLimits) -> None:
        self._ops, self._hidden = ops, hidden
        self._ids = None if medusa.ids is None else medusa.ids.tolist()
        # positions computed, and the hidden state [C] of the last
        self._newest: dict[SeqId, tuple[int, F32]] = {}
        few = replace(limits, max_tokens=limits.max_seqs)
        self._program = ops.capture(lambda: guess_all(ops, medusa, hidden), few)

    def warm(self) -> None:
        """Compute a row, so that the first draft pays for no first use."""
        self._run([np.zeros(self._hidden, np.float32)])

    def follow(self, seq: SeqId, ids: list[int], pages: list[int], start: int, features: F32) -> None:
        """Keep features, float32 [n, C], of positions from `start` on, whose next ids are known."""
        self._newest[seq] = start + len(features), features[-1].copy()

    def read(self, seq: SeqId, ids: Sequence[int], most: int) -> int:
        return 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        newest = [self._newest.get(request.seq, (0, None)) for request in requests]
        known = [x if n == len(request.ids) - 1 else None for (n, x), request in zip(newest, requests, strict=True)]
        rows = [x for x in known if x is not None]
        if not rows:
            return [None] * len(requests)
        logits = iter(zip(*self._run(rows), strict=True))  # per row, the logits of each head
        return [
            None if x is None else self._draft(request, next(logits))
            for request, x in zip(requests, known, strict=True)
        ]

    def forget(self, seqs: Iterable[SeqId]) -> None:
        for seq in seqs:
            self._newest.pop(seq, None)

    def _draft(self, request: DraftRequest, logits: Sequence[F32]) -> Draft | None:
        chain = Chain(request)
        for row in logits[: request.most]:
            best, class_ = likeliest(row)
            if not chain.add(best if self._ids is None else self._ids[best], class_):
                break
        return chain.draft()

    def _run(self, rows: Sequence[F32]) -> list[F32]:
        """The logits of each head, float32 [rows, D]; rows are hidden states [C]."""
        n = len(rows)
        given = np.zeros((n, 3 * self._hidden), np.float32)
        given[:, : self._hidden] = rows
        given[:, 2 * self._hidden :] = 1.0
        none = np.zeros(n, np.int32)
        inputs = StepInputs(
            none, none, none, np.array([0, n], np.int32), np.zeros((1, 1), np.int32), none[:0], feed=given
        )
        return [self._ops.view(logits) for logits in self._program.run(inputs)]
