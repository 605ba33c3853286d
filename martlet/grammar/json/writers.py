"""How an object that meets a form is written, property by property (read `json_machine.py` next).

A writer answers three questions at every position: what may come next, may the container end here,
and can it still be completed? The third is asked before a choice is offered, so no choice leads to
a dead end. `Writers` keeps the writers of all forms, and completes `Algebra` with what they know.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from martlet.grammar.json.algebra import Algebra, Goal
from martlet.grammar.json.array_writer import ArrayWriter
from martlet.grammar.json.counting import MOST_VALUES, few_strings
from martlet.grammar.json.finite import list_values
from martlet.grammar.json.loader import Loader
from martlet.grammar.json.schema_nodes import Node, Problem, SchemaError
from martlet.grammar.json.sets import ANY_TEXT, Texts
from martlet.grammar.json.shapes import ArrayForm, Exists, Literals, ObjectForm
from martlet.grammar.language import Language, literals
from martlet.grammar.numbers import Digits
from martlet.grammar.states import MANY, Limits

__all__ = ["ArrayWriter", "KeyClass", "ObjectWriter", "Writers"]

MOST_EXISTS = 6
MOST_CLASSES = 256
MOST_SECONDS = 3.0
MOST_TRIES = 2000  # of the search for properties that meet every `exists`


@dataclass(frozen=True, slots=True, eq=False)
class KeyClass:
    """Unknown names (in no `properties`) that the same patterns match: those in `matched`."""

    names: Texts
    matched: frozenset[Language]


class ObjectWriter:
    """Writes the objects of one form.

    Its positions are (bits of the names used up, number of properties, bits of `exists` not met
    yet). In the schema's own order a name is also used up once a later name, or an unknown name, is
    written. With `prune`, a question that costs too much is answered yes. SchemaError for a form
    that cannot be enforced.
    """

    def __init__(self, form: ObjectForm, algebra: Writers, prune: bool) -> None:
        self.form, self._algebra, self._prune = form, algebra, prune
        self.nodes = sorted(form.nodes | {exists.node for exists in form.exists}, key=lambda node: node.number)
        self.exists: list[Exists] = sorted(
            form.exists, key=lambda exists: (exists.node.number, -1 if exists.pattern is None else exists.pattern)
        )
        names: dict[str, None] = {}
        for node in self.nodes:
            names |= dict.fromkeys(node.properties)
        own: dict[str, Literals] = {}
        for name, literal in sorted(form.own, key=lambda pair: pair[0]):
            own[name] = own.get(name, frozenset()) | {literal}
        for name in (*own, *sorted(form.required)):
            names.setdefault(name)
        self._own = own
        self.all_names = frozenset(names) | form.absent | {name for node in self.nodes for name in node.properties}
        allowed = self._allowed_names
        self.names = [name for name in names if name not in form.absent and name in allowed]
        self._ranked = (1 << len(self.names)) - 1  # the names that the schema's order ranks
        others = self._few_others(allowed)
        self.names += [name for name in others if name in allowed]
        self.all_names |= frozenset(others)
        self._goals: dict[str, Goal | None] = {}
        self._class_goals: dict[frozenset[Language], Goal | None] = {}
        self.bit = {name: 1 << i for i, name in enumerate(self.names)}
        self.required = sum(self.bit.get(name, 0) for name in form.required)
        self.cap = max(form.low, 0 if form.high is None else form.high + 1)
        if len(self.exists) > MOST_EXISTS:
            pointers = list(dict.fromkeys(exists.node.pointer for exists in self.exists))
            why = f"asks for more than {MOST_EXISTS} properties by what they are not, with {', '.join(pointers[1:9])}"
            raise SchemaError([Problem(pointers[0], why)])

    def _few_others(self, allowed: Texts) -> list[str]:
        """Names that patterns or `propertyNames` allow, if they are few: treated as known."""
        names: set[str] = set()
        patterns = [language for node in self.nodes for language, _ in node.pattern_properties]
        for texts in (allowed, *(Texts(None, language) for language in patterns)):
            few = few_strings(texts)
            if few is not None and len(names.union(few)) <= MOST_VALUES:
                names.update(few)
        return sorted(names - self.all_names)

    @property
    def _allowed_names(self) -> Texts:
        return self._algebra.strings_of(self._algebra.goal(self.form.names)) if self.form.names else ANY_TEXT

    def _inhabited(self, goal: Goal) -> bool:
        return self._algebra.inhabited(goal, self._prune)

    @cached_property
    def can_have_required(self) -> bool:
        """Whether every required name is possible."""
        return all(name in self.bit and self.goal_of(name) is not None for name in self.form.required)

    def goal_of(self, name: str) -> Goal | None:
        """What the value of a known name must meet; None if no value can."""
        if name not in self._goals:
            goal = self._goal_of(name)
            self._goals[name] = goal if self._inhabited(goal) else None
        return self._goals[name]

    def _goal_of(self, name: str) -> Goal:
        demands = set(self._own.get(name, ()))
        for node in self.form.nodes:
            matched = [value for language, value in node.pattern_properties if language.accepts(name)]
            if name in node.properties:
                matched.append(node.properties[name])
            elif not matched and node.additional is not None:
                matched.append(node.additional)
            demands |= {(value, True) for value in matched}
        return self._algebra.goal(demands)

    def goal_of_class(self, key: KeyClass) -> Goal | None:
        """What the value of a name of a class must meet; None if the class is impossible."""
        if key.matched not in self._class_goals:
            self._class_goals[key.matched] = self._goal_of_class(key)
        return self._class_goals[key.matched]

    def _goal_of_class(self, key: KeyClass) -> Goal | None:
        if not self._allowed_names.is_any and self._allowed_names.as_language() not in key.matched:
            return None
        demands: set[tuple[Node, bool]] = set()
        for node in self.form.nodes:
            matched = [value for language, value in node.pattern_properties if language in key.matched]
            if not matched and node.additional is not None:
                matched.append(node.additional)
            demands |= {(value, True) for value in matched}
        goal = self._algebra.goal(demands)
        return goal if self._inhabited(goal) else None

    @cached_property
    def classes(self) -> list[tuple[KeyClass, Goal]]:
        """The classes of unknown names that may come, with their goals."""
        goals = ((key, self.goal_of_class(key)) for key in self._algebra.classes_of((self,)))
        return [(key, goal) for key, goal in goals if goal is not None]

    def name_languages(self) -> list[Language]:
        """The patterns that tell names apart."""
        patterns = [language for node in self.nodes for language, _ in node.pattern_properties]
        allowed = self._allowed_names
        return patterns if allowed.is_any else [*patterns, allowed.as_language()]

    def meets(self, exists: Exists, name: str | None, key: KeyClass | None) -> bool:
        """Whether a name, known or of a class, is among the names that an `exists` speaks of."""
        if name is not None:
            matched = [language.accepts(name) for language, _ in exists.node.pattern_properties]
            known = name in exists.node.properties
        else:
            assert key is not None
            matched = [language in key.matched for language, _ in exists.node.pattern_properties]
            known = False
        return not known and not any(matched) if exists.pattern is None else matched[exists.pattern]

    def possible(self, used: int, count: int, missing: int) -> bool:
        """Whether the object can still be completed."""
        form, needed = self.form, self.required & ~used
        if not self.can_have_required:
            return False
        room = MANY if form.high is None else form.high - count - needed.bit_count()
        if room < 0 or (missing and not _Covering(self, used, needed).can_meet(missing, room)):
            return False
        if count + needed.bit_count() >= form.low:
            return True
        left = sum(not used & self.bit[name] and self.goal_of(name) is not None for name in self.names)
        return count + left >= form.low or bool(self.classes)

    def with_value(self, goal: Goal, exists: Exists) -> Goal | None:
        """A value's goal together with that of an `exists`; None if no value meets both."""
        joined = self._algebra.goal(goal.literals | exists.value)
        return joined if self._inhabited(joined) else None

    @cached_property
    def is_simple(self) -> bool:
        """Whether any unused name may come that passes no required name over."""
        return self.form.high is None and not self.form.low and not self.exists

    def has(self, name: str, used: int, ordered: bool) -> bool:
        """Whether a known name may come next, in a simple form."""
        bit = self.bit[name]
        if used & bit or (ordered and self.required & self._before(bit) & ~used):
            return False
        return self.goal_of(name) is not None

    def _before(self, bit: int) -> int:
        """Bits of the names ranked before a name; unranked names come in any order."""
        return (bit - 1) & self._ranked

    def after(
        self, name: str | None, key: KeyClass | None, used: int, count: int, missing: int, ordered: bool
    ) -> list[tuple[Goal, tuple[int, int, int]]]:
        """Goals of the value after a name, known or of a class, each with the position after it."""
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
        for number, exists in enumerate(self.exists):
            if missing >> number & 1 and self.meets(exists, name, key):
                joined = ((self.with_value(other, exists), left & ~(1 << number)) for other, left in options)
                options += [(other, left) for other, left in joined if other is not None]
        return [(goal, (used, count, left)) for goal, left in options if self.possible(used, count, left)]

    def may_end(self, used: int, count: int, missing: int) -> bool:
        """Whether the object may end."""
        return not self.required & ~used and count >= self.form.low and not missing


