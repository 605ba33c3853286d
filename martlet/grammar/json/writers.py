"""How an array or an object that meets a form is written from one end to the other (read `json_machine.py` next).

A plan answers three questions at every point: what may come next, may it end here, and can it still come to an end. The
last one is asked before a choice is offered, so that no choice leads nowhere.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

from martlet.grammar.json.algebra import Algebra, Goal
from martlet.grammar.json.array_plans import ArrayPlan
from martlet.grammar.json.counting import MOST_VALUES, few_strings
from martlet.grammar.json.covering import Covering
from martlet.grammar.json.finite import values_of
from martlet.grammar.json.schema_nodes import Node, Problem, SchemaError
from martlet.grammar.json.sets import ANY_TEXT, Texts
from martlet.grammar.json.shapes import ArrayForm, Exists, Literals, ObjectForm
from martlet.grammar.language import Language, literals
from martlet.grammar.states import MANY

__all__ = ["ArrayPlan", "KeyClass", "ObjectPlan", "Plans"]

MOST_EXISTS = 6
MOST_CLASSES = 256
MOST_SECONDS = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class KeyClass:
    """Names that no `properties` knows and that the same patterns match; `matched` are these."""

    names: Texts
    matched: frozenset[Language]


class ObjectPlan:
    """An object form; a point in it is (names used up as bits, number of properties, `exists` not met yet as bits).

    In the schema's own order a name also counts as used up when a later one, or one that is not known, was written.
    """

    def __init__(self, form: ObjectForm, plans: Plans, prune: bool) -> None:
        self.form, self._plans, self._prune = form, plans, prune
        self._algebra = plans.algebra
        self.parts = sorted(form.parts | {one.part for one in form.exists}, key=lambda part: part.number)
        self.exists: list[Exists] = sorted(
            form.exists, key=lambda one: (one.part.number, -1 if one.where is None else one.where)
        )
        names: dict[str, None] = {}
        for part in self.parts:
            names |= dict.fromkeys(part.properties)
        own: dict[str, Literals] = {}
        for name, literal in sorted(form.own, key=lambda pair: pair[0]):
            own[name] = own.get(name, frozenset()) | {literal}
        for name in (*own, *sorted(form.required)):
            names.setdefault(name)
        self._own = own
        self.all_names = frozenset(names) | form.absent | {name for part in self.parts for name in part.properties}
        allowed = self._allowed_names
        self.names = [name for name in names if name not in form.absent and name in allowed]
        self._ranked = (1 << len(self.names)) - 1  # those that have a place in the schema's order
        others = self._few_others(allowed)
        self.names += [name for name in others if name in allowed]
        self.all_names |= frozenset(others)
        self._goals: dict[str, Goal | None] = {}
        self._class_goals: dict[frozenset[Language], Goal | None] = {}
        self.bit = {name: 1 << i for i, name in enumerate(self.names)}
        self.required = sum(self.bit.get(name, 0) for name in form.required)
        self.cap = max(form.low, 0 if form.high is None else form.high + 1)
        if len(self.exists) > MOST_EXISTS:
            pointers = list(dict.fromkeys(one.part.pointer for one in self.exists))
            why = f"asks for more than {MOST_EXISTS} properties by what they are not, with {', '.join(pointers[1:9])}"
            raise SchemaError([Problem(pointers[0], why)])

    def _few_others(self, allowed: Texts) -> list[str]:
        """Names that patterns or `propertyNames` allow, where these are few: they count as known, and come at most once."""
        found: set[str] = set()
        for texts in (allowed, *(Texts(None, one) for part in self.parts for one, _ in part.pattern_properties)):
            few = few_strings(texts)
            if few is not None and len(found.union(few)) <= MOST_VALUES:
                found.update(few)
        return sorted(found - self.all_names)

    @property
    def _allowed_names(self) -> Texts:
        return self._algebra.strings_of(self._algebra.goal(self.form.names)) if self.form.names else ANY_TEXT

    @property
    def unknown(self) -> bool:
        """What counts as the answer to a question that is too much work: while only pruning is at stake, yes."""
        return self._prune

    def _inhabited(self, goal: Goal) -> bool:
        return self._algebra.inhabited(goal, self._prune)

    @cached_property
    def can_have_required(self) -> bool:
        """Whether each required name can be there."""
        return all(name in self.bit and self.goal_of(name) is not None for name in self.form.required)

    def goal_of(self, name: str) -> Goal | None:
        """What the value of a name must meet; None if nothing does."""
        if name not in self._goals:
            goal = self._goal_of(name)
            self._goals[name] = goal if self._inhabited(goal) else None
        return self._goals[name]

    def _goal_of(self, name: str) -> Goal:
        found = set(self._own.get(name, ()))
        for part in self.form.parts:
            matched = [value for language, value in part.pattern_properties if language.accepts(name)]
            if name in part.properties:
                matched.append(part.properties[name])
            elif not matched and part.additional is not None:
                matched.append(part.additional)
            found |= {(value, True) for value in matched}
        return self._algebra.goal(found)

    def goal_of_class(self, key: KeyClass) -> Goal | None:
        """What the values of other names must meet; None if there can be none of this class."""
        if key.matched not in self._class_goals:
            self._class_goals[key.matched] = self._goal_of_class(key)
        return self._class_goals[key.matched]

    def _goal_of_class(self, key: KeyClass) -> Goal | None:
        if not self._allowed_names.is_any and self._allowed_names.as_language() not in key.matched:
            return None
        found: set[tuple[Node, bool]] = set()
        for part in self.form.parts:
            matched = [value for language, value in part.pattern_properties if language in key.matched]
            if not matched and part.additional is not None:
                matched.append(part.additional)
            found |= {(value, True) for value in matched}
        goal = self._algebra.goal(found)
        return goal if self._inhabited(goal) else None

    @cached_property
    def classes(self) -> list[tuple[KeyClass, Goal]]:
        """Classes of names that are not known, with their goals."""
        found = ((key, self.goal_of_class(key)) for key in self._plans.classes_of((self,)))
        return [(key, goal) for key, goal in found if goal is not None]

    def name_languages(self) -> list[Language]:
        """The patterns that tell names apart."""
        found = [language for part in self.parts for language, _ in part.pattern_properties]
        allowed = self._allowed_names
        return found if allowed.is_any else [*found, allowed.as_language()]

    def meets(self, one: Exists, name: str | None, key: KeyClass | None) -> bool:
        """Whether a name is in the class of an `exists`."""
        if name is not None:
            matched = [language.accepts(name) for language, _ in one.part.pattern_properties]
            known = name in one.part.properties
        else:
            assert key is not None
            matched = [language in key.matched for language, _ in one.part.pattern_properties]
            known = False
        return not known and not any(matched) if one.where is None else matched[one.where]

    def possible(self, used: int, count: int, missing: int) -> bool:
        """Whether the object can still end well."""
        form, needed = self.form, self.required & ~used
        if not self.can_have_required:
            return False
        room = MANY if form.high is None else form.high - count - needed.bit_count()
        if room < 0 or (missing and not Covering(self, used, needed).has_place_for(missing, room)):
            return False
        if count + needed.bit_count() >= form.low:
            return True
        left = sum(not used & self.bit[name] and self.goal_of(name) is not None for name in self.names)
        return count + left >= form.low or bool(self.classes)

    def with_value(self, goal: Goal, one: Exists) -> Goal | None:
        """A value's goal together with that of an `exists`; None if nothing meets both."""
        joined = self._algebra.goal(goal.literals | one.value)
        return joined if self._inhabited(joined) else None

    @cached_property
    def is_simple(self) -> bool:
        """Whether a name may come wherever it has not been and no required one is passed over."""
        return self.form.high is None and not self.form.low and not self.exists

    def has(self, name: str, used: int, ordered: bool) -> bool:
        """Of a simple plan: whether a known name may come."""
        bit = self.bit[name]
        if used & bit or (ordered and self.required & self._before(bit) & ~used):
            return False
        return self.goal_of(name) is not None

    def _before(self, bit: int) -> int:
        """The names that come before a known one in the schema's order; those without a place in it come in any."""
        return (bit - 1) & self._ranked

    def after(
        self, name: str | None, key: KeyClass | None, used: int, count: int, missing: int, ordered: bool
    ) -> list[tuple[Goal, tuple[int, int, int]]]:
        """Goals of the value after a name (known, or else of a class), each with the point after it."""
        if name is not None:
            if name not in self.bit or used & self.bit[name]:
                return []
            goal, taken = self.goal_of(name), self.bit[name]
            passed = self._before(taken) & ~used if ordered else 0
        else:
            assert key is not None
            goal, taken = self.goal_of_class(key), 0
            passed = self._ranked & ~used if ordered else 0
        if goal is None or self.required & passed:
            return []
        used |= taken | passed
        count = min(count + 1, self.cap)
        options = [(goal, missing)]
        for number, one in enumerate(self.exists):
            if missing >> number & 1 and self.meets(one, name, key):
                joined = ((self.with_value(other, one), left & ~(1 << number)) for other, left in options)
                options += [(other, left) for other, left in joined if other is not None]
        return [(goal, (used, count, left)) for goal, left in options if self.possible(used, count, left)]

    def may_end(self, used: int, count: int, missing: int) -> bool:
        """Whether the object may end."""
        return not self.required & ~used and count >= self.form.low and not missing


