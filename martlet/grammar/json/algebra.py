"""What a goal comes to: the values that meet it, by domain, with every impossible form left out.

Boolean schemas are pushed inwards until only keywords are left, each met or not met. Strings and
numbers are sets with an exact algebra (`sets.py`); arrays and objects are lists of forms
(`shapes.py`). Children stay goals and are worked out when they are needed, so a recursive schema
costs no more than its nodes.

A goal is *inhabited* if some finite value meets it: the least fixed point. While it is worked out,
goals in progress count as impossible; where only pruning is at stake, they count as possible.
Read `writers.py` next, which completes the class `Algebra`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from martlet.errors import RequestError
from martlet.grammar.json.loader import Loader
from martlet.grammar.json.schema_nodes import Node, Problem, SchemaError
from martlet.grammar.json.sets import ANY_TEXT, NO_TEXT, WORDS, Texts, number_leaf, string_leaf, word_leaf
from martlet.grammar.json.shapes import ANYTHING, ArrayForm, Exists, Literals, ObjectForm, array_leaf, object_leaf
from martlet.grammar.numbers import Digits, number_language
from martlet.grammar.states import Limits

MOST_FORMS = 256


@dataclass(slots=True, eq=False)
class Goal:
    """A set of schemas that one value must meet or not meet; equal sets share one object."""

    literals: Literals
    inhabited: bool | None = None  # None: not known yet
    values: ValueSet | None = None  # filled by `Algebra.value_set`


@dataclass(frozen=True, slots=True, eq=False)
class ValueSet:
    """The values that meet a goal; `words` are `null`, `true`, `false`. Every form can be met."""

    words: frozenset[str]
    strings: Texts
    numbers: Texts
    arrays: tuple[ArrayForm, ...]
    objects: tuple[ObjectForm, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Domain:
    """The Boolean algebra of one JSON type: sets of words, of texts, or tuples of forms."""

    name: str
    everything: Any
    nothing: Any
    leaf: Callable[[Algebra, Node, bool], Any]  # what a node's own keywords allow, or exclude
    intersect: Callable[[Algebra, Any, Any], Any]
    unite: Callable[[Any, Any], Any]
    is_empty: Callable[[Any], bool]


class RecursiveError(Exception):
    """A schema was asked for what it allows while that was being worked out."""

    def __init__(self, node: Node) -> None:
        self.node = node
        super().__init__(node.pointer)


class Algebra:
    """Works out goals over the nodes of one loader.

    Whether a form can be met depends on how it is written; `writers.py` answers that in a subclass.
    """

    def __init__(self, loader: Loader, digits: Digits, limits: Limits) -> None:
        self._loader, self._limits = loader, limits
        self.digits = digits
        self._deadline: float | None = None  # while a schema is compiled
        self._goals: dict[Literals, Goal] = {}
        self._known: dict[tuple[Node, bool, str], Any] = {}
        self._working: set[tuple[Node, bool, str]] = set()
        self._open: set[Goal] = set()
        self._assumed = False
        self._constants: dict[str, Node] = {}
        self._containers: dict[Node, list[tuple[type, Node]]] = {}  # of an enum: arrays and objects
        every_number = Texts(None, number_language(integer=False, digits=digits))
        self._numbers = Domain(
            "number", every_number, NO_TEXT, _number_leaf, _intersect_sets, Texts.__or__, _is_empty_text
        )

    def array_possible(self, form: ArrayForm, prune: bool) -> bool:
        """Whether some array meets a form; with `prune`, False only if that is certain already."""
        raise NotImplementedError

    def object_possible(self, form: ObjectForm, prune: bool) -> bool:
        """Whether some object meets a form; with `prune`, False only if that is certain already."""
        raise NotImplementedError

    def list_values(self, goal: Goal) -> dict[bytes, Any] | None:
        """All values of a goal by key; None if there are many, or that is unknown."""
        raise NotImplementedError

    def release(self) -> None:
        """Cut the cycles of recursive schemas; no goal may be worked out afterwards."""
        self._loader.release()

    # -- goals -------------------------------------------------------------------------------------
    def goal(self, literals: Iterable[tuple[Node, bool]]) -> Goal:
        """The goal of a set of schemas. SchemaError if the schema has too many of them."""
        literals = frozenset((node, sign) for node, sign in literals if not (sign and node.is_any))
        goal = self._goals.get(literals)
        if goal is None:
            if len(self._goals) > self._limits.nodes:
                raise self.too_much(f"more than {self._limits.nodes:,} combinations of schemas")
            goal = self._goals[literals] = Goal(literals)
        return goal

    def value_set(self, goal: Goal) -> ValueSet:
        """All values that meet a goal, without forms that cannot be met."""
        if goal.values is None:
            goal.values = ValueSet(
                self._all(goal, WORD_DOMAIN),
                self._all(goal, STRING_DOMAIN),
                self._all(goal, self._numbers),
                tuple(form for form in self._all(goal, ARRAY_DOMAIN) if self.array_possible(form, False)),
                tuple(form for form in self._all(goal, OBJECT_DOMAIN) if self.object_possible(form, False)),
            )
        return goal.values

    def constant(self, value: Any) -> Node:
        """The schema of exactly one value."""
        text = json.dumps(value)
        if text not in self._constants:
            self._constants[text] = self._loader.made_up({"const": value}, "#")
        return self._constants[text]

    def strings_of(self, goal: Goal) -> Texts:
        """The strings that meet a goal."""
        texts: Texts = self._all(goal, STRING_DOMAIN)
        return texts

    def inhabited(self, goal: Goal, prune: bool = False) -> bool:
        """Whether some value meets a goal; with `prune`, False only if that is certain already."""
        if goal.inhabited is not None:
            return goal.inhabited
        if goal in self._open:
            self._assumed = True
            return prune
        self.check_time()
        self._open.add(goal)
        before, self._assumed = self._assumed, False
        try:
            answer = self._some(goal, prune)
        except RecursiveError:
            if not prune:
                raise
            answer, self._assumed = True, True
        finally:
            self._open.discard(goal)
        if not self._assumed or (answer and not prune) or (not prune and not self._open):
            goal.inhabited = answer
        self._assumed = before or self._assumed
        return answer

    def _some(self, goal: Goal, prune: bool) -> bool:
        for domain in (WORD_DOMAIN, STRING_DOMAIN, self._numbers):
            if not domain.is_empty(self._all(goal, domain)):
                return True
        return any(self.array_possible(form, prune) for form in self._all(goal, ARRAY_DOMAIN)) or any(
            self.object_possible(form, prune) for form in self._all(goal, OBJECT_DOMAIN)
        )

    def _all(self, goal: Goal, domain: Domain) -> Any:
        return self._every(sorted(goal.literals, key=lambda literal: (literal[0].number, literal[1])), domain)

    # -- schemas -----------------------------------------------------------------------------------
    def evaluate(self, node: Node, positive: bool, domain: Domain) -> Any:
        """The values of a domain that meet a schema, or fail it.

        Raises RecursiveError, and SchemaError beyond the time limit.
        """
        key = (node, positive, domain.name)
        if key in self._known:
            return self._known[key]
        if key in self._working:
            raise RecursiveError(node)
        self.check_time()
        self._working.add(key)
        try:
            values = self._positive(node, domain) if positive else self._negative(node, domain)
        except SchemaError:
            raise
        except RequestError as error:
            raise SchemaError([Problem(node.pointer, str(error))]) from None
        finally:
            self._working.discard(key)
        if domain in (ARRAY_DOMAIN, OBJECT_DOMAIN) and len(values) > MOST_FORMS:
            raise SchemaError([Problem(node.pointer, f"comes to more than {MOST_FORMS} alternatives")])
        self._known[key] = values
        return values

    def _positive(self, node: Node, domain: Domain) -> Any:
        values = domain.leaf(self, node, True)
        if not node.has_combinators:
            return values
        for demand in self._demands(node, domain):
            if domain.is_empty(values):
                break
            values = domain.intersect(self, values, demand())
        return values

    def _demands(self, node: Node, domain: Domain) -> Iterable[Callable[[], Any]]:
        """The combinators of a schema, each to be met."""
        for child in node.all_of:
            yield partial(self.evaluate, child, True, domain)
        for options in node.any_of:
            yield partial(self.any_of, [(option, True) for option in options], domain)
        for options in node.one_of:
            yield partial(self._one_of, options, domain)
        for child in node.not_:
            yield partial(self.evaluate, child, False, domain)
        if node.if_ is not None:
            yield partial(self._conditional, node.if_, True, domain)

    def _negative(self, node: Node, domain: Domain) -> Any:
        values = domain.leaf(self, node, False)
        for child in node.all_of:
            values = domain.unite(values, self.evaluate(child, False, domain))
        for options in node.any_of:
            values = domain.unite(values, self._every([(option, False) for option in options], domain))
        for options in node.one_of:
            values = domain.unite(values, self._not_one_of(options, domain))
        for child in node.not_:
            values = domain.unite(values, self.evaluate(child, True, domain))
        if node.if_ is not None:
            values = domain.unite(values, self._conditional(node.if_, False, domain))
        return values

    def any_of(self, literals: Iterable[tuple[Node, bool]], domain: Domain) -> Any:
        """The values of a domain that meet at least one literal."""
        values = domain.nothing
        for node, sign in literals:
            values = domain.unite(values, self.evaluate(node, sign, domain))
        return values

    def _every(self, literals: list[tuple[Node, bool]], domain: Domain) -> Any:
        values = self.evaluate(*literals[0], domain) if literals else domain.everything
        for node, sign in literals[1:]:
            if domain.is_empty(values):
                break
            values = domain.intersect(self, values, self.evaluate(node, sign, domain))
        return values

    def _one_of(self, options: list[Node], domain: Domain) -> Any:
        """Disjoint options are simply united; only an overlapping option is asked not to be met."""
        sets = [self.evaluate(option, True, domain) for option in options]
        values = domain.nothing
        for i, own in enumerate(sets):
            for j, other in enumerate(sets):
                if domain.is_empty(own):
                    break
                if i != j and not domain.is_empty(other) and not domain.is_empty(domain.intersect(self, own, other)):
                    own = domain.intersect(self, own, self.evaluate(options[j], False, domain))
            values = domain.unite(values, own)
        return values

    def _not_one_of(self, options: list[Node], domain: Domain) -> Any:
        values = self._every([(option, False) for option in options], domain)
        for i, option in enumerate(options):
            for other in options[:i]:
                values = domain.unite(values, self._every([(option, True), (other, True)], domain))
        return values

    def _conditional(self, if_: tuple[Node, Node | None, Node | None], positive: bool, domain: Domain) -> Any:
        condition, then, otherwise = if_
        values = domain.nothing
        for sign, branch in ((True, then), (False, otherwise)):
            if branch is None and not positive:
                continue
            literals = [(condition, sign)] + ([] if branch is None else [(branch, positive)])
            values = domain.unite(values, self._every(literals, domain))
        return values

    def join_enum(self, node: Node, positive: bool, own: Any, domain: Domain) -> Any:
        """Join a schema's own forms with the forms of the arrays or objects in its enum."""
        if node.values is None:
            return own
        if node not in self._containers:
            self._containers[node] = [
                (type(value), self._loader.made_up(_as_schema(value), node.pointer))
                for value in node.values
                if isinstance(value, list | dict)
            ]
        wanted = list if domain is ARRAY_DOMAIN else dict
        constants = [(child, positive) for json_type, child in self._containers[node] if json_type is wanted]
        if positive:
            return domain.intersect(self, own, self.any_of(constants, domain))
        return domain.unite(own, self._every(constants, domain))

    # -- bounds on the work ------------------------------------------------------------------------
    @contextmanager
    def within_time(self) -> Iterator[None]:
        """Refuse, with SchemaError, what takes more processor time than the limits allow."""
        self._deadline = time.thread_time() + self._limits.seconds
        try:
            yield
        finally:
            self._deadline = None

    def check_time(self) -> None:
        """SchemaError where the time is up."""
        if self._deadline is not None and time.thread_time() > self._deadline:
            raise self.too_much(f"more than {self._limits.seconds:g} s of work")

    def too_much(self, what: str) -> SchemaError:
        """The refusal of a schema that takes too much to work out."""
        return SchemaError([Problem("#", f"the schema takes {what}; make it simpler")])


