"""The transformer: weights by name, the key/value cache, and the forward pass.

    x = embedding of each token
    a layer:  x += Wo · attention(rope(Wq·n), rope(Wk·n), Wv·n)   where n = rmsnorm(x)
              x += Wdown · (silu(Wgate·n) * (Wup·n))              where n = rmsnorm(x)
    logits = Wout · rmsnorm(x)

Streaming gives a layer's pages back to the kernel before the next: what stays is a layer of the file, and a band of numbers a thread.

Differences from the C: many tokens pass at once, and only the last one's logits are made; buffers grow with the text (there: the whole
context); weights may be held as float32; a tensor that is not understood is an error; biases, Gemma's norms. Read next: `tensor.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np

from picolm.config import Config, read_config
from picolm.gguf import GGUF, Weight, check
from picolm.libm import F32, cosf, powf, sinf
from picolm.quant import dequantize_row, fp32_to_fp16
from picolm.tensor import BAND, Team, attention, gelu, matmul, rmsnorm, rope, silu

CHUNK = 256  # tokens of a prompt that pass at once
LOCAL_ROPE_BASE = 10000.0  # Gemma's layers with a window


class KVCache:
    """What attention remembers: keys and values [layer, position, kv heads, dim], and the tokens they belong to."""

    def __init__(self, config: Config) -> None:
        self.keys = np.zeros((config.n_layers, 0, config.n_kv_heads, config.head_dim), np.float16)
        self.values = self.keys
        self.tokens: list[int] = []

    def truncate(self, n: int) -> None:
        """Forget what lies at position n and behind."""
        del self.tokens[n:]

    def extend(self, tokens: list[int]) -> None:
        """Make room for these tokens; they count from now on."""
        start, need = len(self.tokens), len(self.tokens) + len(tokens)
        if need > self.keys.shape[1]:
            more = [(0, 0), (0, max(need, start + start // 2, 64) - self.keys.shape[1]), (0, 0), (0, 0)]
            self.keys, self.values = np.pad(self.keys, more), np.pad(self.values, more)
        self.tokens += tokens


class Layer(NamedTuple):
    """A layer's matrices, and its vectors: norms and biases. Names are the middle of the file's: `attn_q`."""

    w: dict[str, Weight]
    v: dict[str, F32]


class Model:
    """A file's weights. `stream` gives a layer's pages back after use; `hold` keeps the weights as float32 instead."""

    def __init__(self, path: str, context: int = 0, team: Team | None = None, stream: bool = False) -> None:
        self.file, self.team, self.stream = GGUF(path), team or Team(), stream
        embd = self.file.tensors.get("token_embd.weight", ([0, 0], 0, 0))[0]
        self.config = c = read_config(self.file.meta, embd[1] if len(embd) > 1 else 0, context)
        self.token_embd = self.file.weight("token_embd.weight", c.vocab_size, c.n_embd)
        self.layers = [self._layer(i) for i in range(c.n_layers)]
        self.output_norm = self._vector("output_norm.weight", c.n_embd)
        tied = "output.weight" not in self.file.tensors
        self.output = self.token_embd if tied else self.file.weight("output.weight", c.vocab_size, c.n_embd)
        factors = "rope_freqs.weight" in self.file.tensors
        self.freq_factors = self._vector("rope_freqs.weight", c.rope_dim // 2) if factors else np.ones(1, np.float32)
        unknown = sorted(set(self.file.tensors) - self.file.used)
        check(not unknown, f"tensors that are not known here, such as {unknown[:1]}: the result would be wrong")

    def hold(self) -> None:
        """Dequantise all weights now, into one array: 4 bytes a weight, on large pages, and no decoding of blocks later."""
        numbers, at = np.empty(self.n_weights, np.float32), 0
        for w in self.matrices:
            w.held = numbers[at : at + w.rows * w.cols].reshape(w.rows, w.cols)
            at += w.rows * w.cols
            self.team.each(partial(w.decode, step := max(1, BAND // w.cols)), -(-w.rows // step))
            self.file.forget(w)

    def forget(self, weights: Iterable[Weight]) -> None:
        """In streaming mode, give pages back that have been used."""
        for w in weights if self.stream else ():
            self.file.forget(w)

    def norm(self, x: F32, weight: F32) -> F32:
        """RMSNorm with this model's epsilon."""
        return rmsnorm(x, weight, self.config.eps, self.team.order)

    @property
    def matrices(self) -> list[Weight]:
        """In the order in which they are read."""
        return [w for layer in self.layers for w in layer.w.values()] + [self.output]

    @property
    def n_weights(self) -> int:
        """How many numbers `hold` would keep."""
        return sum(w.rows * w.cols for w in self.matrices)

    def _vector(self, name: str, n: int) -> F32:
        w = self.file.weight(name, 1, n)
        return dequantize_row(w.raw, w.type).reshape(n)

    def _layer(self, i: int) -> Layer:
        c, b = self.config, f"blk.{i}."
        e, f, q, kv = c.n_embd, c.n_ffn, c.n_heads * c.head_dim, c.kv_dim
        shapes = {"attn_q": (q, e), "attn_k": (kv, e), "attn_v": (kv, e), "attn_output": (e, q)}
        shapes |= {"ffn_gate": (f, e), "ffn_up": (f, e), "ffn_down": (e, f)}
        vectors = {"attn_norm.weight": e, "ffn_norm.weight": e}
        if c.gemma:
            vectors |= {"attn_q_norm.weight": c.head_dim, "attn_k_norm.weight": c.head_dim}
            vectors |= {"post_attention_norm.weight": e, "post_ffw_norm.weight": e}
        vectors |= {f"{n}.bias": rows for n, (rows, _) in shapes.items() if f"{b}{n}.bias" in self.file.tensors}
        return Layer(
            {name: self.file.weight(f"{b}{name}.weight", *shape) for name, shape in shapes.items()},
            {name.removesuffix(".weight"): self._vector(b + name, n) for name, n in vectors.items()},
        )


