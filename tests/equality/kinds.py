"""A tiny random model of each kind of attention, with a tokenizer, as GGUF files that an LLM loads.

`quantised` is that of tiny_model.py; the others are those of tests/models/tiny.py with more room, float32. Their windows
are longer than a page, and shorter than the prompts of the matrix.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from test_mtp import tensors_of
from test_mtp import write as write_model
from tiny_model import V, add_tokenizer, write_tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import tiny

__all__ = ["KINDS", "OWN_LAYER", "WINDOW", "write_kind"]

WINDOW = 40
OWN_LAYER = "own layer"  # for multi-token prediction: test_mtp.py's, a folder
# kind → (case of tests/models, what else its config says); None: tiny_model.py's
KINDS: Mapping[str, tuple[str, Mapping[str, Any]] | None] = MappingProxyType(
    {
        "quantised": None,  # full attention, products of bytes
        "window": ("llama3", {"sliding_window": WINDOW}),  # in all layers
        "softcap": ("gemma2", {"sliding_window": WINDOW}),  # scores capped, a window in every other layer
        "qk norm": ("gemma3", {"sliding_window": WINDOW}),  # normed queries and keys, two RoPE bases
    }
)


def write_kind(kind: str, folder: Path) -> Path:
    """Write the model of a kind."""
    if kind == OWN_LAYER:
        return write_model(folder / "own-layer", tensors_of())
    path = folder / f"{kind.replace(' ', '-')}.gguf"
    made = KINDS[kind]
    if made is None:
        return write_tiny_model(path)
    case, more = made
    config, tensors, _ = tiny.golden(case)
    shapes = {name: [V if n == tiny.V else n for n in values.shape] for name, values in tensors.items()}
    config = {**config, **more, "vocab_size": V, "max_position_embeddings": 256}
    values = {name: np.ascontiguousarray(array) for name, array in tiny.weights(case, shapes).items()}
    return tiny.write_gguf(config, values, path, add_tokenizer)
