"""What a goal comes to: the scalars, arrays and objects that meet it, none of them impossible (read `writers.py` next).

Boolean schemas are pushed inwards until only keywords are left, met or not met: strings and numbers are sets with an exact
algebra (`sets.py`), arrays and objects are lists of forms (`shapes.py`). Children stay goals, and are worked out when they
are needed, so that recursion costs nothing.

A goal is *inhabited* if some finite value meets it: the least fixed point. While it is worked out, schemas that are being
worked out count as impossible; where only pruning is at stake, as possible.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from martlet.errors import RequestError
from martlet.grammar.json.loader import Loader
from martlet.grammar.json.schema_nodes import Node, Problem, SchemaError
from martlet.grammar.json.sets import ANY_TEXT, NO_TEXT, Texts, number_leaf, string_leaf
from martlet.grammar.json.shapes import (
    ANYTHING,
    ArrayForm,
    Exists,
    Literals,
    ObjectForm,
    array_leaf,
    object_leaf,
)
from martlet.grammar.json.values import WORDS, as_schema, kind_of, word_leaf
from martlet.grammar.numbers import Digits, number_language
from martlet.grammar.states import Limits

__all__ = ["Algebra", "Goal", "Kind", "RecursiveError", "Type"]

MOST_FORMS = 256


@dataclass(slots=True, eq=False)
class Goal:
    """A set of schemas that one value must meet or not meet; one object a set."""

    literals: Literals
    inhabited: bool | None = None  # None: not known yet
    type: Type | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Type:
    """The values that meet a goal: of `null`, `true` and `false` those in `words`; each form can be met."""

    words: frozenset[str]
    strings: Texts
    numbers: Texts
    arrays: tuple[ArrayForm, ...]
    objects: tuple[ObjectForm, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """The algebra of one kind of value."""

    name: str
    every: Any
    none: Any
    leaf: Callable[[Node, bool], Any]
    both: Callable[[Any, Any], Any]
    either: Callable[[Any, Any], Any]
    is_empty: Callable[[Any], bool]


class RecursiveError(Exception):
    """A schema was asked for what it allows while that was being worked out."""

    def __init__(self, node: Node) -> None:
        self.node = node
        super().__init__(node.pointer)


class Algebra:
    """Works out goals over the nodes of one loader."""

    def __init__(self, loader: Loader, digits: Digits, limits: Limits) -> None:
        self._loader, self._limits = loader, limits
        self.digits = digits
        self.deadline: float | None = None  # while a schema is compiled
        self._goals: dict[Literals, Goal] = {}
        self._known: dict[tuple[Node, bool, str], Any] = {}
        self._working: set[tuple[Node, bool, str]] = set()
        self._open: set[Goal] = set()
        self._assumed = False
        self._constants: dict[str, Node] = {}
        self._values: dict[int, list[tuple[str, Node]]] = {}
        self.array_possible: Callable[[ArrayForm, bool], bool] = lambda form, prune: True  # set by plans.py
        self.object_possible: Callable[[ObjectForm, bool], bool] = lambda form, prune: True
        self.values_of: Callable[[Goal], dict[bytes, Any] | None] = lambda goal: None
        every_number = Texts(None, number_language(integer=False, digits=digits))
        self._words = Kind("word", WORDS, frozenset(), word_leaf, frozenset.__and__, frozenset.__or__, _no_words)
        self._strings = Kind("string", ANY_TEXT, NO_TEXT, string_leaf, _text_and, _text_or, _no_text)
        leaf = partial(number_leaf, digits=digits)
        self._numbers = Kind("number", every_number, NO_TEXT, leaf, _text_and, _text_or, _no_text)
        self._arrays = Kind("array", (ArrayForm(),), (), self._array_leaf, self._array_both, _joined, _no_forms)
        self._objects = Kind("object", (ObjectForm(),), (), self._object_leaf, self._object_both, _joined, _no_forms)

    # -- goals -----------------------------------------------------------------------------------------------------
    def goal(self, literals: Iterable[tuple[Node, bool]]) -> Goal:
        """The goal of a set of schemas."""
        literals = frozenset((node, sign) for node, sign in literals if not (sign and node.is_any))
        found = self._goals.get(literals)
        if found is None:
            if len(self._goals) > self._limits.nodes:
                raise self.too_much(f"more than {self._limits.nodes:,} combinations of schemas")
            found = self._goals[literals] = Goal(literals)
        return found

    def type_of(self, goal: Goal) -> Type:
        """All values that meet a goal, forms that can't be met left out."""
        if goal.type is None:
            goal.type = Type(
                self._all(goal, self._words),
                self._all(goal, self._strings),
                self._all(goal, self._numbers),
                tuple(form for form in self._all(goal, self._arrays) if self.array_possible(form, False)),
                tuple(form for form in self._all(goal, self._objects) if self.object_possible(form, False)),
            )
        return goal.type

    def constant(self, value: Any) -> Node:
        """The schema of one value."""
        text = json.dumps(value)
        if text not in self._constants:
            self._constants[text] = self._loader.made_up({"const": value}, "#")
        return self._constants[text]

    def strings_of(self, goal: Goal) -> Texts:
        """The strings that meet a goal."""
        found: Texts = self._all(goal, self._strings)
        return found

    def inhabited(self, goal: Goal, prune: bool = False) -> bool:
        """Whether some value meets a goal; with `prune`, False only if that is certain already."""
        if goal.inhabited is not None:
            return goal.inhabited
        if goal in self._open:
            self._assumed = True
            return prune
        self._check_time()
        self._open.add(goal)
        before, self._assumed = self._assumed, False
        try:
            found = self._some(goal, prune)
        except RecursiveError:
            if not prune:
                raise
            found, self._assumed = True, True
        finally:
            self._open.discard(goal)
        if not self._assumed or (found and not prune) or (not prune and not self._open):
            goal.inhabited = found
        self._assumed = before or self._assumed
        return found

    def _some(self, goal: Goal, prune: bool) -> bool:
        for kind in (self._words, self._strings, self._numbers):
            if not kind.is_empty(self._all(goal, kind)):
                return True
        return any(self.array_possible(form, prune) for form in self._all(goal, self._arrays)) or any(
            self.object_possible(form, prune) for form in self._all(goal, self._objects)
        )

    def _all(self, goal: Goal, kind: Kind) -> Any:
        return self._every(sorted(goal.literals, key=lambda literal: (literal[0].number, literal[1])), kind)

    # -- schemas ---------------------------------------------------------------------------------------------------
    def evaluate(self, node: Node, positive: bool, kind: Kind) -> Any:
        """The values of a kind that meet a schema, or those that do not."""
        key = (node, positive, kind.name)
        if key in self._known:
            return self._known[key]
        if key in self._working:
            raise RecursiveError(node)
        self._check_time()
        self._working.add(key)
        try:
            found = self._positive(node, kind) if positive else self._negative(node, kind)
        except SchemaError:
            raise
        except RequestError as error:
            raise SchemaError([Problem(node.pointer, str(error))]) from None
        finally:
            self._working.discard(key)
        if kind.name in ("array", "object") and len(found) > MOST_FORMS:
            raise SchemaError([Problem(node.pointer, f"comes to more than {MOST_FORMS} alternatives")])
        self._known[key] = found
        return found

    def _positive(self, node: Node, kind: Kind) -> Any:
        found = kind.leaf(node, True)
        if not node.has_combinators:
            return found
        for part in self._demands(node, kind):
            if kind.is_empty(found):
                break
            found = kind.both(found, part())
        return found

    def _demands(self, node: Node, kind: Kind) -> Iterable[Callable[[], Any]]:
        """The combinators of a schema, each to be met."""
        for child in node.all_of:
            yield partial(self.evaluate, child, True, kind)
        for options in node.any_of:
            yield partial(self._any, [(option, True) for option in options], kind)
        for options in node.one_of:
            yield partial(self._exactly_one, options, kind)
        for child in node.not_:
            yield partial(self.evaluate, child, False, kind)
        if node.if_ is not None:
            yield partial(self._conditional, node.if_, True, kind)

    def _negative(self, node: Node, kind: Kind) -> Any:
        found = kind.leaf(node, False)
        for child in node.all_of:
            found = kind.either(found, self.evaluate(child, False, kind))
        for options in node.any_of:
            found = kind.either(found, self._every([(option, False) for option in options], kind))
        for options in node.one_of:
            found = kind.either(found, self._not_one(options, kind))
        for child in node.not_:
            found = kind.either(found, self.evaluate(child, True, kind))
        if node.if_ is not None:
            found = kind.either(found, self._conditional(node.if_, False, kind))
        return found

    def _any(self, literals: list[tuple[Node, bool]], kind: Kind) -> Any:
        found = kind.none
        for node, sign in literals:
            found = kind.either(found, self.evaluate(node, sign, kind))
        return found

    def _every(self, literals: list[tuple[Node, bool]], kind: Kind) -> Any:
        found = self.evaluate(*literals[0], kind) if literals else kind.every
        for node, sign in literals[1:]:
            if kind.is_empty(found):
                break
            found = kind.both(found, self.evaluate(node, sign, kind))
        return found

    def _exactly_one(self, options: list[Node], kind: Kind) -> Any:
        """Options that share no value are simply either; only of the others is it asked that they are not met."""
        sets = [self.evaluate(option, True, kind) for option in options]
        found = kind.none
        for i, own in enumerate(sets):
            for j, other in enumerate(sets):
                if kind.is_empty(own):
                    break
                if i != j and not kind.is_empty(other) and not kind.is_empty(kind.both(own, other)):
                    own = kind.both(own, self.evaluate(options[j], False, kind))
            found = kind.either(found, own)
        return found

    def _not_one(self, options: list[Node], kind: Kind) -> Any:
        found = self._every([(option, False) for option in options], kind)
        for i, one in enumerate(options):
            for other in options[:i]:
                found = kind.either(found, self._every([(one, True), (other, True)], kind))
        return found

    def _conditional(self, parts: tuple[Node, Node | None, Node | None], positive: bool, kind: Kind) -> Any:
        condition, then, otherwise = parts
        found = kind.none
        for sign, branch in ((True, then), (False, otherwise)):
            if branch is None and not positive:
                continue
            literals = [(condition, sign)] + ([] if branch is None else [(branch, positive)])
            found = kind.either(found, self._every(literals, kind))
        return found

    # -- arrays and objects ----------------------------------------------------------------------------------------
    def _array_both(self, one: tuple[ArrayForm, ...], other: tuple[ArrayForm, ...]) -> tuple[ArrayForm, ...]:
        if one == self._arrays.every or other == self._arrays.every:
            return other if one == self._arrays.every else one
        joined = (a & b for a in one for b in other)
        return _distinct(form for form in joined if form is not None and self.array_possible(form, True))

    def _object_both(self, one: tuple[ObjectForm, ...], other: tuple[ObjectForm, ...]) -> tuple[ObjectForm, ...]:
        if one == self._objects.every or other == self._objects.every:
            return other if one == self._objects.every else one
        if len(one) * len(other) > MOST_FORMS * MOST_FORMS:
            raise self.too_much(f"more than {MOST_FORMS} alternatives of objects, squared")
        found: dict[ObjectForm, None] = {}
        for a in one:
            self._check_time()
            for b in other:
                form = a & b
                if form is not None and form not in found and self.object_possible(form, True):
                    found[form] = None
            if len(found) > MOST_FORMS * 4:
                raise self.too_much(f"more than {MOST_FORMS * 4:,} alternatives of one object")
        return tuple(found)

    def _array_leaf(self, node: Node, positive: bool) -> tuple[ArrayForm, ...]:
        if node.never or (node.types is not None and "array" not in node.types):
            return () if positive else self._arrays.every
        own = tuple(array_leaf(node, positive))
        if node.values is None:
            return own
        return tuple(self._with_values(node, positive, own, self._arrays))

    def _object_leaf(self, node: Node, positive: bool) -> tuple[ObjectForm, ...]:
        if node.never or (node.types is not None and "object" not in node.types):
            return () if positive else self._objects.every
        kind, own = self._objects, tuple(object_leaf(node, positive))
        for name, child in node.dependent_schemas.items():
            has = (ObjectForm(required=frozenset({name})),)
            there = kind.both(has, self.evaluate(child, positive, kind))
            if positive:
                own = kind.both(own, kind.either((ObjectForm(absent=frozenset({name})),), there))
            else:
                own = kind.either(own, there)
        if node.names is not None and not positive:
            other = (~self.strings_of(self.goal([(node.names, True)]))).as_language()
            part = Node(f"{node.pointer}/propertyNames", node.names.number)
            part.pattern_properties = [(other, Node(part.pointer, part.number))]
            own = (*own, ObjectForm(exists=frozenset({Exists(part, 0, ANYTHING)})))
        if node.values is None:
            return own
        return tuple(self._with_values(node, positive, own, kind))

    def _with_values(self, node: Node, positive: bool, own: Any, kind: Kind) -> Any:
        """Join a schema's own forms with those of its enum's arrays or objects."""
        if id(node) not in self._values:
            assert node.values is not None
            self._values[id(node)] = [
                (kind_of(value), self._loader.made_up(as_schema(value), node.pointer))
                for value in node.values
                if isinstance(value, list | dict)
            ]
        named = [(child, positive) for name, child in self._values[id(node)] if name == kind.name]
        if positive:
            return kind.both(own, self._any(named, kind))
        return kind.either(own, self._every(named, kind))

    def forget(self) -> None:
        """Let go of everything, of the document as well; nothing of it may be used any more."""
        for goal in self._goals.values():
            goal.type = None
        self._loader.forget()
        self.__dict__.clear()

    def _check_time(self) -> None:
        if self.deadline is not None and time.thread_time() > self.deadline:
            raise self.too_much(f"more than {self._limits.seconds:g} s of work")

    def too_much(self, what: str) -> SchemaError:
        """The refusal of a schema that takes too much to work out."""
        return SchemaError([Problem("#", f"the schema takes {what}; make it simpler")])


def _text_and(one: Texts, other: Texts) -> Texts:
    return one & other


def _text_or(one: Texts, other: Texts) -> Texts:
    return one | other


def _no_text(texts: Texts) -> bool:
    return texts.is_empty


def _no_words(words: frozenset[str]) -> bool:
    return not words


def _no_forms(forms: tuple[Any, ...]) -> bool:
    return not forms


def _joined(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    return _distinct((*one, *other))


def _distinct(forms: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(forms))