class _Covering:
    """A search for properties that meet every missing `exists`; a property may meet several."""

    def __init__(self, writer: ObjectWriter, used: int, needed: int) -> None:
        self._writer, self._used, self._needed = writer, used, needed
        self._tries = MOST_TRIES

    def can_meet(self, missing: int, room: int) -> bool:
        """Whether at most `room` properties beyond the required ones can meet all of `missing`."""
        left = [exists for number, exists in enumerate(self._writer.exists) if missing >> number & 1]
        return self._search(left, (), room)

    def _search(self, left: list[Exists], taken: tuple[tuple[str | KeyClass, Goal], ...], room: int) -> bool:
        if not left:
            return True
        self._tries -= 1
        if self._tries < 0:
            return self._writer._prune  # unknown: yes where only pruning is at stake
        exists, rest = left[0], left[1:]
        for i, (key, goal) in enumerate(taken):
            joined = self._joined(exists, key, goal)
            if joined is not None and self._search(rest, (*taken[:i], (key, joined), *taken[i + 1 :]), room):
                return True
        for key, goal, cost in self._others({key for key, _ in taken}):
            joined = None if cost > room else self._joined(exists, key, goal)
            if joined is not None and self._search(rest, (*taken, (key, joined)), room - cost):
                return True
        return False

    def _joined(self, exists: Exists, key: str | KeyClass, goal: Goal) -> Goal | None:
        name, key_class = (key, None) if isinstance(key, str) else (None, key)
        return self._writer.with_value(goal, exists) if self._writer.meets(exists, name, key_class) else None

    def _others(self, taken: set[str | KeyClass]) -> Iterator[tuple[str | KeyClass, Goal, int]]:
        """Properties not taken, with goals and whether they count beyond the required ones."""
        writer = self._writer
        for i, name in enumerate(writer.names):
            goal = None if self._used >> i & 1 or name in taken else writer.goal_of(name)
            if goal is not None:
                yield name, goal, not self._needed >> i & 1
        yield from ((key, goal, 1) for key, goal in writer.classes)


