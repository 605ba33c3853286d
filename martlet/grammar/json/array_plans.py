"""How an array that meets a form is written, item by item (read `writers.py` first)."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from martlet.errors import RequestError
from martlet.grammar.json.algebra import Algebra, Goal
from martlet.grammar.json.counting import n_numbers, n_strings
from martlet.grammar.json.schema_nodes import Node, Problem, SchemaError
from martlet.grammar.json.shapes import ArrayForm, Contains, Literals

__all__ = ["ArrayPlan"]


class ArrayPlan:
    """An array form; a point in it is (number of items, how many of them counted for each `contains`)."""

    def __init__(self, form: ArrayForm, algebra: Algebra, prune: bool) -> None:
        self.form, self._algebra, self._prune = form, algebra, prune
        self.contains = sorted(form.contains, key=lambda one: (one.node.number, one.positive, one.start, one.low))
        if len(self.contains) > 1 and any(one.high is not None for one in self.contains):
            pointers = sorted({one.node.pointer for one in self.contains})
            raise SchemaError([Problem(pointers[0], f"counts items together with {', '.join(pointers[1:])}")])
        self.listed: dict[bytes, Any] | None = None  # of different arrays or objects: all that there are, by key
        if form.unique and not prune:
            self._check_unique(algebra)
        n_different = self.limit if form.unique and not prune else None
        self.cap = max(
            len(form.prefix), form.low, form.high or 0, n_different or 0, *(one.start for one in self.contains), 0
        )

    def goal(self, index: int, *more: tuple[Node, bool]) -> Goal:
        """What the item at a place must meet."""
        return self._algebra.goal(self.form.goal(index) | frozenset(more))

    def _inhabited(self, goal: Goal) -> bool:
        return self._algebra.inhabited(goal, self._prune)

    def _check_unique(self, algebra: Algebra) -> None:
        """Refuse arrays of different items whose items are too much to compare."""
        kind = algebra.type_of(self.goal(0))
        if self._most_items is not None and self._most_items <= 1:
            return
        if self.form.prefix or self.contains:
            raise self._not_unique("is not enforced beside items that have schemas of their own, or contains")
        if kind.arrays or kind.objects:
            self.listed = algebra.values_of(self.goal(0))
            if self.listed is None:
                raise self._not_unique(
                    "is enforced for strings, numbers and words, or for few enough arrays and objects"
                )

    def _not_unique(self, why: str) -> SchemaError:
        return SchemaError([Problem(f"{self.form.unique}/uniqueItems", why)])

    @property
    def keeps_texts(self) -> bool:
        """Whether a point has the texts of the items before it."""
        return bool(self.form.unique) and self.listed is None

    @cached_property
    def limit(self) -> int | None:
        """The most items that there can be."""
        most = self._most_items
        if not self.form.unique or self.form.prefix:
            return most
        if self.listed is not None:
            return len(self.listed) if most is None else min(most, len(self.listed))
        kind = self._algebra.type_of(self.goal(0))
        if kind.arrays or kind.objects:
            return most
        try:
            n_values, n_others = n_strings(kind.strings), n_numbers(kind.numbers)
        except RequestError as error:
            raise self._not_unique(f"needs to know how many different items there are: {error}") from None
        if n_values is None or n_others is None:
            return most
        n_values += n_others + len(kind.words)
        return n_values if most is None else min(most, n_values)

    @cached_property
    def _most_items(self) -> int | None:
        form = self.form
        for index in range(len(form.prefix) + 1):
            if form.high is not None and index >= form.high:
                return form.high
            if not self._inhabited(self.goal(index)):
                return index
        return form.high

    def possible(self, index: int, counts: tuple[int, ...]) -> bool:
        """Whether the array can still end well."""
        if self.limit is not None and max(self.form.low, index + self._needed(index, counts)) > self.limit:
            return False
        for one, count in zip(self.contains, counts, strict=True):
            if one.low > count and not self._room(one, index, one.low - count):
                return False
            if one.high is not None and not self._spare(one, index, one.high - count):
                return False
        return True

    def _needed(self, index: int, counts: tuple[int, ...]) -> int:
        """How many items are still asked for; one may count for all, if such are possible at every place."""
        missing = [max(one.low - count, 0) for one, count in zip(self.contains, counts, strict=True)]
        if sum(map(bool, missing)) < 2:
            return sum(missing)
        both = [(one.node, one.positive) for one, n in zip(self.contains, missing, strict=True) if n]
        starts = max(one.start for one, n in zip(self.contains, missing, strict=True) if n)
        end = len(self.form.prefix)
        places = range(min(index, end), end + 1 if self.limit is None else min(end + 1, self.limit))
        joint = self._prune or (starts <= index and all(self._inhabited(self.goal(i, *both)) for i in places))
        return max(missing) if joint else sum(missing)

    def _room(self, one: Contains, index: int, needed: int) -> bool:
        """Whether `needed` places from `index` on can hold items that count."""
        end = len(self.form.prefix)
        for place in range(max(index, one.start), end):
            if self.limit is not None and place >= self.limit:
                return False
            needed -= self._inhabited(self.goal(place, (one.node, one.positive)))
            if needed <= 0:
                return True
        places = None if self.limit is None else self.limit - max(index, one.start, end)
        return (places is None or places >= needed) and self._inhabited(self.goal(end, (one.node, one.positive)))

    def _spare(self, one: Contains, index: int, allowed: int) -> bool:
        """Whether no more than `allowed` of the items that must still come count whatever they are."""
        end = max(len(self.form.prefix), one.start)
        forced = 0
        for place in range(max(index, one.start), min(self.form.low, end)):
            forced += not self._inhabited(self.goal(place, (one.node, not one.positive)))
        beyond = self.form.low - max(index, end)
        if beyond > 0 and not self._inhabited(self.goal(end, (one.node, not one.positive))):
            forced += beyond
        return forced <= allowed

    def choices(
        self, index: int, counts: tuple[int, ...], written: frozenset[bytes]
    ) -> list[tuple[Goal, int, tuple[int, ...], frozenset[bytes]]]:
        """Goals of the next item, each with the point after it; it is none of those `written`, if they must differ."""
        if self.limit is not None and index >= self.limit:
            return []
        after = min(index + 1, self.cap)
        if self.listed is not None:
            left = [key for key in self.listed if key not in written]
            constants = [(self._algebra.constant(self.listed[key]), key) for key in left]
            return [(self._algebra.goal([(one, True)]), index + 1, counts, written | {key}) for one, key in constants]
        base = self.form.goal(min(index, len(self.form.prefix)))
        base |= frozenset((self._algebra.constant(json.loads(text)), False) for text in written)
        options: list[tuple[Literals, tuple[int, ...]]] = [(base, counts)]
        for number, one in enumerate(self.contains):
            if index < one.start:
                continue
            does = frozenset({(one.node, one.positive)})
            if one.high is not None:
                doesnt = frozenset({(one.node, not one.positive)})
                options = [(goal | doesnt, same) for goal, same in options]
                if counts[number] < one.high:
                    options.append((base | does, _one_more(counts, number)))
            elif counts[number] < one.low:
                options += [(goal | does, _one_more(count, number)) for goal, count in options]
        found = []
        for goal_literals, count in options:
            goal = self._algebra.goal(goal_literals)
            if self._inhabited(goal) and self.possible(after, count):
                found.append((goal, after, count, written))
        return found

    def may_end(self, index: int, counts: tuple[int, ...], written: frozenset[bytes]) -> bool:
        """Whether the array may end."""
        return index >= self.form.low and all(
            count >= one.low for one, count in zip(self.contains, counts, strict=True)
        )


def _one_more(counts: tuple[int, ...], number: int) -> tuple[int, ...]:
    return (*counts[:number], counts[number] + 1, *counts[number + 1 :])
