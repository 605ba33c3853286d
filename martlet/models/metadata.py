"""A model's metadata, the same from either format (read `rope_scaling.py` next).

`model_meta` reads GGUF's keys or config.json's into one `ModelMeta`, with the help of the family's
record, a `Family`. A value that is missing, of the wrong type or out of range is a FormatError that
names its key.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from martlet.errors import FormatError, UnsupportedError, nearest
from martlet.formats.checkpoint import Checkpoint
from martlet.models.expert_keys import EXPERT_COUNTS, ExpertKeys, ExpertMeta, config_experts, gguf_experts
from martlet.models.keys import Keys
from martlet.quant.ggml import decode
from martlet.spec import Activation, ModelSpec

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu_tanh": Activation.GELU_TANH,
    "gelu": Activation.GELU,
}
# Keys of config.json that change the computation in a way that no family here has, and their
# harmless values.
REFUSED = {
    "quantization_config": None,
    "compression_config": None,
    "mlp_bias": False,
    "use_bias": False,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "lm_head_bias": False,
    "num_local_experts": 0,
    "num_experts": 0,
    "alibi": False,
    "clip_qkv": None,
    "use_bidirectional_attention": False,
    "is_causal": True,
    "is_encoder_decoder": False,
    "attention_sinks": False,
    "attn_temperature_tuning": False,
}

# Families whose config.json calls them otherwise than GGUF does.
CONFIG_NAMES = {
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "granitemoeshared": "granitemoe",
}
MAX_LAYERS = 1024  # a file that says more is hostile


@dataclass(frozen=True, slots=True)
class ModelMeta:
    """Sizes and settings of a model; None where the file does not say."""

    family: str
    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_hidden: int
    eps: float
    vocab: int
    context: int
    rope_base: float
    rope_dims: int
    tied: bool
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)  # as in config.json, with "type"
    rope_divisors: Sequence[float] | None = None  # of each frequency: llama 3 as GGUF stores it
    local_rope_base: float | None = None
    window: int | None = None
    layer_types: Sequence[str] | None = None  # "sliding_attention" or "full_attention"
    no_rope: Sequence[bool] | None = None  # layers without position embedding
    activation: Activation | None = None
    qk_norm: bool = False  # where a file says so
    bias: bool = False  # q, k, v
    out_bias: bool = False
    query_scale: float | None = None  # multiplies q·k
    softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    experts: ExpertMeta | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """What distinguishes a family's models and files; a default is what most families have."""

    spec: Callable[[ModelMeta, int | None], ModelSpec]  # the int: the longest context in use
    # Values of keys that a file lacks: transformers' for config.json, llama.cpp's for GGUF (no
    # prefix).
    config_defaults: Mapping[str, Any] = field(default_factory=dict)
    gguf_defaults: Mapping[str, Any] = field(default_factory=dict)
    activation_key: str = "hidden_act"  # of config.json
    qkv_bias: bool = False  # q, k and v always have a bias, the output never
    window_switch: bool = False  # config.json's window counts only with use_sliding_window
    # Before layer_types, config.json had a number instead: its key, and whether a layer slides by
    # it.
    window_key: str | None = None
    slides: Callable[[int, int], bool] = lambda layer, number: True
    interleaved: bool = False  # files of both formats do what `gguf_permuted` says
    plain_output: bool = False  # attention_bias is not for the output's projection
    next_layers: bool = False  # layers beyond the last predict further tokens, and are not used
    gguf_permuted: bool = False  # GGUF files store rows of q and k for RoPE on neighbouring pairs
    offset_norms: bool = False  # safetensors store a norm's weight minus 1
    # Modules of Hugging Face that mean another row of `tensors.ROWS` than in most families.
    renamed: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertKeys | None = None  # None: all layers are dense
    # Of safetensors: stacks of float matrices [E, k, n], and gate and up row by row in turn.
    transposed_experts: bool = False
    alternating_gate_up: bool = False
    gguf_renamed: Mapping[str, str] = field(default_factory=dict)  # the same for GGUF's names
    mtp_prefix: str | None = None  # of safetensors for multi-token prediction (`mtp_layers.py`)


