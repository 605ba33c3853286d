"""Ids against the published vectors: each model's own tokenizer made them."""

from __future__ import annotations

import pytest
from vocabs import data_text, vocab

NAMES = ("gpt-2", "qwen2", "llama-spm")


def cases(name: str) -> list[tuple[str, list[int]]]:
    texts = data_text(f"ggml-vocab-{name}.inp").split("\n__ggml_vocab_test__\n")
    ids = [[int(token) for token in line.split()] for line in data_text(f"ggml-vocab-{name}.out").split("\n")]
    assert len(texts) == len(ids) == 47
    return list(zip(texts, ids, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_ids(name: str) -> None:
    for text, ids in cases(name):
        assert vocab(name).encode(text, add_special=False) == ids, repr(text)


@pytest.mark.parametrize("name", NAMES)
def test_decoding_gives_the_text_back(name: str) -> None:
    for text, ids in cases(name):
        assert vocab(name).decode(ids) == text
