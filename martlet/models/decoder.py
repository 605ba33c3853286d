"""The one decoder, over a `ModelSpec` and a `Backend` (read `stream.py`, `mixers.py` and `ffn.py` next).

    ids → embed → layers → final norm → head → logits          layer: x += post(mixer(norm(x))); x += post(ffn(norm(x)))

Nothing here depends on the data of a step, so a backend can run these functions once and replay what they did.
"""

from __future__ import annotations

from collections.abc import Sequence

from martlet.models.ffn import feed_forward
from martlet.models.mixers import attend
from martlet.models.stream import Stream
from martlet.models.weights import Model
from martlet.ops.interface import Array, Backend, Rows

__all__ = ["Features", "forward", "hidden_states"]


class Features:
    """The residual stream as it enters some layers, side by side, [T, n * C]: what a draft head reads (`eagle_head.py`).

    The layer after the last stands for what the final norm gives.
    """

    def __init__(self, ops: Backend, layers: Sequence[int], width: int) -> None:
        self.out = ops.empty(Rows.TOKENS, len(layers) * width)
        self._ops, self._layers, self._width = ops, layers, width

    def has(self, layer: int) -> bool:
        """Whether a layer is one of them."""
        return layer in self._layers

    def take(self, layer: int, x: Array) -> None:
        """Copy x [T, C], which enters `layer`, if that is one of them."""
        for place, wanted in enumerate(self._layers):
            if wanted == layer:
                out = self._ops.columns(self.out, place * self._width, (place + 1) * self._width)
                self._ops.scale_cap(x, 1.0, None, out)


def forward(ops: Backend, model: Model, caches: Sequence[Array], features: Features | None = None) -> Array:
    """Return the logits [L, V] of the step's logit rows; `caches` has one KV cache a layer. Call inside a capture."""
    spec = model.spec
    if features is not None and features.has(len(spec.layers)):
        whole = _final(ops, model, caches, Rows.TOKENS, features)  # [T, C]
        features.take(len(spec.layers), whole)
        x = ops.empty(Rows.LOGITS, spec.hidden)
        ops.take_logit_rows(whole, x)
    else:
        x = _final(ops, model, caches, Rows.LOGITS, features)  # [L, C]
    logits = ops.empty(Rows.LOGITS, spec.vocab)
    ops.linear(x, model.head, logits)
    if spec.logit_scale != 1.0 or spec.logit_softcap is not None:
        ops.scale_cap(logits, spec.logit_scale, spec.logit_softcap, logits)
    return logits


def hidden_states(ops: Backend, model: Model, caches: Sequence[Array]) -> Array:
    """Return what the final norm makes of every row, [T, C], for embeddings. Call inside a capture."""
    return _final(ops, model, caches, Rows.TOKENS)


def _final(ops: Backend, model: Model, caches: Sequence[Array], rows: Rows, features: Features | None = None) -> Array:
    """Run all layers and the final norm; the result is [T, C] or [L, C].

    The last layer's keys and values are needed for every row, what comes after them only for the rows of the result.
    """
    spec = model.spec
    stream = Stream(ops, spec.hidden, spec.residual_scale)
    ops.embed(model.embedding, spec.embedding_scale, stream.x)
    last = len(spec.layers) - 1
    for index, (layer, weights, cache) in enumerate(zip(spec.layers, model.layers, caches, strict=True)):
        if index > 0:
            ops.section()  # a section a layer: what is before the first and after the last belongs to these
        if features is not None:
            features.take(index, stream.x)
        y = attend(stream, layer, weights, cache)  # [T, H * D]
        if index == last and rows is Rows.LOGITS:
            y = stream.narrow(y, layer.mixer.n_heads * layer.mixer.head_dim)
        mixer = weights.mixer
        adapters = weights.adapters
        norm, norm_weight = layer.post_mixer_norm, weights.post_mixer_norm
        stream.add(y, mixer.out, mixer.out_bias, norm, norm_weight, adapters.get("attn_output"))
        y = feed_forward(stream, layer, weights)  # [rows, F]
        norm, norm_weight = layer.post_ffn_norm, weights.post_ffn_norm
        stream.add(y, weights.ffn.down, None, norm, norm_weight, adapters.get("ffn_down"))
    return stream.normed(spec.final_norm, model.final_norm)
