"""Single values: null, true and false, and enum's arrays and objects as schemas (see `algebra.py`)."""

from __future__ import annotations

from typing import Any

from martlet.grammar.json.schema_nodes import Node

__all__ = ["WORDS", "as_schema", "kind_of", "word_leaf"]

WORDS = frozenset({"null", "true", "false"})


def word_leaf(node: Node, positive: bool) -> frozenset[str]:
    """Of null, true and false those that a schema's own keywords allow, or those that they do not."""
    allowed = frozenset() if node.never else WORDS
    if node.types is not None:
        allowed &= frozenset(word for word in WORDS if ("null" if word == "null" else "boolean") in node.types)
    if node.values is not None:
        names = {None: "null", True: "true", False: "false"}
        allowed &= {names[value] for value in node.values if value is None or isinstance(value, bool)}
    return allowed if positive else WORDS - allowed


def kind_of(value: Any) -> str:
    return "array" if isinstance(value, list) else "object"


def as_schema(value: Any) -> dict[str, Any]:
    """A schema that one array or object meets."""
    if isinstance(value, list):
        schema: dict[str, Any] = {"type": "array", "minItems": len(value), "maxItems": len(value)}
        return schema | ({"prefixItems": [{"const": item} for item in value]} if value else {})
    return {
        "type": "object",
        "properties": {name: {"const": item} for name, item in value.items()},
        "required": list(value),
        "additionalProperties": False,
    }
