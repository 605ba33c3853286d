"""The part of a layer that works on each position alone (read `weights.py` next, for where the weights come from)."""

from __future__ import annotations

from martlet.models.stream import Stream
from martlet.models.weights import LayerWeights
from martlet.ops.interface import Array
from martlet.spec import Layer

__all__ = ["feed_forward"]


def feed_forward(stream: Stream, layer: Layer, weights: LayerWeights) -> Array:
    """act(gate) * up; the result, [rows, F], awaits the down projection."""
    ops, spec = stream.ops, layer.ffn
    gate_up = stream.scratch("gate_up", 2 * spec.ffn_hidden)
    x = stream.normed(layer.ffn_norm, weights.ffn_norm)
    ops.linear(x, weights.ffn.gate_up, gate_up)
    for start, name in ((0, "ffn_gate"), (spec.ffn_hidden, "ffn_up")):
        if name in weights.adapters:
            ops.adapt(x, weights.adapters[name], ops.columns(gate_up, start, start + spec.ffn_hidden))
    out = stream.scratch("gated", spec.ffn_hidden)
    ops.act_mul(gate_up, spec.activation, out)
    return out
