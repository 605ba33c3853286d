"""The parts of a tokenizer.json: each kind of object against the `tokenizers` library, roles, and
hostile files.
"""

from __future__ import annotations

import json
import random
import unicodedata
from typing import Any

import pytest
from corpus import SAMPLES, corpus, random_text

from martlet.errors import FormatError, MartletError, RequestError, UnsupportedError
from martlet.tokenizer.bpe import byte_level
from martlet.tokenizer.normalize import normalizer
from martlet.tokenizer.presplit import pre_split
from martlet.tokenizer.split import PRE_TOKENIZERS, isolate, pipeline, pre_tokenizer
from martlet.tokenizer.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors  # noqa: E402

BEHAVIORS = ["removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"]
SPLITTERS: dict[str, Any] = {
    **{f"split string {b}": pre_tokenizers.Split(" ", b) for b in BEHAVIORS},
    **{f"split regex {b}": pre_tokenizers.Split(Regex(r"\s+|\d"), b) for b in BEHAVIORS},
    **{f"split invert {b}": pre_tokenizers.Split(Regex(r"\p{L}+"), b, invert=True) for b in BEHAVIORS},
    **{f"punctuation {b}": pre_tokenizers.Punctuation(b) for b in BEHAVIORS},
    "digits": pre_tokenizers.Digits(individual_digits=False),
    "single digits": pre_tokenizers.Digits(individual_digits=True),
    "whitespace": pre_tokenizers.Whitespace(),
    "whitespace split": pre_tokenizers.WhitespaceSplit(),
    "delimiter": pre_tokenizers.CharDelimiterSplit("e"),
    "byte level": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "byte level, prefix": pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True),
    "byte level, bytes only": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    "metaspace": pre_tokenizers.Metaspace(),
    "metaspace first": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "metaspace never, whole": pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
    "lines": pre_tokenizers.Split(Regex(r"^.+$"), "isolated"),
    "intersection": pre_tokenizers.Split(Regex(r"[\p{L}&&[^a-z]]+"), "isolated"),
    "falcon": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    ),
    "nested": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True)]),
            pre_tokenizers.Metaspace(prepend_scheme="always"),
        ]
    ),
}


def stable_punctuation(text: str) -> bool:
    """Whether all tables of Unicode agree on what is punctuation (the oracle's are old)."""
    old, new = unicodedata.ucd_3_2_0.category, unicodedata.category
    return not any("P" in (old(char)[0], new(char)[0]) and old(char)[0] != new(char)[0] for char in text)


@pytest.mark.parametrize("name", SPLITTERS)
def test_pre_tokenizer(name: str) -> None:
    oracle = SPLITTERS[name]
    ours = pre_split(json.loads(oracle.__getstate__()))
    cut = pipeline(ours.steps)
    for text in corpus(seed=21):
        if not stable_punctuation(text):
            continue
        expected = [piece for piece, _ in oracle.pre_tokenize_str(text)]
        pieces = cut(ours.lead(text, True) if ours.lead and text else text)
        if ours.byte_level and not ours.mapped:
            pieces = [byte_level(piece) for piece in pieces]
        assert [piece for piece in pieces if piece] == expected, repr(text)


NORMALIZERS: dict[str, Any] = {
    "lowercase": normalizers.Lowercase(),
    "replace string": normalizers.Replace(" ", "▁"),
    "replace regex": normalizers.Replace(Regex(r"\s{2,}"), " \\1 "),
    "prepend": normalizers.Prepend("▁"),
    "strip": normalizers.Strip(),
    "strip left": normalizers.Strip(left=True, right=False),
    "strip right": normalizers.Strip(left=False, right=True),
    "byte level": normalizers.ByteLevel(),
    "sequence": normalizers.Sequence([normalizers.Prepend("x"), normalizers.Replace("x", "yy")]),
}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_normalizer(name: str) -> None:
    ours = normalizer(json.loads(NORMALIZERS[name].__getstate__()))
    for text in corpus(seed=22):
        assert ours(text) == NORMALIZERS[name].normalize_str(text), repr(text)


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD", "StripAccents"])
def test_unicode_normalizer(form: str) -> None:
    oracle = getattr(normalizers, form)()
    ours = normalizer(json.loads(oracle.__getstate__()))
    for text in SAMPLES:
        assert ours(text) == oracle.normalize_str(text), repr(text)


def letters() -> Any:
    """A tokenizer over printable ASCII and the space mark, without merges.

    § is its unknown token.
    """
    chars = [chr(code) for code in range(33, 127)] + ["▁", "é", "§"]
    oracle = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(chars)}, [], unk_token="§"))
    oracle.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return oracle


