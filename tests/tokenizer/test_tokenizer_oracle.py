"""Ids equal to those of the `tokenizers` library, for every family that can be built from the
vocabularies at hand.

The oracle is built here from vocabulary, merges and the family's rules as its tokenizer.json states
them; Martlet is built once from GGUF metadata with the family's name, and once from the oracle's
own JSON.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from corpus import corpus
from vocabs import GEMMA3, SMOLLM2, model_metadata, vocab_metadata

from martlet.tokenizer.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers  # noqa: E402

Metadata = dict[str, Any]
Split = pre_tokenizers.Split


def split(pattern: str) -> Any:
    return Split(Regex(pattern), "isolated")


def bytes_only() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def gpt2_rule() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# As in each model's tokenizer.json.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]
DEEPSEEK_CODER = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+"]
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"

FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt-2": gpt2_rule,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2_rule()]),
    "command-r": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2_rule()]),
    "llama-bpe": lambda: pre_tokenizers.Sequence([split(LLAMA3), bytes_only()]),
    "glm4": lambda: pre_tokenizers.Sequence([split(LLAMA3), bytes_only()]),
    "dbrx": lambda: pre_tokenizers.Sequence([split(LLAMA3), bytes_only()]),
    "qwen2": lambda: pre_tokenizers.Sequence([split(QWEN2), bytes_only()]),
    "qwen35": lambda: pre_tokenizers.Sequence([split(QWEN35), bytes_only()]),
    "gpt-4o": lambda: pre_tokenizers.Sequence([split(O200K), bytes_only()]),
    "tekken": lambda: pre_tokenizers.Sequence([split(TEKKEN), bytes_only()]),
    "deepseek-v3": lambda: pre_tokenizers.Sequence([*map(split, DEEPSEEK3), bytes_only()]),
    "deepseek-coder": lambda: pre_tokenizers.Sequence(
        [*map(split, DEEPSEEK_CODER), pre_tokenizers.Digits(individual_digits=True), bytes_only()]
    ),
    "bloom": lambda: pre_tokenizers.Sequence([split(BLOOM), bytes_only()]),
}
WHOLE_WORDS = {"llama-bpe", "glm4", "tekken"}


def byte_level_oracle(metadata: Metadata, rule: Any, *, whole_words: bool = False) -> Any:
    ids = {text: token for token, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]
    oracle = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=whole_words))
    oracle.pre_tokenizer = rule
    oracle.decoder = decoders.ByteLevel()
    return oracle


def compare(ours: Tokenizer, oracle: Any, texts: tuple[str, ...]) -> None:
    for text, expected in zip(texts, oracle.encode_batch(list(texts), add_special_tokens=False), strict=True):
        assert ours.encode(text, add_special=False, parse_special=True) == expected.ids, repr(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    metadata = vocab_metadata("gpt-2")
    oracle = byte_level_oracle(metadata, FAMILIES[family](), whole_words=family in WHOLE_WORDS)
    compare(Tokenizer.from_gguf(metadata, pre=family), oracle, corpus())
    compare(Tokenizer.from_hf(json.loads(oracle.to_str())), oracle, corpus())


def recent_mark(char: str) -> bool:
    """Whether a combining mark is younger than the oracle's normalisation tables may be."""
    return unicodedata.combining(char) > 0 and unicodedata.ucd_3_2_0.category(char) == "Cn"


def test_qwen2_vocabulary() -> None:
    metadata = vocab_metadata("qwen2")
    oracle = byte_level_oracle(metadata, FAMILIES["qwen2"]())
    oracle.normalizer = normalizers.NFC()
    old = tuple(text for text in corpus(seed=11) if not any(map(recent_mark, text)))
    compare(Tokenizer.from_hf(json.loads(oracle.to_str())), oracle, old)
    oracle.normalizer = None  # GGUF has no key for it
    compare(Tokenizer.from_gguf(metadata), oracle, corpus(seed=11))


@pytest.mark.model
def test_smollm2_vocabulary() -> None:
    metadata = model_metadata(SMOLLM2)
    oracle = byte_level_oracle(metadata, FAMILIES["smollm"]())
    compare(Tokenizer.from_gguf(metadata), oracle, corpus(seed=12))