def rope_tables(m: Model, start: int, stop: int, local: bool) -> tuple[F32, F32]:
    """Cosines and sines of the angles [position, pair]: position / base^(2i/dim)."""
    c = m.config
    exponents = np.arange(0, c.rope_dim, 2, dtype=np.float32) / np.float32(c.rope_dim)
    divisors = powf(LOCAL_ROPE_BASE if local else c.rope_base, exponents)
    if not local:
        divisors = divisors * np.float32(c.rope_scale) * m.freq_factors
    theta = np.arange(start, stop, dtype=np.float32)[:, None] / divisors
    return cosf(theta), sinf(theta)


def model_forward(m: Model, kv: KVCache, tokens: list[int], every: bool = False) -> F32:
    """Run tokens at the positions that follow the cache's; the last one's logits, or `every` one's."""
    c, start = m.config, len(kv.tokens)
    if start + len(tokens) > c.max_seq_len:
        raise ValueError(f"position {start + len(tokens)} is past the context of {c.max_seq_len}")
    kv.extend(tokens)
    x = dequantize_row(m.token_embd.raw[tokens], m.token_embd.type)
    if c.gemma:
        x *= np.sqrt(np.float32(c.n_embd))
    tables = [rope_tables(m, start, start + len(tokens), local) for local in ([False, True] if c.gemma else [False])]
    for i, layer in enumerate(m.layers):
        x = x + _attend(m, kv, i, x, tables[c.is_local(i)])
        x = x + _feed_forward(m, layer, x)
        m.forget(layer.w.values())
    logits = matmul(m.norm(x if every else x[-1:], m.output_norm), [m.output], m.team)[0]
    m.forget([m.output])
    return logits if every else logits[-1]


def _attend(m: Model, kv: KVCache, i: int, x: F32, table: tuple[F32, F32]) -> F32:
    c, n, start, layer = m.config, len(x), len(kv.tokens) - len(x), m.layers[i]
    q, k, v = _linear(m, layer, m.norm(x, layer.v["attn_norm"]), "attn_q", "attn_k", "attn_v")
    q, k = q.reshape(n, c.n_heads, -1), k.reshape(n, c.n_kv_heads, -1)
    if c.gemma:
        q, k = m.norm(q, layer.v["attn_q_norm"]), m.norm(k, layer.v["attn_k_norm"])
    q, k = (rope(heads, *table, halves=c.arch != "llama") for heads in (q, k))
    kv.keys[i, start : start + n] = fp32_to_fp16(k)
    kv.values[i, start : start + n] = fp32_to_fp16(v.reshape(k.shape))
    reach = c.window if c.is_local(i) else 0
    (o,) = _linear(m, layer, attention(q, kv.keys[i], kv.values[i], start, reach, m.team.order), "attn_output")
    return m.norm(o, layer.v["post_attention_norm"]) if c.gemma else o


def _feed_forward(m: Model, layer: Layer, x: F32) -> F32:
    gate, up = _linear(m, layer, m.norm(x, layer.v["ffn_norm"]), "ffn_gate", "ffn_up")
    gate = gelu(gate, m.team.order) if m.config.gemma else silu(gate, m.team.order)
    (down,) = _linear(m, layer, gate * up, "ffn_down")
    return m.norm(down, layer.v["post_ffw_norm"]) if m.config.gemma else down


def _linear(m: Model, layer: Layer, x: F32, *names: str) -> list[F32]:
    out = matmul(x, [layer.w[name] for name in names], m.team)
    return [y + layer.v[f"{n}.bias"] if f"{n}.bias" in layer.v else y for n, y in zip(names, out, strict=True)]


def prefill(m: Model, kv: KVCache, tokens: list[int]) -> F32:
    """Run a prompt in chunks; the last token's logits."""
    for at in range(0, len(tokens), CHUNK):
        logits = model_forward(m, kv, tokens[at : at + CHUNK])
    return logits
