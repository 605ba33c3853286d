"""The models of the equality matrix: a toy model of each kind of attention, as GGUF files that an
LLM loads.

"quantised" and "experts" have block types, the others are float32. Windows are longer than a page
and shorter than the prompts of the matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from test_mtp import tensors_of
from test_mtp import write as write_own_layer

from martlet import toy

WINDOW = 40
NAN_ID = 255  # its embedding is NaN in `write_nan_model`'s
OWN_LAYER = "own layer"  # for multi-token prediction: test_mtp.py's, a folder
# kind → (family, what its metadata says beside)
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "quantised": ("llama", {}),  # full attention, products of bytes
        "window": ("llama", {"attention.sliding_window": WINDOW}),  # in all layers
        # scores capped, a window in every other layer
        "softcap": ("gemma2", {"attention.sliding_window": WINDOW}),
        # normed queries and keys, two RoPE bases
        "qk norm": ("gemma3", {"attention.sliding_window": WINDOW}),
        "experts": ("qwen2moe", {}),  # and a network for all tokens, with a gate
        # biases of experts, a score without a position, a window in every other layer
        "sinks": ("gpt-oss", {"attention.sliding_window": WINDOW}),
    }
)


def write_kind(kind: str, folder: Path) -> Path:
    """Write the model of a kind."""
    if kind == OWN_LAYER:
        return write_own_layer(folder / "own-layer", tensors_of())
    family, settings = KINDS[kind]
    path = folder / f"{kind.replace(' ', '-')}.gguf"
    return toy.write_model(path, family, quantised=kind in ("quantised", "experts"), settings=settings)


def write_nan_model(path: Path) -> Path:
    """Write a model whose logits are NaN after NAN_ID, and only then: its output matrix is another
    than the embedding.
    """

    def spoil(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        if name == "token_embd.weight":
            values[NAN_ID] = np.nan
        return values

    return toy.write_model(path, tied=False, change=spoil)
