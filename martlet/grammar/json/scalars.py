"""States inside strings, numbers and words (read `json_machine.py` next).

A scalar that is one of some texts is followed in the sorted list of them; any other by the automaton of its lexeme.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

import numpy as np

from martlet.grammar.json.lexemes import JsonLexeme, free_string
from martlet.grammar.states import MANY, Lexeme, Plain, State

if TYPE_CHECKING:
    from martlet.grammar.json.json_machine import Machine

__all__ = ["ByteState", "End", "Lex", "LexemeUse", "Literals", "Survivors"]

Survivors = frozenset[int]


class End(Protocol):
    """What follows a value that is complete."""

    @property
    def keeps_text(self) -> bool:
        """Whether what follows depends on the value's text."""

    def resume(self, met: Survivors, text: bytes = b"") -> State:
        """The state after a value that met the goals with these numbers."""

    def sealed(self, met: Survivors) -> State:
        """The same, if it keeps texts, where the text is not known: nothing goes on there that depends on it."""


class ByteState(Plain):
    """A state that remembers where each byte led."""

    __slots__ = ("_next", "machine")

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._next: dict[int, State | None] = {}

    @property
    def is_json(self) -> bool:
        """Yes."""
        return True

    def step(self, byte: int) -> State | None:
        """The state after one more byte."""
        try:
            return self._next[byte]
        except KeyError:
            found = self._next[byte] = self._step(byte)
            return found

    def _step(self, byte: int) -> State | None:
        raise NotImplementedError

    def forget(self) -> None:
        """Let go of the states that follow."""
        self._next.clear()


class LiteralTable:
    """Texts in order, with the goals that each meets."""

    def __init__(self, outcomes: dict[bytes, Survivors]) -> None:
        self.texts = sorted(outcomes)
        self.met = [outcomes[text] for text in self.texts]


class Literals(ByteState):
    """Inside one of a table's texts `first` … `stop` - 1, which agree in their first `depth` bytes."""

    __slots__ = ("depth", "end", "first", "stop", "table")

    def __init__(self, machine: Machine, table: LiteralTable, first: int, stop: int, depth: int, end: End) -> None:
        super().__init__(machine)
        self.table, self.first, self.stop, self.depth, self.end = table, first, stop, depth, end

    @classmethod
    def of(cls, machine: Machine, outcomes: dict[bytes, Survivors], end: End) -> Literals:
        """Before one of some texts."""
        table = LiteralTable(outcomes)
        return cls(machine, table, 0, len(table.texts), 0, end)

    @property
    def _complete(self) -> State | None:
        """The state after the first text, if it ends here."""
        if len(self.table.texts[self.first]) > self.depth:
            return None
        return self.end.resume(self.table.met[self.first], self.table.texts[self.first])

    @property
    def accepts(self) -> bool:
        """Whether a text ends here, and the whole text may."""
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
        return Literals(self.machine, self.table, first, stop, depth + 1, self.end)

    def next_bytes(self) -> bytes | None:
        """The texts' next bytes, and those after a text that ends here."""
        if self.stop - self.first > 64:
            return None
        found = {text[self.depth] for text in self.table.texts[self.first : self.stop] if len(text) > self.depth}
        complete = self._complete
        if complete is not None:
            after = complete.next_bytes()
            if after is None:
                return None
            found |= set(after)
        return bytes(sorted(found))


class LexemeUse:
    """A lexeme at a place: which goals each of its labels meets, and what follows."""

    def __init__(self, machine: Machine, lexeme: JsonLexeme, outcomes: tuple[Survivors, ...], end: End) -> None:
        self.lexeme, self.outcomes, self.end = lexeme, outcomes, end
        self.free: LexemeUse | None = None
        if lexeme.universal:
            self.free = machine.made(LexemeUse, free_string(), outcomes[:2], end)


class Lex(ByteState):
    """Inside a string or a number; `left` is at least and at most how many characters must come, None is free.

    `text` is what was written of it, where that matters later.
    """

    __slots__ = ("left", "state", "text", "use")

    def __init__(
        self, machine: Machine, use: LexemeUse, state: int, left: tuple[int, int] | None, text: bytes | None
    ) -> None:
        super().__init__(machine)
        self.use, self.state, self.left, self.text = use, state, left, text

    @property
    def accepts(self) -> bool:
        """Whether a number is complete, and the whole text with it."""
        label = int(self.use.lexeme.lexeme.dfa.accept[self.state])
        return bool(label) and self._after(label, self.text).accepts

    @property
    def lexeme(self) -> tuple[Lexeme, int]:
        """The lexeme and where its automaton is."""
        return self.use.lexeme.lexeme, self.state

    @property
    def budget(self) -> tuple[int, int] | None:
        """The characters left."""
        return self.left

    def first_bytes(self) -> set[int]:
        """The bytes with which the lexeme goes on."""
        return set(np.nonzero(self.use.lexeme.lexeme.dfa.table[self.state])[0].tolist())

    def exit(self, label: int) -> State:
        """The state behind the whole lexeme."""
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
            return self.machine.made(Lex, use.free, use.free.lexeme.start, None, text)
        return self.machine.made(Lex, use, after, left, text)
