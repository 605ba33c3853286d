"""An EAGLE-3 head in PyTorch, in the published layout (read `training.py` next).

    g = fc(features of position i)        [C], from 3 hidden states of the target;
                                          in later steps the head's own x before it, not normed
    a = concat(input_layernorm(embedding of token i + 1), hidden_norm(g))        [2C]
    x = g + o_proj(attention(q_proj(a), k_proj(a), v_proj(a)))        causal, RoPE at position i
    x = x + mlp(post_attention_layernorm(x))
    logits of token i + 2 = norm(x) · the output rows of the draft vocabulary's tokens

The names of parameters are those of published checkpoints (arXiv:2503.01840), so `state_dict` is
the file; `lm_head` is left out: its rows are the target's own, and a loader takes them by `d2t`.
The target's norm is learned anew.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from eagle.target import Target, rms_norm, rotate
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """config.json's entries, under their published names."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    eagle_aux_hidden_state_layer_ids: tuple[int, ...]


class Norm(nn.Module):
    """A root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight."""
        return rms_norm(x, self.weight, self.eps)


def _linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


class SelfAttention(nn.Module):
    """Projections of the one layer; its input is twice as wide as its output."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.q_proj = _linear(2 * c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = _linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = _linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = _linear(c.num_attention_heads * c.head_dim, c.hidden_size)


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(c.hidden_size, c.intermediate_size)
        self.up_proj = _linear(c.hidden_size, c.intermediate_size)
        self.down_proj = _linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Every row by itself."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The head's only layer."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = SelfAttention(c)
        self.mlp = Mlp(c)


class Head(nn.Module):
    """The head, with the target's embedding and output rows beside it (frozen, and not in
    `state_dict`).
    """

    def __init__(self, c: HeadConfig, target: Target, draft_ids: Tensor) -> None:
        """`draft_ids`: the target's ids of the draft vocabulary, ascending."""
        super().__init__()
        self.config = c
        self.fc = _linear(3 * c.hidden_size, c.hidden_size)
        self.midlayer = MidLayer(c)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        t2d = torch.zeros(c.vocab_size, dtype=torch.bool)
        t2d[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer("t2d", t2d)
        self.feature_scale = torch.ones(
            3 * c.hidden_size
        )  # `fc` reads features divided by it; the file has it folded in
        self.embedding, self.frequencies = target.embedding, target.frequencies
        self.output = target.head[draft_ids].contiguous()  # [draft vocabulary, C]
        self.output_16 = self.output.bfloat16()  # for training

    @property
    def draft_ids(self) -> Tensor:
        """The target's id of each id of the draft vocabulary."""
        return torch.arange(len(self.d2t)) + self.d2t

    def fuse(self, features: Tensor) -> Tensor:
        """The rows [..., C] that take the place of features [..., 3C]."""
        return self.fc(features / self.feature_scale)

    @torch.no_grad()
    def rescale(self, scale: Tensor) -> None:
        """Let `fc` read features divided by `scale` [3C]; what the head computes stays the same.

        Hidden states are of very different sizes, by layer and by channel, and so are the weights
        that read them: with steps of one size for all, an optimiser would break some and never move
        others.
        """
        self.fc.weight.mul_(scale / self.feature_scale)
        self.feature_scale = scale

    def logits(self, x: Tensor) -> Tensor:
        """Of the draft vocabulary: x [..., C] as a step returns it → [..., draft vocabulary]."""
        return functional.linear(self.norm(x), self.output)

    def unroll(self, features: Tensor, ids: Tensor, steps: int) -> list[Tensor]:
        """What `steps` draft steps make of every position when all guesses are right (EAGLE-3's
        training-time test).

        features [B, T, 3C] of positions 0 to T - 1; ids [B, T + steps - 1] are the tokens from
        position 1 on. Step j of row i has token i + 1 + j at position i + j; it sees the rows of
        step 0 up to i, and row i's own steps 1 to j. Returns the rows [B, T, C] of each step, from
        which `logits` has token i + 2 + j.
        """
        t = features.shape[1]
        g, keys, values, made = self.fuse(features), list[Tensor](), list[Tensor](), list[Tensor]()
        for j in range(steps):
            q, k, v = self._project(g, ids[:, j : j + t], torch.arange(j, j + t))
            keys.append(k)
            values.append(v)
            g = self._finish(g, _attend(q, keys, values))
            made.append(g)
        return made

    def _project(self, g: Tensor, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, H, T, D] of rows g [B, T, C]; keys and values repeated for
        their queries.
        """
        layer, c = self.midlayer, self.config
        a = torch.cat((layer.input_layernorm(self.embedding[ids]), layer.hidden_norm(g)), -1)
        q, k, v = (
            part(a).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        q, k = (rotate(part, positions, self.frequencies).to(v.dtype) for part in (q, k))
        group = c.num_attention_heads // c.num_key_value_heads
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def _finish(self, g: Tensor, y: Tensor) -> Tensor:
        """The rest of the layer, y [B, H, T, D] being what attention gave."""
        x = g + self.midlayer.self_attn.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.midlayer.mlp(self.midlayer.post_attention_layernorm(x))

    @torch.no_grad()
    def guess(self, features: Tensor, ids: Tensor, count: int) -> list[int]:
        """Guess the tokens after `ids` as an engine does it, one at a time: features [T, 3C] of all
        but the last token of ids [T + 1].

        The plain form of the head, for checking others against.
        """
        token, g, t = ids[None, 1:], self.fuse(features)[None], len(features)
        positions = torch.arange(t)
        keys = values = torch.zeros(1, self.config.num_attention_heads, 0, self.config.head_dim)
        guesses: list[int] = []
        for _ in range(count):
            q, k, v = self._project(g, token, positions)
            keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
            mask = torch.arange(keys.shape[2]) <= positions[:, None]
            g = self._finish(g, functional.scaled_dot_product_attention(q, keys, values, mask))[:, -1:]
            guesses.append(int(self.draft_ids[self.logits(g).argmax()]))
            token, positions = torch.tensor([guesses[-1:]]), positions[-1:] + 1
        return guesses


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of one step's rows: causal over step 0, and over the row's own later steps."""
    if len(keys) == 1:
        return functional.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
    t, scale = q.shape[2], q.shape[3] ** -0.5
    scores = (q @ keys[0].transpose(2, 3)).float() * scale  # [B, H, T, T]
    scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
    own = [(q.float() * k).sum(-1, keepdim=True) * scale for k in keys[1:]]
    weights = torch.cat((scores, *own), -1).softmax(-1)
    y = weights[..., :t].to(q.dtype) @ values[0]
    for j, v in enumerate(values[1:]):
        y = y + weights[..., t + j, None].to(q.dtype) * v
    return y


def save_head(head: Head, folder: Path, notes: dict[str, object]) -> None:
    """Write model.safetensors in float16 and config.json; `notes` go into the latter under
    "training".
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = {**head.state_dict(), "fc.weight": head.fc.weight.detach() / head.feature_scale}
    tensors = {name: (t.half() if t.is_floating_point() else t).contiguous() for name, t in held.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        **asdict(head.config),
        "training": notes,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load_head(folder: Path, target: Target) -> Head:
    """A head that `save_head` wrote."""
    held = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = HeadConfig.__dataclass_fields__
    config = HeadConfig(**{name: held[name] for name in names})
    tensors = load_file(folder / "model.safetensors")
    head = Head(config, target, torch.arange(config.draft_vocab_size) + tensors["d2t"])
    head.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in tensors.items()})
    return head
