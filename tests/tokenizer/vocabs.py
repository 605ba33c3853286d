"""Vocabularies for the tests: GGUF metadata of GPT-2, Qwen2 and Llama, and of the real models if
present.
"""

from __future__ import annotations

import io
import lzma
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from martlet.tokenizer.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "tokenizer"
MODELS = Path(os.environ.get("MARTLET_TEST_MODELS", "~/.cache/martlet/models")).expanduser()


def data_text(name: str) -> str:
    return lzma.decompress((DATA / f"{name}.xz").read_bytes()).decode("utf-8")


SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF v3 file that is well-formed (so that these tests need no other part of
    Martlet).
    """
    with path.open("rb") as file:
        return parse_metadata(file)


def parse_metadata(file: BinaryIO) -> dict[str, Any]:
    def number(code: str) -> Any:
        return struct.unpack("<" + code, file.read(struct.calcsize(code)))[0]

    def string() -> str:
        return file.read(number("Q")).decode("utf-8")

    def value(value_type: int) -> Any:
        if value_type == STRING:
            return string()
        if value_type != ARRAY:
            return number(SCALARS[value_type])
        value_type, n = number("I"), number("Q")
        if value_type in (STRING, ARRAY):
            return [value(value_type) for _ in range(n)]
        code = f"<{n}{SCALARS[value_type]}"
        return list(struct.unpack(code, file.read(struct.calcsize(code))))

    magic, version, _, n_keys = struct.unpack("<4sIQQ", file.read(24))
    assert (magic, version) == (b"GGUF", 3)
    return {string(): value(number("I")) for _ in range(n_keys)}


@cache
def vocab_metadata(name: str) -> dict[str, Any]:
    """Metadata of tests/data/tokenizer/ggml-vocab-NAME.gguf.xz; do not change it, copy it."""
    return parse_metadata(io.BytesIO(lzma.decompress((DATA / f"ggml-vocab-{name}.gguf.xz").read_bytes())))


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
QWEN_CODER = "qwen2.5-coder-0.5b.gguf"


def encode_pieces(tokenizer: Tokenizer, pieces: list[tuple[str, bool]]) -> list[int]:
    """A chat prompt given as (text, whether the template wrote it): only there are control tokens
    recognised.
    """
    spans: list[tuple[int, int]] = []
    at = 0
    for text, from_template in pieces:
        if text and not from_template:
            spans.append((at, at + len(text)))
        at += len(text)
    joined = "".join(text for text, _ in pieces)
    return tokenizer.encode(joined, add_special=False, parse_special=True, literal_spans=spans)
