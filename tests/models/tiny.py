"""Tiny random checkpoints of every family, as Hugging Face folders and as GGUF files, with the
logits they must give.

The logits were made with `transformers` by tools/make_golden_models.py; weights are generated again
from fixed bits.

The conversions are those of llama.cpp's conversion scripts: q and k rows of llama, granite and
smollm3 reordered for RoPE on neighbouring pairs, 1 added to gemma's norms, llama3's factors as a
tensor, longrope's two sets as tensors.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

F32 = NDArray[np.float32]
FOLDER = Path(__file__).parents[1] / "data" / "models"

V, C, F, L = 97, 48, 80, 3
IDS = [3 + (i * i * 7 + i * 5) % (V - 3) for i in range(30)]
SIZES = {
    "vocab_size": V,
    "hidden_size": C,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

GLM: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}

# name → (class stem, model_type, config beyond SIZES)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", {}),
    "llama-bias-tied": ("Llama", "llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama3": ("Llama", "llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama-linear": ("Llama", "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("Mistral", "mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", "qwen2", {"use_sliding_window": False, "sliding_window": 5}),
    "qwen2-window": (
        "Qwen2",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("Qwen2", "qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma2-scale": ("Gemma2", "gemma2", {**GEMMA, "query_pre_attn_scalar": 24, "attn_logit_softcapping": None}),
    "gemma3": ("Gemma3Text", "gemma3_text", {**GEMMA, "rope_parameters": GEMMA_ROPE, "num_hidden_layers": 7}),
    "phi3": ("Phi3", "phi3", {"sliding_window": 9}),
    "phi3-longrope": (
        "Phi3",
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    "phi3-longrope-long": (
        "Phi3",
        "phi3",
        {
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 16},
            "original_max_position_embeddings": 16,
        },
    ),
    "smollm3": ("SmolLM3", "smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}),
    "granite": ("Granite", "granite", GRANITE),
    "olmo2": ("Olmo2", "olmo2", {}),
    "mixtral": ("Mixtral", "mixtral", {"num_local_experts": 4}),
    "qwen2moe": ("Qwen2Moe", "qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen2moe-sparse": (
        "Qwen2Moe",
        "qwen2_moe",
        {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 24},
    ),
    "qwen3moe": ("Qwen3Moe", "qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3moe-dense": ("Qwen3Moe", "qwen3_moe", {**EXPERTS, "mlp_only_layers": [0, 2]}),
    "olmoe": ("Olmoe", "olmoe", {"num_experts": 5, "num_experts_per_tok": 3}),
    "gpt-oss": (
        "GptOss",
        "gpt_oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "sliding_window": 6,
            "rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
    "glm4": ("Glm4", "glm4", {"head_dim": 16, "rms_norm_eps": 1e-6}),
    "glm4moe": (
        "Glm4Moe",
        "glm4_moe",
        {
            **GLM,
            "n_group": 2,
            "topk_group": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
        },
    ),
    "glm4moe-plain": ("Glm4Moe", "glm4_moe", {**GLM, "norm_topk_prob": False, "first_k_dense_replace": 0}),
    "seed_oss": ("SeedOss", "seed_oss", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5", "ernie4_5", {"head_dim": 16}),
    "ernie4_5-moe": (
        "Ernie4_5_Moe",
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "num_hidden_layers": 4,
        },
    ),
    "exaone4": (
        "Exaone4",
        "exaone4",
        {"sliding_window": 6, "sliding_window_pattern": 4, "num_hidden_layers": 5, "rope_parameters": LLAMA3},
    ),
    "exaone4-full": ("Exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * L}),
    "granitemoe": ("GraniteMoe", "granitemoe", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "granitemoe-shared": (
        "GraniteMoeShared",
        "granitemoeshared",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    ),
}
# What GGUF has no key for.
NO_GGUF = frozenset({"qwen2-window", "gemma2-scale", "qwen2moe-sparse", "qwen3moe-dense"})


def weights(case: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, F32]:
    """The case's weights by name, the same everywhere: from raw bits of PCG64, whose stream NumPy
    keeps for ever.
    """
    bits = np.random.PCG64(zlib.crc32(case.encode()))
    gemma = case.startswith("gemma")
    tensors = {}
    for name, shape in sorted(shapes.items()):
        raw = bits.random_raw(math.prod(shape)) >> np.uint64(48)
        unit = (raw.astype(np.float32) / 32768 - 1).reshape(shape)  # in [-1, 1), exact
        if name.endswith("norm.weight"):
            unit = unit / 4 + (0 if gemma else 1)
        elif len(shape) == 1:
            unit = unit / 4
        else:
            unit = unit * np.float32(2.5 / math.sqrt(shape[-1]))
        tensors[name] = unit.astype(np.float32)
    return tensors


def golden(case: str) -> tuple[dict[str, Any], dict[str, F32], F32]:
    """The case's config, weights, and the logits [T, V] that `transformers` gives for IDS."""
    stored = np.load(FOLDER / f"{case}.npz")
    description = json.loads(str(stored["description"]))
    return description["config"], weights(case, description["shapes"]), stored["logits"]


