"""A model's captured steps (read `rank.py` next, which runs them)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from martlet.models.decoder import Features, forward
from martlet.models.weights import Model
from martlet.ops.interface import Array, Backend, Program, StepLimits

__all__ = ["Programs", "layered_limits"]


def layered_limits(limits: StepLimits) -> StepLimits:
    """The largest step of a chunk that goes through the layers in parts."""
    return StepLimits(limits.layered_rows, 1, 1, limits.max_pages_per_seq)


@dataclass(frozen=True, slots=True)
class Programs:
    """Each returns the logits, and the features if the model has any.

    `layered` is for one chunk, which goes through some layers a step: its activations wait in the program for the next.
    """

    whole: Program
    layered: Program | None

    @classmethod
    def capture(cls, ops: Backend, model: Model, caches: Sequence[Array], limits: StepLimits) -> Programs:
        """Capture them; `caches` has one KV cache a layer."""

        def step() -> tuple[Array, ...]:
            if not model.features:
                return (forward(ops, model, caches),)
            features = Features(ops, model.features, model.spec.hidden)
            return forward(ops, model, caches, features), features.out

        layered = ops.capture(step, layered_limits(limits)) if limits.layered_rows else None
        return cls(ops.capture(step, limits), layered)