def scored_oracle(metadata: Metadata) -> Any:
    """The BPE form of a SentencePiece vocabulary: a token of rank r (by score) is made by each pair
    of tokens that join to it, in the order of r.
    """
    texts, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata["tokenizer.ggml.token_type"]
    normal = {text: token for token, text in enumerate(texts) if types[token] == 1}
    pairs: list[tuple[float, str, str]] = []
    for text, token in normal.items():
        for cut in range(1, len(text)):
            if text[:cut] in normal and text[cut:] in normal:
                pairs.append((-scores[token], text[:cut], text[cut:]))
    pairs.sort(key=lambda pair: pair[0])
    ids = {text: token for token, text in enumerate(texts)}
    merges = [(left, right) for _, left, right in pairs]
    unk = texts[metadata["tokenizer.ggml.unknown_token_id"]]
    return tokenizers.Tokenizer(models.BPE(ids, merges, unk_token=unk, byte_fallback=True, fuse_unk=True))


@cache
def llama2_oracle() -> Any:
    """Llama 2's tokenizer.json: Prepend and Replace, no pre-tokenizer."""
    oracle = scored_oracle(vocab_metadata("llama-spm"))
    oracle.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    oracle.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    oracle.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return oracle


SPECIAL_TEXTS = ("<s>G", "a<s>b</s> c", "<s> x", " <s>", "<s><s>", "x</s>\n<s>y", "<unk>?")


def test_llama2() -> None:
    texts = (*corpus(seed=13), *SPECIAL_TEXTS)
    compare(Tokenizer.from_gguf(vocab_metadata("llama-spm")), llama2_oracle(), texts)
    compare(Tokenizer.from_hf(json.loads(llama2_oracle().to_str())), llama2_oracle(), texts)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_llama2_with_metaspace(scheme: str) -> None:
    oracle = tokenizers.Tokenizer.from_str(llama2_oracle().to_str())
    oracle.normalizer = normalizers.Sequence([])
    oracle.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    compare(Tokenizer.from_hf(json.loads(oracle.to_str())), oracle, (*corpus(seed=14), *SPECIAL_TEXTS))


@pytest.mark.large
def test_gemma3() -> None:
    """Gemma's tokenizer.json: spaces replaced, whitespace runs and HTML tags as added tokens."""
    metadata = model_metadata(GEMMA3)
    oracle = scored_oracle(metadata)
    oracle.normalizer = normalizers.Replace(" ", "▁")
    oracle.pre_tokenizer = Split(" ", "merged_with_previous")
    types, texts = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.tokens"]
    plain = [
        tokenizers.AddedToken(text, normalized=False)
        for text, token_type in zip(texts, types, strict=True)
        if token_type == 4
    ]
    control = [
        tokenizers.AddedToken(text, normalized=False)
        for text, token_type in zip(texts, types, strict=True)
        if token_type == 3
    ]
    oracle.add_tokens(plain)
    oracle.add_special_tokens(control)
    compare(Tokenizer.from_gguf(metadata), oracle, corpus(seed=15))
    compare(Tokenizer.from_hf(json.loads(oracle.to_str())), oracle, corpus(seed=15))


@pytest.mark.parametrize("family", ["gpt-2", "deepseek-v3"])
def test_decoding_is_the_oracles(family: str) -> None:
    oracle = byte_level_oracle(vocab_metadata("gpt-2"), FAMILIES[family]())
    ours = Tokenizer.from_hf(json.loads(oracle.to_str()))
    for text in corpus():
        ids = oracle.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=False) == text


def test_decoding_scored_is_the_oracles() -> None:
    ours = Tokenizer.from_hf(json.loads(llama2_oracle().to_str()))
    for text in corpus(seed=13):
        ids = llama2_oracle().encode(text, add_special_tokens=False).ids
        expected = text.replace("▁", " ")  # the vocabulary has one sign for both
        assert ours.decode(ids) == llama2_oracle().decode(ids, skip_special_tokens=False) == expected
