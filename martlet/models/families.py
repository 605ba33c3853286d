"""Families as data: what distinguishes one decoder from another, a function each (read `weights.py` next).

A family turns the file's `Facts` into a `ModelSpec`. A new family is an entry of `FAMILIES` and, where it has a
peculiarity, a few lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from martlet.errors import UnsupportedError
from martlet.formats.checkpoint import Checkpoint
from martlet.models.metadata import Facts, facts_of
from martlet.models.rope_scaling import rope_of
from martlet.spec import Activation, Attention, DenseFfn, Layer, ModelSpec, Norm, Rope

__all__ = ["FAMILIES", "GGUF_PERMUTED", "OFFSET_NORMS", "spec_of"]

# Files that hold these differ from the decoder in ways that `weights.py` undoes.
GGUF_PERMUTED = frozenset({"llama", "granite", "smollm3"})  # rows of q and k for RoPE on neighbouring pairs
OFFSET_NORMS = frozenset({"gemma2", "gemma3"})  # safetensors store a norm's weight minus 1


def _attention(facts: Facts, rope: Rope | None, window: int | None = None) -> Attention:
    return Attention(
        facts.n_heads,
        facts.n_kv_heads,
        facts.head_dim,
        facts.head_dim**-0.5 if facts.query_scale is None else facts.query_scale,
        rope,
        window=window,
        softcap=facts.softcap,
        bias=facts.bias,
        out_bias=facts.out_bias,
    )


def _layer(facts: Facts, mixer: Attention, activation: Activation = Activation.SILU) -> Layer:
    norm = Norm(facts.eps)
    return Layer(mixer, DenseFfn(facts.ffn_hidden, facts.activation or activation), norm, norm)


def _model(facts: Facts, layers: Iterable[Layer]) -> ModelSpec:
    return ModelSpec(
        facts.family,
        facts.name,
        facts.vocab,
        facts.hidden,
        facts.context,
        tuple(layers),
        Norm(facts.eps),
        facts.tied,
        embedding_scale=facts.embedding_scale,
        residual_scale=facts.residual_scale,
        logit_scale=1.0 / facts.logit_divisor,
        logit_softcap=facts.logit_softcap,
    )


def _sliding(facts: Facts, default: Callable[[int], bool]) -> list[bool]:
    """Which layers see a window only: the file's list, or the family's rule."""
    if facts.layer_types is None:
        return [facts.window is not None and default(i) for i in range(facts.n_layers)]
    if len(facts.layer_types) != facts.n_layers:
        raise UnsupportedError(f"layer_types has {len(facts.layer_types)} entries for {facts.n_layers} layers")
    for kind in facts.layer_types:
        if kind not in ("sliding_attention", "full_attention"):
            raise UnsupportedError(f"a layer of type {kind!r}", ("sliding_attention", "full_attention"))
    return [kind == "sliding_attention" and facts.window is not None for kind in facts.layer_types]


def _llama(facts: Facts, context: int | None) -> ModelSpec:
    """Llama 1 to 3, Mistral, Qwen2, MiMo, Phi-3, Granite: one kind of layer, a window in all of them or in none."""
    rope = rope_of(facts, context)
    windows = _sliding(facts, lambda i: True)
    return _model(facts, (_layer(facts, _attention(facts, rope, facts.window if w else None)) for w in windows))


def _qwen3(facts: Facts, context: int | None) -> ModelSpec:
    """Queries and keys are normed head by head."""
    spec = _llama(facts, context)
    norm = Norm(facts.eps)
    return replace(spec, layers=tuple(replace(x, mixer=replace(x.mixer, qk_norm=norm)) for x in spec.layers))


def _smollm3(facts: Facts, context: int | None) -> ModelSpec:
    """Every fourth layer has no position embedding (arXiv:2501.18795)."""
    rope = rope_of(facts, context)
    none = facts.no_rope or [i % 4 == 3 for i in range(facts.n_layers)]
    if len(none) != facts.n_layers:
        raise UnsupportedError(f"no_rope_layers has {len(none)} entries for {facts.n_layers} layers")
    windows = [facts.window if w else None for w in _sliding(facts, lambda i: none[i])]
    layers = (_attention(facts, None if n else rope, w) for n, w in zip(none, windows, strict=True))
    return _model(facts, (_layer(facts, mixer) for mixer in layers))


def _olmo2(facts: Facts, context: int | None) -> ModelSpec:
    """Norms stand after the parts, and queries and keys are normed over all heads at once (arXiv:2501.00656)."""
    norm = Norm(facts.eps)
    mixer = replace(_attention(facts, rope_of(facts, context)), qk_norm=norm, qk_norm_per_head=False)
    ffn = DenseFfn(facts.ffn_hidden, facts.activation or Activation.SILU)
    return _model(facts, [Layer(mixer, ffn, None, None, norm, norm)] * facts.n_layers)


def _gemma2(facts: Facts, context: int | None) -> ModelSpec:
    """Norms before and after each part, scores and logits capped, every other layer with a window (arXiv:2408.00118)."""
    if facts.query_scale is None and facts.n_layers == 46:  # the 27B, whose scale GGUF does not store
        facts = replace(facts, query_scale=(facts.hidden // facts.n_heads) ** -0.5)
    facts = replace(facts, embedding_scale=facts.hidden**0.5)
    norm, rope = Norm(facts.eps), rope_of(facts, context)
    layers = []
    for sliding in _sliding(facts, lambda i: i % 2 == 0):
        mixer = _attention(facts, rope, facts.window if sliding else None)
        plain = _layer(facts, mixer, Activation.GELU_TANH)
        layers.append(replace(plain, post_mixer_norm=norm, post_ffn_norm=norm))
    return _model(facts, layers)


def _gemma3(facts: Facts, context: int | None) -> ModelSpec:
    """Five layers with a window and a RoPE base of their own to one without (arXiv:2503.19786)."""
    if facts.query_scale is None and facts.n_layers == 62:  # the 27B, whose scale GGUF does not store
        facts = replace(facts, query_scale=(facts.hidden // facts.n_heads) ** -0.5)
    facts = replace(facts, embedding_scale=facts.hidden**0.5, activation=facts.activation or Activation.GELU_TANH)
    everywhere = rope_of(facts, context)
    nearby = rope_of(facts, context, base=facts.local_rope_base or 10000.0, scaled=False)
    norm, layers = Norm(facts.eps), []
    for sliding in _sliding(facts, lambda i: i % 6 != 5):
        mixer = _attention(facts, nearby if sliding else everywhere, facts.window if sliding else None)
        plain = _layer(facts, replace(mixer, qk_norm=norm))
        layers.append(replace(plain, post_mixer_norm=norm, post_ffn_norm=norm))
    return _model(facts, layers)


FAMILIES: dict[str, Callable[[Facts, int | None], ModelSpec]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "mimo": _llama,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _llama,
    "smollm3": _smollm3,
    "granite": _llama,
    "olmo2": _olmo2,
}


def spec_of(checkpoint: Checkpoint, context: int | None = None) -> ModelSpec:
    """The spec of a checkpoint's model; `context`, the longest in use, chooses between RoPE factors (longrope).

    Raises UnsupportedError for a family that is not in the table, or a part of it that is not known here.
    """
    facts = facts_of(checkpoint, FAMILIES)
    return FAMILIES[facts.family](facts, context)