def model_meta(checkpoint: Checkpoint, families: Mapping[str, Family]) -> ModelMeta:
    """Read a checkpoint's metadata.

    Raises FormatError for a bad value, UnsupportedError for a family not among `families`.
    """
    gguf, config = checkpoint.format == "gguf", checkpoint.metadata
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    key = "general.architecture" if gguf else "model_type"
    name = config.get(key)
    if not isinstance(name, str):
        raise FormatError(checkpoint.path, f"{key} is missing: the file does not say what its model is")
    if not gguf:
        name = CONFIG_NAMES.get(name, name).removesuffix("_text")
    if name not in families:
        raise UnsupportedError(f"The model family {name!r} is not known.{nearest(name, families)}", families)
    family = families[name]
    meta = _from_gguf(checkpoint, name, family) if gguf else _from_config(checkpoint, config, name, family)
    if meta.n_heads % meta.n_kv_heads:
        raise FormatError(checkpoint.path, f"{meta.n_heads} heads cannot share {meta.n_kv_heads} key-value heads")
    if meta.rope_dims < 2 or meta.rope_dims % 2 or meta.rope_dims > meta.head_dim:
        raise FormatError(checkpoint.path, f"{meta.rope_dims} rotary dimensions in heads of {meta.head_dim}")
    return meta


def _n_layers(keys: Keys, key: str) -> int:
    n_layers = keys.size(key)
    if n_layers > MAX_LAYERS:
        keys.fail(f"{key} is {n_layers}, expected at most {MAX_LAYERS}")
    return n_layers


