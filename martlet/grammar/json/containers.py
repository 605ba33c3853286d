"""Arrays and objects as states: levels of items, an item for every alternative still possible.

    [ elements ]       Open → Value → After → , → Value → … → ]
    { "name": value }  Open → Key → Colon → Value → After → , → KeyStart → Key → … → }

An item is a writer and a position in it. With it go its *outcome*, the numbers of the goals around
the container that are met if this alternative completes. See `json_machine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from martlet.grammar.json.algebra import Goal
from martlet.grammar.json.json_machine import Machine
from martlet.grammar.json.lexemes import JsonLexeme, free_key, key_lexeme, names_tree
from martlet.grammar.json.scalars import ByteState, End, Linked, Survivors
from martlet.grammar.json.shapes import ArrayForm, ObjectForm
from martlet.grammar.json.writers import ArrayWriter, KeyClass, ObjectWriter
from martlet.grammar.states import Lexeme, State, Tree

COMMA, CLOSE_ARRAY, CLOSE_OBJECT, QUOTE, COLON = 0x2C, 0x5D, 0x7D, 0x22, 0x3A
# ArrayWriter, index, counts, texts written; or ObjectWriter, used, count, missing.
Item = tuple[Any, ...]
Items = tuple[tuple[Item, Survivors], ...]  # with their outcomes


def _united(items: Iterable[tuple[Item, Survivors]]) -> Items:
    """Equal items become one, with the union of their outcomes."""
    outcomes: dict[Item, Survivors] = {}
    for item, outcome in items:
        outcomes[item] = outcomes[item] | outcome if item in outcomes else outcome
    return tuple(outcomes.items())


class Level(Linked):
    """An open array or object."""

    __slots__ = ("_elements", "_keys", "end", "is_array", "items", "machine")

    def __init__(self, machine: Machine, is_array: bool, items: Items, end: End) -> None:
        self.machine, self.is_array, self.items, self.end = machine, is_array, items, end
        self._elements: dict[bool, State | None] = {}
        self._keys: Key | bool | None = False  # not known yet

    def closed(self) -> State | None:
        """The state after the closing bracket; None if it may not come yet."""
        outcomes = [outcome for (writer, *at), outcome in self.items if writer.may_end(*at)]
        return self.end.resume(frozenset().union(*outcomes)) if outcomes else None

    def element(self, after: bool) -> State | None:
        """The state before the next array element, None if no element may come.

        `after`: the element follows a comma, not the opening bracket.
        """
        if after not in self._elements:
            options = [
                (goal, (writer, *position), outcome)
                for (writer, *at), outcome in self.items
                for goal, *position in writer.choices(*at)
            ]
            self._elements[after] = self.value(options, after) if options else None
        return self._elements[after]

    def unlink(self) -> None:
        self._elements.clear()
        if isinstance(self._keys, Key):
            self._keys.keys.unlink()
        self._keys = None

    def may_close(self) -> bool:
        """Whether the closing bracket may come."""
        return any(writer.may_end(*at) for (writer, *at), _ in self.items)

    def value(self, options: Sequence[tuple[Goal, Item, Survivors]], after: bool) -> State:
        """The state before a value.

        `options` are triples: a goal, the item after the value, and the item's outcome.
        """
        merged: dict[tuple[Goal, Item], Survivors] = {}
        for goal, item, outcome in options:
            merged[goal, item] = merged[goal, item] | outcome if (goal, item) in merged else outcome
        goals = tuple(dict.fromkeys(goal for goal, _ in merged))
        numbers = {goal: i for i, goal in enumerate(goals)}
        items = tuple((numbers[goal], item, outcome) for (goal, item), outcome in merged.items())
        end = self.machine.intern(Inside, self.is_array, items, self.end)
        value = self.machine.value(goals, end)
        return self.machine.gap(value, True) if after else value

    def key(self) -> Key | None:
        """The state after the quotation mark of the next name; None if there is no next name."""
        if isinstance(self._keys, bool):
            keys = KeySet(self)
            self._keys = Key(self.machine, keys, keys.start, keys.root) if keys.start or keys.root else None
        return self._keys


class Inside(Linked):
    """The end of a value inside a container: the items go on whose goal it met."""

    def __init__(
        self, machine: Machine, is_array: bool, items: tuple[tuple[int, Item, Survivors], ...], end: End
    ) -> None:
        self._machine, self._is_array, self._items, self._end = machine, is_array, items, end
        self._known: dict[tuple[Survivors, bytes], State] = {}
        self.keeps_text = is_array and any(item[0].keeps_texts for _, item, _ in items)

    def resume(self, met: Survivors, text: bytes = b"") -> State:
        key = (met, text if self.keeps_text else b"")
        state = self._known.get(key)
        if state is None:
            state = self._known[key] = self._machine.gap(self._machine.intern(After, self._level(met, text)), False)
        return state

    def unlink(self) -> None:
        self._known.clear()

    def sealed(self, met: Survivors) -> State:
        return self._machine.gap(Sealed(self._machine, self._level(met, b"")), False)

    def _level(self, met: Survivors, text: bytes) -> Level:
        items = _united((_with(item, text), outcome) for number, item, outcome in self._items if number in met)
        return self._machine.intern(Level, self._is_array, items, self._end)


def _with(item: Item, text: bytes) -> Item:
    """An item of an array of different elements, once an element was written."""
    if isinstance(item[0], ArrayWriter) and item[0].keeps_texts and text:
        return (*item[:-1], item[-1] | {text})
    return item


class LevelState(ByteState):
    """A state directly inside an open container."""

    __slots__ = ("level",)

    def __init__(self, machine: Machine, level: Level) -> None:
        super().__init__(machine)
        self.level = level


class Open(LevelState):
    """After an opening bracket."""

    __slots__ = ()

    def _step(self, byte: int) -> State | None:
        level = self.level
        if level.is_array:
            if byte == CLOSE_ARRAY:
                return level.closed()
            element = level.element(False)
            return None if element is None else element.step(byte)
        if byte == CLOSE_OBJECT:
            return level.closed()
        return level.key() if byte == QUOTE else None

    def next_bytes(self) -> bytes | None:
        level = self.level
        if not level.is_array:
            return (b'"' if level.key() is not None else b"") + (b"}" if level.may_close() else b"")
        element = level.element(False)
        first = b"" if element is None else element.next_bytes()
        return None if first is None else first + (b"]" if level.may_close() else b"")


class After(LevelState):
    """After an element or a property."""

    __slots__ = ()

    def _step(self, byte: int) -> State | None:
        level = self.level
        if byte == (CLOSE_ARRAY if level.is_array else CLOSE_OBJECT):
            return level.closed()
        if byte != COMMA:
            return None
        if level.is_array:
            return level.element(True)
        if level.key() is None:
            return None
        return self.machine.gap(self.machine.intern(KeyStart, level), True)

    def next_bytes(self) -> bytes:
        level = self.level
        more = level.element(True) if level.is_array else level.key()
        close = b"]" if level.is_array else b"}"
        return (b"" if more is None else b",") + (close if level.may_close() else b"")


class Sealed(After):
    """After an element whose text is unknown: a comma may come, but nothing after it."""

    __slots__ = ()

    def _step(self, byte: int) -> State | None:
        after = super()._step(byte)
        return Nowhere(self.machine) if after is not None and byte == COMMA else after


class Nowhere(ByteState):
    """A state that no byte leaves. Only masks get here, where what may follow is unknown."""

    __slots__ = ()

    def _step(self, byte: int) -> State | None:
        return None

    def next_bytes(self) -> bytes:
        return b""


class KeyStart(LevelState):
    """Before a name."""

    __slots__ = ()

    def _step(self, byte: int) -> State | None:
        return self.level.key() if byte == QUOTE else None

    def next_bytes(self) -> bytes:
        return b'"'


class KeySet:
    """The names that may come next: a tree of those a schema knows, an automaton for all others."""

    def __init__(self, level: Level) -> None:
        self.level, self.machine = level, level.machine
        self._after: dict[str | KeyClass, State | None] = {}
        # By the automaton's state and the id of the tree's node.
        self._states: dict[tuple[int, int], Key] = {}
        writers = tuple(dict.fromkeys(item[0] for item, _ in level.items))
        classes = [key for key in self.machine.algebra.classes(writers) if self.after(key) is not None]
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
            self.root = self.machine.intern(known_names_tree, writers)
        else:
            names = dict.fromkeys(name for writer in writers for name in writer.names)
            if len(writers) > 1:  # a name that one writer excludes may come by another
                names |= dict.fromkeys(sorted(frozenset().union(*(writer.all_names for writer in writers))))
            self.root = self.machine.intern(names_tree, tuple(name for name in names if self._may_come(name)))

    def _may_come(self, name: str) -> bool:
        """Whether a known name may come, without working out what follows where that is simple."""
        writer, *at = self.level.items[0][0]
        if len(self.level.items) == 1 and writer.is_simple:
            return bool(writer.has(name, at[0], self.machine.ordered))
        return self.after(name) is not None

    def state(self, state: int, node: Tree | None) -> Key:
        """The state inside a name."""
        key = (state, id(node))
        if key not in self._states:
            self._states[key] = Key(self.machine, self, state, node)
        return self._states[key]

    def after(self, key: str | KeyClass) -> State | None:
        """The state after a name and its quotation mark; None if the name may not come."""
        if key not in self._after:
            name, others = (key, None) if isinstance(key, str) else (None, key)
            level, machine = self.level, self.machine
            options = [
                (goal, (writer, *position), outcome)
                for (writer, *at), outcome in level.items
                for goal, position in self._choices(writer, name, others, at)
            ]
            self._after[key] = (
                machine.gap(machine.intern(Colon, level.value(options, True)), False) if options else None
            )
        return self._after[key]

    def _choices(self, writer: Any, name: str | None, others: KeyClass | None, at: list[Any]) -> Any:
        """What a writer does with a name.

        A name that only other writers know belongs to a class here.
        """
        if name is not None and name not in writer.all_names:
            others = self.machine.algebra.class_of(writer, name)
            name = None
        return writer.after(name, others, *at, ordered=self.machine.ordered)

    def unlink(self) -> None:
        """Drop the links to states."""
        self._after.clear()
        self._states.clear()

    def after_label(self, label: int) -> State | None:
        """The state after a name that no schema knows."""
        key = self._labels[label]
        return None if key is None else self.after(key)


def known_names_tree(machine: Machine, writers: tuple[ObjectWriter, ...]) -> Tree:
    """All names that writers know, as a tree of bytes."""
    return names_tree(machine, tuple({name for writer in writers for name in writer.all_names}))


class Key(ByteState):
    """Inside a name.

    `state` is that of the automaton of unknown names (0: not one of them); `node` is in the tree of
    known names.
    """

    __slots__ = ("keys", "node", "state")

    def __init__(self, machine: Machine, keys: KeySet, state: int, node: Tree | None) -> None:
        super().__init__(machine)
        self.keys, self.state, self.node = keys, state, node

    @property
    def lexeme(self) -> tuple[Lexeme, int] | None:
        """The automaton of unknown names, where no known name interferes."""
        if not self.state or (self.node and not self.keys.is_free):
            return None
        assert self.keys.lexeme is not None
        return self.keys.lexeme.lexeme, self.state

    def exit(self, label: int) -> State | None:
        return self.keys.after_label(label)

    def reserved(self) -> Tree | None:
        """The known names still possible."""
        return self.node if self.keys.is_free or not self.state else None

    def alternatives(self) -> tuple[State, ...] | None:
        """The automaton and the tree as two states, where they share no name."""
        if not self.state or not self.node or self.keys.is_free:
            return None
        return self.keys.state(self.state, None), self.keys.state(0, self.node)

    def after_reserved(self, name: str) -> State | None:
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
        twin = self.value.twin()
        return None if twin is None else (self.machine.intern(Colon, twin[0]), twin[1])

    def next_bytes(self) -> bytes:
        return b":"


class JsonMachine(Machine):
    """The states of all of JSON."""

    def open_array(self, forms: list[tuple[ArrayForm, ...]], end: End) -> State | None:
        writers = [(self.algebra.array(form), i) for i, own in enumerate(forms) for form in own]
        return self._opened(
            True,
            [((writer, 0, (0,) * len(writer.contains), frozenset[bytes]()), frozenset({i})) for writer, i in writers],
            end,
        )

    def open_object(self, forms: list[tuple[ObjectForm, ...]], end: End) -> State | None:
        writers = [(self.algebra.object(form), i) for i, own in enumerate(forms) for form in own]
        return self._opened(
            False, [((writer, 0, 0, (1 << len(writer.exists)) - 1), frozenset({i})) for writer, i in writers], end
        )

    def _opened(self, is_array: bool, items: list[tuple[Item, Survivors]], end: End) -> State | None:
        level = self.intern(Level, is_array, _united(items), end) if items else None
        return None if level is None else self.gap(self.intern(Open, level), False)
