"""States joined: a language's texts, free text up to a mark, one text after another, either of two.

All are `State`s as `states.py` has them. Equal states are one object: their makers keep them.
Read `compile.py` next, which uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from martlet.errors import RequestError
from martlet.grammar.language import Language, literals
from martlet.grammar.states import Dfa, Lexeme, Plain, State, Tree
from martlet.grammar.utf8 import to_bytes


class _End(Plain):
    """The state after everything."""

    accepts = True

    def step(self, byte: int) -> State | None:
        return None

    def next_bytes(self) -> bytes | None:
        return b""


END: State = _End()


class _Automaton:
    """A lexeme with what follows each of its labels; it makes its states when they are needed.

    `ends` says whether the text may end in a state of the automaton.
    """

    def __init__(
        self, dfa: Dfa, after: Callable[[int], State], labels: Sequence[int], ends: Callable[[int], bool]
    ) -> None:
        self.dfa = dfa
        self.after = after
        self.ends = ends
        follow = frozenset(byte for label in labels for byte in first_bytes(after(label)))
        self.lexeme = Lexeme(dfa, follow)
        self.rows = [np.flatnonzero(row).astype(np.uint8).tobytes() for row in dfa.table]
        self._states: dict[int, _Inside] = {}

    def at(self, q: int) -> _Inside:
        state = self._states.get(q)
        if state is None:
            state = self._states[q] = _Inside(self, q)
        return state


class _Inside(Plain):
    """A state inside an automaton; what follows begins only where the automaton cannot go on."""

    __slots__ = ("_accepts", "_lexeme", "_machine", "_q")

    def __init__(self, machine: _Automaton, q: int) -> None:
        self._machine, self._q = machine, q
        self._lexeme = machine.lexeme, q
        label = int(machine.dfa.accept[q])
        self._accepts = machine.ends(q) or bool(label and machine.after(label).accepts)

    @property
    def accepts(self) -> bool:
        return self._accepts

    @property
    def lexeme(self) -> tuple[Lexeme, int] | None:
        return self._lexeme

    def step(self, byte: int) -> State | None:
        machine = self._machine
        q = int(machine.dfa.table[self._q, byte])
        if q:
            return machine.at(q)
        label = int(machine.dfa.accept[self._q])
        return machine.after(label).step(byte) if label else None

    def exit(self, label: int) -> State | None:
        return self._machine.after(label)

    def next_bytes(self) -> bytes | None:
        machine = self._machine
        label = int(machine.dfa.accept[self._q])
        if not label:
            return machine.rows[self._q]
        return bytes(sorted({*machine.rows[self._q], *first_bytes(machine.after(label))}))


def first_bytes(state: State) -> bytes:
    """The bytes with which a state goes on."""
    known = state.next_bytes()
    return known if known is not None else bytes(byte for byte in range(256) if state.step(byte) is not None)


def language_state(language: Language, after: State = END) -> State | None:
    """The texts of a language, each followed by the texts of `after`; None if there are none.

    The longest match counts: what follows begins only where no longer text of the language goes on.
    """
    if language.is_empty:
        return None
    dfa = to_bytes(language)
    return _Automaton(dfa, lambda label: after, (1,), lambda q: False).at(dfa.start)


def free_text(marks: Sequence[str], after: Callable[[int], State], may_end: bool, *, at_start: bool = False) -> State:
    """Any text up to the first of the marks, and then the texts of `after(i)` for mark i.

    `may_end` allows a text without marks; `at_start` looks for a mark at the beginning only.
    """
    anything = Language.everything()
    inside = literals(marks)
    without = anything - ((inside if at_start else anything + inside) + anything)
    dfa, whole = _up_to(without, marks, at_start)
    states = [after(i) for i in range(len(marks))]
    labels = range(1, len(marks) + 1)
    return _Automaton(dfa, lambda label: states[label - 1], labels, lambda q: may_end and whole[q]).at(dfa.start)


def _up_to(without: Language, marks: Sequence[str], at_start: bool) -> tuple[Dfa, list[bool]]:
    """The automaton of texts that end with their first mark, labelled by its number from 1 on.

    Also says in which states a text without any mark is whole, which it is not inside a character.
    The automaton is that of texts without a mark, extended by the bytes that complete a mark. Its
    states are pairs: a state without marks, and the last bytes that may begin a mark. With
    `at_start` these are all bytes, and None once no mark begins so.
    """
    plain = to_bytes(without)
    encoded = [mark.encode() for mark in marks]
    whole_marks = {text: i for i, text in reversed(list(enumerate(encoded)))}
    prefixes = {text[:n] for text in encoded for n in range(len(text) + 1)}
    first: tuple[int, bytes | None] = (plain.start, b"")
    numbers, queue = {first: 1}, [first]
    rows: list[list[int]] = [[0] * 256]
    ends: list[tuple[int, int, int]] = []
    for q, seen in queue:
        row = [0] * 256
        for byte in range(256):
            text = None if seen is None else seen + bytes((byte,))
            done = None if text is None else whole_marks.get(text)
            if done is None and text is not None and not at_start:
                done = next((i for i, mark in enumerate(encoded) if text.endswith(mark)), None)
            if done is not None:
                ends.append((len(rows), byte, done))
                continue
            after = int(plain.table[q, byte])
            if after == 0:
                continue
            while text is not None and text not in prefixes:
                text = None if at_start else text[1:]
            key = after, text
            if key not in numbers:
                numbers[key] = len(numbers) + 1
                queue.append(key)
            row[byte] = numbers[key]
        rows.append(row)
    n = len(rows)
    table = np.zeros((n + len(marks), 256), np.int32)
    table[:n] = rows
    accept = np.zeros(n + len(marks), np.int32)
    for state, byte, done in ends:
        table[state, byte] = n + done
        accept[n + done] = done + 1
    whole = [False, *(bool(plain.accept[q]) for q, _ in queue), *([False] * len(marks))]
    return Dfa(table, accept, 1), whole


def one_of(texts: Sequence[str], after: Callable[[int], State], *, may_end: bool = False) -> State:
    """One of the texts, and then the texts of `after(i)` for text i.

    `may_end` also allows nothing at all. RequestError if a text begins with another.
    """
    rows: list[dict[int, int]] = [{}, {}]
    labels = [0, 0]
    for number, text in enumerate(texts):
        at = 1
        for byte in text.encode():
            if byte not in rows[at]:
                rows[at][byte] = len(rows)
                rows.append({})
                labels.append(0)
            at = rows[at][byte]
        labels[at] = labels[at] or number + 1
    if any(row and label for row, label in zip(rows, labels, strict=True)):
        raise RequestError("tags: one tag's begin is the beginning of another's.", param="structured")
    table = np.zeros((len(rows), 256), np.int32)
    for state, row in enumerate(rows):
        for byte, to in row.items():
            table[state, byte] = to
    dfa = Dfa(table, np.array(labels, np.int32), 1)
    used = sorted({label for label in labels if label})
    return _Automaton(dfa, lambda label: after(label - 1), used, lambda q: may_end and q == 1).at(1)


class Again(Plain):
    """A state that is known later: free text leads to tags, which lead back to free text."""

    accepts = True
    target: State

    @property
    def lexeme(self) -> tuple[Lexeme, int] | None:
        return self.target.lexeme

    def step(self, byte: int) -> State | None:
        return self.target.step(byte)

    def exit(self, label: int) -> State | None:
        return self.target.exit(label)

    def next_bytes(self) -> bytes | None:
        return _CHARACTERS


_CHARACTERS = bytes((*range(0x80), *range(0xC2, 0xF5)))  # with which a character begins


class _Then:
    """The texts of a state; where it cannot go on, the texts of a second state follow."""

    __slots__ = ("_first", "_made", "_second", "accepts", "budget", "is_json", "lexeme")

    def __init__(self, first: State, second: State, made: dict[State, State]) -> None:
        self._first, self._second, self._made = first, second, made
        self.accepts = first.accepts and second.accepts
        self.lexeme = first.lexeme
        self.budget = first.budget
        self.is_json = first.is_json

    def step(self, byte: int) -> State | None:
        state = self._first.step(byte)
        if state is not None:
            return _then(state, self._second, self._made)
        return self._second.step(byte) if self._first.accepts else None

    def exit(self, label: int) -> State | None:
        state = self._first.exit(label)
        return None if state is None else _then(state, self._second, self._made)

    def reserved(self) -> Tree | None:
        return self._first.reserved()

    def after_reserved(self, name: Any) -> State | None:
        state = self._first.after_reserved(name)
        return None if state is None else _then(state, self._second, self._made)

    def split(self) -> tuple[bytes, State] | None:
        return None

    def alternatives(self) -> tuple[State, ...] | None:
        alternatives = self._first.alternatives()
        return (
            None
            if alternatives is None
            else tuple(_then(alternative, self._second, self._made) for alternative in alternatives)
        )

    def twin(self) -> tuple[State, Callable[[Any], State]] | None:
        twin = self._first.twin()
        if twin is None:
            return None
        state, resume = twin
        return state, lambda reached: _then(resume(reached), self._second, self._made)

    @property
    def reached(self) -> Any:
        return None

    def next_bytes(self) -> bytes | None:
        known = self._first.next_bytes()
        if known is None or not self._first.accepts:
            return known
        return bytes(sorted({*known, *first_bytes(self._second)}))


def _then(first: State, second: State, made: dict[State, State]) -> State:
    if first.accepts and first.lexeme is None and first.next_bytes() == b"":
        return second
    state = made.get(first)
    if state is None:
        state = made[first] = _Then(first, second, made)
    return state


def then(first: State, second: State) -> State:
    """The texts of one state, each followed by a text of another.

    The first's last byte must not be inside a lexeme, as the end of a JSON container is not;
    otherwise `second` is not expected there.
    """
    return second if first is END else _then(first, second, {})


class _Either(Plain):
    """The texts of both states, followed side by side."""

    __slots__ = ("_a", "_b")

    def __init__(self, a: State, b: State) -> None:
        self._a, self._b = a, b

    @property
    def accepts(self) -> bool:
        return self._a.accepts or self._b.accepts

    @property
    def is_json(self) -> bool:
        return self._a.is_json or self._b.is_json

    def step(self, byte: int) -> State | None:
        a, b = self._a.step(byte), self._b.step(byte)
        if a is None or b is None:
            return b if a is None else a
        return _Either(a, b)

    def alternatives(self) -> tuple[State, ...] | None:
        return self._a, self._b

    def next_bytes(self) -> bytes | None:
        return bytes(sorted({*first_bytes(self._a), *first_bytes(self._b)}))


def either(a: State, b: State) -> State:
    """The texts of two states."""
    return _Either(a, b)
