"""Arrays and objects as alternatives, each a conjunction of positive demands.

A *literal* is a schema that a value must meet, `(node, True)`, or must not meet, `(node, False)`; a
*goal* is a set of literals for one value. A *form* gives the goal of every element or property of a
container, the names it must have, and how many there may be. The negation of a form is a choice of
forms, so every schema becomes a list of forms. Read `algebra.py` next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from martlet.grammar.json.schema_nodes import Node

Literal = tuple[Node, bool]
Literals = frozenset[Literal]
ANYTHING: Literals = frozenset()


class Contains(NamedTuple):
    """From `low` to `high` of the elements at `start` and after meet a literal."""

    node: Node
    positive: bool
    start: int
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """Arrays of `low` to `high` elements: first goals in `prefix`, `rest` for all others."""

    prefix: tuple[Literals, ...] = ()
    rest: Literals = ANYTHING
    low: int = 0
    high: int | None = None
    contains: frozenset[Contains] = frozenset()
    unique: str = ""  # the pointer of a schema that asks for different elements

    def goal(self, index: int) -> Literals:
        """What the element at an index must meet."""
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
    """Some property that matches a pattern of `node`, or an additional property, meets `value`."""

    node: Node
    pattern: int | None  # the pattern's number; None: the additional properties
    value: Literals


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """Objects whose properties meet every schema of `nodes` and the literals in `own`.

    `names` is the goal of all names.
    """

    nodes: frozenset[Node] = frozenset()
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
            self.nodes | other.nodes,
            self.own | other.own,
            required,
            low,
            high,
            self.names | other.names,
            absent,
            self.exists | other.exists,
        )


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else (a if b is None else min(a, b))


def array_leaf(node: Node, positive: bool) -> list[ArrayForm]:
    """The arrays that a node's own keywords allow, or those they exclude.

    `Algebra.join_enum` adds enum and const.
    """
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
    """The objects that a node's own keywords allow, or those they exclude.

    `Algebra.join_enum` adds enum and const.
    """
    if not positive:
        return _not_object(node)
    names = ANYTHING if node.names is None else frozenset({(node.names, True)})
    nodes = frozenset({node} if node.properties or node.pattern_properties or node.additional else ())
    forms = [ObjectForm(nodes, frozenset(), frozenset(node.required), node.min_properties, node.max_properties, names)]
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
