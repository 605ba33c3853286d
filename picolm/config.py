"""What a model is, read from its file's metadata: sizes, the shape of its family, and what RoPE turns by.

Three families: `llama` (SmolLM, TinyLlama …), `qwen2` (biases; RoPE on halves), `gemma3` (norms on queries, keys and after each
block; GELU; scaled embeddings; most layers see a window only). Others are refused by name. Keys: ggml's `docs/gguf.md`.

Differences from the C (part of model.c): the epsilon, RoPE's dimension count and scaling, and key lengths are read; a required key
that is missing, or a value out of range, is an error. Read next: `tokenizer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from picolm.gguf import check

MAX_CONTEXT = 1 << 20  # positions; RoPE's angles are exact up to here, and float32 positions too


@dataclass(frozen=True)
class Config:
    """Sizes of a model."""

    arch: str
    n_embd: int
    n_ffn: int
    n_heads: int
    n_kv_heads: int
    n_layers: int
    vocab_size: int
    max_seq_len: int
    head_dim: int
    rope_base: float
    rope_dim: int
    rope_scale: float
    eps: float
    window: int

    @property
    def gemma(self) -> bool:
        """Gemma's shape."""
        return self.arch == "gemma3"

    @property
    def kv_dim(self) -> int:
        """Numbers that a position keeps as its key, and again as its value, in each layer."""
        return self.n_kv_heads * self.head_dim

    def is_local(self, layer: int) -> bool:
        """Gemma's layers see a window, but each sixth sees everything."""
        return self.gemma and self.window > 0 and layer % 6 != 5


def read_config(meta: dict[str, Any], vocab_rows: int, context: int) -> Config:
    """The sizes, checked. `context` lowers the file's context; 0 keeps it."""
    arch = str(meta.get("general.architecture"))
    check(arch in ("llama", "qwen2", "gemma3"), f"general.architecture is {arch!r}: llama, qwen2 and gemma3 are read")
    keys = _Keys(meta)
    n_embd, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    kv_heads = keys.whole("attention.head_count_kv", heads)
    fits = f"{arch}.attention.key_length" in keys or n_embd % heads == 0
    check(fits, f"embedding_length {n_embd} is no multiple of head_count {heads}")
    head_dim = keys.whole("attention.key_length", n_embd // heads)
    check(keys.whole("attention.value_length", head_dim) == head_dim, "keys and values of different lengths")
    check(heads % kv_heads == 0, f"head_count {heads} is no multiple of head_count_kv {kv_heads}")
    rope_dim = keys.whole("rope.dimension_count", head_dim)
    fits = rope_dim <= head_dim and rope_dim % 2 == 0
    check(fits, f"rope.dimension_count {rope_dim}: an even number up to the head's {head_dim} is needed")
    scaling = keys.get(f"{arch}.rope.scaling.type", "none")
    check(str(scaling) in ("none", "linear"), f"rope.scaling.type is {scaling!r}: none and linear are read")
    trained = keys.whole("context_length", 2048)
    check(0 <= context <= trained, f"a context of {context}: between 1 and the model's {trained} is needed")
    vocab = keys.whole("vocab_size", vocab_rows)
    check(vocab == vocab_rows, f"vocab_size is {vocab}, but token_embd.weight has {vocab_rows} rows")
    return Config(
        arch=arch, n_embd=n_embd, n_ffn=keys.whole("feed_forward_length"), n_heads=heads, n_kv_heads=kv_heads,
        n_layers=keys.whole("block_count"), vocab_size=vocab_rows, max_seq_len=min(context or trained, MAX_CONTEXT),
        head_dim=head_dim, rope_base=keys.real("rope.freq_base", 1e6 if arch == "gemma3" else 1e4), rope_dim=rope_dim,
        rope_scale=keys.real("rope.scaling.factor", 1.0) if scaling == "linear" else 1.0,
        eps=keys.real("attention.layer_norm_rms_epsilon", 1e-5), window=keys.whole("attention.sliding_window", 0, least=0),
    )  # fmt: skip


class _Keys(dict[str, Any]):
    """Metadata, and the family's keys with checks."""

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        name = f"{self['general.architecture']}.{key}"
        value: Any = self.get(name, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        check(value is not None, f"key {name} is missing")
        fine = type(value) is int and value >= least and value != 0xFFFFFFFF
        check(fine, f"key {name} is {value!r:.40}: a whole number of at least {least} is needed")
        return int(value)

    def real(self, key: str, default: float) -> float:
        name = f"{self['general.architecture']}.{key}"
        value = self.get(name, default)
        fine = isinstance(value, float) and 0 < value < np.inf
        check(fine, f"key {name} is {value!r:.40}: a positive number is needed")
        return float(value)
