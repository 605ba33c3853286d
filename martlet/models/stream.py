"""The residual stream: what every layer reads from and adds to, and the scratch that the layers share.

Layers run one after the other, so an array of scratch serves a purpose in all of them. Read `mixers.py` next.
"""

from __future__ import annotations

from martlet.ops.interface import Array, Backend, Rows, Weight
from martlet.spec import Norm

__all__ = ["Stream"]


class Stream:
    """The residual `x` [rows, width]; `scale` multiplies what is added to it."""

    def __init__(self, ops: Backend, width: int, scale: float) -> None:
        self.ops = ops
        self.rows = Rows.TOKENS
        self.x = ops.empty(Rows.TOKENS, width)
        self._width = width
        self._scale = scale
        self._scratch: dict[tuple[str, Rows, int], Array] = {}

    def scratch(self, purpose: str, width: int) -> Array:
        """The array [rows, width] that all layers use for this purpose; what it held before is lost."""
        key = (purpose, self.rows, width)
        if key not in self._scratch:
            self._scratch[key] = self.ops.empty(self.rows, width)
        return self._scratch[key]

    def normed(self, norm: Norm | None, weight: Array | None) -> Array:
        """norm(x) [rows, width], or x itself where the model has no norm here."""
        if norm is None:
            return self.x
        out = self.scratch("normed", self._width)
        self.ops.rms_norm(self.x, weight, norm.eps, out)
        return out

    def add(
        self,
        y: Array,
        weight: Weight,
        bias: Array | None,
        norm: Norm | None = None,
        norm_weight: Array | None = None,
        adapter: Array | None = None,
    ) -> None:
        """x += scale * norm(y @ weightᵀ + bias), in as few operations as the model allows; `adapter` updates the product."""
        if norm is None and self._scale == 1.0:
            self.ops.linear(y, weight, self.x, bias, self.x)
            if adapter is not None:
                self.ops.adapt(y, adapter, self.x)
            return
        out = self.scratch("added", self._width)
        self.ops.linear(y, weight, out, bias)
        if adapter is not None:
            self.ops.adapt(y, adapter, out)
        if norm is not None:
            self.ops.rms_norm(out, norm_weight, norm.eps, out)
        self.ops.add(self.x, out, self._scale, self.x)

    def narrow(self, y: Array, width: int) -> Array:
        """Go on with the rows that get logits only: those of the stream, and those of y [T, width], returned."""
        x, picked = self.ops.empty(Rows.LOGITS, self._width), self.ops.empty(Rows.LOGITS, width)
        self.ops.take_logit_rows(self.x, x)
        self.ops.take_logit_rows(y, picked)
        self.x, self.rows = x, Rows.LOGITS
        return picked
