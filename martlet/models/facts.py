"""What a file says of its model, the same from either format (read `families.py` next).

`facts_of` reads GGUF's keys or config.json's into one `Facts`; whatever a family must know beyond names and sizes is a
field here. A value that is missing, of the wrong type or out of range is a FormatError that names its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from martlet.errors import FormatError, UnsupportedError
from martlet.formats.checkpoint import Checkpoint
from martlet.quant.ggml import decode
from martlet.spec import Activation

__all__ = ["Facts", "facts_of"]

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu_tanh": Activation.GELU_TANH,
    "gelu": Activation.GELU,
}
# Keys of config.json that change the computation and that no family here has.
REFUSED = {"quantization_config": None, "mlp_bias": False, "num_local_experts": 0, "num_experts": 0, "alibi": False}


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes and settings of a model; None where the file says nothing."""

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
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)  # "type" and its parameters, config.json's names
    rope_divisors: Sequence[float] | None = None  # llama 3 as GGUF stores it: what divides each frequency
    local_rope_base: float | None = None
    window: int | None = None
    layer_types: Sequence[str] | None = None  # "sliding_attention" or "full_attention" for each layer
    no_rope: Sequence[bool] | None = None  # layers without position embedding
    activation: Activation | None = None
    bias: bool = False  # q, k, v
    out_bias: bool = False
    query_scale: float | None = None  # multiplies q·k
    softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0


