"""Where a head begins: not at random but at the best linear guess, found in closed form (read
`training.py` next).

What the target's final norm makes of position i + 1 is nearly linear in the features of position i
and the embedding of token i + 1, far enough that this alone guesses four tokens in ten. Each part
of the head has a share of it:

    fc           the features' part, by ridge regression
    attention    one query head of each KV group looks at its own position alone, and its values
                 carry the embedding's part, cut to the rank that there is room for; the other heads
                 begin with nothing to say
    mlp          gate and up are the last layer's, down is fitted to what is still missing
    norm         the target's
"""

from __future__ import annotations

import numpy as np
import torch
from eagle.corpus import Features
from eagle.head import Head
from eagle.target import Target, rms_norm
from torch import Tensor
from torch.nn import functional

RIDGE = 1e-3  # of the mean square of a regressor
# sharpness of the look at one's own position; RoPE's fastest pairs, which tell positions apart
FOCUS, PAIRS = 8.0, 6


@torch.no_grad()
def fit_start(head: Head, target: Target, data: Features, chosen: list[int], rows: int = 60_000) -> None:
    """Set the head's weights from up to `rows` positions of the conversations `chosen`."""
    features, embedded, goal = _gather(head, target, data, chosen, rows)
    c, layer = head.config.hidden_size, head.midlayer
    weight = _ridge(torch.cat((features, embedded), 1), goal)  # [4C, C]
    head.fc.weight.copy_(weight[: 3 * c].T)
    g = features @ weight[: 3 * c]
    carried = _carry(head, embedded, weight[3 * c :])
    _look_at_self(head, rms_norm(g, layer.hidden_norm.weight, layer.hidden_norm.eps).mean(0))
    x = g + embedded @ carried
    last = target.last
    gate, up = last["gate_up"].chunk(2)
    layer.mlp.gate_proj.weight.copy_(gate)
    layer.mlp.up_proj.weight.copy_(up)
    layer.post_attention_layernorm.weight.copy_(last["ffn_norm"])
    n = layer.post_attention_layernorm(x)
    layer.mlp.down_proj.weight.copy_(_ridge(functional.silu(n @ gate.T) * (n @ up.T), goal - x).T)
    head.norm.weight.copy_(target.final_norm)


def _gather(head: Head, target: Target, data: Features, chosen: list[int], rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features [N, 3C] of positions i, normed embeddings [N, C] of tokens i + 1, and the final
    states [N, C] of positions i + 1.
    """
    features, tokens, goals, n = list[Tensor](), list[Tensor](), list[Tensor](), 0
    for i in chosen:
        line, states = (
            data.lines[i],
            torch.from_numpy(data.states[data.starts[i] : data.starts[i + 1]].astype(np.float32)),
        )
        answered = torch.tensor(line.answered)
        told = answered[1:-1] & answered[2:]  # where a guess of token i + 2 can be asked for
        features.append(states[:-2, :3][told].flatten(1))
        tokens.append(torch.tensor(line.ids)[1:-1][told])
        goals.append(states[1:-1, 3][told] / target.final_norm)
        n += len(tokens[-1])
        if n >= rows:
            break
    return torch.cat(features), head.midlayer.input_layernorm(target.embedding[torch.cat(tokens)]), torch.cat(goals)


def _ridge(x: Tensor, y: Tensor) -> Tensor:
    """The weights [n, m] with which x [N, n] tells y [N, m]; every column of x counts alike,
    whatever its size.
    """
    size = x.pow(2).mean(0).sqrt().clamp_min(1e-6)
    x = x / size
    gram = (x.T @ x).double() + RIDGE * len(x) * torch.eye(x.shape[1], dtype=torch.double)
    return (torch.linalg.solve(gram, (x.T @ y).double()) / size[:, None]).float()


def _carry(head: Head, embedded: Tensor, weight: Tensor) -> Tensor:
    """Let the values of one query head of each group carry `weight` [C, C]; returns it as far as
    their rank allows.
    """
    c, attention = head.config, head.midlayer.self_attn
    rank = c.num_key_value_heads * c.head_dim
    spread = embedded.T @ embedded / len(embedded)
    root = torch.linalg.cholesky(
        spread + 1e-4 * spread.diagonal().mean() * torch.eye(c.hidden_size)
    )  # root rootᵀ = spread
    u, s, v = torch.linalg.svd(root.T @ weight)
    into = torch.linalg.solve(root.T, u[:, :rank])  # [C, rank]; its values have a mean square of 1
    out = s[:rank, None] * v[:rank]  # [rank, C]
    attention.v_proj.weight.normal_(std=0.002)
    attention.v_proj.weight[:, : c.hidden_size] = into.T
    attention.o_proj.weight.normal_(std=0.002)
    group = c.num_attention_heads // c.num_key_value_heads
    columns = attention.o_proj.weight.view(c.hidden_size, c.num_key_value_heads, group, c.head_dim)
    columns[:, :, 0] = out.T.reshape(c.hidden_size, c.num_key_value_heads, c.head_dim)
    return into @ out


def _look_at_self(head: Head, mean: Tensor) -> None:
    """Make every group's first query head look at its own position: query and key have a constant
    part, which RoPE turns apart.

    `mean` [C] is that of the normed hidden half, so that its product with mean / |mean|² is about 1
    in every row.
    """
    c, attention = head.config, head.midlayer.self_attn
    pairs = min(PAIRS, c.head_dim // 2)
    constant = FOCUS * mean / mean.pow(2).sum()
    for part in (attention.q_proj, attention.k_proj):
        part.weight.normal_(std=0.01)
        heads = part.weight.view(c.num_key_value_heads, -1, c.head_dim, 2 * c.hidden_size)
        for half in (slice(0, pairs), slice(c.head_dim // 2, c.head_dim // 2 + pairs)):
            heads[:, 0, half] = 0
        heads[:, 0, :pairs, c.hidden_size :] = constant
