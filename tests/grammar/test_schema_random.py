"""Random schemas, both ways, with `jsonschema` as judge: what a grammar writes is valid, what is
valid it accepts.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from martlet.grammar.json.schema_nodes import SchemaError
from martlet.grammar.json_schema import SchemaOptions, schema_start
from martlet.grammar.numbers import Digits
from martlet.grammar.states import State
from tests.grammar.schema_texts import ANY_ORDER, accepts, text_of

jsonschema = pytest.importorskip("jsonschema")
# so few that the judge's arithmetic, which is of doubles, is exact too
DIGITS = Digits(6, 3, False)
NAMES = st.sampled_from(["a", "b", "ab", "c"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 12), st.sampled_from(["", "a", "ab", "xyz", "é"]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=5,
)
KEYWORDS: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(
        ["null", "boolean", "integer", "number", "string", "array", "object", ["string", "object"]]
    ),
    "enum": st.lists(VALUES, min_size=1, max_size=4),
    "const": VALUES,
    "minimum": st.integers(-2, 8),
    "exclusiveMaximum": st.integers(0, 12),
    "multipleOf": st.sampled_from([2, 3, 0.5]),
    "minLength": st.integers(0, 3),
    "maxLength": st.integers(0, 4),
    "pattern": st.sampled_from(["^a", "b$", "^[a-z]*$", "x"]),
    "minItems": st.integers(0, 2),
    "maxItems": st.integers(0, 3),
    "minProperties": st.integers(0, 2),
    "maxProperties": st.integers(0, 3),
    "required": st.lists(NAMES, max_size=2, unique=True),
    "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=1),
}


def with_children(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, min_size=1, max_size=2)
    more = {
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=1),
        "additionalProperties": inner,
        "propertyNames": st.fixed_dictionaries({"pattern": st.sampled_from(["^a", "^[abc]+$"])}),
        "items": inner,
        "prefixItems": lists,
        "contains": inner,
        "allOf": lists,
        "anyOf": lists,
        "oneOf": lists,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
    }
    return chosen({**KEYWORDS, **more}, 4)


def chosen(keywords: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[Any]:
    """Schemas of up to `most` keywords."""
    picks = st.lists(st.sampled_from(sorted(keywords)), max_size=most, unique=True)
    return picks.flatmap(lambda names: st.fixed_dictionaries({name: keywords[name] for name in names}))


SCHEMAS = st.recursive(st.one_of(st.booleans(), chosen(KEYWORDS, 3)), with_children, max_leaves=5)


def written(start: State, chance: random.Random, most: int = 400) -> str | None:
    """A random text, ended as soon as it may be; None if it got long."""
    state, out = start, bytearray()
    while not state.accepts or chance.random() < 0.3:
        known = state.next_bytes()
        options = [byte for byte in (range(256) if known is None else known) if state.step(byte) is not None]
        if not options:
            assert state.accepts, f"a dead end after {bytes(out)!r}"
            break
        closing = [byte for byte in options if byte in b'"]}']
        byte = chance.choice(closing if closing and chance.random() < 0.5 else options)
        after = state.step(byte)
        assert after is not None
        state = after
        out.append(byte)
        if len(out) > most:
            return None
    return out.decode()


def has_unknown_name_twice(text: str, schema: Any) -> bool:
    """Whether a name that the schema does not know comes twice in an object: of such, readers keep
    one.
    """
    repeated: list[str] = []

    def pairs(members: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in members]
        repeated.extend(name for name in names if names.count(name) > 1)

    json.loads(text, object_pairs_hook=pairs)
    known = json.dumps(schema)
    return any(json.dumps(name) not in known for name in repeated)


SETTINGS = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))


@SETTINGS
@given(SCHEMAS, st.integers(0, 2**32))
def test_what_is_written_is_valid(schema: Any, seed: int) -> None:
    try:
        start = schema_start(schema, SchemaOptions(ordered=bool(seed % 2), digits=DIGITS))
    except SchemaError:
        return
    judge = jsonschema.Draft202012Validator(schema)
    for i in range(4):
        text = written(start, random.Random(seed + i))
        if text is not None and not has_unknown_name_twice(text, schema):
            judge.validate(json.loads(text))


@SETTINGS
@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=6))
def test_it_agrees_with_the_judge(schema: Any, values: list[Any]) -> None:
    """What is valid is accepted, what is not is rejected; whole numbers have one spelling."""
    judge = jsonschema.Draft202012Validator(schema)
    try:
        start = schema_start(schema, ANY_ORDER)
    except SchemaError as error:
        if "no value meets it" in str(error):
            assert not any(judge.is_valid(value) for value in values)
        return
    for value in values:
        assert accepts(start, text_of(value)) == judge.is_valid(value), (value, judge.is_valid(value))
