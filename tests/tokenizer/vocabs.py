"""Vocabularies for the tests: GGUF metadata of GPT-2, Qwen2 and Llama, and of the real models if present."""

from __future__ import annotations

import lzma
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from martlet.tokenizer.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "tokenizer"
MODELS = Path(os.environ.get("MARTLET_TEST_MODELS", "~/.cache/martlet/models")).expanduser()


def data_text(name: str) -> str:
    return lzma.decompress((DATA / f"{name}.xz").read_bytes()).decode("utf-8")


def read_metadata(path: Path) -> dict[str, Any]:
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith(("tokenizer.", "general."))}


@cache
def vocab_metadata(name: str) -> dict[str, Any]:
    """Metadata of tests/data/tokenizer/ggml-vocab-NAME.gguf.xz; do not change it, copy it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.gguf"
        path.write_bytes(lzma.decompress((DATA / f"ggml-vocab-{name}.gguf.xz").read_bytes()))
        return read_metadata(path)


@cache
def vocab(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(vocab_metadata(name))


@cache
def model_metadata(name: str) -> dict[str, Any]:
    """Metadata of a real model; skips the test where the file is absent."""
    path = MODELS / name
    if not path.exists():
        pytest.skip(f"{path} is absent (set MARTLET_TEST_MODELS)")
    return read_metadata(path)


@cache
def model(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(model_metadata(name))


SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma-3-270m-q4_k_m.gguf"
