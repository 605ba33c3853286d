"""Arrays and objects as states: levels of points, one for each alternative that is still possible (see `json_machine.py`).

    [  items  ]      ArrayOpen → Value → ArrayAfter → , → Value → … → ]
    { "name": value }  ObjectOpen → Key → : → Value → ObjectAfter → , → Key → … → }

A point is a plan and where it stands in it; beside it stand the numbers of the goals around the container that are met if
this alternative comes to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from martlet.grammar.json.algebra import Goal
from martlet.grammar.json.json_machine import Machine
from martlet.grammar.json.lexemes import JsonLexeme, free_key, key_lexeme, names_tree
from martlet.grammar.json.scalars import ByteState, End, Survivors
from martlet.grammar.json.shapes import ArrayForm, ObjectForm
from martlet.grammar.json.writers import ArrayPlan, KeyClass, ObjectPlan
from martlet.grammar.states import Lexeme, State, Tree

__all__ = ["JsonMachine"]

COMMA, CLOSE_ARRAY, CLOSE_OBJECT, QUOTE, COLON = 0x2C, 0x5D, 0x7D, 0x22, 0x3A
Point = tuple[Any, ...]  # an ArrayPlan, index, counts, texts written; or an ObjectPlan, used, count, missing
Points = tuple[tuple[Point, Survivors], ...]


def _united(points: Iterable[tuple[Point, Survivors]]) -> Points:
    """Equal points as one, for all that it is for."""
    found: dict[Point, Survivors] = {}
    for point, ups in points:
        found[point] = found[point] | ups if point in found else ups
    return tuple(found.items())


class Level:
    """An open array or object."""

    __slots__ = ("_items", "_keys", "end", "is_array", "machine", "points")

    def __init__(self, machine: Machine, is_array: bool, points: Points, end: End) -> None:
        self.machine, self.is_array, self.points, self.end = machine, is_array, points, end
        self._items: dict[bool, State | None] = {}
        self._keys: Key | bool | None = False  # not looked at yet

    def closed(self) -> State | None:
        """The state after the closing bracket, None if it may not come yet."""
        met = [ups for (plan, *at), ups in self.points if plan.may_end(*at)]
        return self.end.resume(frozenset().union(*met)) if met else None

    def item(self, after: bool) -> State | None:
        """The state before the next item, None if there can be none; `after` a comma, not a bracket."""
        if after not in self._items:
            options = [
                (goal, (plan, *place), ups) for (plan, *at), ups in self.points for goal, *place in plan.choices(*at)
            ]
            self._items[after] = self.value(options, after) if options else None
        return self._items[after]

    def forget(self) -> None:
        """Let go of the states that follow."""
        self._items.clear()
        if isinstance(self._keys, Key):
            self._keys.keys.forget()
        self._keys = None

    def may_close(self) -> bool:
        """Whether the closing bracket may come."""
        return any(plan.may_end(*at) for (plan, *at), _ in self.points)

    def value(self, options: Sequence[tuple[Goal, Point, Survivors]], after: bool) -> State:
        """The state before a value: each option is a goal, the point after it, and what that is for."""
        merged: dict[tuple[Goal, Point], Survivors] = {}
        for goal, point, ups in options:
            merged[goal, point] = merged[goal, point] | ups if (goal, point) in merged else ups
        goals = tuple(dict.fromkeys(goal for goal, _ in merged))
        numbers = {goal: i for i, goal in enumerate(goals)}
        points = tuple((numbers[goal], point, ups) for (goal, point), ups in merged.items())
        end = self.machine.made(Inside, self.is_array, points, self.end)
        value = self.machine.value(goals, end)
        return self.machine.gap(value, True) if after else value

    def key(self) -> Key | None:
        """The state after the quotation mark of the next name, None if there can be none."""
        if isinstance(self._keys, bool):
            keys = KeySet(self)
            self._keys = Key(self.machine, keys, keys.start, keys.root) if keys.start or keys.root else None
        return self._keys


class Inside:
    """The end of a value inside an array or object: `points` go on whose goal it met."""

    def __init__(
        self, machine: Machine, is_array: bool, points: tuple[tuple[int, Point, Survivors], ...], end: End
    ) -> None:
        self._machine, self._is_array, self._points, self._end = machine, is_array, points, end
        self._known: dict[tuple[Survivors, bytes], State] = {}
        self.keeps_text = is_array and any(point[0].keeps_texts for _, point, _ in points)

    def resume(self, met: Survivors, text: bytes = b"") -> State:
        """The state after a value that met these goals."""
        key = (met, text if self.keeps_text else b"")
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._machine.gap(self._machine.made(After, self._level(met, text)), False)
        return found

    def forget(self) -> None:
        """Let go of the states that follow."""
        self._known.clear()

    def sealed(self, met: Survivors) -> State:
        """The same, up to the next item."""
        return self._machine.gap(Sealed(self._machine, self._level(met, b"")), False)

    def _level(self, met: Survivors, text: bytes) -> Level:
        points = _united((_with(point, text), ups) for number, point, ups in self._points if number in met)
        return self._machine.made(Level, self._is_array, points, self._end)


def _with(point: Point, text: bytes) -> Point:
    """A point in an array of different items, once one was written."""
    if isinstance(point[0], ArrayPlan) and point[0].keeps_texts and text:
        return (*point[:-1], point[-1] | {text})
    return point


class Open(ByteState):
    """After an opening bracket."""

    __slots__ = ("level",)

    def __init__(self, machine: Machine, level: Level) -> None:
        super().__init__(machine)
        self.level = level

    def _step(self, byte: int) -> State | None:
        level = self.level
        if level.is_array:
            if byte == CLOSE_ARRAY:
                return level.closed()
            item = level.item(False)
            return None if item is None else item.step(byte)
        if byte == CLOSE_OBJECT:
            return level.closed()
        return level.key() if byte == QUOTE else None

    def next_bytes(self) -> bytes | None:
        """A quotation mark, the first byte of an item, or the closing bracket."""
        level = self.level
        if not level.is_array:
            return (b'"' if level.key() is not None else b"") + (b"}" if level.may_close() else b"")
        item = level.item(False)
        first = b"" if item is None else item.next_bytes()
        return None if first is None else first + (b"]" if level.may_close() else b"")


class After(ByteState):
    """After an item or a property."""

    __slots__ = ("level",)

    def __init__(self, machine: Machine, level: Level) -> None:
        super().__init__(machine)
        self.level = level

    def _step(self, byte: int) -> State | None:
        level = self.level
        if byte == (CLOSE_ARRAY if level.is_array else CLOSE_OBJECT):
            return level.closed()
        if byte != COMMA:
            return None
        if level.is_array:
            return level.item(True)
        if level.key() is None:
            return None
        return self.machine.gap(self.machine.made(KeyStart, level), True)

    def next_bytes(self) -> bytes:
        """A comma or the closing bracket."""
        level = self.level
        more = level.item(True) if level.is_array else level.key()
        close = b"]" if level.is_array else b"}"
        return (b"" if more is None else b",") + (close if level.may_close() else b"")


class Sealed(After):
    """After an item whose text is not known: a comma may come, but nothing more."""

    __slots__ = ()

    def _step(self, byte: int) -> State | None:
        after = super()._step(byte)
        return Nowhere(self.machine) if after is not None and byte == COMMA else after


class Nowhere(ByteState):
    """A place from which no byte leads on. Only masks come here, where what may follow is not known."""

    __slots__ = ()

    def _step(self, byte: int) -> State | None:
        return None

    def next_bytes(self) -> bytes:
        """None."""
        return b""


class KeyStart(ByteState):
    """Before a name."""

    __slots__ = ("level",)

    def __init__(self, machine: Machine, level: Level) -> None:
        super().__init__(machine)
        self.level = level

    def _step(self, byte: int) -> State | None:
        return self.level.key() if byte == QUOTE else None

    def next_bytes(self) -> bytes:
        """A quotation mark."""
        return b'"'


class KeySet:
    """The names that may come next at a level: a tree of those that a schema knows, an automaton for all others."""

    def __init__(self, level: Level) -> None:
        self.level, self.machine = level, level.machine
        self._after: dict[str | KeyClass, State | None] = {}
        self._states: dict[tuple[int, int], Key] = {}  # by the automaton's state and the tree's node, which lives on
        plans = tuple(dict.fromkeys(point[0] for point, _ in level.points))
        classes = [key for key in self.machine.plans.classes(plans) if self.after(key) is not None]
        self.is_free = len(classes) == 1 and classes[0].names.is_any
        self.lexeme: JsonLexeme | None = None
        self._labels: tuple[KeyClass | None, ...] = ()
        if self.is_free:
            self.lexeme, self._labels = free_key(), (None, classes[0])
        elif classes:
            self.lexeme, members = key_lexeme(tuple(key.names.as_language() for key in classes))
            self._labels = (None, *(classes[min(member)] for member in members[1:]))
        self.start = self.lexeme.start if self.lexeme is not None else 0
        self.root: Tree
        if self.is_free:
            self.root = self.machine.made(known_names_tree, plans)
        else:
            names = dict.fromkeys(name for plan in plans for name in plan.names)
            if len(plans) > 1:  # what is known to one as a name that must not be there may come by another
                names |= dict.fromkeys(sorted(frozenset().union(*(plan.all_names for plan in plans))))
            self.root = self.machine.made(names_tree, tuple(name for name in names if self._may_come(name)))

    def _may_come(self, name: str) -> bool:
        """Whether a known name may come, without working out what comes after it where that is simple."""
        plan, *at = self.level.points[0][0]
        if len(self.level.points) == 1 and plan.is_simple:
            return bool(plan.has(name, at[0], self.machine.ordered))
        return self.after(name) is not None

    def state(self, state: int, node: Tree | None) -> Key:
        """The state inside a name."""
        key = (state, id(node))
        if key not in self._states:
            self._states[key] = Key(self.machine, self, state, node)
        return self._states[key]

    def after(self, key: str | KeyClass) -> State | None:
        """The state after a name and its quotation mark, None if the name may not come."""
        if key not in self._after:
            name, others = (key, None) if isinstance(key, str) else (None, key)
            level, machine = self.level, self.machine
            options = [
                (goal, (plan, *place), ups)
                for (plan, *at), ups in level.points
                for goal, place in self._choices(plan, name, others, at)
            ]
            self._after[key] = machine.gap(machine.made(Colon, level.value(options, True)), False) if options else None
        return self._after[key]

    def _choices(self, plan: Any, name: str | None, others: KeyClass | None, at: list[Any]) -> Any:
        """What a plan does with a name; one that only another plan knows is for this one of a class."""
        if name is not None and name not in plan.all_names:
            others = self.machine.plans.class_of(plan, name)
            name = None
        return plan.after(name, others, *at, ordered=self.machine.ordered)

    def forget(self) -> None:
        """Let go of the states that follow."""
        self._after.clear()
        self._states.clear()

    def after_label(self, label: int) -> State | None:
        """The state after a name that no schema knows."""
        key = self._labels[label]
        return None if key is None else self.after(key)


def known_names_tree(machine: Machine, plans: tuple[ObjectPlan, ...]) -> Tree:
    """All names that plans know, as a tree."""
    return names_tree(machine, tuple({name for plan in plans for name in plan.all_names}))


class Key(ByteState):
    """Inside a name: `state` of the automaton of unknown names (0: it is none), `node` in the tree of known ones."""

    __slots__ = ("keys", "node", "state")

    def __init__(self, machine: Machine, keys: KeySet, state: int, node: Tree | None) -> None:
        super().__init__(machine)
        self.keys, self.state, self.node = keys, state, node

    @property
    def lexeme(self) -> tuple[Lexeme, int] | None:
        """The automaton, where the known names are among its texts or out of reach."""
        if not self.state or (self.node and not self.keys.is_free):
            return None
        assert self.keys.lexeme is not None
        return self.keys.lexeme.lexeme, self.state

    def exit(self, label: int) -> State | None:
        """The state after the name."""
        return self.keys.after_label(label)

    def detours(self) -> Tree | None:
        """The known names that this may become."""
        return self.node if self.keys.is_free or not self.state else None

    def parts(self) -> tuple[State, ...] | None:
        """The automaton and the tree, where no known name is among the automaton's texts."""
        if not self.state or not self.node or self.keys.is_free:
            return None
        return self.keys.state(self.state, None), self.keys.state(0, self.node)

    def detour(self, name: str) -> State | None:
        """The state after a known name."""
        return self.keys.after(name)

    def _step(self, byte: int) -> State | None:
        node, lexeme = self.node, self.keys.lexeme
        child = None if node is None else node.get(byte)
        if child is not None and -1 in child:
            return self.keys.after(child[-1])
        after = int(lexeme.lexeme.dfa.table[self.state, byte]) if lexeme is not None and self.state else 0
        if lexeme is not None and after in lexeme.final:
            return self.keys.after_label(int(lexeme.lexeme.dfa.accept[after]))
        return self.keys.state(after, child) if after or child is not None else None

    def next_bytes(self) -> bytes | None:
        """Those of known names, if there can be no others."""
        if self.state or self.node is None:
            return None
        return bytes(sorted(self.node))


