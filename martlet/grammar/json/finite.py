"""All values of a goal that has few: what `uniqueItems` compares arrays or objects by.

Every choice of a writer is followed. The listing is given up where there are too many values, or
where it may not end. See `writers.py`.
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
    from martlet.grammar.json.writers import Writers

MOST_STEPS = 20_000
DEEPEST = 32


class TooManyError(Exception):
    """There are more values than are listed."""


def list_values(algebra: Writers, goal: Goal) -> dict[bytes, Any] | None:
    """The values of a goal by their keys; None if there are too many, or if that is unknown."""
    try:
        return _Lister(algebra).values(goal, 0)
    except TooManyError:
        return None


def value_key(value: Any) -> bytes:
    """Canonical JSON, equal for equal values only: names sorted, whole numbers without fraction."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


class _Lister:
    """Lists values; nested listings share one count of steps."""

    def __init__(self, algebra: Writers) -> None:
        self._algebra, self._steps = algebra, 0

    def values(self, goal: Goal, depth: int) -> dict[bytes, Any]:
        """All values of a goal, by key."""
        if depth > DEEPEST:
            raise TooManyError
        allowed = self._algebra.value_set(goal)
        values: dict[bytes, Any] = {}
        for value in self._each(allowed.words, allowed.strings, allowed.numbers):
            self._add(values, value)
        for array in allowed.arrays:
            for elements in self._arrays(array, depth):
                self._add(values, elements)
        for form in allowed.objects:
            for members in self._objects(form, depth):
                self._add(values, members)
        return values

    def _each(self, words: frozenset[str], strings: Texts, numbers: Texts) -> Iterator[Any]:
        yield from (json.loads(word) for word in sorted(words))
        texts, written = few_strings(strings), few_numbers(numbers)
        if texts is None or written is None:
            raise TooManyError
        yield from texts
        yield from (json.loads(text) for text in written)

    def _add(self, values: dict[bytes, Any], value: Any) -> None:
        values.setdefault(value_key(value), value)
        if len(values) > MOST_VALUES:
            raise TooManyError

    def _step(self, size: int) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS or size > MOST_VALUES:
            raise TooManyError

    def _arrays(self, form: ArrayForm, depth: int) -> Iterator[list[Any]]:
        writer = self._algebra.array(form)
        ahead: list[tuple[tuple[Any, ...], list[Any]]] = [((0, (0,) * len(writer.contains), frozenset()), [])]
        while ahead:
            at, elements = ahead.pop()
            self._step(len(elements))
            if writer.may_end(*at) and not (
                form.unique and len({value_key(element) for element in elements}) < len(elements)
            ):
                yield elements
            for goal, *after in writer.choices(*at):
                ahead += [(tuple(after), [*elements, value]) for value in self.values(goal, depth + 1).values()]

    def _objects(self, form: ObjectForm, depth: int) -> Iterator[dict[str, Any]]:
        writer = self._algebra.object(form)
        ahead: list[tuple[tuple[int, int, int], dict[str, Any]]] = [((0, 0, (1 << len(writer.exists)) - 1), {})]
        while ahead:
            at, members = ahead.pop()
            self._step(len(members))
            if writer.may_end(*at):
                yield members
            if any(writer.after(None, key, *at, ordered=True) for key, _ in writer.classes):
                raise TooManyError
            for name in writer.names:
                for goal, after in writer.after(name, None, *at, ordered=True):
                    values = self.values(goal, depth + 1).values()
                    ahead += [(after, {**members, name: value}) for value in values]
