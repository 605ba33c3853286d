"""Keywords that look at others: unevaluated*, references by dynamic scope, different arrays and
objects.

The oracle is `jsonschema`, with schemas and instances drawn at random; what is refused names its
keyword's place.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from martlet.errors import RequestError
from martlet.grammar.json.schema_nodes import SchemaError
from martlet.grammar.json_schema import coverage, schema_start
from tests.grammar.schema_texts import ANY_ORDER, accepts, meets, text_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"
LEAVES: list[Any] = [True, False, {"type": "integer"}, {"const": 1}, {"type": "string"}, {"enum": ["x", 1]}]


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    """A schema of objects whose names are few, so that its parts speak of the same ones."""
    names = ["a", "b", "c"]
    schema: dict[str, Any] = {}
    if rng.random() < 0.7:
        schema["properties"] = {name: rng.choice(LEAVES) for name in rng.sample(names, rng.randint(1, 2))}
    if rng.random() < 0.2:
        schema["patternProperties"] = {rng.choice(["^a", "b|c", "d"]): rng.choice(LEAVES)}
    if rng.random() < 0.15:
        schema["additionalProperties"] = rng.choice(LEAVES)
    if rng.random() < 0.3:
        schema["required"] = rng.sample(names, 1)
    if depth:
        for key in ("allOf", "anyOf", "oneOf"):
            if rng.random() < 0.3:
                schema[key] = [random_object(rng, depth - 1) for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.3:
            schema["if"] = random_object(rng, depth - 1)
            for key in rng.choice(([], ["then"], ["else"], ["then", "else"])):
                schema[key] = random_object(rng, depth - 1)
        if rng.random() < 0.25:
            schema["dependentSchemas"] = {rng.choice(names): random_object(rng, depth - 1)}
        if rng.random() < 0.15:
            schema["not"] = random_object(rng, 0)
        if rng.random() < 0.2:
            schema["$ref"] = "#/$defs/other"
    if rng.random() < (0.25 if depth < 2 else 1):
        schema["unevaluatedProperties"] = rng.choice(LEAVES)
    return schema


def random_array(rng: random.Random, depth: int) -> dict[str, Any]:
    """The same for arrays."""
    schema: dict[str, Any] = {}
    if rng.random() < 0.5:
        schema["prefixItems"] = [rng.choice(LEAVES) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.2:
        schema["items"] = rng.choice(LEAVES)
    elif rng.random() < 0.3:
        schema["contains"] = rng.choice(LEAVES[2:])
    if depth:
        for key in ("allOf", "anyOf", "oneOf"):
            if rng.random() < 0.3:
                schema[key] = [random_array(rng, depth - 1) for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.3:
            schema |= {"if": random_array(rng, depth - 1), "then": random_array(rng, depth - 1)}
    if rng.random() < (0.25 if depth < 2 else 1):
        schema["unevaluatedItems"] = rng.choice(LEAVES)
    return schema


@pytest.mark.parametrize("make", [random_object, random_array])
def test_unevaluated_as_jsonschema_has_it(make: Any) -> None:
    rng = random.Random(7)
    n_compiled = n_valid = n_invalid = 0
    for _ in range(120):
        schema = {"$schema": DIALECT, "$defs": {"other": random_object(rng, 0)}, **make(rng, 2)}
        try:
            start = schema_start(schema, ANY_ORDER)
        except RequestError:  # no value meets it, or several `contains`
            continue
        n_compiled += 1
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(12):
            values = [rng.choice([1, 2, "x", "y"]) for _ in range(rng.randint(0, 3))]
            names = rng.sample(["a", "b", "c", "d", "e"], len(values))
            value: Any = values if make is random_array else dict(zip(names, values, strict=True))
            valid = validator.is_valid(value)
            assert accepts(start, text_of(value)) == valid, (schema, value)
            n_valid += valid
            n_invalid += not valid
    assert n_compiled > 50
    assert min(n_valid, n_invalid) > 150


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"allOf": [{"$ref": "#/$defs/base"}], "properties": {"b": {}}, "unevaluatedProperties": False,
             "$defs": {"base": {"properties": {"a": {"type": "integer"}}}}},
            '{"a":1,"b":2}', '{"a":1,"c":2}',
        ),
        (
            {"anyOf": [{"required": ["a"], "properties": {"a": {}}}, {"required": ["b"], "properties": {"b": {}}}],
             "unevaluatedProperties": {"type": "string"}},
            '{"a":1,"c":"x"}', '{"a":1,"c":1}',
        ),
        ({"prefixItems": [{}], "contains": {"const": 3}, "unevaluatedItems": False}, "[1,3,3]", "[1,3,2]"),
        ({"unevaluatedProperties": False, "type": ["object", "string"]}, '"a"', '{"a":1}'),
    ],
)  # fmt: skip
def test_the_rest_is_what_nothing_else_speaks_of(schema: dict[str, Any], right: str, wrong: str) -> None:
    assert meets(schema, right)
    assert not meets(schema, wrong)
    assert not coverage(schema).problems
    assert any(key.startswith("unevaluated") for key in coverage(schema).enforced)


def test_ways_beyond_count_are_refused_by_pointer() -> None:
    options = [{"required": [f"n{i}"], "properties": {f"n{i}": {}}} for i in range(9)]
    with pytest.raises(SchemaError) as caught:
        schema_start({"anyOf": options, "unevaluatedProperties": False})
    assert [problem.pointer for problem in caught.value.problems] == ["#/unevaluatedProperties"]


def test_what_is_made_of_itself_is_refused_by_pointer() -> None:
    with pytest.raises(SchemaError) as caught:
        schema_start({"allOf": [{"$ref": "#"}], "unevaluatedProperties": False})
    assert "#/unevaluatedProperties" in [problem.pointer for problem in caught.value.problems]


TREE = {
    "$id": "https://example.com/strict-tree",
    "$dynamicAnchor": "node",
    "$ref": "tree",
    "unevaluatedProperties": False,
    "$defs": {
        "tree": {
            "$id": "tree",
            "$dynamicAnchor": "node",
            "type": "object",
            "properties": {"data": True, "children": {"type": "array", "items": {"$dynamicRef": "#node"}}},
        }
    },
}


def test_a_dynamic_reference_names_the_root_that_every_way_begins_with() -> None:
    """The specification's own example: the tree's misspelled names are found at every depth."""
    assert meets(TREE, '{"children":[{"data":1}]}')
    assert not meets(TREE, '{"children":[{"daat":1}]}')


def test_a_dynamic_reference_with_one_anchor_is_a_plain_one() -> None:
    schema = {"items": {"$dynamicRef": "#n"}, "$defs": {"n": {"$dynamicAnchor": "n", "type": "integer"}}}
    assert meets(schema, "[1]")
    assert not meets(schema, '["a"]')
    older = {"$schema": "https://json-schema.org/draft/2019-09/schema", "type": ["array", "integer"],
             "$recursiveAnchor": True, "items": {"$recursiveRef": "#"}}  # fmt: skip
    assert meets(older, "[[1],2]")
    assert not meets(older, '[["a"]]')


def test_a_dynamic_reference_that_depends_on_the_way_is_refused() -> None:
    there = {
        name: {"$id": name, "$dynamicAnchor": "n", "type": json_type}
        for name, json_type in (("x", "null"), ("y", "array"))
    }
    with pytest.raises(SchemaError) as caught:
        schema_start({"items": {"$ref": "x#/$defs/z"}, "$defs": {
            "x": {**there["x"], "$defs": {"z": {"$dynamicRef": "#n"}}}, "y": there["y"]}})  # fmt: skip
    assert [problem.pointer for problem in caught.value.problems] == ["#/$defs/x/$defs/z/$dynamicRef"]


# -- different items -------------------------------------------------------------------------------
CHOICE = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
PAIRS = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}


@pytest.mark.parametrize(
    ("items", "right", "wrong"),
    [
        (CHOICE, '[{"a":"x"},{"a":"y"},{"a":"x","b":true}]', '[{"a":"x"},{"a":"y"},{"a":"x"}]'),
        (CHOICE, '[{"b":true,"a":"x"},{"a":"x","b":false}]', '[{"b":true,"a":"x"},{"a":"x","b":true}]'),
        (PAIRS, "[[1,2],[2,1],[1,1],[2,2]]", "[[1,2],[2,1],[1,2]]"),
        ({"enum": [[1], [1.0], "a", 1]}, '[[1],"a",1]', '[[1],[1],"a"]'),
        ({"enum": [{"a": 1, "b": [2]}, {"b": [2], "a": 1}, None]}, '[{"a":1,"b":[2]},null]', "[null,null]"),
    ],
)
def test_few_arrays_and_objects_are_told_apart(items: Any, right: str, wrong: str) -> None:
    schema = {"type": "array", "items": items, "uniqueItems": True}
    assert meets(schema, right)
    assert not meets(schema, wrong)
    assert not coverage(schema).problems


def test_no_more_different_items_than_there_are() -> None:
    """Six values: an array of six is possible, in any order, and nothing but its end follows.

    One of seven is not.
    """
    schema = {"type": "array", "items": CHOICE, "uniqueItems": True, "minItems": 6}
    state = schema_start(schema)
    values = [{"a": a} | ({} if b is None else {"b": b}) for a in "xy" for b in (True, None, False)]
    for byte in json.dumps(values, separators=(",", ":")).encode()[:-1]:
        after = state.step(byte)
        assert after is not None
        state = after
    assert state.next_bytes() == b"]"
    with pytest.raises(SchemaError, match="no value meets it"):
        schema_start({**schema, "minItems": 7})


@pytest.mark.parametrize(
    ("pointer", "schema"),
    [
        ("#/uniqueItems", {"type": "array", "items": {"type": "object"}, "uniqueItems": True}),
        ("#/uniqueItems", {"type": "array", "items": {"$ref": "#"}, "uniqueItems": True}),
        ("#/items/uniqueItems", {"items": {"type": "array", "items": {"type": "array"}, "uniqueItems": True}}),
        ("#/uniqueItems", {"type": "array", "prefixItems": [{"const": 1}], "uniqueItems": True}),
        (
            "#/uniqueItems",
            {"type": "array", "uniqueItems": True,
             "items": {"type": "object", "properties": {n: {"type": "boolean"} for n in "abcd"}}},
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_by_pointer(pointer: str, schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError) as caught:
        schema_start(schema)
    assert [problem.pointer for problem in caught.value.problems] == [pointer]
