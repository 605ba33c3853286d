"""The part of a layer that mixes positions: attention (read `ffn.py` next; `ops/reference.py` defines the operations)."""

from __future__ import annotations

from martlet.models.stream import Stream
from martlet.models.weights import LayerWeights
from martlet.ops.interface import Array
from martlet.spec import Layer

__all__ = ["attend"]


def attend(stream: Stream, layer: Layer, weights: LayerWeights, cache: Array, x: Array | None = None) -> Array:
    """Project, normalise, rotate, write the cache and attend; the result, [T, H * D], awaits the output projection.

    What is projected is the normed stream, or `x` where the caller has made something else of it.
    """
    ops, spec, mixer = stream.ops, layer.mixer, weights.mixer
    q_width, kv_width = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    qkv = stream.scratch("qkv", q_width + 2 * kv_width)
    if x is None:
        x = stream.normed(layer.mixer_norm, weights.mixer_norm)
    ops.linear(x, mixer.qkv, qkv, mixer.qkv_bias)

    q = ops.columns(qkv, 0, q_width)  # [T, H * D]
    k = ops.columns(qkv, q_width, q_width + kv_width)  # [T, G * D]
    v = ops.columns(qkv, q_width + kv_width, q_width + 2 * kv_width)
    for part, name in ((q, "attn_q"), (k, "attn_k"), (v, "attn_v")):
        if name in weights.adapters:
            ops.adapt(x, weights.adapters[name], part)
    if spec.qk_norm is not None:
        ops.rms_norm(q, mixer.q_norm, spec.qk_norm.eps, q)
        ops.rms_norm(k, mixer.k_norm, spec.qk_norm.eps, k)
    if spec.rope is not None:
        ops.rope(q, spec.head_dim, spec.rope, q)
        ops.rope(k, spec.head_dim, spec.rope, k)
    ops.kv_write(k, v, cache)
    out = stream.scratch("attended", q_width)
    ops.attention(q, cache, spec, out)
    return out