class Writers(Algebra):
    """The algebra of a document, with the writers of its forms."""

    def __init__(self, loader: Loader, digits: Digits, limits: Limits) -> None:
        super().__init__(loader, digits, limits)
        self._arrays: dict[ArrayForm, ArrayWriter] = {}
        self._objects: dict[ObjectForm, ObjectWriter] = {}
        self._classes: dict[tuple[ObjectWriter, ...], list[KeyClass]] = {}
        self._listing: set[Goal] = set()  # goals whose values are being listed

    def release(self) -> None:
        """Drop the writers, which point back here, and cut the cycles of recursive schemas."""
        self._arrays.clear()
        self._objects.clear()
        self._classes.clear()
        super().release()

    def array(self, form: ArrayForm) -> ArrayWriter:
        """The writer of an array form."""
        writer = self._arrays.get(form)
        if writer is None:
            writer = self._arrays[form] = ArrayWriter(form, self, False)
        return writer

    def object(self, form: ObjectForm) -> ObjectWriter:
        """The writer of an object form."""
        writer = self._objects.get(form)
        if writer is None:
            writer = self._objects[form] = ObjectWriter(form, self, False)
        return writer

    def array_possible(self, form: ArrayForm, prune: bool) -> bool:
        if not (form.low or form.contains):
            return True
        writer = ArrayWriter(form, self, prune)
        return writer.possible(0, (0,) * len(writer.contains))

    def object_possible(self, form: ObjectForm, prune: bool) -> bool:
        if not (form.required or form.low or form.exists):
            return True
        writer = ObjectWriter(form, self, prune)
        return writer.possible(0, 0, (1 << len(writer.exists)) - 1)

    def list_values(self, goal: Goal) -> dict[bytes, Any] | None:
        if goal in self._listing:  # values made of such values are without end
            return None
        self._listing.add(goal)
        try:
            return list_values(self, goal)
        finally:
            self._listing.discard(goal)

    def class_of(self, writer: ObjectWriter, name: str) -> KeyClass:
        """The class of a name that a writer does not know."""
        return KeyClass(ANY_TEXT, frozenset(language for language in writer.name_languages() if language.accepts(name)))

    def classes(self, writers: tuple[ObjectWriter, ...]) -> list[KeyClass]:
        """The names that no writer knows, in classes that no writer's patterns tell apart; kept."""
        if writers not in self._classes:
            self._classes[writers] = self.classes_of(writers)
        return self._classes[writers]

    def classes_of(self, writers: tuple[ObjectWriter, ...]) -> list[KeyClass]:
        """The same, not kept. SchemaError where there are too many classes."""
        languages = list(dict.fromkeys(language for writer in writers for language in writer.name_languages()))
        if not languages:
            return [KeyClass(ANY_TEXT, frozenset())]
        known = tuple(sorted({name for writer in writers for name in writer.all_names}))
        classes = _told_apart(tuple(languages), known)
        if classes is None:
            pointers = [node.pointer for writer in writers for node in writer.nodes if node.pattern_properties]
            why = (
                f"patterns overlap in more than {MOST_CLASSES} ways, or take more than {MOST_SECONDS:g} s to tell apart"
            )
            raise SchemaError([Problem(f"{pointer}/patternProperties", why) for pointer in (pointers or ["#"])[:1]])
        return classes


@lru_cache(maxsize=256)
def _told_apart(languages: tuple[Language, ...], known: tuple[str, ...]) -> list[KeyClass] | None:
    """Classes of names that are not `known` and that the languages tell apart; None if too many."""
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