class Colon(ByteState):
    """After a name."""

    __slots__ = ("value",)

    def __init__(self, machine: Machine, value: State) -> None:
        super().__init__(machine)
        self.value = value

    def _step(self, byte: int) -> State | None:
        return self.value if byte == COLON else None

    def twin(self) -> tuple[State, Callable[[Any], State]] | None:
        """The colon before the value's twin."""
        found = self.value.twin()
        return None if found is None else (self.machine.made(Colon, found[0]), found[1])

    def next_bytes(self) -> bytes:
        """A colon."""
        return b":"


class JsonMachine(Machine):
    """All of JSON."""

    def open_array(self, forms: list[tuple[ArrayForm, ...]], end: End) -> State | None:
        """The state after `[`: for each goal the forms of its arrays."""
        plans = [(self.plans.array(form), i) for i, own in enumerate(forms) for form in own]
        points = _united(
            ((plan, 0, (0,) * len(plan.contains), frozenset[bytes]()), frozenset({i})) for plan, i in plans
        )
        return self.gap(self.made(Open, self.made(Level, True, points, end)), False) if points else None

    def open_object(self, forms: list[tuple[ObjectForm, ...]], end: End) -> State | None:
        """The state after `{`: for each goal the forms of its objects."""
        plans = [(self.plans.object(form), i) for i, own in enumerate(forms) for form in own]
        points = _united(((plan, 0, 0, (1 << len(plan.exists)) - 1), frozenset({i})) for plan, i in plans)
        return self.gap(self.made(Open, self.made(Level, False, points, end)), False) if points else None
