"""States inside strings, numbers and words (read `json_machine.py` next).

A scalar from a list of texts is followed by bisecting the sorted list; any other by the automaton
of its lexeme.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

import numpy as np

from martlet.grammar.json.lexemes import JsonLexeme, free_string
from martlet.grammar.states import MANY, Lexeme, Plain, State

if TYPE_CHECKING:
    from martlet.grammar.json.json_machine import Machine

Survivors = frozenset[int]  # the numbers of the goals that a value met


class End(Protocol):
    """What follows a complete value."""

    @property
    def keeps_text(self) -> bool:
        """Whether what follows depends on the value's text."""

    def resume(self, met: Survivors, text: bytes = b"") -> State:
        """The state after a value that met these goals."""

    def sealed(self, met: Survivors) -> State:
        """The same for an unknown text: a state that stops where the text would matter."""


class Linked:
    """An interned object that links to states which may lead back to it."""

    __slots__ = ()

    def unlink(self) -> None:
        """Drop the links, so that no cycle is left."""
        raise NotImplementedError


class ByteState(Plain, Linked):
    """A state that remembers where each byte led."""

    __slots__ = ("_next", "machine")

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._next: dict[int, State | None] = {}

    @property
    def is_json(self) -> bool:
        return True

    def step(self, byte: int) -> State | None:
        try:
            return self._next[byte]
        except KeyError:
            after = self._next[byte] = self._step(byte)
            return after

    def _step(self, byte: int) -> State | None:
        raise NotImplementedError

    def unlink(self) -> None:
        self._next.clear()


class EnumTable:
    """Texts in order, with the goals that each meets."""

    def __init__(self, outcomes: dict[bytes, Survivors]) -> None:
        self.texts = sorted(outcomes)
        self.met = [outcomes[text] for text in self.texts]


class EnumState(ByteState):
    """Inside a listed text: texts `first` to `stop` - 1 agree in their first `depth` bytes."""

    __slots__ = ("depth", "end", "first", "stop", "table")

    def __init__(self, machine: Machine, table: EnumTable, first: int, stop: int, depth: int, end: End) -> None:
        super().__init__(machine)
        self.table, self.first, self.stop, self.depth, self.end = table, first, stop, depth, end

    @classmethod
    def of(cls, machine: Machine, outcomes: dict[bytes, Survivors], end: End) -> EnumState:
        """The state before any of some texts."""
        table = EnumTable(outcomes)
        return cls(machine, table, 0, len(table.texts), 0, end)

    @property
    def _complete(self) -> State | None:
        """The state after the first text, if it ends here."""
        if len(self.table.texts[self.first]) > self.depth:
            return None
        return self.end.resume(self.table.met[self.first], self.table.texts[self.first])

    @property
    def accepts(self) -> bool:
        """Whether a listed text ends here, and the answer may."""
        complete = self._complete
        return complete is not None and complete.accepts

    def _step(self, byte: int) -> State | None:
        texts, depth = self.table.texts, self.depth
        complete = self._complete
        first = self.first + (complete is not None)
        first = bisect_left(texts, byte, first, self.stop, key=lambda text: text[depth])
        stop = bisect_left(texts, byte + 1, first, self.stop, key=lambda text: text[depth])
        if first == stop:
            return None if complete is None else complete.step(byte)
        if stop - first == 1 and len(texts[first]) == depth + 1:
            return self.end.resume(self.table.met[first], texts[first])
        return EnumState(self.machine, self.table, first, stop, depth + 1, self.end)

    def next_bytes(self) -> bytes | None:
        if self.stop - self.first > 64:
            return None
        ahead = {text[self.depth] for text in self.table.texts[self.first : self.stop] if len(text) > self.depth}
        complete = self._complete
        if complete is not None:
            after = complete.next_bytes()
            if after is None:
                return None
            ahead |= set(after)
        return bytes(sorted(ahead))


class LexemeUse:
    """A lexeme in its context: the goals that each of its labels meets, and what follows."""

    def __init__(self, machine: Machine, lexeme: JsonLexeme, outcomes: tuple[Survivors, ...], end: End) -> None:
        self.lexeme, self.outcomes, self.end = lexeme, outcomes, end
        self.free: LexemeUse | None = None
        if lexeme.universal:
            self.free = machine.intern(LexemeUse, free_string(), outcomes[:2], end)


class LexemeState(ByteState):
    """Inside a string or a number.

    `left` is the least and the most characters still to come (None: free); `text` is what was
    written of it, where that matters later.
    """

    __slots__ = ("left", "state", "text", "use")

    def __init__(
        self, machine: Machine, use: LexemeUse, state: int, left: tuple[int, int] | None, text: bytes | None
    ) -> None:
        super().__init__(machine)
        self.use, self.state, self.left, self.text = use, state, left, text

    @property
    def accepts(self) -> bool:
        """Whether a number is complete, and the answer with it."""
        label = int(self.use.lexeme.lexeme.dfa.accept[self.state])
        return bool(label) and self._after(label, self.text).accepts

    @property
    def lexeme(self) -> tuple[Lexeme, int]:
        return self.use.lexeme.lexeme, self.state

    @property
    def budget(self) -> tuple[int, int] | None:
        return self.left

    def first_bytes(self) -> set[int]:
        """The bytes with which the lexeme goes on."""
        return set(np.nonzero(self.use.lexeme.lexeme.dfa.table[self.state])[0].tolist())

    def exit(self, label: int) -> State:
        if self.text is not None:
            return self.use.end.sealed(self.use.outcomes[label])
        return self.use.end.resume(self.use.outcomes[label])

    def _after(self, label: int, text: bytes | None) -> State:
        return self.use.end.resume(self.use.outcomes[label], text or b"")

    def _step(self, byte: int) -> State | None:
        use, lexeme = self.use, self.use.lexeme.lexeme
        after = int(lexeme.dfa.table[self.state, byte])
        label = int(lexeme.dfa.accept[after or self.state])
        if not after:
            return self._after(label, self.text).step(byte) if label else None
        left, text = self.left, None if self.text is None else self.text + bytes([byte])
        if after in use.lexeme.final:
            return None if left is not None and left[0] > 0 else self._after(label, text)
        if left is not None and self.state == lexeme.counted:
            if left[1] == 0:
                return None
            left = (max(left[0] - 1, 0), left[1] - 1 if left[1] < MANY else MANY)
        if after in use.lexeme.universal and use.free is not None:
            return self.machine.intern(LexemeState, use.free, use.free.lexeme.start, None, text)
        return self.machine.intern(LexemeState, use, after, left, text)
