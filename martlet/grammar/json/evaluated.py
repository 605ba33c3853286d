"""`unevaluatedProperties` and `unevaluatedItems` as ordinary schemas (see `schema_nodes.py`; read `algebra.py` next).

What counts as evaluated depends on which parts of a schema a value meets: of `anyOf`, `oneOf`, `if`, `dependentSchemas`.
So there are *ways*: parts that are met, with what these evaluate all together. The more is evaluated the less is asked of
the rest. A value is therefore good exactly if it is good in some way, and a schema becomes a choice of its ways, each with
the rest of its names or items as plain `additionalProperties` or `items`. Source: JSON Schema 2020-12, core, section 11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from martlet.grammar.json.schema_nodes import Node, Problem, SchemaError
from martlet.grammar.language import Language

__all__ = ["settle_unevaluated"]

MOST_WAYS = 64


@dataclass(frozen=True, slots=True)
class Seen:
    """What is evaluated: names, names of patterns; so many first items, items that a `contains` counts; or all."""

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
        """Whether all that `other` has is here."""
        return (self | other) == self


class Way(NamedTuple):
    """Schemas that are met (or not), and what is evaluated then."""

    conditions: frozenset[tuple[Node, bool]] = frozenset()
    seen: Seen = Seen()


class Ways:
    """Finds the ways of a document's nodes. `fresh` makes a node; `contains` is whether that keyword evaluates."""

    def __init__(self, fresh: Callable[[str], Node], contains: bool) -> None:
        self._fresh, self._contains = fresh, contains
        self._absent: dict[str, Node] = {}
        self._known: dict[Node, list[Way] | None] = {}  # None: under way

    def of(self, node: Node) -> list[Way]:
        """The ways of a schema that is met. SchemaError for one that is made of itself, or has too many."""
        known = self._known.get(node, [])
        if known is None:
            raise SchemaError([Problem(node.pointer, "is made of itself: what it evaluates has no end")])
        if known:
            return known
        self._known[node] = None
        found = [Way(seen=self._own(node))]
        for child in node.all_of:
            found = self._both(node, found, self.of(child))
        for options in node.any_of:
            for option in options:
                found = self._both(node, found, [Way(), *self._met(option)])
        for options in node.one_of:
            found = self._both(node, found, [Way(), *(way for option in options for way in self._met(option))])
        if node.if_ is not None:
            condition, then, otherwise = node.if_
            met = self._met(condition)
            if then is not None:
                met = self._both(node, met, self.of(then))
            unmet = [] if otherwise is None else [_on(way, (condition, False)) for way in self.of(otherwise)]
            found = self._both(node, found, [Way(), *met, *unmet])
        for name, child in node.dependent_schemas.items():
            there = [_on(way, (self._without(node, name), False)) for way in self._met(child)]
            found = self._both(node, found, [Way(), *there])
        self._known[node] = found
        return found

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
        """A schema of objects that do not have a name."""
        if name not in self._absent:
            made, nothing = self._fresh(node.pointer), self._fresh(node.pointer)
            nothing.never = True
            made.properties = {name: nothing}
            self._absent[name] = made
        return self._absent[name]

    def _both(self, node: Node, ways: Iterable[Way], others: list[Way]) -> list[Way]:
        """Every way of one kind with every way of the other; of those that ask for more and evaluate less, none."""
        joined = {Way(a.conditions | b.conditions, a.seen | b.seen): None for a in ways for b in others}
        if len(joined) > MOST_WAYS * MOST_WAYS:
            raise _too_many(node)
        found: list[Way] = []
        for way in sorted(joined, key=lambda way: len(way.conditions)):
            if not any(kept.conditions <= way.conditions and kept.seen.covers(way.seen) for kept in found):
                found.append(way)
        if len(found) > MOST_WAYS:
            raise _too_many(node)
        return found


def settle_unevaluated(nodes: Iterable[Node], fresh: Callable[[str], Node], contains: bool) -> list[Problem]:
    """Put ordinary schemas in the place of both keywords, wherever they are; returns what cannot be enforced."""
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
    for node, options in made:  # only now, so that no way sees what was made
        node.any_of.append(options)
    return problems


def _without_own(node: Node, fresh: Callable[[str], Node]) -> Node:
    """A node without the two keywords, which evaluate all that is left for those around it."""
    made = fresh(node.pointer)
    for name in ("all_of", "any_of", "one_of", "if_", "properties", "pattern_properties", "additional"):
        setattr(made, name, getattr(node, name))
    made.prefix, made.items, made.contains = node.prefix, node.items, node.contains
    made.dependent_schemas = node.dependent_schemas
    return made


def _option(way: Way, rest: Node, fresh: Callable[[str], Node]) -> Node:
    """A schema that is met in one way."""
    made = fresh(rest.pointer)
    ordered = sorted(way.conditions, key=lambda condition: (condition[0].number, condition[1]))
    made.all_of = [*(node for node, sign in ordered if sign), rest]
    made.not_ = [node for node, sign in ordered if not sign]
    return made


def _names(seen: Seen, rest: Node, fresh: Callable[[str], Node]) -> Node:
    """A schema of which all names but those evaluated meet `rest`."""
    made, anything = fresh(rest.pointer), fresh(rest.pointer)
    if not seen.all_names:
        made.properties = dict.fromkeys(sorted(seen.names), anything)
        made.pattern_properties = [(language, anything) for language in seen.patterns]
        made.additional = rest
    return made


def _items(seen: Seen, rest: Node, fresh: Callable[[str], Node]) -> Node:
    """A schema of which all items but those evaluated meet `rest`."""
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
