"""Masks: what the matcher says of a whole vocabulary is what stepping through each token says.

And the rest of a Constraint.
"""

from __future__ import annotations

import gc
import json
import random
from typing import Any

import numpy as np
import pytest

from martlet.errors import RequestError
from martlet.grammar.json_schema import SchemaOptions, compile_schema
from martlet.grammar.matcher import Matcher
from martlet.grammar.vocabulary import Vocabulary
from martlet.ops.cpu.simd.isa import chosen_isa
from martlet.ops.cpu.store import KernelStore
from tests.grammar.schema_texts import DATA, EOS, text_of, vocabulary

ROWS = [json.loads(line) for line in (DATA / "maskbench.jsonl").read_text(encoding="utf-8").splitlines()]
VALID = [(row["schema"], text_of(data).encode()) for row in ROWS for valid, data in row["tests"] if valid]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelStore:
    return KernelStore(chosen_isa(), tmp_path_factory.mktemp("kernels"))


def pieces(n: int, seed: int) -> list[bytes]:
    """Random pieces of valid texts, as tokens: they straddle what the grammar tells apart."""
    chance, texts = random.Random(seed), {b'"}': None, b'","': None, b"},{": None, b"\xc3": None}
    while len(texts) < n:
        text = chance.choice(VALID)[1]
        start = chance.randrange(len(text))
        texts[text[start : start + chance.randint(2, 9)]] = None
    return [*texts, b'"}']  # one twice


def allowed(matcher: Matcher) -> set[int]:
    out = np.zeros(matcher.grammar.vocabulary.n_words, np.uint32)
    matcher.mask(out)
    return set(np.nonzero(np.unpackbits(out.view(np.uint8), bitorder="little"))[0].tolist())


def walk(tokens: Vocabulary, schema: Any, text: bytes, chance: random.Random, options: SchemaOptions) -> int:
    """Write a text in random tokens and compare every mask on the way; returns how many."""
    matcher, at, n = compile_schema(schema, tokens, options).matcher(), 0, 0
    while True:
        expected = {token for token in range(tokens.n_vocab) if matcher.allows(token)}
        assert allowed(matcher) == expected, text[:at]
        assert expected, "a dead end"
        n += 1
        fitting = [t for t in expected if t != EOS and text.startswith(tokens.tokens[t] or b"-", at)]
        if at == len(text) or not fitting:
            assert at < len(text) or matcher.may_end()
            return n
        token = chance.choice(fitting)
        assert matcher.advance(token)
        at += len(tokens.tokens[token] or b"")


@pytest.mark.parametrize("spacing", ["compact", "any"])
def test_masks_are_what_stepping_says(kernels: KernelStore, spacing: str) -> None:
    tokens, chance = vocabulary(pieces(700, 1), kernels), random.Random(2)
    options = SchemaOptions(spacing=spacing, ordered=False)
    sample = chance.sample([pair for pair in VALID if len(pair[1]) < 200 and "uniqueItems" not in str(pair[0])], 12)
    assert sum(walk(tokens, schema, text, chance, options) for schema, text in sample) > 200


def test_the_compiled_walk_is_the_one_in_python(kernels: KernelStore) -> None:
    texts = pieces(300, 3)
    chance = random.Random(4)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 2, "maxLength": 5, "pattern": "^é|x"}},
    }
    for each in ({"type": "string", "minLength": 1, "maxLength": 6}, {"type": "number", "minimum": -3}, schema):
        walk(vocabulary(texts), each, b'"abc"', chance, SchemaOptions())
        fast, slow = (compile_schema(each, vocabulary(texts, store)).matcher() for store in (kernels, None))
        assert allowed(fast) == allowed(slow)


