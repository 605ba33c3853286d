"""Properties that hold for any text (hypothesis)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabs import encode_pieces, vocab

from martlet.tokenizer.bpe import BYTE_CHARS, SHORT_SYMBOLS, byte_level, merge, token_text_bytes
from martlet.tokenizer.special import AddedTokenFinder
from martlet.tokenizer.vocab import AddedToken

NAMES = ("gpt-2", "qwen2", "llama-spm")
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=80)
CONTROL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|endoftext|>", "<unk>")
FORGED = st.lists(st.one_of(TEXTS, st.sampled_from(CONTROL)), max_size=6).map("".join)


@pytest.mark.parametrize("name", NAMES)
@given(text=FORGED)
@settings(max_examples=150, deadline=None)
def test_round_trip_and_no_control_tokens(name: str, text: str) -> None:
    tokenizer = vocab(name)
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids) == text
    assert not tokenizer.special_ids.intersection(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() in (text, " " + text)


@pytest.mark.parametrize("name", NAMES)
@given(text=FORGED)
@settings(max_examples=100, deadline=None)
def test_round_trip_with_control_tokens(name: str, text: str) -> None:
    tokenizer = vocab(name)
    assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=True)) == text


@given(pieces=st.lists(st.tuples(FORGED, st.booleans()), max_size=6))
@settings(max_examples=150, deadline=None)
def test_parts(pieces: list[tuple[str, bool]]) -> None:
    """Control tokens are those of the template's own pieces.

    Everything decodes to the joined text.
    """
    tokenizer = vocab("qwen2")
    ids = encode_pieces(tokenizer, pieces)
    assert tokenizer.decode(ids) == "".join(text for text, _ in pieces)
    runs: list[str] = []  # what the template wrote without interruption
    fresh = True
    for text, from_template in pieces:
        if from_template and text:
            runs = [*runs, text] if fresh else [*runs[:-1], runs[-1] + text]
        if text:
            fresh = not from_template
    allowed = sum(run.count(mark) for run in runs for mark in CONTROL[:2])
    assert sum(token in tokenizer.special_ids and token != 151643 for token in ids) == allowed


@given(data=st.binary(max_size=64))
def test_alphabet_of_bytes(data: bytes) -> None:
    assert token_text_bytes("".join(BYTE_CHARS[byte] for byte in data)) == data


@given(text=TEXTS)
def test_byte_level(text: str) -> None:
    assert token_text_bytes(byte_level(text)) == text.encode()


def slow_merge(symbols: list[str], ranks: dict[str, int]) -> list[str]:
    """The definition: join the leftmost pair of lowest rank, again and again."""
    while True:
        pairs = [(ranks[a + " " + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + " " + b in ranks]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]


PAIRS = st.tuples(st.text("ab", min_size=1, max_size=4), st.text("ab", min_size=1, max_size=4))


@given(
    pairs=st.lists(PAIRS, max_size=20, unique=True),
    text=st.one_of(st.text("abc", max_size=40), st.text("ab", min_size=SHORT_SYMBOLS + 1, max_size=SHORT_SYMBOLS + 60)),
)
@settings(max_examples=300, deadline=None)
def test_merge_is_its_definition(pairs: list[tuple[str, str]], text: str) -> None:
    """Short and long words alike, for any list of merges, also one that no training would give."""
    ranks = {left + " " + right: rank for rank, (left, right) in enumerate(pairs)}
    assert merge(list(text), ranks, " ") == slow_merge(list(text), ranks)


def slow_split(text: str, tokens: dict[str, int]) -> list[str | int]:
    """The definition: at each place the longest token that stands there."""
    pieces: list[str | int] = []
    at = 0
    while at < len(text):
        here = max((word for word in tokens if text.startswith(word, at)), key=len, default="")
        if here:
            pieces.append(tokens[here])
        elif pieces and isinstance(pieces[-1], str):
            pieces[-1] += text[at]
        else:
            pieces.append(text[at])
        at += len(here) or 1
    return pieces


@given(
    words=st.lists(st.text("ab<", min_size=1, max_size=5), min_size=1, max_size=12, unique=True),
    text=st.text("ab<c", max_size=40),
    strip=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_finder_is_its_definition(words: list[str], text: str, strip: bool) -> None:
    """Both ways of finding (one pattern for plain tokens, lookups otherwise): leftmost, then
    longest.
    """
    tokens = [AddedToken(i, word, special=True, rstrip=strip) for i, word in enumerate(words)]
    assert AddedTokenFinder(tokens).split(text, parse_special=True) == slow_split(
        text, {word: i for i, word in enumerate(words)}
    )