class _Keys:
    """Typed access to a mapping from an untrusted file."""

    def __init__(self, checkpoint: Checkpoint, values: Mapping[str, Any], prefix: str = "") -> None:
        self._path, self._values, self._prefix = checkpoint.path, values, prefix

    def get(self, key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        value = self._values.get(self._prefix + key)
        if value is None:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise FormatError(self._path, f"{self._prefix}{key} is {str(value)[:60]!r}, expected {wanted}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A count of at least 1; a list whose entries are equal counts as its entry."""
        value = self.get(key, (int, list), default)
        if isinstance(value, list):
            if len(set(map(str, value))) != 1:
                raise UnsupportedError(f"{self._prefix}{key} differs from layer to layer: {str(value)[:60]}")
            value = value[0]
        if value is None:
            raise FormatError(self._path, f"{self._prefix}{key} is missing: the file does not describe its model")
        if not isinstance(value, int) or not 1 <= value <= 1 << 24:
            raise FormatError(self._path, f"{self._prefix}{key} is {value!r}, expected a count of 1 or more")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.get(key, (int, float), default)
        if value is not None and not abs(value) < 1e30:
            raise FormatError(self._path, f"{self._prefix}{key} is {value!r}, expected a finite number")
        return None if value is None else float(value)

    def positive(self, key: str, default: float) -> float:
        value = self.number(key, default)
        if value is None or value <= 0:
            raise FormatError(self._path, f"{self._prefix}{key} is {value!r}, expected a number above 0")
        return value


def facts_of(checkpoint: Checkpoint) -> Facts:
    """Read a checkpoint's metadata. Raises FormatError and UnsupportedError."""
    facts = _from_gguf(checkpoint) if checkpoint.kind == "gguf" else _from_config(checkpoint)
    if facts.n_heads % facts.n_kv_heads:
        raise FormatError(checkpoint.path, f"{facts.n_heads} heads cannot share {facts.n_kv_heads} key-value heads")
    if facts.rope_dims % 2 or facts.rope_dims > facts.head_dim:
        raise FormatError(checkpoint.path, f"{facts.rope_dims} rotary dimensions in heads of {facts.head_dim}")
    return facts


def _from_gguf(checkpoint: Checkpoint) -> Facts:
    family = checkpoint.metadata.get("general.architecture")
    if not isinstance(family, str):
        raise FormatError(checkpoint.path, "general.architecture is missing: the file does not say what its model is")
    keys = _Keys(checkpoint, checkpoint.metadata, f"{family}.")
    if keys.get("expert_count", (int,), 0):
        raise UnsupportedError(f"{family}.expert_count: mixtures of experts")
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FormatError(checkpoint.path, "the matrix token_embd.weight is missing")
    n_heads, hidden = keys.size("attention.head_count"), keys.size("embedding_length")
    head_dim = keys.size("attention.key_length", hidden // n_heads)
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{family}.attention.value_length differs from key_length")
    tensors = checkpoint.tensors
    divisors = decode(tensors["rope_freqs.weight"]).reshape(-1).tolist() if "rope_freqs.weight" in tensors else None
    return Facts(
        family=family,
        name=str(checkpoint.metadata.get("general.name", checkpoint.path.stem)),
        n_layers=keys.size("block_count"),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=keys.size("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        ffn_hidden=keys.size("feed_forward_length"),
        eps=keys.positive("attention.layer_norm_rms_epsilon", 1e-5),
        vocab=embedding.shape[0],
        context=keys.size("context_length"),
        rope_base=keys.positive("rope.freq_base", 10000.0),
        rope_dims=keys.size("rope.dimension_count", head_dim),
        tied="output.weight" not in tensors,
        rope_scaling=_gguf_scaling(checkpoint, keys),
        rope_divisors=divisors,
        local_rope_base=keys.number("rope.freq_base_swa"),
        window=keys.get("attention.sliding_window", (int,)) or None,
        bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        query_scale=keys.number("attention.scale"),
        softcap=keys.number("attn_logit_softcapping"),
        logit_softcap=keys.number("final_logit_softcapping"),
        embedding_scale=keys.positive("embedding_scale", 1.0),
        residual_scale=keys.positive("residual_scale", 1.0),
        logit_divisor=keys.positive("logit_scale", 1.0),
    )


def _gguf_scaling(checkpoint: Checkpoint, keys: _Keys) -> dict[str, Any]:
    """RoPE scaling under config.json's names; longrope's factors are tensors."""
    kind = keys.get("rope.scaling.type", (str,), "none")
    scaling: dict[str, Any] = {
        "type": "longrope" if "rope_factors_long.weight" in checkpoint.tensors else kind,
        "factor": keys.number("rope.scaling.factor", 1.0),
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length", (int,)),
        "attention_factor": keys.number("rope.scaling.attn_factor"),
    }
    for name in ("long", "short"):
        tensor = checkpoint.tensors.get(f"rope_factors_{name}.weight")
        if tensor is not None:
            scaling[f"{name}_factor"] = decode(tensor).reshape(-1).tolist()
    return {} if scaling["type"] == "none" else scaling


def _from_config(checkpoint: Checkpoint) -> Facts:
    config = checkpoint.metadata
    if isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    family = config.get("model_type")
    if not isinstance(family, str):
        raise FormatError(
            checkpoint.path / "config.json", "model_type is missing: the file does not say what its model is"
        )
    for key, harmless in REFUSED.items():
        if config.get(key) not in (None, harmless):
            raise UnsupportedError(f"config.json's {key} = {str(config[key])[:60]}")
    keys = _Keys(checkpoint, config)
    n_heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
    head_dim = keys.size("head_dim", hidden // n_heads)
    act = keys.get("hidden_activation", (str,)) or keys.get("hidden_act", (str,), "silu")
    if act not in ACTIVATIONS:
        raise UnsupportedError(f"config.json's hidden_act = {act!r}", ACTIVATIONS)
    full, local = _rope_parameters(config)
    query_scalar = keys.number("query_pre_attn_scalar")
    divided = config.get("no_rope_layers")
    return Facts(
        family=family.removesuffix("_text"),
        name=str(config.get("_name_or_path") or checkpoint.path.name),
        n_layers=keys.size("num_hidden_layers"),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=keys.size("num_key_value_heads", n_heads),
        head_dim=head_dim,
        ffn_hidden=keys.size("intermediate_size"),
        eps=keys.positive("rms_norm_eps", 1e-6),
        vocab=keys.size("vocab_size"),
        context=keys.size("max_position_embeddings", 2048),
        rope_base=float(full.get("rope_theta", 10000.0)),
        rope_dims=int(head_dim * float(full.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0))),
        tied=bool(keys.get("tie_word_embeddings", (bool,), family.startswith("gemma"))),
        rope_scaling={} if full.get("type", "default") == "default" else full,
        local_rope_base=local,
        window=_window(keys),
        layer_types=keys.get("layer_types", (list,)),
        no_rope=[not used for used in divided] if isinstance(divided, list) else None,
        activation=ACTIVATIONS[act],
        bias=bool(keys.get("attention_bias", (bool,), family == "qwen2")),
        out_bias=bool(keys.get("attention_bias", (bool,), False)) and family != "qwen2",
        query_scale=keys.number("attention_multiplier") or (None if query_scalar is None else query_scalar**-0.5),
        softcap=keys.number("attn_logit_softcapping"),
        logit_softcap=keys.number("final_logit_softcapping"),
        embedding_scale=keys.positive("embedding_multiplier", 1.0),
        residual_scale=keys.positive("residual_multiplier", 1.0),
        logit_divisor=keys.positive("logits_scaling", 1.0),
    )


def _window(keys: _Keys) -> int | None:
    """The sliding window, unless a switch turns it off."""
    window: int | None = keys.get("sliding_window", (int,))
    return window if window and keys.get("use_sliding_window", (bool,), True) else None


def _rope_parameters(config: Mapping[str, Any]) -> tuple[dict[str, Any], float | None]:
    """(parameters of full attention with "type" and "rope_theta", base of sliding layers), old or new spelling."""
    given = config.get("rope_parameters")
    local = config.get("rope_local_base_freq")
    if isinstance(given, Mapping) and isinstance(given.get("full_attention"), Mapping):
        local = dict(given.get("sliding_attention") or {}).get("rope_theta", local)
        given = given["full_attention"]
    if not isinstance(given, Mapping):
        given = config.get("rope_scaling")
    full = dict(given) if isinstance(given, Mapping) else {}
    full.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    full["type"] = full.get("rope_type") or full.get("type") or "default"
    if full["type"] == "su":
        full["type"] = "longrope"
    for key in ("original_max_position_embeddings", "max_position_embeddings"):
        if key in config:
            full.setdefault(key, config[key])
    return full, None if local is None else float(local)
