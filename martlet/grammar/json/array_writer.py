"""How an array that meets a form is written, element by element (read `writers.py` first)."""

import json
from functools import cached_property
from typing import Any

from martlet.errors import RequestError
from martlet.grammar.json.algebra import Algebra, Goal
from martlet.grammar.json.counting import n_numbers, n_strings
from martlet.grammar.json.schema_nodes import Node, Problem, SchemaError
from martlet.grammar.json.shapes import ArrayForm, Contains, Literals


class ArrayWriter:
    """Writes the arrays of one form.

    Its positions are (number of elements, how many of them counted for each `contains`, texts of
    the elements where they must differ). With `prune`, a question that costs too much is answered
    yes. SchemaError for a form that cannot be enforced.
    """

    def __init__(self, form: ArrayForm, algebra: Algebra, prune: bool) -> None:
        self.form, self._algebra, self._prune = form, algebra, prune
        self.contains = sorted(form.contains, key=lambda each: (each.node.number, each.positive, each.start, each.low))
        if len(self.contains) > 1 and any(contains.high is not None for contains in self.contains):
            pointers = sorted({contains.node.pointer for contains in self.contains})
            raise SchemaError([Problem(pointers[0], f"counts items together with {', '.join(pointers[1:])}")])
        self.listed: dict[bytes, Any] | None = None  # of different containers: every value, by key
        if form.unique and not prune:
            self._check_unique(algebra)
        n_different = self.limit if form.unique and not prune else None
        self.cap = max(
            len(form.prefix), form.low, form.high or 0, n_different or 0, *(each.start for each in self.contains), 0
        )

    def goal(self, index: int, *more: tuple[Node, bool]) -> Goal:
        """What the element at an index must meet."""
        return self._algebra.goal(self.form.goal(index) | frozenset(more))

    def _inhabited(self, goal: Goal) -> bool:
        return self._algebra.inhabited(goal, self._prune)

    def _check_unique(self, algebra: Algebra) -> None:
        """Refuse arrays of different elements that are too costly to compare."""
        values = algebra.value_set(self.goal(0))
        if self._most_elements is not None and self._most_elements <= 1:
            return
        if self.form.prefix or self.contains:
            raise self._not_unique("is not enforced beside items that have schemas of their own, or contains")
        if values.arrays or values.objects:
            self.listed = algebra.list_values(self.goal(0))
            if self.listed is None:
                raise self._not_unique(
                    "is enforced for strings, numbers and words, or for few enough arrays and objects"
                )

    def _not_unique(self, why: str) -> SchemaError:
        return SchemaError([Problem(f"{self.form.unique}/uniqueItems", why)])

    @property
    def keeps_texts(self) -> bool:
        """Whether a position holds the texts of the elements before it."""
        return bool(self.form.unique) and self.listed is None

    @cached_property
    def limit(self) -> int | None:
        """The most elements there can be; None: no bound."""
        most = self._most_elements
        if not self.form.unique or self.form.prefix:
            return most
        if self.listed is not None:
            return len(self.listed) if most is None else min(most, len(self.listed))
        values = self._algebra.value_set(self.goal(0))
        if values.arrays or values.objects:
            return most
        try:
            n_texts, n_others = n_strings(values.strings), n_numbers(values.numbers)
        except RequestError as error:
            raise self._not_unique(f"needs to know how many different items there are: {error}") from None
        if n_texts is None or n_others is None:
            return most
        n_values = n_texts + n_others + len(values.words)
        return n_values if most is None else min(most, n_values)

    @cached_property
    def _most_elements(self) -> int | None:
        form = self.form
        for index in range(len(form.prefix) + 1):
            if form.high is not None and index >= form.high:
                return form.high
            if not self._inhabited(self.goal(index)):
                return index
        return form.high

    def possible(self, index: int, counts: tuple[int, ...]) -> bool:
        """Whether the array can still be completed."""
        if self.limit is not None and max(self.form.low, index + self._needed(index, counts)) > self.limit:
            return False
        for contains, count in zip(self.contains, counts, strict=True):
            if contains.low > count and not self._has_room(contains, index, contains.low - count):
                return False
            if contains.high is not None and not self._stays_below(contains, index, contains.high - count):
                return False
        return True

    def _needed(self, index: int, counts: tuple[int, ...]) -> int:
        """How many elements are still required.

        An element that can meet every `contains` counts once.
        """
        missing = [max(each.low - count, 0) for each, count in zip(self.contains, counts, strict=True)]
        if sum(map(bool, missing)) < 2:
            return sum(missing)
        both = [(each.node, each.positive) for each, n in zip(self.contains, missing, strict=True) if n]
        starts = max(each.start for each, n in zip(self.contains, missing, strict=True) if n)
        end = len(self.form.prefix)
        indices = range(min(index, end), end + 1 if self.limit is None else min(end + 1, self.limit))
        joint = self._prune or (starts <= index and all(self._inhabited(self.goal(i, *both)) for i in indices))
        return max(missing) if joint else sum(missing)

    def _has_room(self, contains: Contains, index: int, needed: int) -> bool:
        """Whether `needed` elements from `index` on can count for a `contains`."""
        end = len(self.form.prefix)
        for i in range(max(index, contains.start), end):
            if self.limit is not None and i >= self.limit:
                return False
            needed -= self._inhabited(self.goal(i, (contains.node, contains.positive)))
            if needed <= 0:
                return True
        left = None if self.limit is None else self.limit - max(index, contains.start, end)
        return (left is None or left >= needed) and self._inhabited(self.goal(end, (contains.node, contains.positive)))

    def _stays_below(self, contains: Contains, index: int, allowed: int) -> bool:
        """Whether at most `allowed` of the elements still required must count for a `contains`."""
        end = max(len(self.form.prefix), contains.start)
        forced = 0
        for i in range(max(index, contains.start), min(self.form.low, end)):
            forced += not self._inhabited(self.goal(i, (contains.node, not contains.positive)))
        beyond = self.form.low - max(index, end)
        if beyond > 0 and not self._inhabited(self.goal(end, (contains.node, not contains.positive))):
            forced += beyond
        return forced <= allowed

    def choices(
        self, index: int, counts: tuple[int, ...], written: frozenset[bytes]
    ) -> list[tuple[Goal, int, tuple[int, ...], frozenset[bytes]]]:
        """Goals of the next element, each with the position after it.

        Where elements must differ, the next element is none of those `written`.
        """
        if self.limit is not None and index >= self.limit:
            return []
        after = min(index + 1, self.cap)
        if self.listed is not None:
            left = [key for key in self.listed if key not in written]
            constants = [(self._algebra.constant(self.listed[key]), key) for key in left]
            return [(self._algebra.goal([(node, True)]), index + 1, counts, written | {key}) for node, key in constants]
        base = self.form.goal(min(index, len(self.form.prefix)))
        base |= frozenset((self._algebra.constant(json.loads(text)), False) for text in written)
        options: list[tuple[Literals, tuple[int, ...]]] = [(base, counts)]
        for number, contains in enumerate(self.contains):
            if index < contains.start:
                continue
            does = frozenset({(contains.node, contains.positive)})
            if contains.high is not None:
                doesnt = frozenset({(contains.node, not contains.positive)})
                options = [(goal | doesnt, same) for goal, same in options]
                if counts[number] < contains.high:
                    options.append((base | does, _counted(counts, number)))
            elif counts[number] < contains.low:
                options += [(goal | does, _counted(count, number)) for goal, count in options]
        choices = []
        for goal_literals, count in options:
            goal = self._algebra.goal(goal_literals)
            if self._inhabited(goal) and self.possible(after, count):
                choices.append((goal, after, count, written))
        return choices

    def may_end(self, index: int, counts: tuple[int, ...], written: frozenset[bytes]) -> bool:
        """Whether the array may end."""
        return index >= self.form.low and all(
            count >= contains.low for contains, count in zip(self.contains, counts, strict=True)
        )


def _counted(counts: tuple[int, ...], number: int) -> tuple[int, ...]:
    return (*counts[:number], counts[number] + 1, *counts[number + 1 :])
