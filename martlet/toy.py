"""Toy parts: a tiny random model, a tokenizer of bytes and an executor that follows a script.

They run the whole engine without a download, for tests, docs and experiments:

>>> from martlet import LLM, SamplingParams, toy
>>> path = toy.write_model("/tmp/toy.gguf", family="llama")
>>> with LLM(str(path), threads=1) as llm:
...     output = llm.generate("hello", SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0]
>>> len(output.outputs[0].token_ids)
8

With `scripted_llm` no model computes: every other part is real, and the answer is known in advance.

>>> with toy.scripted_llm(toy.spell("It is blue.")) as llm:
...     llm.generate("Why?")[0].outputs[0].text
'It is blue.'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.errors import UnsupportedError
from martlet.formats.gguf_write import write_gguf
from martlet.quant.encode import encode
from martlet.quant.table import BlockType, RawTensor
from martlet.tokenizer.tokenizer import Tokenizer

__all__ = [
    "CONTEXT",
    "END",
    "FAMILIES",
    "FFN_HIDDEN",
    "HEAD_DIM",
    "HIDDEN",
    "N_HEADS",
    "N_KV_HEADS",
    "N_LAYERS",
    "VOCAB",
    "byte_tokenizer",
    "tokenizer_metadata",
    "write_model",
]

F32 = NDArray[np.float32]

END = 256  # the id of the end token; the ids below it are the bytes
VOCAB = 258  # the bytes, the end token, and the pair "th"
HIDDEN, FFN_HIDDEN, N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM, CONTEXT = 64, 96, 3, 4, 2, 16, 256

_BIASES = {
    "attn_q.bias": N_HEADS * HEAD_DIM,
    "attn_k.bias": N_KV_HEADS * HEAD_DIM,
    "attn_v.bias": N_KV_HEADS * HEAD_DIM,
}
_QK_NORMS = {"attn_q_norm.weight": HEAD_DIM, "attn_k_norm.weight": HEAD_DIM}
_POST_NORMS = {"post_attention_norm.weight": HIDDEN, "post_ffw_norm.weight": HIDDEN}
# family → (a layer's further vectors with their lengths, the family's own settings)
FAMILIES: Mapping[str, tuple[Mapping[str, int], Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": ({}, {}),
        "qwen2": (_BIASES, {}),
        "qwen3": (_QK_NORMS, {}),
        "gemma2": (
            _POST_NORMS,
            {"attention.sliding_window": 40, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
        ),
        "gemma3": (
            _QK_NORMS | _POST_NORMS,
            {"attention.sliding_window": 40, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4},
        ),
    }
)


def tokenizer_metadata(*, pair: bool = True) -> dict[str, Any]:
    """GGUF metadata of the byte tokenizer; `pair` adds a token for "th", which a merge makes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2's letters for bytes
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(256 + number) for number, byte in enumerate(others)}
    tokens = [letters.get(byte, chr(byte)) for byte in range(256)] + ["<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + ["th"] * pair,
        "tokenizer.ggml.token_type": [1] * 256 + [3] + [1] * pair,
        "tokenizer.ggml.merges": ["t h"] * pair,
        "tokenizer.ggml.eos_token_id": END,
    }


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are the 256 bytes, each with its own number as id, and the end token END."""
    return Tokenizer.from_gguf(tokenizer_metadata(pair=False))


def write_model(
    path: str | Path,
    family: str = "llama",
    *,
    quantised: bool = True,
    n_layers: int = N_LAYERS,
    tied: bool = True,
    seed: int = 7,
    settings: Mapping[str, Any] = MappingProxyType({}),
    change: Callable[[str, F32], F32] = lambda name, values: values,
) -> Path:
    """Write a random model with the byte tokenizer as a GGUF file of about 100 kB, and return its path.

    `quantised` stores matrices as Q8_0 and Q4_0, otherwise everything is float32. `tied` False
    gives the model an output matrix of its own, float32 as the embedding then is. `settings` adds or replaces
    the family's metadata, with keys as "rope.freq_base". `change` sees each tensor, float32 [n] or
    [n, k], under its GGUF name, and returns its values. Equal arguments give equal bytes.
    UnsupportedError for a family that is not in FAMILIES.
    """
    if family not in FAMILIES:
        raise UnsupportedError(f"no toy model of the family {family!r}", FAMILIES)
    vectors, own_settings = FAMILIES[family]
    sizes = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": n_layers,
        "feed_forward_length": FFN_HIDDEN,
        "attention.head_count": N_HEADS,
        "attention.head_count_kv": N_KV_HEADS,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": VOCAB,
    }
    keys = {f"{family}.{key}": value for key, value in {**sizes, **own_settings, **settings}.items()}
    metadata = {"general.architecture": family, "general.name": "tiny", **keys, **tokenizer_metadata()}
    rng = np.random.default_rng(seed)
    tensors = []
    for name, (shape, block_type) in _shapes(n_layers, vectors, tied).items():
        values = (rng.standard_normal(shape) * (0.3 if len(shape) == 2 else 0.05)).astype(np.float32)
        centre = 4 if ".post_" in name else 1  # with 4 a layer outweighs Gemma's scaled embedding
        values = change(name, values if len(shape) == 2 else values + np.float32(centre))
        stored = block_type if quantised else BlockType.F32
        data = encode(values.reshape(-1, shape[-1]), stored).reshape(-1)
        tensors.append(RawTensor(name, shape, stored, data))
    [written] = write_gguf(path, metadata, tensors)
    return written


def _shapes(n_layers: int, vectors: Mapping[str, int], tied: bool) -> dict[str, tuple[tuple[int, ...], BlockType]]:
    """Each tensor's shape and block type, in the order in which their values are drawn."""
    f32, q8, q4 = BlockType.F32, BlockType.Q8_0, BlockType.Q4_0
    shapes: dict[str, tuple[tuple[int, ...], BlockType]] = {"token_embd.weight": ((VOCAB, HIDDEN), q8 if tied else f32)}
    for layer in range(n_layers):
        tensors: dict[str, tuple[tuple[int, ...], BlockType]] = {
            "attn_norm.weight": ((HIDDEN,), f32),
            "attn_q.weight": ((N_HEADS * HEAD_DIM, HIDDEN), q4),
            "attn_k.weight": ((N_KV_HEADS * HEAD_DIM, HIDDEN), q4),
            "attn_v.weight": ((N_KV_HEADS * HEAD_DIM, HIDDEN), q8),
            "attn_output.weight": ((HIDDEN, N_HEADS * HEAD_DIM), q8),
            "ffn_norm.weight": ((HIDDEN,), f32),
            "ffn_gate.weight": ((FFN_HIDDEN, HIDDEN), q4),
            "ffn_up.weight": ((FFN_HIDDEN, HIDDEN), q4),
            "ffn_down.weight": ((HIDDEN, FFN_HIDDEN), q8),
        }
        tensors |= {name: ((length,), f32) for name, length in vectors.items()}
        shapes |= {f"blk.{layer}.{name}": tensor for name, tensor in tensors.items()}
    shapes["output_norm.weight"] = ((HIDDEN,), f32)
    if not tied:
        shapes["output.weight"] = ((VOCAB, HIDDEN), f32)
    return shapes
