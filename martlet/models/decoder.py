"""The one decoder, over a `ModelSpec` and a `Backend` (read `layer.py` next).

    ids → embed → layers → final norm → head → logits

Nothing here depends on the data of a step, so a backend can run these functions once and replay
the operations that they called.
"""

from collections.abc import Sequence

from martlet.models.layer import Stream, run_layer
from martlet.models.weights import Model
from martlet.ops.interface import Array, Backend, Rows


class Features:
    """A draft head's input: the inputs of n layers of the model side by side, float32 [T, n * C].

    The layer after the last stands for the output of the final norm. `eagle_head.py` and
    `medusa_heads.py` read them.
    """

    def __init__(self, ops: Backend, layers: Sequence[int], width: int) -> None:
        self.out = ops.empty(Rows.TOKENS, len(layers) * width)
        self._ops, self._layers, self._width = ops, layers, width

    def has(self, layer: int) -> bool:
        """Whether the input of a layer is among them."""
        return layer in self._layers

    def take(self, layer: int, x: Array) -> None:
        """Copy x [T, C], the input of `layer`, if it is among them."""
        for number, wanted in enumerate(self._layers):
            if wanted == layer:
                out = self._ops.columns(self.out, number * self._width, (number + 1) * self._width)
                self._ops.scale_cap(x, 1.0, None, out)


def forward(ops: Backend, model: Model, caches: Sequence[Array], features: Features | None = None) -> Array:
    """Return the logits [L, V] of the step's logit rows. Call inside a capture.

    `caches` has one KV cache per layer.
    """
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
    """Return the final norm's output of every row, [T, C] (embeddings). Call inside a capture."""
    return _final(ops, model, caches, Rows.TOKENS)


def _final(ops: Backend, model: Model, caches: Sequence[Array], rows: Rows, features: Features | None = None) -> Array:
    """Run all layers and the final norm; the result is [T, C] or [L, C].

    In the last layer all rows need keys and values, but only the rows of the result need more.
    """
    spec = model.spec
    stream = Stream(ops, spec.hidden, spec.residual_scale)
    ops.embed(model.embedding, spec.embedding_scale, stream.x)
    last = len(spec.layers) - 1
    for index, (layer, weights, cache) in enumerate(zip(spec.layers, model.layers, caches, strict=True)):
        if index > 0:
            ops.section()  # one per layer; the first has the embedding too, the last the logits
        if features is not None:
            features.take(index, stream.x)
        run_layer(stream, layer, weights, cache, narrows=index == last and rows is Rows.LOGITS)
    return stream.normed(spec.final_norm, model.final_norm)
