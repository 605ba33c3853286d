"""`unevaluatedProperties` and `unevaluatedItems` as ordinary schemas.

What counts as evaluated depends on which subschemas of `anyOf`, `oneOf`, `if` and
`dependentSchemas` a value meets. A *way* is a set of subschemas that are met, with all that they
evaluate. The more is evaluated, the less is asked of the rest. So a value is valid exactly if it is
valid in some way, and a schema becomes a choice of its ways, each with the rest of its names or
items as plain `additionalProperties` or `items`. Source: JSON Schema 2020-12, core, section 11. See
`schema_nodes.py`; read `sets.py` next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from martlet.grammar.json.schema_nodes import Node, Problem, SchemaError
from martlet.grammar.language import Language

MOST_WAYS = 64


@dataclass(frozen=True, slots=True)
class Seen:
    """What is evaluated: names, patterns of names, `n_items` first items, items of a `contains`.

    `all_names` and `all_items` stand for everything.
    """

    names: frozenset[str] = frozenset()
    patterns: frozenset[Language] = frozenset()
    all_names: bool = False
    n_items: int = 0
    contained: frozenset[Node] = frozenset()
    all_items: bool = False

    def __or__(self, other: Seen) -> Seen:
        return Seen(
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_names or other.all_names,
            max(self.n_items, other.n_items),
            self.contained | other.contained,
            self.all_items or other.all_items,
        )

    def covers(self, other: Seen) -> bool:
        """Whether everything in `other` is here."""
        return (self | other) == self


class Way(NamedTuple):
    """Schemas that are met or not met, and what is evaluated then."""

    conditions: frozenset[tuple[Node, bool]] = frozenset()
    seen: Seen = Seen()


class Ways:
    """Finds the ways of a document's nodes.

    `fresh` makes a node; `contains`: that keyword evaluates.
    """

    def __init__(self, fresh: Callable[[str], Node], contains: bool) -> None:
        self._fresh, self._contains = fresh, contains
        self._absent: dict[str, Node] = {}
        self._known: dict[Node, list[Way] | None] = {}  # None: under way

    def of(self, node: Node) -> list[Way]:
        """The ways to meet a schema.

        SchemaError for a schema made of itself, or with too many ways.
        """
        known = self._known.get(node, [])
        if known is None:
            raise SchemaError([Problem(node.pointer, "is made of itself: what it evaluates has no end")])
        if known:
            return known
        self._known[node] = None
        ways = [Way(seen=self._own(node))]
        for child in node.all_of:
            ways = self._both(node, ways, self.of(child))
        for options in node.any_of:
            for option in options:
                ways = self._both(node, ways, [Way(), *self._met(option)])
        for options in node.one_of:
            ways = self._both(node, ways, [Way(), *(way for option in options for way in self._met(option))])
        if node.if_ is not None:
            condition, then, otherwise = node.if_
            met = self._met(condition)
            if then is not None:
                met = self._both(node, met, self.of(then))
            unmet = [] if otherwise is None else [_on(way, (condition, False)) for way in self.of(otherwise)]
            ways = self._both(node, ways, [Way(), *met, *unmet])
        for name, child in node.dependent_schemas.items():
            there = [_on(way, (self._without(node, name), False)) for way in self._met(child)]
            ways = self._both(node, ways, [Way(), *there])
        self._known[node] = ways
        return ways

    def _own(self, node: Node) -> Seen:
        """What a schema's own keywords evaluate."""
        return Seen(
            frozenset(node.properties),
            frozenset(language for language, _ in node.pattern_properties),
            node.additional is not None or node.unevaluated_properties is not None,
            len(node.prefix),
            frozenset((node.contains[0],) if node.contains is not None and self._contains else ()),
            node.items is not None or node.unevaluated_items is not None,
        )

    def _met(self, node: Node) -> list[Way]:
        return [_on(way, (node, True)) for way in self.of(node)]

    def _without(self, node: Node, name: str) -> Node:
        """A schema of objects without a name."""
        if name not in self._absent:
            made, nothing = self._fresh(node.pointer), self._fresh(node.pointer)
            nothing.never = True
            made.properties = {name: nothing}
            self._absent[name] = made
        return self._absent[name]

    def _both(self, node: Node, ways: Iterable[Way], others: list[Way]) -> list[Way]:
        """Every way of one list with every way of the other, without ways that others cover."""
        joined = {Way(a.conditions | b.conditions, a.seen | b.seen): None for a in ways for b in others}
        if len(joined) > MOST_WAYS * MOST_WAYS:
            raise _too_many(node)
        minimal: list[Way] = []
        for way in sorted(joined, key=lambda way: len(way.conditions)):
            if not any(kept.conditions <= way.conditions and kept.seen.covers(way.seen) for kept in minimal):
                minimal.append(way)
        if len(minimal) > MOST_WAYS:
            raise _too_many(node)
        return minimal


