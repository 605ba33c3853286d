"""Hugging Face's tensor names as GGUF's, the canonical ones (read `weights.py` next).

A table for each part of a name; what is not in it is not part of a model that this engine runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from martlet.quant.table import RawTensor

__all__ = ["canonical", "canonical_names"]

TOP = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
}
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",  # both stacked, gate first, as GGUF names it too
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Where there is a norm after attention, that is what post_attention_layernorm means.
POST_NORM_FAMILIES = frozenset({"gemma2", "gemma3", "olmo2"})
PREFIX = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?")


def canonical(name: str, family: str) -> str | None:
    """GGUF's name of a tensor, None where there is none."""
    if name.endswith("lm_head.weight"):
        return "output.weight"
    rest = PREFIX.sub("", name)
    if rest in TOP:
        return TOP[rest]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", rest)
    if match is None or match[2] not in LAYER:
        return None
    part = LAYER[match[2]]
    if match[2] == "post_attention_layernorm" and family in POST_NORM_FAMILIES:
        part = "post_attention_norm"
    return f"blk.{match[1]}.{part}.{match[3]}"


def canonical_names(tensors: Mapping[str, RawTensor], family: str) -> tuple[dict[str, RawTensor], list[str]]:
    """The tensors under GGUF's names, and the names that have none."""
    found, unknown = {}, []
    for name, tensor in tensors.items():
        new = canonical(name, family)
        if new is None:
            unknown.append(name)
        else:
            found[new] = tensor
    return found, unknown
