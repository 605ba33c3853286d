"""A JSON Schema read strictly: references followed, the spellings of all drafts unified, the rest
refused.

A `Node` is a schema object; its children are nodes, so a recursive schema is a graph with cycles.
Every assertion is either in a node or among `problems`, with its JSON pointer: nothing is ignored
in silence. Read `loader.py` next. Source: json-schema.org, drafts 4, 6, 7, 2019-09 and 2020-12.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from martlet.errors import RequestError
from martlet.grammar.language import Language
from martlet.grammar.numbers import Bound

TYPES = ("null", "boolean", "number", "string", "array", "object")


@dataclass(frozen=True, slots=True)
class Problem:
    """A keyword that cannot be enforced, or is invalid."""

    pointer: str
    why: str

    def __str__(self) -> str:
        return f"{self.pointer}: {self.why}"


class SchemaError(RequestError):
    """A refused schema; `problems` has every reason with its JSON pointer."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        listed = "; ".join(str(problem).rstrip(".") for problem in problems[:8])
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        super().__init__(f"The JSON Schema can't be enforced: {listed}{more}.", code="unsupported_schema")


@dataclass(slots=True, eq=False)
class Node:
    """One schema. Absent keywords are None or empty; `types` None allows any type."""

    pointer: str
    number: int = 0  # in document order
    never: bool = False  # the schema `false`
    types: frozenset[str] | None = None
    integer: bool = False  # of numbers, only integers
    values: list[Any] | None = None  # enum, const
    all_of: list[Node] = field(default_factory=list)  # and $ref
    any_of: list[list[Node]] = field(default_factory=list)
    one_of: list[list[Node]] = field(default_factory=list)
    not_: list[Node] = field(default_factory=list)
    if_: tuple[Node, Node | None, Node | None] | None = None
    low: Bound | None = None
    high: Bound | None = None
    multiple: Decimal | None = None
    min_length: int = 0
    max_length: int | None = None
    patterns: list[Language] = field(default_factory=list)  # pattern, format
    prefix: list[Node] = field(default_factory=list)
    items: Node | None = None
    contains: tuple[Node, int, int | None] | None = None
    min_items: int = 0
    max_items: int | None = None
    unique: bool = False
    properties: dict[str, Node] = field(default_factory=dict)
    pattern_properties: list[tuple[Language, Node]] = field(default_factory=list)
    additional: Node | None = None
    names: Node | None = None
    required: tuple[str, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None
    dependent_required: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dependent_schemas: dict[str, Node] = field(default_factory=dict)
    unevaluated_properties: Node | None = None  # `evaluated.py` turns both into ordinary schemas
    unevaluated_items: Node | None = None

    def unlink(self) -> None:
        """Drop the links to other schemas, which may lead back here."""
        self.all_of, self.any_of, self.one_of, self.not_ = [], [], [], []
        self.prefix, self.pattern_properties, self.properties, self.dependent_schemas = [], [], {}, {}
        self.if_ = self.items = self.contains = self.additional = self.names = None
        self.unevaluated_properties = self.unevaluated_items = None

    @property
    def is_any(self) -> bool:
        """Whether every value meets it."""
        return not (
            self.never or self.types is not None or self.values is not None or self.has_combinators or self.constrains
        )

    @property
    def has_combinators(self) -> bool:
        """Whether it is made of other schemas for the same value."""
        return bool(self.all_of or self.any_of or self.one_of or self.not_ or self.if_)

    @property
    def constrains(self) -> bool:
        """Whether it has a keyword for strings, numbers, arrays or objects."""
        return bool(
            self.low or self.high or self.multiple is not None or self.min_length or self.max_length is not None
        ) or bool(self.patterns or self.constrains_arrays or self.constrains_objects)

    @property
    def constrains_arrays(self) -> bool:
        """Whether it has a keyword for arrays."""
        return bool(self.prefix or self.items or self.contains or self.min_items or self.unique) or (
            self.max_items is not None
        )

    @property
    def constrains_objects(self) -> bool:
        """Whether it has a keyword for objects."""
        return bool(
            self.properties
            or self.pattern_properties
            or self.additional
            or self.names
            or self.required
            or self.min_properties
            or self.dependent_required
            or self.dependent_schemas
        ) or (self.max_properties is not None)
