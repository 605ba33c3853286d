"""A small random EAGLE-3 head for tiny_model.py's model, in the published layout, and its arithmetic in NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tiny_model import C, V

__all__ = ["HeadReference", "head_config", "head_tensors", "write_head"]

F32 = NDArray[np.float32]
H, G, F, D_IDS, EPS, BASE = 4, 2, 96, 96, 1e-5, 10000.0


def head_config(**more: Any) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": C,
        "num_attention_heads": H,
        "num_key_value_heads": G,
        "intermediate_size": F,
        "num_hidden_layers": 1,
        "vocab_size": V,
        "draft_vocab_size": D_IDS,
        "rope_theta": BASE,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **more,
    }


def head_tensors(seed: int = 5, c: int = C) -> dict[str, NDArray[Any]]:
    """Random weights; the head knows the ids 32 … 127."""
    rng = np.random.default_rng(seed)
    d = c // H

    def matrix(n: int, k: int) -> F32:
        return (rng.standard_normal((n, k)) * k**-0.5).astype(np.float32)

    def norm() -> F32:
        return (1 + 0.1 * rng.standard_normal(c)).astype(np.float32)

    known = np.zeros(V, bool)
    known[32 : 32 + D_IDS] = True
    return {
        "fc.weight": matrix(c, 3 * c),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(H * d, 2 * c),
        "midlayer.self_attn.k_proj.weight": matrix(G * d, 2 * c),
        "midlayer.self_attn.v_proj.weight": matrix(G * d, 2 * c),
        "midlayer.self_attn.o_proj.weight": matrix(c, H * d),
        "midlayer.mlp.gate_proj.weight": matrix(F, c),
        "midlayer.mlp.up_proj.weight": matrix(F, c),
        "midlayer.mlp.down_proj.weight": matrix(c, F),
        "norm.weight": norm(),
        "lm_head.weight": 4 * matrix(D_IDS, c),
        "d2t": np.full(D_IDS, 32, np.int64),
        "t2d": known,
    }


def write_head(folder: Path, tensors: Mapping[str, NDArray[Any]] | None = None, **config: Any) -> Path:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head_config(**config)))
    save_file(dict(head_tensors() if tensors is None else tensors), folder / "model.safetensors")
    return folder


class HeadReference:
    """What the head computes, a whole sequence at a time, in float64 (arXiv:2503.01840, section 3)."""

    def __init__(self, tensors: Mapping[str, NDArray[Any]], embedding: F32) -> None:
        self.w = {name.removeprefix("midlayer."): np.asarray(x, np.float64) for name, x in tensors.items()}
        self.embedding = embedding

    def fused(self, features: F32) -> Any:
        """x of each position, from its features [n, 3C]."""
        return features @ self.w["fc.weight"].T

    def run(self, x: Any, ids: Sequence[int]) -> tuple[Any, Any]:
        """(logits, x) of the positions 0 …; row p has x of position p and the id of p + 1."""
        w, n, c = self.w, len(ids), x.shape[1]
        d = c // H
        both = np.concatenate(
            [
                self._norm(self.embedding[list(ids)], "input_layernorm"),
                self._norm(x, "hidden_norm"),
            ],
            axis=1,
        )
        q, k, v = (
            (both @ w[f"self_attn.{name}_proj.weight"].T).reshape(n, -1, d).transpose(1, 0, 2) for name in "qkv"
        )
        q, k = self._turned(q), self._turned(k)
        k, v = (np.repeat(part, H // G, axis=0) for part in (k, v))
        scores = q @ k.transpose(0, 2, 1) * d**-0.5
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        x = x + (weights @ v).transpose(1, 0, 2).reshape(n, -1) @ w["self_attn.o_proj.weight"].T
        y = self._norm(x, "post_attention_layernorm")
        gate = y @ w["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        return self._norm(x, "norm") @ w["lm_head.weight"].T, x

    def guesses(self, features: F32, ids: Sequence[int], count: int) -> tuple[list[int], list[Any]]:
        """Greedy guesses after `ids` (features of all but the last), with each one's logits."""
        x, made, rows = self.fused(features), list(ids[1:]), []
        base = int(np.asarray(self.w["d2t"])[0])
        for _ in range(count):
            logits, out = self.run(x, made)
            rows.append(logits[-1])
            made.append(int(logits[-1].argmax()) + base)
            x = np.concatenate([x, out[-1:]])
        return made[len(ids) - 1 :], rows

    def _norm(self, x: Any, name: str) -> Any:
        return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS) * self.w[f"{name}.weight"]

    def _turned(self, x: Any) -> Any:
        """RoPE of [heads, n, d], pairs (i, i + d/2)."""
        n, d = x.shape[1:]
        angles = np.arange(n)[:, None] * BASE ** (-np.arange(0, d, 2) / d)
        a, b = np.split(x, 2, axis=2)
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], 2)
