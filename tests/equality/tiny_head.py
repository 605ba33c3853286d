"""Small EAGLE-3 heads in the published layout, random or fitted to some answers, and their
arithmetic in NumPy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from martlet import LLM
from martlet.formats.checkpoint import open_checkpoint
from martlet.quant.ggml import decode
from martlet.toy import HIDDEN as C
from martlet.toy import VOCAB as V
from martlet.types import Request

F32 = NDArray[np.float32]
H, G, D, F, EPS, BASE = 4, 2, 16, 96, 1e-5, 10000.0
KNOWN = range(32, 128)  # ids of a random head


def _config(**more: Any) -> dict[str, Any]:
    """config.json for a toy model."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": C,
        "num_attention_heads": H,
        "num_key_value_heads": G,
        "head_dim": D,
        "intermediate_size": F,
        "num_hidden_layers": 1,
        "vocab_size": V,
        "draft_vocab_size": len(KNOWN),
        "rope_theta": BASE,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **more,
    }


def head_tensors(seed: int = 5, c: int = C, vocab: int = V, ids: Sequence[int] = KNOWN) -> dict[str, NDArray[Any]]:
    """Random weights; `ids` are those that the head knows."""
    rng = np.random.default_rng(seed)

    def matrix(n: int, k: int) -> F32:
        return (rng.standard_normal((n, k)) * k**-0.5).astype(np.float32)

    def norm() -> F32:
        return (1 + 0.1 * rng.standard_normal(c)).astype(np.float32)

    known = np.zeros(vocab, bool)
    known[list(ids)] = True
    return {
        "fc.weight": matrix(c, 3 * c),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(H * D, 2 * c),
        "midlayer.self_attn.k_proj.weight": matrix(G * D, 2 * c),
        "midlayer.self_attn.v_proj.weight": matrix(G * D, 2 * c),
        "midlayer.self_attn.o_proj.weight": matrix(c, H * D),
        "midlayer.mlp.gate_proj.weight": matrix(F, c),
        "midlayer.mlp.up_proj.weight": matrix(F, c),
        "midlayer.mlp.down_proj.weight": matrix(c, F),
        "norm.weight": norm(),
        "lm_head.weight": 4 * matrix(len(ids), c),
        "d2t": np.array(ids) - np.arange(len(ids)),
        "t2d": known,
    }


def write_head(folder: Path, tensors: Mapping[str, NDArray[Any]] | None = None, **config: Any) -> Path:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(**config)))
    save_file(dict(head_tensors() if tensors is None else tensors), folder / "model.safetensors")
    return folder


class HeadReference:
    """What the head computes, a whole sequence at a time, in float64 (arXiv:2503.01840, section
    3).
    """

    def __init__(self, tensors: Mapping[str, NDArray[Any]], embedding: F32) -> None:
        self.w = {name.removeprefix("midlayer."): np.asarray(x, np.float64) for name, x in tensors.items()}
        self.embedding = embedding
        self.ids = np.asarray(tensors["d2t"]) + np.arange(len(tensors["d2t"]))

    def fused(self, features: F32) -> Any:
        """x of each position, from its features [n, 3C]."""
        return features @ self.w["fc.weight"].T

    def run(self, x: Any, ids: Sequence[int]) -> tuple[Any, Any]:
        """(logits, x) of the positions 0 …; row p has x of position p and the id of p + 1."""
        w, n = self.w, len(ids)
        embedded = self.embedding[list(ids)]
        both = np.concatenate([self.normed(embedded, "input_layernorm"), self.normed(x, "hidden_norm")], axis=1)
        q, k, v = ((both @ w[f"self_attn.{name}_proj.weight"].T).reshape(n, -1, D).transpose(1, 0, 2) for name in "qkv")
        q, k = self._turned(q), self._turned(k)
        k, v = (np.repeat(part, H // G, axis=0) for part in (k, v))
        scores = q @ k.transpose(0, 2, 1) * D**-0.5
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        x = x + (weights @ v).transpose(1, 0, 2).reshape(n, -1) @ w["self_attn.o_proj.weight"].T
        y = self.normed(x, "post_attention_layernorm")
        gate = y @ w["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
        return self.normed(x, "norm") @ w["lm_head.weight"].T, x

    def guesses(self, features: F32, ids: Sequence[int], count: int) -> tuple[list[int], list[Any]]:
        """Greedy guesses after `ids` (features of all but the last), with each one's logits."""
        x, made, rows = self.fused(features), list(ids[1:]), []
        for _ in range(count):
            logits, out = self.run(x, made)
            rows.append(logits[-1])
            made.append(int(self.ids[logits[-1].argmax()]))
            x = np.concatenate([x, out[-1:]])
        return made[len(ids) - 1 :], rows

    def normed(self, x: Any, name: str) -> Any:
        """RMS norm by the weight of this name."""
        return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS) * self.w[f"{name}.weight"]

    def _turned(self, x: Any) -> Any:
        """RoPE of [heads, n, d], pairs (i, i + d/2)."""
        n, d = x.shape[1:]
        angles = np.arange(n)[:, None] * BASE ** (-np.arange(0, d, 2) / d)
        a, b = np.split(x, 2, axis=2)
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], 2)


