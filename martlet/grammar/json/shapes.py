"""Arrays and objects as alternatives, each a conjunction of positive demands (read `algebra.py` next).

A *goal* is a set of schemas, each to be met or not to be met, by one value: `(node, True)`, `(node, False)`. A form says
of an array or an object which goal each part of it has, what must be there, and how many. The negation of a form is a
choice of forms, so a schema becomes a list of forms whatever it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from martlet.grammar.json.schema_nodes import Node

__all__ = [
    "ANYTHING",
    "ArrayForm",
    "Contains",
    "Exists",
    "Literal",
    "Literals",
    "ObjectForm",
    "array_leaf",
    "object_leaf",
]

Literal = tuple[Node, bool]
Literals = frozenset[Literal]
ANYTHING: Literals = frozenset()


class Contains(NamedTuple):
    """From `low` to `high` items, of those from `start` on, meet a goal."""

    node: Node
    positive: bool
    start: int
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """`low` to `high` items: the first ones with goals of their own, all others with `rest`."""

    prefix: tuple[Literals, ...] = ()
    rest: Literals = ANYTHING
    low: int = 0
    high: int | None = None
    contains: frozenset[Contains] = frozenset()
    unique: str = ""  # the pointer of a schema that asks for different items

    def goal(self, index: int) -> Literals:
        """What the item at a place must meet."""
        return self.prefix[index] if index < len(self.prefix) else self.rest

    def __and__(self, other: ArrayForm) -> ArrayForm | None:
        n = max(len(self.prefix), len(other.prefix))
        high = _least(self.high, other.high)
        low = max(self.low, other.low)
        if high is not None and low > high:
            return None
        return ArrayForm(
            tuple(self.goal(i) | other.goal(i) for i in range(n)),
            self.rest | other.rest,
            low,
            high,
            self.contains | other.contains,
            self.unique or other.unique,
        )


class Exists(NamedTuple):
    """Some property that `part` puts in its class `where` (a pattern's number, None: the additional ones) meets a goal."""

    part: Node
    where: int | None
    value: Literals


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """Properties as each of `parts` says, those of `own` besides; `names` is a goal for all names."""

    parts: frozenset[Node] = frozenset()
    own: frozenset[tuple[str, Literal]] = frozenset()
    required: frozenset[str] = frozenset()
    low: int = 0
    high: int | None = None
    names: Literals = ANYTHING
    absent: frozenset[str] = frozenset()
    exists: frozenset[Exists] = frozenset()

    def __and__(self, other: ObjectForm) -> ObjectForm | None:
        required = self.required | other.required
        absent = self.absent | other.absent
        high = _least(self.high, other.high)
        low = max(self.low, other.low)
        if required & absent or (high is not None and max(low, len(required)) > high):
            return None
        return ObjectForm(
            self.parts | other.parts,
            self.own | other.own,
            required,
            low,
            high,
            self.names | other.names,
            absent,
            self.exists | other.exists,
        )


def _least(one: int | None, other: int | None) -> int | None:
    return other if one is None else (one if other is None else min(one, other))


def array_leaf(node: Node, positive: bool) -> list[ArrayForm]:
    """The arrays that a node's own keywords (but enum and const) allow, or those that they do not."""
    if positive:
        contains: set[Contains] = set()
        if node.contains is not None:
            inner, low, high = node.contains
            if high is not None and low > high:
                return []
            contains.add(Contains(inner, True, 0, low, high))
        prefix = tuple(_goal(item) for item in node.prefix)
        rest = ANYTHING if node.items is None else _goal(node.items)
        return [
            ArrayForm(
                prefix, rest, node.min_items, node.max_items, frozenset(contains), node.pointer if node.unique else ""
            )
        ]
    out: list[ArrayForm] = []
    if node.min_items:
        out.append(ArrayForm(high=node.min_items - 1))
    if node.max_items is not None:
        out.append(ArrayForm(low=node.max_items + 1))
    for i, item in enumerate(node.prefix):
        out.append(ArrayForm((ANYTHING,) * i + (frozenset({(item, False)}),), low=i + 1))
    if node.items is not None:
        start = len(node.prefix)
        if node.items.never:
            out.append(ArrayForm(low=start + 1))
        else:
            out.append(ArrayForm(contains=frozenset({Contains(node.items, False, start, 1, None)})))
    if node.contains is not None:
        inner, low, high = node.contains
        if low:
            out.append(ArrayForm(contains=frozenset({Contains(inner, True, 0, 0, low - 1)})))
        if high is not None:
            out.append(ArrayForm(contains=frozenset({Contains(inner, True, 0, high + 1, None)})))
    return out


def object_leaf(node: Node, positive: bool) -> list[ObjectForm]:
    """The objects that a node's own keywords (but enum and const) allow, or those that they do not."""
    if not positive:
        return _not_object(node)
    names = ANYTHING if node.names is None else frozenset({(node.names, True)})
    parts = frozenset({node} if node.properties or node.pattern_properties or node.additional else ())
    forms = [ObjectForm(parts, frozenset(), frozenset(node.required), node.min_properties, node.max_properties, names)]
    for name, others in node.dependent_required.items():
        with_it = [ObjectForm(required=frozenset({name, *others}))]
        forms = _either(forms, [*with_it, ObjectForm(absent=frozenset({name}))])
    return forms


def _either(forms: list[ObjectForm], options: list[ObjectForm]) -> list[ObjectForm]:
    return [joined for form in forms for option in options if (joined := form & option) is not None]


def _not_object(node: Node) -> list[ObjectForm]:
    out = [ObjectForm(absent=frozenset({name})) for name in node.required]
    if node.min_properties:
        out.append(ObjectForm(high=node.min_properties - 1))
    if node.max_properties is not None:
        out.append(ObjectForm(low=node.max_properties + 1))
    for name, value in node.properties.items():
        out.append(ObjectForm(own=frozenset({(name, (value, False))}), required=frozenset({name})))
    for number, (_, value) in enumerate(node.pattern_properties):
        out.append(ObjectForm(exists=frozenset({Exists(node, number, frozenset({(value, False)}))})))
    if node.additional is not None:
        out.append(ObjectForm(exists=frozenset({Exists(node, None, frozenset({(node.additional, False)}))})))
    for name, others in node.dependent_required.items():
        out += [ObjectForm(required=frozenset({name}), absent=frozenset({other})) for other in others if other != name]
    return out


def _goal(node: Node) -> Literals:
    return ANYTHING if node.is_any else frozenset({(node, True)})