# -- the domains -----------------------------------------------------------------------------------
def _word_leaf(algebra: Algebra, node: Node, positive: bool) -> frozenset[str]:
    return word_leaf(node, positive)


def _string_leaf(algebra: Algebra, node: Node, positive: bool) -> Texts:
    return string_leaf(node, positive)


def _number_leaf(algebra: Algebra, node: Node, positive: bool) -> Texts:
    return number_leaf(node, positive, algebra.digits)


def _array_leaf(algebra: Algebra, node: Node, positive: bool) -> tuple[ArrayForm, ...]:
    if node.never or (node.types is not None and "array" not in node.types):
        return () if positive else ANY_ARRAY
    forms: tuple[ArrayForm, ...] = algebra.join_enum(node, positive, tuple(array_leaf(node, positive)), ARRAY_DOMAIN)
    return forms


def _object_leaf(algebra: Algebra, node: Node, positive: bool) -> tuple[ObjectForm, ...]:
    if node.never or (node.types is not None and "object" not in node.types):
        return () if positive else ANY_OBJECT
    own = tuple(object_leaf(node, positive))
    for name, child in node.dependent_schemas.items():
        with_name = (ObjectForm(required=frozenset({name})),)
        dependent = _intersect_objects(algebra, with_name, algebra.evaluate(child, positive, OBJECT_DOMAIN))
        if positive:
            without_name = (ObjectForm(absent=frozenset({name})),)
            own = _intersect_objects(algebra, own, _unite_forms(without_name, dependent))
        else:
            own = _unite_forms(own, dependent)
    if node.names is not None and not positive:
        forbidden = (~algebra.strings_of(algebra.goal([(node.names, True)]))).as_language()
        bad_names = Node(f"{node.pointer}/propertyNames", node.names.number)
        bad_names.pattern_properties = [(forbidden, Node(bad_names.pointer, bad_names.number))]
        own = (*own, ObjectForm(exists=frozenset({Exists(bad_names, 0, ANYTHING)})))
    forms: tuple[ObjectForm, ...] = algebra.join_enum(node, positive, own, OBJECT_DOMAIN)
    return forms