class Plans:
    """The plans of an algebra's forms."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra
        self._arrays: dict[ArrayForm, ArrayPlan] = {}
        self._objects: dict[ObjectForm, ObjectPlan] = {}
        self._classes: dict[tuple[ObjectPlan, ...], list[KeyClass]] = {}
        self.listing: set[Goal] = set()  # goals whose values are being listed
        algebra.array_possible = self._array_possible
        algebra.object_possible = self._object_possible
        algebra.values_of = partial(values_of, self)

    def forget(self) -> None:
        """Let go of all plans."""
        self._arrays.clear()
        self._objects.clear()
        self._classes.clear()

    def array(self, form: ArrayForm) -> ArrayPlan:
        """The plan of an array."""
        found = self._arrays.get(form)
        if found is None:
            found = self._arrays[form] = ArrayPlan(form, self.algebra, False)
        return found

    def object(self, form: ObjectForm) -> ObjectPlan:
        """The plan of an object."""
        found = self._objects.get(form)
        if found is None:
            found = self._objects[form] = ObjectPlan(form, self, False)
        return found

    def _array_possible(self, form: ArrayForm, prune: bool) -> bool:
        if not (form.low or form.contains):
            return True
        plan = ArrayPlan(form, self.algebra, prune)
        return plan.possible(0, (0,) * len(plan.contains))

    def _object_possible(self, form: ObjectForm, prune: bool) -> bool:
        if not (form.required or form.low or form.exists):
            return True
        plan = ObjectPlan(form, self, prune)
        return plan.possible(0, 0, (1 << len(plan.exists)) - 1)

    def class_of(self, plan: ObjectPlan, name: str) -> KeyClass:
        """The class that a name is of for a plan that does not know it."""
        return KeyClass(ANY_TEXT, frozenset(one for one in plan.name_languages() if one.accepts(name)))

    def classes(self, plans: tuple[ObjectPlan, ...]) -> list[KeyClass]:
        """The names that none of the plans knows, told apart as far as any of them does."""
        if plans not in self._classes:
            self._classes[plans] = self.classes_of(plans)
        return self._classes[plans]

    def classes_of(self, plans: tuple[ObjectPlan, ...]) -> list[KeyClass]:
        """The same, not kept."""
        languages = list(dict.fromkeys(language for plan in plans for language in plan.name_languages()))
        if not languages:
            return [KeyClass(ANY_TEXT, frozenset())]
        known = tuple(sorted({name for plan in plans for name in plan.all_names}))
        found = _told_apart(tuple(languages), known)
        if found is None:
            pointers = [part.pointer for plan in plans for part in plan.parts if part.pattern_properties]
            why = (
                f"patterns overlap in more than {MOST_CLASSES} ways, or take more than {MOST_SECONDS:g} s to tell apart"
            )
            raise SchemaError([Problem(f"{pointer}/patternProperties", why) for pointer in (pointers or ["#"])[:1]])
        return found


@lru_cache(maxsize=256)
def _told_apart(languages: tuple[Language, ...], known: tuple[str, ...]) -> list[KeyClass] | None:
    """The classes of names that are not `known` and that the languages tell apart; None where that is too much."""
    deadline = time.thread_time() + MOST_SECONDS
    first = Language.everything()
    pieces = [(first - literals(known) if known else first, frozenset[Language]())]
    for language in languages:
        split = []
        for piece, matched in pieces:
            split += [(piece & language, matched | {language}), (piece - language, matched)]
            if time.thread_time() > deadline:
                return None
        pieces = [(piece, matched) for piece, matched in split if not piece.is_empty]
        if len(pieces) > MOST_CLASSES:
            return None
    return [KeyClass(Texts(None, piece), matched) for piece, matched in pieces]
