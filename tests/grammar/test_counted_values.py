"""Sets of few values: different items run out of them, and arrays and objects that need more than
there are are refused.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from martlet.grammar.json.counting import few_strings, n_strings
from martlet.grammar.json.schema_nodes import SchemaError
from martlet.grammar.json.sets import Texts
from martlet.grammar.json_schema import SchemaOptions, compile_schema, schema_start
from martlet.grammar.language import Language
from martlet.grammar.regex import regex_language
from tests.grammar.schema_texts import EOS, accepts, meets, runs, vocabulary

LETTER = {"type": "string", "pattern": "^[ab]$"}
BOOLEAN = {"type": "boolean"}


def integers(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def different(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


HALVES = {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5}
OF_FEW = [
    (LETTER, '["a","b"]'),
    ({"type": "string", "pattern": "^(x|y)?$"}, '["","y","x"]'),
    ({"type": "string", "pattern": "^a{0,2}$"}, '["","aa","a"]'),
    ({"type": "string", "maxLength": 0}, '[""]'),
    (HALVES, "[0,0.5,1]"),
    (HALVES, "[0.50,1.0,0.0]"),
    ({"type": "number", "minimum": 0, "maximum": 0}, "[0]"),
    ({"anyOf": [integers(1, 2), LETTER]}, '[1,"a",2,"b"]'),
    (integers(1, 3), "[3,1,2]"),
    ({"anyOf": [LETTER, {"enum": [[1]]}]}, '["b",[1],"a"]'),
]


@pytest.mark.parametrize(("items", "text"), OF_FEW)
def test_no_comma_follows_the_last_of_few_values(items: Any, text: str) -> None:
    for more in ({}, {"minItems": len(json.loads(text))}):
        state = runs(schema_start(different(items, **more)), text[:-1])
        assert state is not None
        assert state.step(ord(",")) is None
        assert accepts(state, "]")


@pytest.mark.parametrize(("items", "text"), OF_FEW)
def test_more_different_items_than_there_are_values_are_refused(items: Any, text: str) -> None:
    with pytest.raises(SchemaError, match="no value meets it"):
        schema_start(different(items, minItems=len(json.loads(text)) + 1))


def test_a_property_that_no_value_meets_does_not_come() -> None:
    impossible = different(integers(1, 2), minItems=3)
    schema = {"type": "object", "properties": {"t": impossible, "z": BOOLEAN}, "required": ["z"],
              "additionalProperties": False}  # fmt: skip
    state = runs(schema_start(schema), '{"')
    assert state is not None
    assert state.next_bytes() == b"z"


@pytest.mark.parametrize("items", [items for items, _ in OF_FEW])
def test_random_answers_of_different_items_come_to_their_end(items: Any) -> None:
    """In tokens that join what the grammar tells apart: after every one something may follow."""
    tokens = vocabulary(['",', '","', "a", '["', '"]', ",1", "0,", ".0", ".5,", "],"])
    chance = random.Random(1)
    for spacing in ("compact", "single"):
        grammar = compile_schema(different(items), tokens, SchemaOptions(spacing=spacing))
        for _ in range(10):
            matcher, text = grammar.matcher(), b""
            while True:
                out = np.zeros(tokens.n_words, np.uint32)
                matcher.mask(out)
                allowed = np.flatnonzero(np.unpackbits(out.view(np.uint8), bitorder="little")).tolist()
                assert allowed, text
                longer = [token for token in allowed if token not in (EOS, 1 + ord("]"))]
                token = chance.choice(longer or allowed)
                if token == EOS:
                    break
                assert matcher.advance(token)
                text += tokens.tokens[token] or b""
            values = json.loads(text)
            assert len({json.dumps(float(v) if isinstance(v, int) else v) for v in values}) == len(values)


@pytest.mark.parametrize(
    ("pattern", "number"),
    [("[ab]{0,3}", 15), ("[a-z]{4}", 26**4), ("a*", None), ("(?!)", 0), ("", 1), ("ab|ac|b", 3)],
)
def test_texts_are_counted(pattern: str, number: int | None) -> None:
    assert n_strings(Texts(None, regex_language(f"^({pattern})$"))) == number


def test_halves_of_surrogate_pairs_are_not_counted() -> None:
    texts = Texts(None, Language.characters([(0xD7FE, 0xE000)]))
    assert n_strings(texts) == 3
    assert few_strings(texts) == ["\ud7fe", "\ud7ff", "\ue000"]
    assert n_strings(Texts(None, Language.characters([(0, 0x10FFFF)]))) == 0x110000 - 2048
    assert few_strings(Texts(None, regex_language("^.x$"))) is None


@pytest.mark.parametrize("more", [{"minContains": 3, "maxContains": 2}, {"maxContains": 0}])
def test_more_items_that_count_than_may_count_are_refused(more: dict[str, int]) -> None:
    schema = {"type": "array", "contains": {"type": "integer"}, **more}
    with pytest.raises(SchemaError, match="no value meets it"):
        schema_start(schema)
    assert meets({**schema, "minContains": 0}, '["a"]')
    assert meets({"contains": {"type": "integer"}, **more}, '"no array"')
    assert meets({"not": schema}, "[1]")


AT_MOST_TWO = {"type": "object", "propertyNames": {"enum": ["b", "a"]}, "additionalProperties": BOOLEAN}
ONLY_A = {"type": "object", "patternProperties": {"^a$": BOOLEAN}, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {**AT_MOST_TWO, "minProperties": 3},
        {**ONLY_A, "minProperties": 2, "maxProperties": 2},
        {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "minProperties": 3},
        {"type": "object", "propertyNames": {"maxLength": 0}, "minProperties": 2},
    ],
)
def test_more_properties_than_there_are_names_are_refused(schema: Any) -> None:
    with pytest.raises(SchemaError, match="no value meets it"):
        schema_start(schema)


@pytest.mark.parametrize("ordered", [True, False])
def test_names_that_are_few_come_once_and_in_any_order(ordered: bool) -> None:
    options = SchemaOptions(ordered=ordered)
    two = {**AT_MOST_TWO, "minProperties": 2}
    assert meets(two, '{"b":true,"a":true}', options)
    assert meets(two, '{"a":true,"b":true}', options)
    assert not meets(two, '{"a":true,"a":true}', options)
    assert not meets(two, '{"a":true}', options)
    assert meets(ONLY_A, '{"a":false}', options)
    assert not meets(ONLY_A, '{"a":false,"a":false}', options)


def test_names_that_are_few_follow_those_of_properties() -> None:
    """Beside names of other patterns, and of none."""
    schema = {"type": "object", "properties": {"z": BOOLEAN, "y": BOOLEAN}, "required": ["y"],
              "patternProperties": {"^[ab]$": BOOLEAN, "^a": {"const": True}}}  # fmt: skip
    ordered = SchemaOptions(ordered=True)
    assert meets(schema, '{"z":true,"y":true,"b":false,"ab":true,"q":1,"a":true}', ordered)
    assert not meets(schema, '{"y":true,"a":false}', ordered)
    assert not meets(schema, '{"a":true,"y":true}', ordered)
    assert meets(schema, '{"a":true,"y":true}')
    assert not meets(schema, '{"b":true}')
