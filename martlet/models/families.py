"""Families as data: a record for each, with all its peculiarities (read `metadata.py` next).

A record's function turns the file's `ModelMeta` into a `ModelSpec`. A new family is an entry of
`FAMILIES` and, if its layers are of a new kind, a function of a few lines.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from martlet.errors import UnsupportedError
from martlet.formats.checkpoint import Checkpoint
from martlet.models.expert_keys import ExpertKeys
from martlet.models.metadata import Family, ModelMeta, model_meta
from martlet.models.rope_scaling import rope_of
from martlet.spec import Activation, Attention, DenseFfn, Layer, ModelSpec, MoeFfn, Norm, Rope, Scoring


def _attention(meta: ModelMeta, rope: Rope | None, window: int | None = None) -> Attention:
    return Attention(
        meta.n_heads,
        meta.n_kv_heads,
        meta.head_dim,
        meta.head_dim**-0.5 if meta.query_scale is None else meta.query_scale,
        rope,
        window=window,
        softcap=meta.softcap,
        bias=meta.bias,
        out_bias=meta.out_bias,
    )


def _layer(meta: ModelMeta, mixer: Attention, activation: Activation = Activation.SILU, index: int = 0) -> Layer:
    norm = Norm(meta.eps)
    return Layer(mixer, _ffn(meta, meta.activation or activation, index), norm, norm)


def _ffn(meta: ModelMeta, activation: Activation, index: int) -> DenseFfn | MoeFfn:
    """The network of layer `index`: experts, or dense."""
    experts, keys = meta.experts, FAMILIES[meta.family].experts
    if experts is None or keys is None or index in experts.dense:
        return DenseFfn(meta.ffn_hidden, activation)
    shared = DenseFfn(experts.shared_hidden, activation) if experts.shared_hidden else None
    return MoeFfn(
        experts.routing,
        experts.hidden,
        activation,
        correction=keys.correction,
        router_bias=keys.biases,
        bias=keys.biases,
        shared=shared,
        shared_gated=keys.shared_gated,
    )


def _model(meta: ModelMeta, layers: Iterable[Layer]) -> ModelSpec:
    return ModelSpec(
        meta.family,
        meta.name,
        meta.vocab,
        meta.hidden,
        meta.context,
        tuple(layers),
        Norm(meta.eps),
        meta.tied,
        embedding_scale=meta.embedding_scale,
        residual_scale=meta.residual_scale,
        logit_scale=1.0 / meta.logit_divisor,
        logit_softcap=meta.logit_softcap,
    )


def _sliding(meta: ModelMeta, default: Callable[[int], bool]) -> list[bool]:
    """Which layers attend in a window: the file's list, or the family's rule."""
    if meta.layer_types is None:
        return [meta.window is not None and default(i) for i in range(meta.n_layers)]
    if len(meta.layer_types) != meta.n_layers:
        raise UnsupportedError(f"layer_types has {len(meta.layer_types)} entries for {meta.n_layers} layers")
    for type_ in meta.layer_types:
        if type_ not in ("sliding_attention", "full_attention"):
            raise UnsupportedError(f"a layer of type {type_!r}", ("sliding_attention", "full_attention"))
    return [type_ == "sliding_attention" and meta.window is not None for type_ in meta.layer_types]


def _llama(meta: ModelMeta, context: int | None) -> ModelSpec:
    """Llama 1 to 3, Mistral, Qwen2, MiMo, Phi-3, Granite: layers differ in windows and experts."""
    rope = rope_of(meta, context)
    windows = [meta.window if slides else None for slides in _sliding(meta, lambda i: True)]
    return _model(meta, (_layer(meta, _attention(meta, rope, w), index=i) for i, w in enumerate(windows)))


def _qwen3(meta: ModelMeta, context: int | None) -> ModelSpec:
    """Queries and keys are normed head by head."""
    spec = _llama(meta, context)
    norm = Norm(meta.eps)
    return replace(spec, layers=tuple(replace(x, mixer=replace(x.mixer, qk_norm=norm)) for x in spec.layers))


def _olmoe(meta: ModelMeta, context: int | None) -> ModelSpec:
    """Queries and keys are normed over all heads at once (arXiv:2409.02060)."""
    spec = _qwen3(meta, context)
    layers = (replace(x, mixer=replace(x.mixer, qk_norm_per_head=False)) for x in spec.layers)
    return replace(spec, layers=tuple(layers))


def _gpt_oss(meta: ModelMeta, context: int | None) -> ModelSpec:
    """Every other layer has a window; heads have sinks, experts biases (arXiv:2508.10925)."""
    meta = replace(meta, activation=Activation.SWIGLU_OAI, rope_scaling={**meta.rope_scaling, "truncate": False})
    rope, layers = rope_of(meta, context), []
    for i, slides in enumerate(_sliding(meta, lambda i: i % 2 == 0)):
        mixer = replace(_attention(meta, rope, meta.window if slides else None), sinks=True)
        layers.append(_layer(meta, mixer, index=i))
    return _model(meta, layers)


def _glm4(meta: ModelMeta, context: int | None) -> ModelSpec:
    """Norms before and after each sublayer (GLM-4)."""
    spec, norm = _llama(meta, context), Norm(meta.eps)
    return replace(spec, layers=tuple(replace(x, post_mixer_norm=norm, post_ffn_norm=norm) for x in spec.layers))


def _glm4moe(meta: ModelMeta, context: int | None) -> ModelSpec:
    """Experts chosen by sigmoid scores; the largest model norms queries and keys (GLM-4.5)."""
    return _qwen3(meta, context) if meta.qk_norm else _llama(meta, context)


def _exaone4(meta: ModelMeta, context: int | None) -> ModelSpec:
    """Norms follow the sublayers; layers beside those with a window have no position embedding."""
    norm, rope, layers = Norm(meta.eps), rope_of(meta, context), []
    ffn = DenseFfn(meta.ffn_hidden, meta.activation or Activation.SILU)
    for slides in _sliding(meta, lambda i: i % 4 != 3):
        everywhere = meta.window is not None and not slides
        mixer = _attention(meta, None if everywhere else rope, meta.window if slides else None)
        layers.append(Layer(replace(mixer, qk_norm=norm), ffn, None, None, norm, norm))
    return _model(meta, layers)


def _smollm3(meta: ModelMeta, context: int | None) -> ModelSpec:
    """Every fourth layer has no position embedding (arXiv:2501.18795)."""
    rope = rope_of(meta, context)
    none = meta.no_rope or [i % 4 == 3 for i in range(meta.n_layers)]
    if len(none) != meta.n_layers:
        raise UnsupportedError(f"no_rope_layers has {len(none)} entries for {meta.n_layers} layers")
    windows = [meta.window if w else None for w in _sliding(meta, lambda i: none[i])]
    layers = (_attention(meta, None if n else rope, w) for n, w in zip(none, windows, strict=True))
    return _model(meta, (_layer(meta, mixer) for mixer in layers))


def _olmo2(meta: ModelMeta, context: int | None) -> ModelSpec:
    """Norms follow the sublayers; queries and keys are normed over all heads (arXiv:2501.00656)."""
    norm = Norm(meta.eps)
    mixer = replace(_attention(meta, rope_of(meta, context)), qk_norm=norm, qk_norm_per_head=False)
    ffn = DenseFfn(meta.ffn_hidden, meta.activation or Activation.SILU)
    return _model(meta, [Layer(mixer, ffn, None, None, norm, norm)] * meta.n_layers)


def _gemma2(meta: ModelMeta, context: int | None) -> ModelSpec:
    """Norms before and after each sublayer, capped scores and logits (arXiv:2408.00118).

    Every other layer has a window.
    """
    if meta.query_scale is None and meta.n_layers == 46:  # the 27B, whose scale GGUF does not store
        meta = replace(meta, query_scale=(meta.hidden // meta.n_heads) ** -0.5)
    meta = replace(meta, embedding_scale=meta.hidden**0.5)
    norm, rope = Norm(meta.eps), rope_of(meta, context)
    layers = []
    for sliding in _sliding(meta, lambda i: i % 2 == 0):
        mixer = _attention(meta, rope, meta.window if sliding else None)
        plain = _layer(meta, mixer, Activation.GELU_TANH)
        layers.append(replace(plain, post_mixer_norm=norm, post_ffn_norm=norm))
    return _model(meta, layers)


def _gemma3(meta: ModelMeta, context: int | None) -> ModelSpec:
    """Five layers with a window and their own RoPE base for each without (arXiv:2503.19786)."""
    if meta.query_scale is None and meta.n_layers == 62:  # the 27B, whose scale GGUF does not store
        meta = replace(meta, query_scale=(meta.hidden // meta.n_heads) ** -0.5)
    meta = replace(meta, embedding_scale=meta.hidden**0.5, activation=meta.activation or Activation.GELU_TANH)
    everywhere = rope_of(meta, context)
    nearby = rope_of(meta, context, base=meta.local_rope_base or 10000.0, scaled=False)
    norm, layers = Norm(meta.eps), []
    for sliding in _sliding(meta, lambda i: i % 6 != 5):
        mixer = _attention(meta, nearby if sliding else everywhere, meta.window if sliding else None)
        plain = _layer(meta, replace(mixer, qk_norm=norm))
        layers.append(replace(plain, post_mixer_norm=norm, post_ffn_norm=norm))
    return _model(meta, layers)


def _before_last_of(layer: int, period: int) -> bool:
    """Whether a layer is not the last of its period."""
    return (layer + 1) % period != 0


def _from_on(layer: int, first: int) -> bool:
    return layer >= first


GEMMA_CONFIG = {
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
# The name that other families' ffn_norm has is that of the norm after attention in these.
POST_NORMS = {"post_attention_layernorm": "post_attention_norm"}
# And in GGUF the name of that norm is ffn_norm's in these.
NORM_BEFORE_FFN = {"post_attention_norm": "ffn_norm"}
FAMILIES: dict[str, Family] = {
    # In GGUF, Mixtral is a llama with experts.
    "llama": Family(_llama, gguf_permuted=True, experts=ExpertKeys(None)),
    "mistral": Family(_llama),
    "mixtral": Family(
        _llama,
        {"num_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        experts=ExpertKeys("intermediate_size", True),
    ),
    "qwen2": Family(
        _llama,
        {"max_window_layers": 28},
        qkv_bias=True,
        window_switch=True,
        window_key="max_window_layers",
        slides=_from_on,
    ),
    "mimo": Family(_llama, qkv_bias=True, window_switch=True, mtp_prefix="model.mtp_layers."),
    "qwen3": Family(
        _qwen3,
        {"head_dim": 128, "max_window_layers": 28},
        window_switch=True,
        window_key="max_window_layers",
        slides=_from_on,
    ),
    "gemma2": Family(
        _gemma2,
        GEMMA_CONFIG,
        {"attention.sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        activation_key="hidden_activation",  # transformers ignores its hidden_act
        offset_norms=True,
        renamed=POST_NORMS,
    ),
    "gemma3": Family(
        _gemma3,
        {
            **GEMMA_CONFIG,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
        },
        activation_key="hidden_activation",
        window_key="sliding_window_pattern",
        slides=_before_last_of,
        offset_norms=True,
        renamed=POST_NORMS,
    ),
    "phi3": Family(_llama, {"rms_norm_eps": 1e-5}),
    "smollm3": Family(
        _smollm3, {"rope_theta": 2000000.0, "tie_word_embeddings": True}, window_switch=True, gguf_permuted=True
    ),
    "granite": Family(_llama, gguf_permuted=True),
    "granitemoe": Family(_llama, gguf_permuted=True, experts=ExpertKeys("intermediate_size", True)),
    "qwen2moe": Family(
        _llama,
        {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "max_window_layers": 28},
        qkv_bias=True,
        window_switch=True,
        window_key="max_window_layers",
        slides=_from_on,
        experts=ExpertKeys(gguf_normalised=False, shared_gated=True),
    ),
    "qwen3moe": Family(
        _qwen3,
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        window_switch=True,
        experts=ExpertKeys(),
    ),
    "olmoe": Family(
        _olmoe,
        {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
        experts=ExpertKeys(hidden="intermediate_size", gguf_normalised=False),
    ),
    "gpt-oss": Family(
        _gpt_oss,
        {"attention_bias": True, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5, "num_experts_per_tok": 4},
        experts=ExpertKeys("intermediate_size", True, biases=True),
        gguf_renamed=NORM_BEFORE_FFN,
        transposed_experts=True,
        alternating_gate_up=True,
    ),
    "glm4": Family(
        _glm4,
        {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7},
        interleaved=True,
        plain_output=True,
    ),
    "glm4moe": Family(
        _glm4moe,
        {"n_routed_experts": 128, "norm_topk_prob": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
        plain_output=True,
        next_layers=True,
        experts=ExpertKeys(scoring=Scoring.SIGMOID, correction=True),
        gguf_renamed=NORM_BEFORE_FFN,
    ),
    "seed_oss": Family(
        _llama, {"attention_bias": True, "head_dim": 128}, plain_output=True, gguf_renamed=NORM_BEFORE_FFN
    ),
    "ernie4_5": Family(
        _llama,
        {"tie_word_embeddings": True, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
        interleaved=True,
    ),
    "ernie4_5-moe": Family(
        _llama,
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "moe_num_experts": 64},
        interleaved=True,
        experts=ExpertKeys(normalised=True, correction=True),
        mtp_prefix="model.mtp_",
    ),
    "exaone4": Family(
        _exaone4,
        {"rms_norm_eps": 1e-5},
        window_key="sliding_window_pattern",
        slides=_before_last_of,
        renamed=POST_NORMS,
    ),
    "olmo2": Family(_olmo2, {"rms_norm_eps": 1e-5}, renamed=POST_NORMS),
}


def spec_of(checkpoint: Checkpoint, context: int | None = None) -> ModelSpec:
    """The spec of a checkpoint's model.

    `context`, the longest one in use, selects between RoPE factors (longrope). Raises FormatError
    for bad metadata, UnsupportedError for a family or a feature that is not known here.
    """
    meta = model_meta(checkpoint, FAMILIES)
    return FAMILIES[meta.family].spec(meta, context)
