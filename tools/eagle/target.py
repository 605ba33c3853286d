"""Of a target model what a head is made of or trained with, in PyTorch (read `head.py` next).

Its embedding and its output rows, which a head shares; its last layer and final norm, from which a
head begins. The weights are those of the file, dequantised. What the model computes is recorded
while it answers (`recorder.py`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from martlet.errors import UnsupportedError
from martlet.formats.checkpoint import open_checkpoint
from martlet.models.weights import LayerWeights, Model, load_model
from martlet.ops.reference import ReferenceBackend
from martlet.spec import Activation, Attention, Layer, ModelSpec


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
    """A frozen model of llama's shape: RMS norms, RoPE in whole heads, grouped-query attention,
    SiLU.
    """

    def __init__(self, model: Model) -> None:
        self.spec: ModelSpec = model.spec
        for layer in self.spec.layers:
            _refuse_unusual(self.spec, layer)
        self.embedding = torch.from_numpy(model.embedding)  # [V, C]
        self.head = torch.from_numpy(model.head)  # [V, C]
        self.final_norm = torch.from_numpy(model.final_norm)
        self.last = _tensors(model.layers[-1])
        rope = self.attention.rope
        assert rope is not None
        self.frequencies = torch.tensor(rope.inverse_frequencies)

    @classmethod
    def load(cls, path: str | Path) -> Target:
        """The target of a GGUF file or Hugging Face folder."""
        with open_checkpoint(path) as checkpoint:
            return cls(load_model(checkpoint, ReferenceBackend()))

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
