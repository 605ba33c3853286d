"""What a model computes while it answers, kept: the states that a head is trained on (read
`corpus.py` next).

The engine's runner tells a draft head the residual stream at every position that it computes. Here
it tells `Recorder`, so the states cost nothing but their memory, and are those that a head will
see, to the bit. Of every token four rows are kept: what enters layers n/2, 3n/4 and n - 2 (features
as EAGLE-3 has them, arXiv:2503.01840), and what the final norm makes of the last layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet import LLM
from martlet.runtime.rank import Programs
from martlet.types import SeqId

KEPT = 4  # rows of each token: three features and the final one
F16, F32 = NDArray[np.float16], NDArray[np.float32]


def feature_layers(n_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are a head's features: later ones tell more of the next token than
    EAGLE-3's 2, n/2 and n - 3.
    """
    return (n_layers // 2, 3 * n_layers // 4, n_layers - 2)


@dataclass(slots=True)
class _Text:
    """A sequence: its ids as they come, and its states from position 0 on."""

    ids: list[int]
    states: list[F16] = field(default_factory=list)


class Recorder:
    """Keeps the states of every sequence that an LLM computes, until they are taken. It must not
    cache prefixes.
    """

    def __init__(self, llm: LLM, layers: Sequence[int] | None = None) -> None:
        """Take the place of a draft head. `layers` are counted as `Features` does."""
        assert not llm.config.prefix_cache, "a prefix from the cache is not computed again"
        executor: Any = llm.engine.executor
        rank, spec = executor._rank, executor._rank._model.spec
        kept = layers or (*feature_layers(len(spec.layers)), len(spec.layers))
        self._texts: dict[SeqId, _Text] = {}
        self._shape = (len(kept), spec.hidden)
        self.token_bytes = 2 * len(kept) * spec.hidden
        model = replace(rank._model, features=tuple(kept))
        rank._programs = Programs.capture(rank._ops, model, rank._caches, rank._limits)
        executor._reader = self

    def follow(self, seq: SeqId, ids: list[int], pages: list[int], start: int, features: F32) -> None:
        """Positions from `start` on are computed, [n, W]; their next ids are known."""
        if start == 0:  # it begins, or begins again after it was preempted
            self._texts[seq] = _Text(ids)
        self._texts[seq].states.append(features.astype(np.float16))

    def take(self) -> dict[tuple[int, ...], F16]:
        """By the ids of each sequence, of which the last is not computed: its states [ids - 1, 4,
        C]. Forgets them.
        """
        found = {}
        for text in self._texts.values():
            states = np.concatenate(text.states).reshape(-1, *self._shape)
            assert len(states) == len(text.ids) - 1, "a sequence was not computed from its beginning to its end"
            found[tuple(text.ids)] = states
        self._texts.clear()
        return found
