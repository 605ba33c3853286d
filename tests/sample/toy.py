"""A vocabulary without a language: token i spells the character chr(ord("a") + i), or what `texts`
says.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.sample.sampler import Sampler, SequenceSampler
from martlet.sampling_params import SamplingParams


def sampler(
    vocab: int,
    *,
    eog: Sequence[int] = (),
    unused: Sequence[int] = (),
    texts: Sequence[str] | None = None,
    n_logits: int | None = None,
    seed: int | None = None,
) -> Sampler:
    """What sequences over `vocab` tokens share."""
    spelled = texts or [chr(ord("a") + i) for i in range(vocab)]

    def encode(text: str, *, add_special: bool) -> list[int]:  # spaces have no token here
        assert not add_special
        return [spelled.index(character) for character in text.replace(" ", "")]

    tokenizer: Any = SimpleNamespace(
        vocab_size=vocab,
        eog_ids=frozenset(eog),
        unused_ids=frozenset(unused),
        strips_space=False,
        encode=encode,
        token_bytes=lambda token: spelled[token].encode(),
    )
    return Sampler(tokenizer, n_logits, seed)


def sequence(vocab: int, prompt: Sequence[int] = (0,), index: int = 0, **settings: Any) -> SequenceSampler:
    """A sequence over `vocab` tokens with these parameters and no end."""
    return sampler(vocab).start(SamplingParams(**{"max_tokens": None, "seed": 1, **settings}), prompt, index)


def logits(*values: float) -> NDArray[np.float32]:
    """A row of logits."""
    return np.array(values, np.float32)