def _intersect_sets(algebra: Algebra, left: Any, right: Any) -> Any:
    return left & right


def _intersect_arrays(
    algebra: Algebra, left: tuple[ArrayForm, ...], right: tuple[ArrayForm, ...]
) -> tuple[ArrayForm, ...]:
    if left == ANY_ARRAY or right == ANY_ARRAY:
        return right if left == ANY_ARRAY else left
    joined = (a & b for a in left for b in right)
    return _distinct(form for form in joined if form is not None and algebra.array_possible(form, True))


def _intersect_objects(
    algebra: Algebra, left: tuple[ObjectForm, ...], right: tuple[ObjectForm, ...]
) -> tuple[ObjectForm, ...]:
    if left == ANY_OBJECT or right == ANY_OBJECT:
        return right if left == ANY_OBJECT else left
    if len(left) * len(right) > MOST_FORMS * MOST_FORMS:
        raise algebra.too_much(f"more than {MOST_FORMS} alternatives of objects, squared")
    forms: dict[ObjectForm, None] = {}
    for a in left:
        algebra.check_time()
        for b in right:
            form = a & b
            if form is not None and form not in forms and algebra.object_possible(form, True):
                forms[form] = None
        if len(forms) > MOST_FORMS * 4:
            raise algebra.too_much(f"more than {MOST_FORMS * 4:,} alternatives of one object")
    return tuple(forms)


