"""Faults that other engines had with JSON Schema, each as a case with what is right (fault
STR-nn).
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from martlet.errors import RequestError
from martlet.grammar.json.schema_nodes import SchemaError
from martlet.grammar.json_schema import SchemaOptions, compile_schema, coverage, schema_start
from martlet.grammar.states import Limits
from tests.grammar.schema_texts import EOS, accepts, meets, vocabulary

NODE = {
    "$ref": "#/$defs/n",
    "$defs": {
        "n": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}


def with_property(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema}, "required": [name], **more}


COLOURS = {**with_property("c", {"$ref": "#/$defs/C"}), "$defs": {"C": {"enum": ["red", "blue"]}}}
UNIT = with_property("u", {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]})
CASES = [
    ("STR-01", {"type": "object"}, ['{"a":1}', "{}", '{"a":{"b":[]}}'], ["[1]"]),
    ("STR-01", {"type": "array"}, ["[]", '[1,"a",[{}]]'], ["{}"]),
    ("STR-01", {}, ["1", '"a"', "null", "[true]"], ["", "nul"]),
    ("STR-03", COLOURS, ['{"c":"red"}'], ['{"c":{}}', '{"c":"green"}']),
    ("STR-05", NODE, ['{"v":1,"kids":[{"v":2,"kids":[{"v":3}]}]}'], ['{"v":1,"kids":[{"v":"x"}]}']),
    ("STR-07", UNIT, ['{"u":"C"}', '{"u":null}'], ['{"u":"K"}']),
    ("STR-07", {"type": ["string", "null"]}, ['"K"', "null"], ["1"]),
    ("STR-09", {"type": "integer", "minimum": 3}, ["3", "30"], ["01", "2", "00", "-3"]),
    ("STR-09", {"type": "integer"}, ["0", "-7"], ["-0", "00", "1.0", "1e2"]),
    ("STR-11", {"properties": {"a": {}}, "additionalProperties": False}, ['{"a":1}'], ['{"a":1,"z":2}']),
    ("STR-11", {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, ['{"a":1,"z":2}'], ['{"z":""}']),
    ("STR-11", {"properties": {"a": {}}}, ['{"a":1,"z":2}'], []),
    ("STR-31", {"enum": [1, True, None, [1, "x"], {"k": "v"}]}, ["1", "true", "null", '[1,"x"]', '{"k":"v"}'],
     ["2", "false", '[1,"y"]', "[1]", '{"k":"w"}', "{}", '{"k":"v","l":1}']),
    ("STR-31", {"enum": ['a"b', "c\\d", "line\nend", "é"]}, ['"a\\"b"', '"c\\\\d"', '"line\\nend"', '"é"'], ['"a"b"']),
    ("STR-31", with_property('q"é', {"type": "integer"}), ['{"q\\"é":1}'], ['{"q":1}']),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "schema", "right", "wrong"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_case(fault: str, schema: Any, right: list[str], wrong: list[str]) -> None:
    start = schema_start(schema, SchemaOptions(ordered=False))
    assert [text for text in right if not accepts(start, text)] == []
    assert [text for text in wrong if accepts(start, text)] == []


def test_keys_come_in_the_schemas_order() -> None:
    """Fault STR-13."""
    names = ["thought", "answer", "aa"]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names,
              "additionalProperties": False}  # fmt: skip
    text = (
        '{"type":"object","properties":{"thought":{"const":1},"answer":{"const":2},"aa":{"const":3}},"required":["aa",'
    )
    forced = compile_schema(text + '"answer","thought"],"additionalProperties":false}', vocabulary()).matcher().forced()
    assert forced == b'{"thought":1,"answer":2,"aa":3}'
    assert meets(schema, '{"thought":1,"answer":2,"aa":3}', SchemaOptions())
    assert not meets(schema, '{"aa":3,"answer":2,"thought":1}', SchemaOptions())
    assert meets(schema, '{"aa":3,"answer":2,"thought":1}', SchemaOptions(ordered=False))


def test_an_empty_enum_is_refused_with_its_place() -> None:
    """Fault STR-15."""
    with pytest.raises(SchemaError, match="#/properties/x/enum"):
        schema_start(with_property("x", {"enum": []}))


@pytest.mark.parametrize(
    ("keyword", "schema", "right", "wrong"),
    [
        ("uniqueItems", {"type": "array", "items": {"type": "string"}, "uniqueItems": True}, '["a","b"]', '["a","a"]'),
        ("contains", {"type": "array", "contains": {"const": 1}}, "[2,1]", "[2]"),
        ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^x"}}, '{"xy":1}', '{"y":1}'),
        ("if", {"if": {"type": "string"}, "then": {"minLength": 2}}, '"ab"', '"a"'),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}, '{"b":1,"a":1}', '{"a":1}'),
        ("format", {"type": "string", "format": "email"}, '"a@b.de"', '"a"'),
    ],
)
def test_a_keyword_is_enforced(keyword: str, schema: Any, right: str, wrong: str) -> None:
    """Fault STR-17, ask 17."""
    assert meets(schema, right)
    assert not meets(schema, wrong)
    assert keyword in coverage(schema).enforced


@pytest.mark.parametrize(
    ("pointer", "schema"),
    [
        ("#/items/$dynamicRef", {"items": {"$dynamicRef": "#a"}}),
        ("#/properties/a~1b/$ref", {"properties": {"a/b": {"$ref": "https://example.com/s"}}}),
        ("#/$ref", {"$ref": "#/$defs/nothing"}),
        ("#/pattern", {"pattern": "(a)\\1"}),
        ("#/pattern", {"pattern": "foo**"}),
        ("#/format", {"format": "regex"}),
        ("#/type", {"type": "strng"}),
        ("#/minimum", {"minimum": "3"}),
        ("#/properties", {"properties": []}),
        ("#", {"type": "string", "enum": [1]}),
        ("#/anyOf", {"anyOf": []}),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_pointer(pointer: str, schema: Any) -> None:
    """Faults STR-17 and STR-19, ask 17."""
    with pytest.raises(SchemaError) as caught:
        schema_start(schema)
    assert pointer in [problem.pointer for problem in caught.value.problems]
    assert coverage(schema).problems == caught.value.problems


def test_what_takes_too_much_is_refused() -> None:
    """Neither the stack nor the clock is used up: a chain of required objects, patterns that
    overlap in every way.
    """
    deep: Any = {"type": "integer"}
    for _ in range(120):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    with pytest.raises(SchemaError, match="nested too deep"):
        schema_start(deep)
    patterns = {f"{a}.*{b}": {"type": "integer"} for a in "abcdefghij" for b in "uvwxyz"}
    with pytest.raises(SchemaError, match="overlap") as caught:
        schema_start({"type": "object", "patternProperties": patterns, "additionalProperties": False})
    assert caught.value.problems[0].pointer == "#/patternProperties"


def test_half_a_surrogate_pair_is_written_as_an_escape() -> None:
    schema = {"type": "object", "properties": {"\ud800": {"enum": ["\udfff", "é"]}}, "required": ["\ud800"]}
    assert meets(schema, r'{"\ud800":"\udfff"}')
    assert meets(schema, r'{"\ud800":"é"}')


def test_annotations_are_no_constraints_and_unknown_keywords_are_reported() -> None:
    """Fault STR-17."""
    schema = {"title": "t", "description": "d", "default": 1, "$schema": "https://json-schema.org/draft/2020-12/schema"}
    assert meets(schema, "null")
    report = coverage({**schema, "minLenght": 3, "format": "colour"})
    assert sorted(problem.pointer for problem in report.ignored) == ["#/format", "#/minLenght"]


def test_no_white_space_by_default_and_never_more_than_said() -> None:
    """Fault STR-25, ask 16."""
    schema = {"type": "array", "items": {"type": "integer"}}
    assert not meets(schema, "[1, 2]", SchemaOptions())
    assert meets(schema, "[1, 2]", SchemaOptions(spacing="single"))
    assert not meets(schema, "[1,  2]", SchemaOptions(spacing="single"))
    assert meets(schema, "[\n  1,\n  2\n]", SchemaOptions(spacing="any"))
    assert not meets(schema, "[" + " " * 65 + "1]", SchemaOptions(spacing="any"))


def test_every_byte_of_a_token_counts() -> None:
    """Fault STR-27."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    words = ["{}", '"Why', '":"', "0.98", ",}", "trux", '{"a', '":', "12", '{"a":1}', "1}"]
    tokens = vocabulary(words)
    matcher = compile_schema(schema, tokens).matcher()
    number = {word: 257 + i for i, word in enumerate(words)}
    assert [word for word in words if matcher.allows(number[word])] == ['{"a', '{"a":1}']
    assert matcher.advance(number['{"a'])
    assert [word for word in words if matcher.allows(number[word])] == ['":']
    assert matcher.advance(number['":'])
    assert [word for word in words if matcher.allows(number[word])] == ["12", "1}"]


def test_the_end_only_where_the_text_is_complete() -> None:
    """Fault STR-33."""
    matcher = compile_schema({"type": "object", "additionalProperties": False}, vocabulary(["{}"])).matcher()
    assert not matcher.may_end()
    assert not matcher.advance(EOS)
    assert matcher.advance(257)
    assert matcher.may_end()
    assert matcher.is_done()
    assert not matcher.allows(1 + ord(" "))
    assert matcher.advance(EOS)


def test_a_large_enum_compiles_at_once() -> None:
    """Fault STR-37."""
    names = [f"name {i:05}" for i in range(5000)]
    start = time.perf_counter()
    first = schema_start({"enum": names})
    assert accepts(first, '"name 04999"')
    assert not accepts(first, '"name 05000"')
    assert time.perf_counter() - start < 2.0


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(5000),
        "[" * 100_000,
        '{"type": "string"',
        "1" * (2 << 20),
        {"allOf": [{"$ref": "#"}]},
        {"not": {"$ref": "#"}},
        {"$ref": "#"},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {"allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(4)]} for i in range(12)]},
        {"oneOf": [{"properties": {f"p{i}{j}": {"type": "integer"} for j in range(8)}} for i in range(8)]},
        {"type": "string", "pattern": "^(a?){300}(a{1,300}){300}$"},
        {"type": "string", "pattern": "(x+x+)+y", "maxLength": 50_000},
    ],
    ids=range(12),
)
def test_hostile_schemas_are_refused_in_time(schema: Any) -> None:
    """Faults STR-05 and STR-19, ask 18."""
    start = time.thread_time()
    with pytest.raises(RequestError):
        schema_start(schema, SchemaOptions(), Limits(seconds=2.0))
    assert time.thread_time() - start < 15.0


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "number", "minimum": 1e30}, "more digits than answers have: 24 before the point and 24 after it."),
        ({"type": "integer", "exclusiveMinimum": 1e308}, "24 before the point and 24 after it."),
        ({"type": "number", "minimum": 1e31, "maximum": 1e30}, "no value meets it."),
        ({"type": "number", "multipleOf": 1e30}, "needs too many remainders: more than 20,000."),
    ],
)
def test_a_refusal_says_the_right_reason_and_ends_once(schema: Any, reason: str) -> None:
    with pytest.raises(SchemaError) as error:
        schema_start(schema)
    assert str(error.value).endswith(reason)
    assert not str(error.value).endswith("..")
