"""A tiny random llama as a GGUF file, its vocabulary the 256 bytes, an end token and one pair; the blocks are of several types."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import gguf
import numpy as np

__all__ = ["END", "NAN_ID", "V", "add_tokenizer", "write_tiny_model"]

END = 256
NAN_ID = 255  # its embedding is NaN in a model written with nan=True
V, C, F, L, H, G, D, CONTEXT = 258, 64, 96, 3, 4, 2, 16, 256


def write_tiny_model(
    path: Path, *, quantised: bool = True, nan: bool = False, n_layers: int = L, heard: Collection[int] | None = None
) -> Path:
    """Write the model; `quantised` stores its matrices as Q8_0 and Q4_0, else all is float32.

    `heard` are the layers whose attention says anything; None: all.
    """
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(C)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(F)
    writer.add_head_count(H)
    writer.add_head_count_kv(G)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(V)
    add_tokenizer(writer)

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> None:
        values = (rng.standard_normal(shape) * (0.3 if len(shape) == 2 else 0.05)).astype(np.float32)
        values = values if len(shape) == 2 else values + 1
        if heard is not None and "attn_output" in name and int(name.split(".")[1]) not in heard:
            values *= 1e-4
        if nan and name == "token_embd.weight":
            values[NAN_ID] = np.nan
        if quantised and kind is not gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)

    q8, q4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0
    add("token_embd.weight", V, C, kind=gguf.GGMLQuantizationType.F32 if nan else q8)
    for i in range(n_layers):
        add(f"blk.{i}.attn_norm.weight", C)
        add(f"blk.{i}.attn_q.weight", H * D, C, kind=q4)
        add(f"blk.{i}.attn_k.weight", G * D, C, kind=q4)
        add(f"blk.{i}.attn_v.weight", G * D, C, kind=q8)
        add(f"blk.{i}.attn_output.weight", C, H * D, kind=q8)
        add(f"blk.{i}.ffn_norm.weight", C)
        add(f"blk.{i}.ffn_gate.weight", F, C, kind=q4)
        add(f"blk.{i}.ffn_up.weight", F, C, kind=q4)
        add(f"blk.{i}.ffn_down.weight", C, F, kind=q8)
    add("output_norm.weight", C)
    if nan:
        add("output.weight", V, C)  # untied: the logits of others do not see the NaN
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The 256 bytes, an end token and one pair: V tokens."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2's letters for bytes
    rest = {byte: chr(256 + number) for number, byte in enumerate(b for b in range(256) if b not in kept)}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([rest.get(byte, chr(byte)) for byte in range(256)] + ["<|end|>", "th"])
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(END)
