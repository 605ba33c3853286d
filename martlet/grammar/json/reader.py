"""One schema object into one node.

The spellings of all drafts are unified (read `evaluated.py` next).
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from martlet.errors import RequestError
from martlet.grammar.json.schema_nodes import TYPES, Node, Problem
from martlet.grammar.language import Language
from martlet.grammar.numbers import Bound
from martlet.grammar.regex import regex_language
from martlet.grammar.string_formats import format_language

if TYPE_CHECKING:
    from martlet.grammar.json.loader import Loader

REFUSED = {
    "extends": "draft 3 is not supported; use allOf",
    "disallow": "draft 3 is not supported; use not",
    "divisibleBy": "draft 3 is not supported; use multipleOf",
}
ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$comment",
        "$id",
        "id",
        "$anchor",
        "$vocabulary",
        "$dynamicAnchor",
        "$recursiveAnchor",
        "definitions",
        "$defs",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "nullable",
    ]
)
ASSERTIONS = frozenset(
    [
        "type",
        "enum",
        "const",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "items",
        "prefixItems",
        "additionalItems",
        "contains",
        "minContains",
        "maxContains",
        "minItems",
        "maxItems",
        "uniqueItems",
        "properties",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "required",
        "minProperties",
        "maxProperties",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "unevaluatedItems",
    ]
)


def escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def shortened(value: Any) -> str:
    return f"{value!r:.60}"


class Reader:
    """Fills one node from its schema, a group of keywords at a time."""

    def __init__(
        self, loader: Loader, node: Node, schema: dict[str, Any], pointer: str, base: str, depth: int, draft: int
    ) -> None:
        self.loader, self.node, self.schema, self.pointer = loader, node, schema, pointer
        self.base, self.depth, self.draft = base, depth, draft

    def read(self) -> None:
        schema = self.schema
        if "$ref" in schema:
            self._reference(schema["$ref"])
            if self.draft < 8:
                return  # before 2019-09, keywords beside $ref have no effect
        for key in ("$dynamicRef", "$recursiveRef"):
            if key in schema:
                self._dynamic_reference(key, schema[key])
        self.loader.enforced.update(key for key in schema if key in ASSERTIONS)
        for key in schema:
            if key in REFUSED:
                self.loader.problem(f"{self.pointer}/{escaped(key)}", REFUSED[key])
            elif key not in ASSERTIONS and key not in ANNOTATIONS:
                self.loader.ignored.append(Problem(f"{self.pointer}/{escaped(key)}", "no keyword: an annotation"))
        self._types()
        self._combinators()
        self._numbers()
        self._strings()
        self._arrays()
        self._objects()

    def wrong(self, key: str, expected: str) -> None:
        """Note that a keyword's value is invalid."""
        self.loader.problem(f"{self.pointer}/{key}", f"is {shortened(self.schema[key])}; expected {expected}")

    def child(self, schema: Any, *path: str | int) -> Node:
        """The node of a schema inside this schema."""
        pointer = "/".join([self.pointer, *(escaped(str(segment)) for segment in path)])
        return self.loader.node(schema, pointer, self.base, self.depth + 1)

    def sub(self, key: str) -> Node | None:
        """The node of the schema that a keyword holds, None if absent."""
        return self.child(self.schema[key], key) if key in self.schema else None

    def children(self, key: str) -> list[Node]:
        """The nodes of a keyword that holds a list of schemas."""
        value = self.schema.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not value:
            self.wrong(key, "a list of schemas")
            return []
        return [self.child(item, key, i) for i, item in enumerate(value)]

    def mapping(self, key: str) -> dict[str, Any]:
        """The value of a keyword that holds an object."""
        value = self.schema.get(key, {})
        if not isinstance(value, dict):
            self.wrong(key, "an object")
            return {}
        return value

    def count(self, key: str) -> int | None:
        """The value of a keyword that holds a count, None if absent."""
        value = self.schema.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.wrong(key, "an integer ≥ 0")
            return None
        return value

    def number(self, key: str) -> Decimal | None:
        """The value of a keyword that holds a number, None if absent."""
        value = self.schema.get(key)
        if value is None or isinstance(value, bool):
            return None
        if isinstance(value, Decimal):
            return value
        if not isinstance(value, int | float):
            self.wrong(key, "a number")
            return None
        return Decimal(repr(value))

    def _reference(self, reference: Any) -> None:
        if not isinstance(reference, str):
            self.wrong("$ref", "the address of a schema")
            return
        target = self.loader.resolve(reference, self.base)
        if target is None:
            local = reference.startswith("#")
            why = "nothing is there" if local else "only references within the document are followed"
            self.loader.problem(f"{self.pointer}/$ref", f"{reference!r:.100}: {why}")
            return
        schema, pointer, base = target
        self.node.all_of.append(self.loader.node(schema, pointer, base, self.depth + 1))

    def _dynamic_reference(self, key: str, reference: Any) -> None:
        if not isinstance(reference, str) or (key == "$recursiveRef" and reference != "#"):
            self.wrong(key, "the address of a schema" if key == "$dynamicRef" else "'#'")
            return
        target = self.loader.resolve_dynamic(key, reference, self.base)
        if isinstance(target, str):
            self.loader.problem(f"{self.pointer}/{key}", f"{reference!r:.100}: {target}")
            return
        schema, pointer, base = target
        self.node.all_of.append(self.loader.node(schema, pointer, base, self.depth + 1))

    def _types(self) -> None:
        schema, node = self.schema, self.node
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            if not names or not all(isinstance(name, str) and name in (*TYPES, "integer") for name in names):
                self.wrong("type", f"one or more of {', '.join(TYPES)}, integer")
            else:
                node.types = frozenset("number" if name == "integer" else name for name in names)
                node.integer = "integer" in names and "number" not in names
                if schema.get("nullable") is True:
                    node.types |= {"null"}
        if "const" in schema:
            node.values = [schema["const"]]
        if "enum" in schema:
            values = schema["enum"]
            if not isinstance(values, list) or not values:
                self.wrong("enum", "a list of at least one value")
            elif node.values is None:
                node.values = values
            else:
                node.all_of.append(self.loader.made_up({"enum": values}, self.pointer))

    def _combinators(self) -> None:
        schema, node = self.schema, self.node
        node.all_of += self.children("allOf")
        for key, into in (("anyOf", node.any_of), ("oneOf", node.one_of)):
            options = self.children(key)
            if options:
                into.append(options)
        negated = self.sub("not")
        if negated is not None:
            node.not_.append(negated)
        condition = self.sub("if")
        if condition is not None and ("then" in schema or "else" in schema or self.loader.has_unevaluated):
            node.if_ = (condition, self.sub("then"), self.sub("else"))

    def _numbers(self) -> None:
        node, schema = self.node, self.schema
        low, high = self.number("minimum"), self.number("maximum")
        above, below = self.number("exclusiveMinimum"), self.number("exclusiveMaximum")
        if low is not None:
            node.low = Bound(low, schema.get("exclusiveMinimum") is True)  # draft 4
        if high is not None:
            node.high = Bound(high, schema.get("exclusiveMaximum") is True)
        if above is not None and (node.low is None or above >= node.low.value):
            node.low = Bound(above, True)
        if below is not None and (node.high is None or below <= node.high.value):
            node.high = Bound(below, True)
        node.multiple = self.number("multipleOf")
        if node.multiple is not None and node.multiple <= 0:
            self.wrong("multipleOf", "a number above 0")
            node.multiple = None

    def _strings(self) -> None:
        node, schema = self.node, self.schema
        node.min_length = self.count("minLength") or 0
        node.max_length = self.count("maxLength")
        if "pattern" in schema:
            node.patterns += self._pattern(schema["pattern"], "pattern")
        if "format" in schema:
            name = schema["format"]
            language = format_language(name) if isinstance(name, str) else None
            if language is not None:
                node.patterns.append(language)
            elif name in ("regex", "idn-email", "idn-hostname"):
                self.loader.problem(
                    f"{self.pointer}/format", f"{name!r} is no regular language, or needs tables of names"
                )
            else:
                self.loader.ignored.append(
                    Problem(f"{self.pointer}/format", f"{name!r:.40} is no format of a standard")
                )

    def _pattern(self, pattern: Any, *path: str) -> list[Language]:
        pointer = "/".join([self.pointer, *map(escaped, path)])
        if not isinstance(pattern, str):
            self.loader.problem(pointer, f"is {shortened(pattern)}; expected a regular expression")
            return []
        try:
            return [regex_language(pattern, search=True)]
        except RequestError as error:
            self.loader.problem(pointer, str(error))
            return []

    def _arrays(self) -> None:
        node, schema = self.node, self.schema
        node.min_items = self.count("minItems") or 0
        node.max_items = self.count("maxItems")
        items = schema.get("items")
        if isinstance(items, list):  # before 2020-12
            node.prefix = [self.child(item, "items", i) for i, item in enumerate(items)]
            node.items = self.sub("additionalItems")
        else:
            node.prefix = self.children("prefixItems")
            node.items = self.sub("items")
        contains = self.sub("contains")
        if contains is not None:
            least = self.count("minContains")
            node.contains = (contains, 1 if least is None else least, self.count("maxContains"))
        node.unique = schema.get("uniqueItems") is True
        node.unevaluated_items = self.sub("unevaluatedItems")

    def _objects(self) -> None:
        node, schema = self.node, self.schema
        for name, value in self.mapping("properties").items():
            node.properties[name] = self.child(value, "properties", name)
        for pattern, value in self.mapping("patternProperties").items():
            for language in self._pattern(pattern, "patternProperties", pattern):
                node.pattern_properties.append((language, self.child(value, "patternProperties", pattern)))
        node.additional = self.sub("additionalProperties")
        node.names = self.sub("propertyNames")
        # Draft 3: no effect since.
        if "required" in schema and not isinstance(schema["required"], bool):
            node.required = self._names(schema["required"], "required")
        node.min_properties = self.count("minProperties") or 0
        node.max_properties = self.count("maxProperties")
        for key in ("dependentRequired", "dependencies"):
            for name, value in self.mapping(key).items():
                if isinstance(value, list):
                    node.dependent_required[name] = self._names(value, key, name)
                elif key == "dependencies":
                    node.dependent_schemas[name] = self.child(value, key, name)
        for name, value in self.mapping("dependentSchemas").items():
            node.dependent_schemas[name] = self.child(value, "dependentSchemas", name)
        node.unevaluated_properties = self.sub("unevaluatedProperties")

    def _names(self, value: Any, *path: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            pointer = "/".join([self.pointer, *map(escaped, path)])
            self.loader.problem(pointer, f"is {shortened(value)}; expected a list of property names")
            return ()
        return tuple(dict.fromkeys(value))
