"""Write a GGUF file with the true shapes of a published model and random weights.

    python bench/random_model.py olmoe-1b-7b OUT.gguf [--layers 16] [--type Q4_K]
    python bench/random_model.py --list

For speed only: its answers are noise. llama.cpp loads it as well, so that both engines can be
measured on models that are not at hand. Sizes are those of the models' config.json on Hugging Face;
`--layers` takes fewer layers than the model has, for less memory. Blocks are random codes whose
scales give weights about 1/√k in size, so that activations stay finite. The output matrix is Q6_K
where its rows allow, routers and norms are float32; other matrices have the type that is asked for
(beside MXFP4, which is for experts, Q8_0).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from martlet.formats.gguf_write import write_gguf
from martlet.quant.table import BLOCKS, BlockType, RawTensor


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, under GGUF's names of keys, and what its layers have beside."""

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int = 0
    chosen: int = 0
    expert_ffn: int = 0
    qk_norm: str = ""  # "heads": one weight for each head; "all": one over all of them
    rope_base: float = 1e6


SHAPES = {
    "olmoe-1b-7b": Shape("olmoe", 16, 2048, 16, 16, 128, 1024, 50304, 64, 8, 1024, "all", 1e4),
    "qwen3-30b-a3b": Shape("qwen3moe", 48, 2048, 32, 4, 128, 6144, 151936, 128, 8, 768, "heads"),
    "mixtral-8x7b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 32000, 8, 2, 14336),
    "gpt-oss-20b": Shape("gpt-oss", 24, 2880, 64, 8, 64, 2880, 201088, 32, 4, 2880, rope_base=1.5e5),
    "llama-3.2-3b": Shape("llama", 28, 3072, 24, 8, 128, 8192, 128256, rope_base=5e5),
    "qwen3-4b": Shape("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, qk_norm="heads"),
    "llama-3.1-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256, rope_base=5e5),
}
# Where a block's float16 fields stand, and what each is for weights of size 1 (mean 0 where the
# type has a minimum); all other bits are random.
FIELDS: dict[BlockType, dict[int, float]] = {
    BlockType.Q4_0: {0: 0.22},
    BlockType.Q4_1: {0: 0.22, 2: -1.65},
    BlockType.Q8_0: {0: 0.0135},
    BlockType.Q4_K: {0: 0.0058, 2: 0.0435},
    BlockType.Q5_K: {0: 0.0028, 2: 0.0434},
    BlockType.Q6_K: {208: 0.00073},
    BlockType.MXFP4: {},
}


def metadata(shape: Shape, layers: int) -> dict[str, Any]:
    """The keys of the file; its tokens are numbers in angle brackets, and the bytes of GPT-2."""
    keys: dict[str, Any] = {
        "context_length": 32768,
        "embedding_length": shape.hidden,
        "block_count": layers,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": shape.rope_base,
    }
    if shape.experts:
        keys |= {"expert_count": shape.experts, "expert_used_count": shape.chosen}
        keys |= {} if shape.arch in ("olmoe", "llama") else {"expert_feed_forward_length": shape.expert_ffn}
    if shape.arch == "gpt-oss":
        keys |= {"attention.sliding_window": 128, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0}
        keys |= {"rope.scaling.original_context_length": 4096}
    from martlet import toy

    tokenizer = toy.tokenizer_metadata()
    known = len(tokenizer["tokenizer.ggml.tokens"])
    tokenizer["tokenizer.ggml.tokens"] += [f"<{i}>" for i in range(known, shape.vocab)]
    tokenizer["tokenizer.ggml.token_type"] += [1] * (shape.vocab - known)
    return {
        "general.architecture": shape.arch,
        "general.name": "random",
        **{f"{shape.arch}.{key}": value for key, value in keys.items()},
        **tokenizer,
    }


def tensors(shape: Shape, layers: int, kind: BlockType, rng: np.random.Generator) -> Iterator[RawTensor]:
    """All tensors of the model."""
    c, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    dense = BlockType.Q8_0 if kind is BlockType.MXFP4 else kind  # as published files have it
    k_types = c % BLOCKS[BlockType.Q6_K].size == 0
    yield matrix("token_embd.weight", (shape.vocab, c), dense, rng)
    yield matrix("output.weight", (shape.vocab, c), BlockType.Q6_K if k_types else BlockType.Q8_0, rng)
    yield floats("output_norm.weight", (c,), rng)
    for i in range(layers):
        block = f"blk.{i}."
        is_oss = shape.arch == "gpt-oss"
        for name in ("attn_norm", "post_attention_norm" if is_oss else "ffn_norm"):
            yield floats(f"{block}{name}.weight", (c,), rng)
        if shape.qk_norm:
            widths = (shape.head_dim,) * 2 if shape.qk_norm == "heads" else (q, kv)
            for name, width in zip(("attn_q_norm", "attn_k_norm"), widths, strict=True):
                yield floats(f"{block}{name}.weight", (width,), rng)
        for name, rows, columns in (("q", q, c), ("k", kv, c), ("v", kv, c), ("output", c, q)):
            yield matrix(f"{block}attn_{name}.weight", (rows, columns), dense, rng)
            if is_oss:
                yield floats(f"{block}attn_{name}.bias", (rows,), rng)
        if is_oss:
            yield floats(f"{block}attn_sinks.weight", (shape.heads,), rng)
        stack, ffn, end = ((shape.experts,), shape.expert_ffn, "_exps") if shape.experts else ((), shape.ffn, "")
        if shape.experts:
            yield floats(f"{block}ffn_gate_inp.weight", (shape.experts, c), rng)
            if is_oss:
                yield floats(f"{block}ffn_gate_inp.bias", (shape.experts,), rng)
        for name, rows, columns in (("gate", ffn, c), ("up", ffn, c), ("down", c, ffn)):
            yield matrix(f"{block}ffn_{name}{end}.weight", (*stack, rows, columns), kind, rng)
            if is_oss:
                yield floats(f"{block}ffn_{name}{end}.bias", (*stack, rows), rng)


def matrix(name: str, shape: tuple[int, ...], kind: BlockType, rng: np.random.Generator) -> RawTensor:
    """A matrix, or a stack of them, of random blocks."""
    block = BLOCKS[kind]
    blocks = np.frombuffer(rng.bytes(int(np.prod(shape)) // block.size * block.nbytes), np.uint8).copy()
    blocks = blocks.reshape(-1, block.nbytes)
    for at, value in FIELDS[kind].items():
        blocks[:, at : at + 2] = np.array([value / shape[-1] ** 0.5], np.float16).view(np.uint8)
    if kind is BlockType.MXFP4:
        blocks[:, 0] = 127 - 1 - round(np.log2(shape[-1]) / 2)  # an exponent of two
    return RawTensor(name, shape, kind, blocks.reshape(-1))


def floats(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> RawTensor:
    """Float32 values: 1 for a norm, about 1/√k for a matrix."""
    values = np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) / shape[-1] ** 0.5
    return RawTensor(name, shape, BlockType.F32, values.astype(np.float32).reshape(-1).view(np.uint8))


def main() -> int:
    """Write the file and say its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=SHAPES)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--layers", type=int, help="of the model's layers, from the first; default: all")
    parser.add_argument("--type", default="Q4_K", choices=[kind.name for kind in FIELDS])
    parser.add_argument("--list", action="store_true", help="print the shapes and end")
    args = parser.parse_args()
    if args.list or args.shape is None or args.out is None:
        print("\n".join(f"{name:16} {shape.layers} layers, {shape.arch}" for name, shape in SHAPES.items()))
        return 0
    shape, rng = SHAPES[args.shape], np.random.default_rng(1)
    layers = min(args.layers or shape.layers, shape.layers)
    write_gguf(args.out, metadata(shape, layers), list(tensors(shape, layers, BlockType[args.type], rng)))
    print(f"{args.out}: {layers} of {shape.layers} layers, {args.out.stat().st_size / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