def _unite_forms(left: tuple[Any, ...], right: tuple[Any, ...]) -> tuple[Any, ...]:
    return _distinct((*left, *right))


def _distinct(forms: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(forms))


def _is_empty_text(texts: Texts) -> bool:
    return texts.is_empty


def _as_schema(value: list[Any] | dict[str, Any]) -> dict[str, Any]:
    """A schema that exactly one array or object meets."""
    if isinstance(value, list):
        schema: dict[str, Any] = {"type": "array", "minItems": len(value), "maxItems": len(value)}
        return schema | ({"prefixItems": [{"const": item} for item in value]} if value else {})
    return {
        "type": "object",
        "properties": {name: {"const": item} for name, item in value.items()},
        "required": list(value),
        "additionalProperties": False,
    }


ANY_ARRAY = (ArrayForm(),)
ANY_OBJECT = (ObjectForm(),)
WORD_DOMAIN = Domain("word", WORDS, frozenset(), _word_leaf, _intersect_sets, frozenset.__or__, lambda words: not words)
STRING_DOMAIN = Domain("string", ANY_TEXT, NO_TEXT, _string_leaf, _intersect_sets, Texts.__or__, _is_empty_text)
ARRAY_DOMAIN = Domain("array", ANY_ARRAY, (), _array_leaf, _intersect_arrays, _unite_forms, lambda forms: not forms)
OBJECT_DOMAIN = Domain(
    "object", ANY_OBJECT, (), _object_leaf, _intersect_objects, _unite_forms, lambda forms: not forms
)