def write_hf(config: Mapping[str, Any], tensors: Mapping[str, F32], folder: Path) -> Path:
    """Write the model as a Hugging Face folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def interleave(weight: F32, heads: int) -> F32:
    """Rows in halves (i, i + D/2) to neighbouring pairs (2i, 2i + 1), within each head."""
    shape = weight.shape
    return weight.reshape(heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)


GGUF_NAMES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "granitemoeshared": "granitemoe",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "ernie4_5_moe": "ernie4_5-moe",
}
PERMUTED = ("llama", "granite", "granitemoe", "smollm3")


def stacked(tensors: Mapping[str, F32]) -> dict[str, F32]:
    """The tensors with those of experts [n, k] stacked as [E, n, k], gate and up apart."""
    out: dict[str, Any] = {}
    for name, values in tensors.items():
        if expert := re.search(r"\.experts\.(\d+)\.", name):
            out.setdefault(name.replace(expert[0], ".experts."), {})[int(expert[1])] = values
        elif ".experts.gate_up_proj" in name:  # gpt-oss: gate and up in turn, matrices transposed
            rows = values.swapaxes(1, 2) if values.ndim == 3 else values
            ending = name.partition(".experts.gate_up_proj")[2].replace("_bias", ".bias") or ".weight"
            base = name.partition("gate_up_proj")[0]
            out |= {f"{base}gate_proj{ending}": rows[:, ::2], f"{base}up_proj{ending}": rows[:, 1::2]}
        elif ".experts.down_proj" in name:
            out[name.replace("_bias", "") + (".bias" if values.ndim == 2 else ".weight")] = (
                values.swapaxes(1, 2) if values.ndim == 3 else values
            )
        elif name.endswith(".e_score_correction_bias"):
            out[name.replace("correction_bias", "correction.bias")] = values.reshape(-1)
        elif name.endswith(".sinks"):
            out[f"{name}.weight"] = values
        elif ".input_linear." in name:  # granite's gate and up, of experts and of the shared network
            gate, up = np.split(values, 2, axis=-2)
            module = name.replace("block_sparse_moe.input_linear.weight", "mlp.experts.")
            module = module.replace("shared_mlp.input_linear.weight", "mlp.shared_expert.")
            out |= {f"{module}gate_proj.weight": gate, f"{module}up_proj.weight": up}
        else:
            out[name.replace("shared_mlp.output_linear", "mlp.shared_expert.down_proj")] = values
    return {name: np.stack([v[e] for e in sorted(v)]) if isinstance(v, dict) else v for name, v in out.items()}


def write_gguf(
    config_keys: Mapping[str, Any],
    tensors: Mapping[str, F32],
    path: Path,
) -> Path:
    """Write the model as llama.cpp's converter would, in float32."""
    import gguf

    config = SimpleNamespace(**config_keys)
    arch = GGUF_NAMES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    _sizes(writer, config, arch)
    _rope(writer, config, arch)
    names = gguf.get_tensor_name_map(
        {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers
    )
    for name, values in stacked(tensors).items():
        if arch in PERMUTED and ".q_proj." in name:
            values = interleave(values, config.num_attention_heads)
        if arch in PERMUTED and ".k_proj." in name:
            values = interleave(values, config.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        writer.add_tensor(new, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sizes(writer: Any, config: Any, arch: str) -> None:
    import gguf

    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if getattr(config, "sliding_window", None) and arch != "qwen2":
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "exaone4" and config.sliding_window:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    for key, add in (
        ("num_local_experts", writer.add_expert_count),
        ("num_experts", writer.add_expert_count),
        ("n_routed_experts", writer.add_expert_count),
        ("moe_num_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_k", writer.add_expert_used_count),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("moe_num_shared_experts", writer.add_expert_shared_count),
        ("first_k_dense_replace", writer.add_leading_dense_block_count),
        ("moe_layer_start_index", writer.add_leading_dense_block_count),
        ("moe_layer_interval", writer.add_interleave_moe_layer_step),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
    ):
        if getattr(config, key, None):
            add(getattr(config, key))
    if arch == "glm4moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if getattr(config, key, None):
            writer.add_expert_shared_feed_forward_length(getattr(config, key))


def _rope(writer: Any, config: Any, arch: str) -> None:
    import gguf

    rope = config.rope_parameters
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if local is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch != "gemma3":
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    rule = rope.get("rope_type", "default")
    if rule in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rule))
        writer.add_rope_scaling_factor(rope["factor"])
    if rule == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rule == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))
    if rule == "longrope":
        trained = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / trained
        writer.add_rope_scaling_orig_ctx_len(trained)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(trained)))
        for which in ("long", "short"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> F32:
    """What divides each frequency, as Llama 3.1's reference code has it."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        trained = rope["original_max_position_embeddings"]
        if wavelength < trained / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > trained / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (trained / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
