"""Whether the properties that an object may still have can meet all that is asked of some of them (see `writers.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from martlet.grammar.json.algebra import Goal
from martlet.grammar.json.shapes import Exists

if TYPE_CHECKING:
    from martlet.grammar.json.writers import KeyClass, ObjectPlan

__all__ = ["Covering"]

MOST_TRIES = 2000


class Covering:
    """A search for properties that meet all `exists` of a plan that are missing; one property may meet several."""

    def __init__(self, plan: ObjectPlan, used: int, needed: int) -> None:
        self._plan, self._used, self._needed = plan, used, needed
        self._tries = MOST_TRIES

    def has_place_for(self, missing: int, room: int) -> bool:
        """Whether they can be met with at most `room` properties beyond the required ones."""
        left = [one for number, one in enumerate(self._plan.exists) if missing >> number & 1]
        return self._place(left, (), room)

    def _place(self, left: list[Exists], taken: tuple[tuple[str | KeyClass, Goal], ...], room: int) -> bool:
        if not left:
            return True
        self._tries -= 1
        if self._tries < 0:
            return self._plan.unknown
        one, rest = left[0], left[1:]
        for i, (who, goal) in enumerate(taken):
            joined = self._joined(one, who, goal)
            if joined is not None and self._place(rest, (*taken[:i], (who, joined), *taken[i + 1 :]), room):
                return True
        for who, goal, cost in self._others({who for who, _ in taken}):
            joined = None if cost > room else self._joined(one, who, goal)
            if joined is not None and self._place(rest, (*taken, (who, joined)), room - cost):
                return True
        return False

    def _joined(self, one: Exists, who: str | KeyClass, goal: Goal) -> Goal | None:
        name, key = (who, None) if isinstance(who, str) else (None, who)
        return self._plan.with_value(goal, one) if self._plan.meets(one, name, key) else None

    def _others(self, taken: set[str | KeyClass]) -> Iterator[tuple[str | KeyClass, Goal, int]]:
        """Properties that are not taken, with their goals and whether they are beyond the required ones."""
        plan = self._plan
        for i, name in enumerate(plan.names):
            goal = None if self._used >> i & 1 or name in taken else plan.goal_of(name)
            if goal is not None:
                yield name, goal, not self._needed >> i & 1
        yield from ((key, goal, 1) for key, goal in plan.classes)