def settle_unevaluated(nodes: Iterable[Node], fresh: Callable[[str], Node], contains: bool) -> list[Problem]:
    """Replace both keywords by ordinary schemas, wherever they are.

    Returns what cannot be enforced.
    """
    problems: list[Problem] = []
    made: list[tuple[Node, list[Node]]] = []
    for node in nodes:
        for key, rest in (
            ("unevaluatedProperties", node.unevaluated_properties),
            ("unevaluatedItems", node.unevaluated_items),
        ):
            if rest is None or rest.is_any:
                continue
            try:
                ways = Ways(fresh, contains).of(_without_own(node, fresh))
            except SchemaError as error:
                problems += [Problem(f"{node.pointer}/{key}", problem.why) for problem in error.problems]
                continue
            ending = _names if key == "unevaluatedProperties" else _items
            made.append((node, [_option(way, ending(way.seen, rest, fresh), fresh) for way in ways]))
    for node, options in made:  # only now, so that no way sees the new options
        node.any_of.append(options)
    return problems


def _without_own(node: Node, fresh: Callable[[str], Node]) -> Node:
    """A node without the two keywords, which would evaluate everything that is left."""
    made = fresh(node.pointer)
    for name in ("all_of", "any_of", "one_of", "if_", "properties", "pattern_properties", "additional"):
        setattr(made, name, getattr(node, name))
    made.prefix, made.items, made.contains = node.prefix, node.items, node.contains
    made.dependent_schemas = node.dependent_schemas
    return made


def _option(way: Way, rest: Node, fresh: Callable[[str], Node]) -> Node:
    """A schema that is met in exactly one way."""
    made = fresh(rest.pointer)
    ordered = sorted(way.conditions, key=lambda condition: (condition[0].number, condition[1]))
    made.all_of = [*(node for node, sign in ordered if sign), rest]
    made.not_ = [node for node, sign in ordered if not sign]
    return made


def _names(seen: Seen, rest: Node, fresh: Callable[[str], Node]) -> Node:
    """A schema whose unevaluated names meet `rest`."""
    made, anything = fresh(rest.pointer), fresh(rest.pointer)
    if not seen.all_names:
        made.properties = dict.fromkeys(sorted(seen.names), anything)
        made.pattern_properties = [(language, anything) for language in seen.patterns]
        made.additional = rest
    return made


def _items(seen: Seen, rest: Node, fresh: Callable[[str], Node]) -> Node:
    """A schema whose unevaluated items meet `rest`."""
    made, anything = fresh(rest.pointer), fresh(rest.pointer)
    if seen.all_items:
        return made
    made.prefix = [anything] * seen.n_items
    made.items = rest
    if seen.contained:
        made.items = fresh(rest.pointer)
        made.items.any_of = [[rest, *sorted(seen.contained, key=lambda node: node.number)]]
    return made


def _on(way: Way, condition: tuple[Node, bool]) -> Way:
    return Way(way.conditions | {condition}, way.seen)


def _too_many(node: Node) -> SchemaError:
    return SchemaError([Problem(node.pointer, f"depends on more than {MOST_WAYS} combinations of other keywords")])
