"""Arrays and objects that no schema bounds, under logits that never end them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from martlet.config import resolve_config
from martlet.errors import RequestError
from martlet.grammar.grammars import Grammars
from martlet.grammar.matcher import Matcher
from martlet.sample.sampler import Sampler
from martlet.sampling_params import SamplingParams
from martlet.structured import ITEM_LIMIT, Structured

# Tokens that go over the end of an item without a stop.
WORDS = [
    '","',
    "1,",
    ",1",
    '},{"a":"',
    '"},{"a":"',
    "],[",
    ',"',
    '":',
    "]]",
    '"]',
    '"}',
    "[[",
    "x,y",
    "<call>",
    "</call>",
]
TEXTS = [bytes((b,)) for b in range(256)] + [word.encode() for word in WORDS]
EOS = len(TEXTS)


def toy() -> Any:
    return SimpleNamespace(
        vocab_size=EOS + 1,
        eog_ids=frozenset((EOS,)),
        unused_ids=frozenset(),
        special_ids=frozenset((EOS,)),
        strips_space=False,
        encode=lambda text, add_special: list(text.encode()),
        token_bytes=lambda token, special=True: b"" if token == EOS else TEXTS[token],
        token_text=lambda token: "<end>" if token == EOS else TEXTS[token].decode("latin-1"),
    )


def answer(structured: Any, liked: dict[str, float], seed: int | None = None, most: int = 600) -> tuple[str, bool]:
    """The text under logits that like some tokens, or draw at random.

    And whether it says that something was cut.
    """
    shared = Sampler(toy(), constraints=Grammars(toy()).matcher)
    heat = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
    seq = shared.start(SamplingParams(max_tokens=most, structured=structured, **heat), (0,))  # type: ignore[arg-type]
    row = np.zeros(EOS + 1, np.float32)
    for text, value in liked.items():
        row[EOS if text == "<end>" else TEXTS.index(text.encode())] = value
    data = b""
    for _ in range(most):
        token, _ = seq.sample(row)
        assert seq.constraint is not None
        if token == EOS:
            return data.decode(), seq.constraint.is_limited()
        data += TEXTS[token]
    raise AssertionError(f"no end: {data[:80]!r}")


STRINGS = {"type": "array", "items": {"type": "string", "maxLength": 3}}
NUMBERS = {"type": "array", "items": {"enum": [1, 11, 111]}}
OBJECTS = {
    "type": "array",
    "items": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 2}}, "required": ["a"],
              "additionalProperties": False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "liked"),
    [
        (STRINGS, {'","': 9.0, '"': 5.0}),
        (NUMBERS, {"1,": 9.0, "1": 5.0}),
        (NUMBERS, {",1": 9.0, "1": 5.0}),
        (OBJECTS, {'"},{"a":"': 9.0, '},{"a":"': 8.0, "{": 3.0, '"': 2.0}),
        ({"type": "array", "items": {"type": "array", "items": {"const": 1}, "maxItems": 1}}, {"],[": 9.0, "[": 5.0}),
    ],
)
def test_an_array_without_bound_ends(schema: dict[str, Any], liked: dict[str, float]) -> None:
    """Tokens that carry on over the end of every item are left out behind the limit."""
    text, limited = answer({"json": schema, "item_limit": 12}, liked)
    assert 12 <= len(json.loads(text)) <= 13
    assert limited


def test_an_object_without_bound_ends() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "null"}, "propertyNames": {"maxLength": 1}}
    text, limited = answer({"json": schema, "item_limit": 5}, {',"': 9.0, '"': 5.0})
    assert (text.count(":"), limited) == (5, True)


def test_what_the_schema_bounds_has_its_own_bounds() -> None:
    for more, length in (({"maxItems": 20}, 20), ({"minItems": 30, "maxItems": 30}, 30)):
        text, limited = answer({"json": {**NUMBERS, **more}, "item_limit": 4}, {"1,": 9.0, "1": 5.0})
        assert (len(json.loads(text)), limited) == (length, False)
    text, limited = answer({"json": {**NUMBERS, "minItems": 30}, "item_limit": 4}, {"1,": 9.0, "1": 5.0})
    assert (len(json.loads(text)), limited) == (30, True)  # as soon as it may


def test_each_array_is_counted_alone() -> None:
    """Ten short arrays in an array are no long one."""
    inner = {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}
    schema = {"type": "array", "items": inner, "minItems": 9, "maxItems": 9}
    text, limited = answer({"json": schema, "item_limit": 8}, {})
    assert (json.loads(text), limited) == ([[1, 1, 1]] * 9, False)


def test_in_tags_and_after_a_reasoning() -> None:
    """What is not JSON is not counted: brackets and commas before it, and between two calls."""
    tag = {"begin": "<call>", "end": "</call>", "schema": NUMBERS}
    text, limited = answer(
        {"tags": [tag], "at_least_one": True, "stop_after_first": True, "item_limit": 6}, {"1,": 9.0, "1": 5.0}
    )
    assert text.startswith("<call>[")
    assert text.endswith("]</call>")
    assert (len(json.loads(text[6:-7])), limited) == (6, True)
    matcher = Grammars(toy()).matcher(Structured.from_value({"json": NUMBERS, "after": ".", "item_limit": 3}))  # type: ignore[arg-type]
    for byte in b'[[["{ ,,,,,,,. '[:-1]:
        assert matcher.advance(byte)
    assert not matcher.is_limited()
    assert all(map(matcher.advance, b"[1,1,1"))
    assert matcher.is_limited()
    assert allowed(matcher) == {ord("]")}


def allowed(matcher: Matcher) -> set[int]:
    words = np.zeros((EOS + 32) // 32, np.uint32)
    matcher.mask(words)
    return {t for t in range(EOS + 1) if words[t >> 5] >> (t & 31) & 1}


def test_the_mask_is_what_it_allows_and_goes_back() -> None:
    matcher = Grammars(toy()).matcher(Structured.from_value({"json": OBJECTS, "item_limit": 2}))  # type: ignore[arg-type]
    for number, byte in enumerate(b'[{"a":"x"},{"a":"y"'):
        assert allowed(matcher) == {t for t in range(EOS + 1) if matcher.allows(t)}, number
        assert matcher.advance(byte)
    assert matcher.is_limited()
    assert matcher.advance(ord("}"))
    assert allowed(matcher) == {ord("]")}
    matcher.rollback(10)
    assert not matcher.is_limited()
    assert ord(",") in allowed(matcher)


def longest(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max([len(inner), *map(longest, inner)])


def test_whatever_is_drawn_ends_and_says_whether_it_was_cut() -> None:
    schema = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "object", "additionalProperties": {"$ref": "#"},
              "propertyNames": {"maxLength": 2}}, {"enum": [1, True]}]}  # fmt: skip
    liked = dict.fromkeys(("1", "1,", ",1", "[", '","', ',"', '"', ":", '":', ","), 2.0) | {"[[": 1.0}
    seen = []
    for seed in range(60):
        try:
            text, limited = answer({"json": schema, "item_limit": 4}, liked, seed, most=2000)
        except AssertionError:  # deeper and deeper: depth is bounded by max_tokens alone
            continue
        assert (longest(json.loads(text)) >= 4) == limited, text
        assert longest(json.loads(text)) <= 4
        seen.append(limited)
    assert {True, False} == set(seen)


def test_the_engine_has_a_limit_of_its_own() -> None:
    assert resolve_config({"model": "m"}).item_limit == ITEM_LIMIT
    for wrong in (-1, True, 1.5):
        with pytest.raises(RequestError) as caught:
            resolve_config({"model": "m", "item_limit": wrong})
        assert caught.value.param == "item_limit"
    form = Structured.from_value({"json": NUMBERS})
    assert form is not None
    assert Grammars(toy(), limits=(7, 3)).compile(form).item_limit == 3
    assert Grammars(toy(), limits=(7, 3)).compile(form).string_limit == 7
    assert Grammars(toy(), limits=(7, 0)).compile(form).item_limit == 0