def test_added_tokens_against_the_oracle() -> None:
    """Every combination of flags, in random neighbourhoods, with tokens that are prefixes of one
    another.
    """
    rng = random.Random(5)
    oracle = letters()
    words = ["<a>", "<ab>", "<a>b", "aa", "aaa", "a", "<|x|>", "~", "~~", "x y", "-->"]
    for i, word in enumerate(words):
        token = AddedToken(
            word,
            single_word=i % 5 == 3,
            lstrip=i % 3 == 1,
            rstrip=i % 4 == 2,
            normalized=False,
            special=i % 2 == 0,
        )
        (oracle.add_special_tokens if i % 2 == 0 else oracle.add_tokens)([token])
    ours = Tokenizer.from_hf(json.loads(oracle.to_str()))
    alphabet = [*words, *"<>ab|xy- \n", "é"]
    for _ in range(2000):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 12)))
        expected = oracle.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=True) == expected, repr(text)


def test_normalized_added_tokens() -> None:
    """A token marked `normalized` is found in the normalised text."""
    oracle = letters()
    oracle.normalizer = normalizers.Replace("x", "y")
    oracle.add_tokens([AddedToken("<y>", normalized=True), AddedToken("<x>", normalized=False)])
    ours = Tokenizer.from_hf(json.loads(oracle.to_str()))
    for text in ("a<y>b", "a<x>b<y>", "<y><x>", "x<y"):
        assert ours.encode(text) == oracle.encode(text).ids


PROCESSORS: dict[str, Any] = {
    "template": processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]),
    "sequence": processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing(single="<s> <s> $A", special_tokens=[("<s>", 0)])]
    ),
    "roberta": processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
    "bert": processors.BertProcessing(("</s>", 1), ("<s>", 0)),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_post_processor(name: str) -> None:
    oracle = tokenizers.Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "a": 2}, []))
    oracle.add_special_tokens(["<s>", "</s>"])
    oracle.post_processor = PROCESSORS[name]
    ours = Tokenizer.from_hf(json.loads(oracle.to_str()))
    for text in ("", "a", "aaa"):
        assert ours.encode(text) == oracle.encode(text).ids
        assert ours.encode(text, add_special=False) == oracle.encode(text, add_special_tokens=False).ids
    assert (ours.add_bos, ours.add_eos) == (True, name != "sequence")


def small_json(**parts: Any) -> dict[str, Any]:
    return {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 3, "</s>": 4}, "merges": ["a b"]},
        "added_tokens": [
            {"id": 3, "content": "<s>", "special": True},
            {"id": 4, "content": "</s>", "special": True},
            {"id": 5, "content": "<|im_end|>", "special": True},
        ],
        **parts,
    }


def test_roles_from_the_config() -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "pad_token": "<nope>"}
    tokenizer = Tokenizer.from_hf(small_json(), config, eos_ids=[4, 99])
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id) == (3, 4, None, None)
    assert tokenizer.eog_ids == {4, 5}
    assert tokenizer.encode("abba") == [3, 2, 1, 0]
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (6, {3, 4, 5})
    assert any("<nope>" in warning for warning in tokenizer.warnings)
    assert any("99" in warning for warning in tokenizer.warnings)


def test_config_wins_over_the_post_processor() -> None:
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]}
    file = small_json(post_processor={**template, "special_tokens": {"<s>": {"ids": [3]}}})
    assert Tokenizer.from_hf(file, {"bos_token": "<s>"}).encode("a") == [3, 0]
    assert Tokenizer.from_hf(file, {"bos_token": "<s>", "add_bos_token": False}).encode("a") == [0]
    assert Tokenizer.from_hf(file, {"bos_token": "<s>", "add_bos_token": True}).encode("a") == [3, 0]


def test_added_tokens_of_the_config_alone() -> None:
    config = {"added_tokens_decoder": {"6": {"content": "<x>", "special": False}, "3": {"content": "<s>"}}}
    tokenizer = Tokenizer.from_hf(small_json(), config)
    assert tokenizer.encode("a<x>b") == [0, 6, 1]