def followed(llm: LLM) -> dict[int, dict[int, tuple[F32, Any]]]:
    """Of each sequence, by position, the features that its head is handed from here on, and the
    rows' ids.
    """
    found: dict[int, dict[int, tuple[F32, Any]]] = {}
    head: Any = llm.engine.executor._reader  # type: ignore[attr-defined]
    follow = head.follow

    def spy(seq: int, ids: Any, pages: Any, start: int, features: F32) -> None:
        places = found.setdefault(seq, {})
        places.update((start + i, (row.copy(), ids)) for i, row in enumerate(features))
        follow(seq, ids, pages, start, features)

    head.follow = spy
    return found


def fit_head(llm_of: Any, path: Path, requests: Sequence[Request], folder: Path) -> Path:
    """A head with random weights but for its output rows, which are fitted to the answers to
    `requests`.

    `llm_of(draft)` opens an engine. So some guesses are right, and others are not.
    """
    with open_checkpoint(path) as checkpoint, LLM(str(path), backend="null", threads=1) as llm:
        spec = llm._parts.spec
        embedding = decode(checkpoint.tensors["token_embd.weight"])
    sizes = {"hidden_size": spec.hidden, "vocab_size": spec.vocab}
    tensors = head_tensors(c=spec.hidden, vocab=spec.vocab)
    write_head(folder, tensors, draft_vocab_size=len(KNOWN), **sizes)
    with llm_of(f"eagle={folder}") as llm:
        found = followed(llm)
        for request in requests:
            llm.engine.add(request)
            while llm.engine.has_work:
                llm.engine.step()
    reference, rows, came = HeadReference(tensors, embedding), [], []
    for places in found.values():
        ids = next(iter(places.values()))[1]
        if sorted(places) == list(range(len(ids) - 1)):
            x = reference.fused(np.array([places[p][0] for p in range(len(ids) - 1)]))
            n_known = max(len(r.prompt_ids) for r in requests if list(r.prompt_ids) == ids[: len(r.prompt_ids)])
            rows.append(reference.normed(reference.run(x, ids[1:])[1], "norm")[n_known - 2 : -1])
            came += ids[n_known:]
    known = sorted(set(came))
    wanted = np.array(came)[:, None] == np.array(known)
    x = np.concatenate(rows)
    tensors = head_tensors(c=spec.hidden, vocab=spec.vocab, ids=known)
    tensors["lm_head.weight"] = np.linalg.solve(x.T @ x + np.eye(x.shape[1]), x.T @ wanted).T.astype(np.float32) * 9
    return write_head(folder, tensors, draft_vocab_size=len(known), **sizes)