@pytest.mark.parametrize(
    ("low", "high", "right", "wrong"),
    [
        (2, 3, ["ab", "abc", "é😀", "\\\\\\\\", '\\"x'], ["", "a", "abcd", "é"]),
        (0, 0, [""], ["a"]),
        (1, None, ["a"], [""]),
    ],
)
def test_lengths_count_characters(low: int, high: int | None, right: list[str], wrong: list[str]) -> None:
    schema = {"type": "string", "minLength": low} | ({} if high is None else {"maxLength": high})
    grammar = compile_schema(schema, vocabulary())
    assert all(grammar.accepts(f'"{text}"'.encode()) for text in right)
    assert not any(grammar.accepts(f'"{text}"'.encode()) for text in wrong)


def test_a_token_must_leave_room_for_the_shortest_and_the_longest_text(kernels: KernelStore) -> None:
    tokens = vocabulary(['ab"', 'abc"', '"ab', '"abcd', '"abcde', '"a"'], kernels)
    matcher = compile_schema({"type": "string", "minLength": 2, "maxLength": 4}, tokens).matcher()
    assert allowed(matcher) == {1 + ord('"'), 259, 260}
    assert matcher.advance(1 + ord('"'))
    assert {257, 258} <= allowed(matcher)
    assert 1 + ord('"') not in allowed(matcher)


def test_rollback_is_exact(kernels: KernelStore) -> None:
    tokens = vocabulary(pieces(300, 5), kernels)
    schema, text = next(pair for pair in VALID if 60 < len(pair[1]) < 120)
    matcher = compile_schema(schema, tokens, SchemaOptions(ordered=False)).matcher()
    masks = [allowed(matcher)]
    for byte in text:
        assert matcher.advance(1 + byte)
        masks.append(allowed(matcher))
    assert matcher.advance(EOS)
    assert allowed(matcher) == {EOS}
    matcher.rollback(11)
    assert allowed(matcher) == masks[-11]
    with pytest.raises(ValueError, match="to take back"):
        matcher.rollback(len(text) + 1)


def test_forced_text() -> None:
    """Ask 16's other half: what there is no choice about is known ahead."""
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["alpha", "alps"]}, "kind": {"const": [1, {"x": None}]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
    matcher = compile_schema(schema, vocabulary()).matcher()
    assert matcher.forced() == b'{"name":"alp'
    for byte in b'{"name":"alps':
        matcher.advance(1 + byte)
    assert matcher.forced() == b'","kind":[1,{"x":null}]}'


def test_a_vocabulary_is_its_sorted_texts() -> None:
    texts = [b"b", b"ab", None, b"a", b"abc", b"b", b"\xff\x00", b""]
    tokens = Vocabulary(texts, [])
    at = {}
    for token, text in enumerate(texts):
        if text:
            node = tokens.find(0, text)
            assert node is not None
            assert token in tokens.tokens_at(node)
            at[text] = tokens.tokens_at(node)
    assert at[b"b"] == [0, 5]
    assert sum(map(len, at.values())) == 6
    assert tokens.find(0, b"ac") is None


def test_a_grammar_leaves_nothing_to_the_garbage_collector(kernels: KernelStore) -> None:
    """Which would stop everybody's answers while it looks at all that there is."""
    tokens = vocabulary(pieces(300, 3), kernels)
    schema = {
        "properties": {"a": {"type": ["string", "number"]}, "b": {"type": "array", "items": {"$ref": "#"}}},
        "anyOf": [{"required": ["a"]}, {"patternProperties": {"^x": {"type": "null"}}, "unevaluatedProperties": False}],
        "type": "object",
    }

    def use() -> None:
        matcher = compile_schema(schema, tokens).matcher()
        for byte in b'{"a":1,"b":[{"a":"\\n"}]}':
            allowed(matcher)
            assert matcher.advance(1 + byte)
        with pytest.raises(RequestError):
            compile_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}, tokens)

    use()  # what is kept for the next one is made
    gc.collect()
    gc.disable()
    try:
        use()
        assert gc.collect() < 20
    finally:
        gc.enable()