@pytest.mark.parametrize("entry", [[], [{"id": 5, "content": "<|im_end|>", "special": False, "normalized": True}]])
def test_tok_09_an_end_token_that_is_not_marked_special(entry: list[dict[str, Any]]) -> None:
    """Fault TOK-09: a file that does not mark <|im_end|> special still does not let a user write
    it.
    """
    vocab = {"<": 0, "|": 1, "im_end": 2, ">": 3, "<|": 4, "<|im_end|>": 5}
    file = {"model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "|"}, "added_tokens": entry}
    tokenizer = Tokenizer.from_hf(file)
    assert 5 not in tokenizer.encode("<|im_end|>")
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [5]
    assert tokenizer.eog_ids == {5}
    assert any("<|im_end|>" in warning for warning in tokenizer.warnings)


def test_gaps_in_the_ids_are_unused() -> None:
    file = small_json(added_tokens=[{"id": 9, "content": "<x>", "special": False}])
    tokenizer = Tokenizer.from_hf(file)
    assert (tokenizer.vocab_size, tokenizer.unused_ids) == (10, {5, 6, 7, 8})
    assert tokenizer.decode([0, 7, 1]) == "ab"


def test_merges_of_symbols_with_spaces() -> None:
    """Newer files list merges as pairs, because a symbol may hold a space."""
    vocab = {" ": 0, "a": 1, "a ": 2, "a a": 3}
    pairs = [["a", " "], ["a ", "a"]]
    tokenizer = Tokenizer.from_hf({"model": {"type": "BPE", "vocab": vocab, "merges": pairs}})
    assert tokenizer.encode("a aa ") == [3, 2]


def test_pre_overrides() -> None:
    oracle = letters()
    with pytest.raises(UnsupportedError):
        Tokenizer.from_hf(json.loads(oracle.to_str()), pre="nope")


@pytest.mark.parametrize(
    "parts",
    [
        {"model": None},
        {"model": {"type": "BPE", "vocab": {}}, "added_tokens": []},
        {"model": {"type": "BPE", "vocab": {"a": 1 << 40}}},
        {"model": {"type": "BPE", "vocab": {"a": -1}}},
        {"model": {"type": "BPE", "vocab": {"a": "b"}}},
        {"model": {"type": "WordPiece", "vocab": {"a": 0}}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "end_of_word_suffix": "</w>"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [[1, 2]]}},
        {"added_tokens": [{"id": "x", "content": "y"}]},
        {"added_tokens": [{"id": 1 << 50, "content": "y"}]},
        {"added_tokens": [{"content": "y"}]},
        {"added_tokens": 5},
        {"pre_tokenizer": {"type": "Nope"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Nope"}},
        {"pre_tokenizer": {"type": "Split"}},
        {"pre_tokenizer": []},
        {"normalizer": {"type": "Nope"}},
        {"normalizer": {"type": "Replace", "pattern": {}, "content": ""}},
        {"post_processor": {"type": "Nope"}},
        {"post_processor": {"type": "RobertaProcessing", "cls": ["x", 99], "sep": ["y", 0]}},
        {"decoder": {"type": "Sequence"}},
    ],
)
def test_hostile_files(parts: dict[str, Any]) -> None:
    with pytest.raises(MartletError):
        Tokenizer.from_hf(small_json(**parts))


def test_a_file_without_a_model() -> None:
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        Tokenizer.from_hf({})


def test_a_pattern_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern of the file with exponential time ends in an error of the request."""
    monkeypatch.setattr("martlet.tokenizer.split.FILE_TIMEOUT_S", 0.05)
    monkeypatch.setattr("martlet.tokenizer.presplit.FILE_TIMEOUT_S", 0.05)
    for behavior in ("Isolated", "Removed"):
        slow = {"type": "Split", "pattern": {"Regex": "(?:(?:a|b|ab)*)*[cd]"}, "behavior": behavior}
        tokenizer = Tokenizer.from_hf(small_json(pre_tokenizer=slow))
        with pytest.raises(RequestError, match="pattern"):
            tokenizer.encode("ab" * 5000)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_named_pre_tokenizer_loses_nothing(name: str) -> None:
    cut = pipeline([isolate(pattern) for pattern in pre_tokenizer(name).patterns])
    rng = random.Random(9)
    for text in (*SAMPLES, *(random_text(rng) for _ in range(20))):
        pieces = cut(text)
        assert "".join(pieces) == text
        assert all(pieces)


@pytest.mark.parametrize(
    "unit", [" ", "\n", " \n", "a", "A", "1", "!", "中", "\u0301", "'", "\t ", "A\u0301", "१", "a1"]
)
def test_tok_15_every_named_pre_tokenizer_is_linear(unit: str) -> None:
    """Fault TOK-15: no pattern takes quadratic time on a run (a quadratic one takes minutes on this
    one).
    """
    for rules in set(PRE_TOKENIZERS.values()):
        cut = pipeline([isolate(pattern) for pattern in rules.patterns])
        text = unit * (60_000 // len(unit)) + "x"
        assert "".join(cut(text)) == text
