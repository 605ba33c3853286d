"""A target model's forward in PyTorch, and the hidden states that a head is trained on (read `head.py` next).

The weights are those of the file, dequantised. Of every token four rows are kept in float16: the hidden states that enter
layers 2, n/2 and n - 3 (EAGLE-3's features, arXiv:2503.01840), and what the final norm makes of the last one, from which
the model's distribution over any part of the vocabulary is one product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from eagle.corpus import Conversation
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from martlet.errors import UnsupportedError
from martlet.formats.checkpoint import open_checkpoint
from martlet.models.load import LayerWeights, Model, load_model
from martlet.ops.reference import ReferenceBackend
from martlet.spec import Activation, Attention, Layer, ModelSpec

__all__ = [
    "Features",
    "Target",
    "batches_by_length",
    "extract",
    "feature_layers",
    "open_features",
    "rms_norm",
    "rotate",
]


def feature_layers(n_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are a head's features, if its config.json names no others."""
    return (2, n_layers // 2, n_layers - 3)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, in float32."""
    return functional.rms_norm(x.float(), (x.shape[-1],), weight, eps)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """RoPE in the half-split pairing; x is [..., T, D], positions [T], frequencies [D / 2]."""
    angles = positions[:, None].float() * frequencies  # [T, D / 2]
    cos, sin = torch.cos(angles), torch.sin(angles)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Target:
    """A frozen model of llama's shape: RMS norms, RoPE in whole heads, grouped-query attention, SiLU."""

    def __init__(self, model: Model, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is that of the layers' products; the rows between them, norms and RoPE are float32."""
        self.spec: ModelSpec = model.spec
        for layer in self.spec.layers:
            _refuse_unusual(self.spec, layer)
        self.embedding = torch.from_numpy(model.embedding)  # [V, C]
        self.head = torch.from_numpy(model.head)  # [V, C]
        self.final_norm = torch.from_numpy(model.final_norm)
        self.layers = [_tensors(weights) for weights in model.layers]
        self.products = [{n: t.to(dtype) for n, t in layer.items() if t.dim() == 2} for layer in self.layers]
        rope = self.attention.rope
        assert rope is not None
        self.frequencies = torch.tensor(rope.inverse_frequencies)

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> Target:
        """The target of a GGUF file or Hugging Face folder."""
        with open_checkpoint(path) as checkpoint:
            return cls(load_model(checkpoint, ReferenceBackend()), dtype)

    @property
    def attention(self) -> Attention:
        """The first layer's; all are alike."""
        return self.spec.layers[0].mixer

    @property
    def eps(self) -> float:
        """Of the norms."""
        return self.spec.final_norm.eps

    @property
    def rope_theta(self) -> float:
        """The base of RoPE's frequencies, base^(-2i / D)."""
        return float(self.frequencies[1] ** (-self.attention.head_dim / 2))

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """The four kept rows of every token: ids [B, T] → [B, T, 4, C]."""
        x = self.embedding[ids] * self.spec.embedding_scale
        positions = torch.arange(ids.shape[1])
        kept: dict[int, Tensor] = {}
        for number, (weights, products) in enumerate(zip(self.layers, self.products, strict=True)):
            kept[number] = x
            x = x + self._attend(rms_norm(x, weights["attn_norm"], self.eps), products, positions)
            y = rms_norm(x, weights["ffn_norm"], self.eps)
            gate, up = _product(y, products["gate_up"]).chunk(2, -1)
            x = x + _product(functional.silu(gate) * up, products["down"])
        features = [kept[number] for number in feature_layers(len(self.layers))]
        return torch.stack((*features, rms_norm(x, self.final_norm, self.eps)), 2)

    def _attend(self, x: Tensor, products: dict[str, Tensor], positions: Tensor) -> Tensor:
        a = self.attention
        b, t, _ = x.shape
        sizes = (a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim, a.n_kv_heads * a.head_dim)
        parts = _product(x, products["qkv"]).split(sizes, -1)
        q, k, v = (part.view(b, t, -1, a.head_dim).transpose(1, 2) for part in parts)  # [B, H or G, T, D]
        q, k = (rotate(part, positions, self.frequencies).to(v.dtype) for part in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=a.scale, enable_gqa=True)
        return _product(y.transpose(1, 2).reshape(b, t, -1), products["out"])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x.to(weight.dtype), weight)


def _refuse_unusual(spec: ModelSpec, layer: Layer) -> None:
    a = layer.mixer
    unusual = (
        a.rope is None or a.rope.dims != a.head_dim or a.rope.magnitude != 1.0 or a.softcap or a.qk_norm or a.bias
        or a.out_bias or a.window or layer.post_mixer_norm or layer.post_ffn_norm or layer.ffn.activation is not Activation.SILU
        or spec.residual_scale != 1.0 or spec.logit_scale != 1.0 or spec.logit_softcap
    )  # fmt: skip
    if unusual:
        raise UnsupportedError(f"training a head for a {spec.family} model", ["models of llama's shape"])


def _tensors(weights: LayerWeights) -> dict[str, Tensor]:
    named = {
        "qkv": weights.mixer.qkv,
        "out": weights.mixer.out,
        "gate_up": weights.ffn.gate_up,
        "down": weights.ffn.down,
        "attn_norm": weights.mixer_norm,
        "ffn_norm": weights.ffn_norm,
    }
    return {name: torch.from_numpy(values) for name, values in named.items()}


KEPT = 4  # rows of each token: three features and the final one
WINDOW = 64  # conversations computed before they are written


@dataclass(frozen=True, slots=True)
class Features:
    """All conversations end to end, and the kept rows of each token."""

    lines: list[Conversation]
    starts: NDArray[np.int64]  # where each begins, and the end
    states: NDArray[np.float16]  # [tokens, 4, C], on disk


def batches_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices in batches of similar lengths, of at most `tokens` when padded."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[i] * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def open_features(lines: list[Conversation], path: Path, hidden: int) -> Features:
    """The file of kept rows as an array, with those conversations that it has whole."""
    starts = np.cumsum([0, *(len(line.ids) for line in lines)])
    n_lines = int(np.searchsorted(starts, path.stat().st_size // (KEPT * hidden * 2), "right")) - 1
    shape = (int(starts[n_lines]), KEPT, hidden)
    states = np.memmap(path, np.float16, "r", shape=shape)
    return Features(lines[:n_lines], starts[: n_lines + 1], states)


def extract(target: Target, lines: list[Conversation], path: Path, tokens: int = 4096) -> None:
    """Run the target over the conversations that `path` does not have yet, and append its kept rows in float16."""
    path.touch()
    first = len(open_features(lines, path, target.spec.hidden).lines) if path.stat().st_size else 0
    with path.open("ab") as out:
        for start in range(first, len(lines), WINDOW):
            window = lines[start : start + WINDOW]
            rows: dict[int, NDArray[np.float16]] = {}
            for batch in batches_by_length([len(line.ids) for line in window], tokens):
                width = max(len(window[i].ids) for i in batch)
                ids = torch.tensor([window[i].ids + [0] * (width - len(window[i].ids)) for i in batch])
                states = target.states(ids).to(torch.float16).numpy()
                rows.update({i: states[row, : len(window[i].ids)] for row, i in enumerate(batch)})
            for i in range(len(window)):
                rows[i].tofile(out)
            print(f"features: {start + len(window)} of {len(lines)} conversations", flush=True)
