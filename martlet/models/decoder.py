"""The one decoder, over a `ModelSpec` and a `Backend` (read `mixers.py` and `ffn.py` next).

Nothing here depends on the data of a step, so a backend can run these functions once and replay what they did.
"""

from __future__ import annotations

from collections.abc import Sequence

from martlet.models.load import Model
from martlet.ops.interface import Array, Backend

__all__ = ["forward", "hidden_states"]


def forward(ops: Backend, model: Model, caches: Sequence[Array]) -> Array:
    """Return the logits [L, V] of the step's logit rows; `caches` has one KV cache a layer. Call inside a capture."""
    raise NotImplementedError


def hidden_states(ops: Backend, model: Model, caches: Sequence[Array]) -> Array:
    """Return what the final norm makes of every row, [T, C], for embeddings. Call inside a capture."""
    raise NotImplementedError
