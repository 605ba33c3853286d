"""All values of a goal that has few, one by one: what arrays of different arrays or objects are compared by (see `writers.py`).

A plan is walked along all its choices. It is given up where there are too many values, or may be without end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from martlet.grammar.json.algebra import Goal
from martlet.grammar.json.counting import MOST_VALUES, few_numbers, few_strings
from martlet.grammar.json.sets import Texts
from martlet.grammar.json.shapes import ArrayForm, ObjectForm

if TYPE_CHECKING:
    from martlet.grammar.json.writers import Plans

__all__ = ["value_key", "values_of"]

MOST_STEPS = 20_000
DEEPEST = 32


class TooManyError(Exception):
    """More values than are listed."""


def values_of(plans: Plans, goal: Goal) -> dict[bytes, Any] | None:
    """The values of a goal by their keys; None if there are too many, or if that is not known."""
    if goal in plans.listing:  # values that are made of such values have no end
        return None
    plans.listing.add(goal)
    try:
        return Lister(plans).values(goal, 0)
    except TooManyError:
        return None
    finally:
        plans.listing.discard(goal)


def value_key(value: Any) -> bytes:
    """The same for equal values, and only for them: as JSON, names in order, whole numbers without fraction."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


class Lister:
    """Lists values, with one account of the work for all that are inside each other."""

    def __init__(self, plans: Plans) -> None:
        self._plans, self._steps = plans, 0

    def values(self, goal: Goal, depth: int) -> dict[bytes, Any]:
        """All values of a goal, by key."""
        if depth > DEEPEST:
            raise TooManyError
        kind = self._plans.algebra.type_of(goal)
        found: dict[bytes, Any] = {}
        for value in self._each(kind.words, kind.strings, kind.numbers):
            self._add(found, value)
        for array in kind.arrays:
            for items in self._arrays(array, depth):
                self._add(found, items)
        for form in kind.objects:
            for members in self._objects(form, depth):
                self._add(found, members)
        return found

    def _each(self, words: frozenset[str], strings: Texts, numbers: Texts) -> Iterator[Any]:
        yield from (json.loads(word) for word in sorted(words))
        texts, written = few_strings(strings), few_numbers(numbers)
        if texts is None or written is None:
            raise TooManyError
        yield from texts
        yield from (json.loads(text) for text in written)

    def _add(self, found: dict[bytes, Any], value: Any) -> None:
        found.setdefault(value_key(value), value)
        if len(found) > MOST_VALUES:
            raise TooManyError

    def _step(self, size: int) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS or size > MOST_VALUES:
            raise TooManyError

    def _arrays(self, form: ArrayForm, depth: int) -> Iterator[list[Any]]:
        plan = self._plans.array(form)
        ahead: list[tuple[tuple[Any, ...], list[Any]]] = [((0, (0,) * len(plan.contains), frozenset()), [])]
        while ahead:
            at, items = ahead.pop()
            self._step(len(items))
            if plan.may_end(*at) and not (form.unique and len({value_key(item) for item in items}) < len(items)):
                yield items
            for goal, *after in plan.choices(*at):
                ahead += [(tuple(after), [*items, value]) for value in self.values(goal, depth + 1).values()]

    def _objects(self, form: ObjectForm, depth: int) -> Iterator[dict[str, Any]]:
        plan = self._plans.object(form)
        ahead: list[tuple[tuple[int, int, int], dict[str, Any]]] = [((0, 0, (1 << len(plan.exists)) - 1), {})]
        while ahead:
            at, members = ahead.pop()
            self._step(len(members))
            if plan.may_end(*at):
                yield members
            if any(plan.after(None, key, *at, ordered=True) for key, _ in plan.classes):
                raise TooManyError
            for name in plan.names:
                for goal, after in plan.after(name, None, *at, ordered=True):
                    values = self.values(goal, depth + 1).values()
                    ahead += [(after, {**members, name: value}) for value in values]