def _from_gguf(checkpoint: Checkpoint, name: str, family: Family) -> ModelMeta:
    prefix = f"{name}."
    defaults = {prefix + key: value for key, value in family.gguf_defaults.items()}
    keys = Keys(checkpoint, {**defaults, **checkpoint.metadata}, prefix)
    n_layers = _n_layers(keys, "block_count")
    experts = gguf_experts(keys, family.experts, n_layers)
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FormatError(checkpoint.path, "the matrix token_embd.weight is missing")
    n_heads, hidden = keys.size("attention.head_count"), keys.size("embedding_length")
    head_dim = keys.size("attention.key_length", hidden // n_heads)
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{prefix}attention.value_length differs from key_length")
    tensors = checkpoint.tensors
    if family.next_layers:
        n_layers -= keys.count("nextn_predict_layers")
    rope_dims = keys.size("rope.dimension_count", head_dim)
    meta = ModelMeta(
        family=name,
        name=str(checkpoint.metadata.get("general.name", checkpoint.path.stem)),
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=keys.size("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        ffn_hidden=keys.size("feed_forward_length", None if experts is None else experts.hidden),
        eps=keys.positive("attention.layer_norm_rms_epsilon", 1e-5),
        vocab=embedding.shape[0],
        context=keys.size("context_length"),
        rope_base=keys.positive("rope.freq_base", 10000.0),
        rope_dims=rope_dims,
        tied="output.weight" not in tensors,
        rope_scaling=_gguf_scaling(checkpoint, keys, rope_dims // 2),
        rope_divisors=_divisors(checkpoint, "rope_freqs.weight", rope_dims // 2),
        local_rope_base=keys.number("rope.freq_base_swa"),
        window=keys.get("attention.sliding_window", (int,)) or None,
        layer_types=_gguf_layer_types(keys, n_layers),
        bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        query_scale=keys.number("attention.scale"),
        softcap=keys.number("attn_logit_softcapping") or None,
        logit_softcap=keys.number("final_logit_softcapping") or None,
        embedding_scale=keys.positive("embedding_scale", 1.0),
        residual_scale=keys.positive("residual_scale", 1.0),
        logit_divisor=keys.positive("logit_scale", 1.0),
        experts=experts,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )
    keys.refuse_unread()
    return meta


def _gguf_layer_types(keys: Keys, n_layers: int) -> list[str] | None:
    """Which layers slide, where the file says so: a list, or a period whose last layer does not."""
    pattern = keys.get("attention.sliding_window_pattern", (int, list))
    if pattern is None:
        return None
    if isinstance(pattern, int):
        pattern = [pattern == 0 or i % pattern < pattern - 1 for i in range(n_layers)]
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _divisors(checkpoint: Checkpoint, name: str, n: int) -> list[float] | None:
    """A tensor [n] of divisors, one per rotary frequency; None where the file has none."""
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        return None
    if tensor.shape != (n,):
        raise FormatError(checkpoint.path, f"{name} has the shape {tensor.shape}, expected ({n},)")
    values = [float(value) for value in decode(tensor)]
    if not all(0 < value < math.inf for value in values):
        raise FormatError(checkpoint.path, f"{name} has values that are not finite and above 0")
    return values


def _gguf_scaling(checkpoint: Checkpoint, keys: Keys, n: int) -> dict[str, Any]:
    """RoPE scaling under config.json's names; longrope's factors are tensors."""
    scaling: dict[str, Any] = {
        "type": keys.get("rope.scaling.type", (str,), "none"),
        "factor": keys.positive("rope.scaling.factor", 1.0),
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length", (int,)),
        "attention_factor": keys.number("rope.scaling.attn_factor"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow"),
        "long_factor": _divisors(checkpoint, "rope_factors_long.weight", n),
        "short_factor": _divisors(checkpoint, "rope_factors_short.weight", n),
    }
    if scaling["long_factor"] is not None:
        scaling["type"] = "longrope"
    elif scaling["type"] == "yarn" and scaling["attention_factor"] not in (None, 1.0):
        raise UnsupportedError(f"{checkpoint.path}: yarn with rope.scaling.attn_factor = {scaling['attention_factor']}")
    elif scaling["type"] == "yarn":
        scaling["attention_factor"] = None  # 1 times the rule's own
    return {} if scaling["type"] == "none" else scaling


def _from_config(checkpoint: Checkpoint, config: Mapping[str, Any], name: str, family: Family) -> ModelMeta:
    has_experts = family.experts is not None and family.experts.hidden is not None
    for key, harmless in REFUSED.items():
        if _is_mxfp4(key, config.get(key)):
            continue  # `formats/expert_stacks.py` reads it
        if config.get(key) not in (None, harmless) and not (has_experts and key in EXPERT_COUNTS):
            raise UnsupportedError(f"config.json's {key} = {str(config[key])[:60]}")
    config = {**family.config_defaults, **{key: value for key, value in config.items() if value is not None}}
    keys = Keys(checkpoint, config)
    n_heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
    head_dim = keys.size("head_dim", hidden // n_heads)
    activation = keys.get(family.activation_key, (str,), "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"config.json's {family.activation_key} = {activation!r}", ACTIVATIONS)
    full, local = _rope_parameters(checkpoint, config)
    rope = Keys(checkpoint, full)
    partial = rope.positive("partial_rotary_factor", keys.positive("partial_rotary_factor", 1.0))
    n_layers, attention_bias = _n_layers(keys, "num_hidden_layers"), keys.get("attention_bias", (bool,), False)
    query_scalar = keys.number("query_pre_attn_scalar")
    return ModelMeta(
        family=name,
        name=str(config.get("_name_or_path") or checkpoint.path.name),
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=keys.size("num_key_value_heads", n_heads),
        head_dim=head_dim,
        ffn_hidden=keys.size("intermediate_size"),
        eps=keys.positive("rms_norm_eps", 1e-6),
        vocab=keys.size("vocab_size"),
        context=keys.size("max_position_embeddings", 2048),
        rope_base=rope.positive("rope_theta", keys.positive("rope_theta", 10000.0)),
        rope_dims=int(head_dim * partial),
        tied=keys.get("tie_word_embeddings", (bool,), False),
        rope_scaling={} if full["type"] == "default" else full,
        local_rope_base=local,
        window=_window(keys, family),
        layer_types=_layer_types(keys, family, n_layers),
        no_rope=_no_rope(keys, n_layers),
        activation=ACTIVATIONS[activation],
        bias=attention_bias or family.qkv_bias,
        out_bias=keys.get(
            "attention_out_bias", (bool,), attention_bias and not family.qkv_bias and not family.plain_output
        ),
        query_scale=keys.number("attention_multiplier") or (None if query_scalar is None else query_scalar**-0.5),
        softcap=keys.number("attn_logit_softcapping") or None,
        logit_softcap=keys.number("final_logit_softcapping") or None,
        embedding_scale=keys.positive("embedding_multiplier", 1.0),
        residual_scale=keys.positive("residual_multiplier", 1.0),
        logit_divisor=keys.positive("logits_scaling", 1.0),
        experts=config_experts(keys, family.experts, n_layers),
        qk_norm=keys.get("use_qk_norm", (bool,), False),
    )


def _is_mxfp4(key: str, value: Any) -> bool:
    """Whether it says that experts are stored as MXFP4."""
    return key == "quantization_config" and isinstance(value, Mapping) and value.get("quant_method") == "mxfp4"


def _window(keys: Keys, family: Family) -> int | None:
    """The sliding window, unless a switch turns it off."""
    window: int | None = keys.get("sliding_window", (int,))
    return window if window and keys.get("use_sliding_window", (bool,), not family.window_switch) else None


def _layer_types(keys: Keys, family: Family, n_layers: int) -> list[str] | None:
    """Which layers slide, where the file says so: as a list, or in the family's older spelling."""
    types: list[str] | None = keys.get("layer_types", (list,))
    if types is not None or family.window_key is None:
        return types
    if number := keys.get(family.window_key, (int,)):
        layers = range(n_layers)
        types = ["sliding_attention" if family.slides(i, number) else "full_attention" for i in layers]
    return types


def _no_rope(keys: Keys, n_layers: int) -> list[bool] | None:
    """Which layers have no position embedding, where the file says so."""
    rotates = keys.get("no_rope_layers", (list,))
    if rotates is not None:
        return [not does for does in rotates][:n_layers]
    if keys.get("no_rope_layer_interval", (int, list)) is None:
        return None
    every = keys.size("no_rope_layer_interval")
    return [(i + 1) % every == 0 for i in range(n_layers)]


def _rope_parameters(checkpoint: Checkpoint, config: Mapping[str, Any]) -> tuple[dict[str, Any], float | None]:
    """(parameters of full attention with "type", base of sliding layers), old or new spelling."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise FormatError(checkpoint.path / "config.json", f"the RoPE parameters are {str(given)[:60]!r}")
    local: Any = {"rope_theta": config.get("rope_local_base_freq")}
    if "full_attention" in given:
        given, local = given["full_attention"], given.get("sliding_attention", {})
        if not isinstance(given, Mapping) or not isinstance(local, Mapping):
            raise FormatError(checkpoint.path / "config.json", "the RoPE parameters of a layer type are no object")
        if local.get("rope_type", "default") != "default":
            raise UnsupportedError(f"RoPE scaling {local['rope_type']!r} in sliding layers")
    full = dict(given)
    full["type"] = full.get("rope_type") or full.get("type") or "default"
    if full["type"] == "su" or (full["type"] == "yarn" and config.get("model_type") == "phi3"):
        full["type"] = "longrope"  # its names in Phi-3's first files
    for key in ("mscale", "mscale_all_dim"):
        if full.get(key):
            raise UnsupportedError(f"config.json's RoPE parameter {key} = {full[key]}")
    if "original_max_position_embeddings" in config:
        full.setdefault("original_max_position_embeddings", config["original_max_position_embeddings"])
    return full, Keys(checkpoint, local).number("rope_theta")
