"""JSON that meets a goal, byte by byte: the states of a matcher (read `containers.py` next).

JSON's structure is visible: whatever alternatives there are, they open and close the same brackets at the same places.
So alternatives run side by side as *points* of one level, and what a value under way is for is known to its *end*: which
alternatives of the level around it go on if the value meets their goal. When a value is complete, those go on whose goal
it met; all others are gone. A value is several goals to be met at once only where alternatives ask for different things.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from martlet.grammar.json.algebra import Algebra, Goal, Type
from martlet.grammar.json.lexemes import JsonLexeme, free_string, json_text, number_lexeme, string_lexeme
from martlet.grammar.json.scalars import ByteState, End, Lex, LexemeUse, Literals, Survivors
from martlet.grammar.json.sets import Texts
from martlet.grammar.json.shapes import ArrayForm, ObjectForm
from martlet.grammar.json.writers import Plans
from martlet.grammar.states import MANY, State

__all__ = ["Machine", "Root", "Space", "Spacing", "Value"]

S = TypeVar("S")
MOST_STATES = 300_000


@dataclass(frozen=True, slots=True)
class Spacing:
    """White space: how many characters may stand after `,` and `:`, and how many at every other place between tokens."""

    after: int = 0
    around: int = 0
    characters: bytes = b" "


class Machine:
    """The states of one schema. Equal states are one object, for as long as they are kept.

    `containers.py` has the machine that knows arrays and objects.
    """

    def __init__(self, algebra: Algebra, spacing: Spacing, ordered: bool) -> None:
        self.algebra, self.plans = algebra, Plans(algebra)
        self.spacing, self.ordered = spacing, ordered
        self._made: dict[tuple[Any, ...], Any] = {}
        self.first_bytes: dict[tuple[Goal, ...], bytes] = {}  # of values
        self.probe = Probe(self)

    def made(self, kind: Callable[..., S], *parts: Any) -> S:
        """The object of a kind with these parts."""
        key = (kind, *parts)
        found = self._made.get(key)
        if found is None:
            if len(self._made) > MOST_STATES:
                self._made.clear()
            found = self._made[key] = kind(self, *parts)
        made: S = found
        return made

    def forget(self) -> None:
        """Let go of all states; none of them may be used any more."""
        made, self._made = list(self._made.values()), {}
        self.first_bytes.clear()
        for one in made:
            forget = getattr(one, "forget", None)
            if forget is not None:
                forget()
        self.plans.forget()
        self.algebra.forget()
        self.__dict__.clear()

    def gap(self, state: State, after: bool) -> State:
        """A state before which white space may stand: after a comma or colon, or at another place."""
        most = self.spacing.after if after else self.spacing.around
        return self.made(Space, state, most) if most else state

    def open_array(self, forms: list[tuple[ArrayForm, ...]], end: End) -> State | None:
        """The state after `[`: for each goal the forms of its arrays."""
        raise NotImplementedError

    def open_object(self, forms: list[tuple[ObjectForm, ...]], end: End) -> State | None:
        """The state after `{`: for each goal the forms of its objects."""
        raise NotImplementedError

    def value(self, goals: tuple[Goal, ...], end: End) -> State:
        """Where a value begins."""
        return self.made(Value, goals, end)


class Finished(ByteState):
    """After the whole text."""

    __slots__ = ()

    @property
    def accepts(self) -> bool:
        """Yes."""
        return True

    def _step(self, byte: int) -> State | None:
        return None

    def next_bytes(self) -> bytes:
        """None."""
        return b""


class Root:
    """The end of the whole text."""

    def __init__(self, machine: Machine) -> None:
        self._finished = Finished(machine)

    keeps_text = False

    def resume(self, met: Survivors, text: bytes = b"") -> State:
        """Finished."""
        return self._finished

    def sealed(self, met: Survivors) -> State:
        """Finished."""
        return self._finished


class Reached(ByteState):
    """The end of a value, wherever it stands: it met these goals."""

    __slots__ = ("met",)

    def __init__(self, machine: Machine, met: Survivors) -> None:
        super().__init__(machine)
        self.met = met

    @property
    def reached(self) -> Survivors:
        """The goals that were met."""
        return self.met

    def _step(self, byte: int) -> State | None:
        return None

    def next_bytes(self) -> bytes:
        """None."""
        return b""


class Probe:
    """The end of a value, wherever it stands."""

    keeps_text = False

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def resume(self, met: Survivors, text: bytes = b"") -> State:
        """That it is reached."""
        return self._machine.made(Reached, met)

    def sealed(self, met: Survivors) -> State:
        """That it is reached."""
        return self._machine.made(Reached, met)


class Space(ByteState):
    """White space, at most `left` characters more, before a state."""

    __slots__ = ("left", "state")

    def __init__(self, machine: Machine, state: State, left: int) -> None:
        super().__init__(machine)
        self.state, self.left = state, left

    @property
    def accepts(self) -> bool:
        """As the state behind it."""
        return self.state.accepts

    def _step(self, byte: int) -> State | None:
        if byte in self.machine.spacing.characters:
            return self.machine.made(Space, self.state, self.left - 1) if self.left > 1 else self.state
        return self.state.step(byte)

    def next_bytes(self) -> bytes | None:
        """Those of the state behind it, and white space."""
        known = self.state.next_bytes()
        return None if known is None else known + self.machine.spacing.characters


class Value(ByteState):
    """Before a value that must meet at least one of its goals."""

    __slots__ = ("_numbers", "end", "goals")

    def __init__(self, machine: Machine, goals: tuple[Goal, ...], end: End) -> None:
        super().__init__(machine)
        self.goals, self.end = goals, end
        self._numbers: State | bool | None = False  # not looked at yet

    @property
    def number(self) -> State | None:
        """Before a number, None if there can be none."""
        if isinstance(self._numbers, bool):
            self._numbers = self._number()
        return self._numbers

    def twin(self) -> tuple[State, Callable[[Any], State]] | None:
        """The same value at the end of a text."""
        if self.end.keeps_text or isinstance(self.end, Probe) or any(kind.numbers.finite for kind in self.types()):
            return None  # a number that is one of a list ends with the byte after it
        return self.machine.value(self.goals, self.machine.probe), self.end.resume

    def types(self) -> list[Type]:
        """What the goals come to."""
        return [self.machine.algebra.type_of(goal) for goal in self.goals]

    def split(self) -> tuple[bytes, State] | None:
        """A number's lexeme, and the first bytes of all other values."""
        number = self.number
        if not isinstance(number, Lex):
            return None
        return bytes(byte for byte in self.next_bytes() if byte not in b"-0123456789"), number

    def next_bytes(self) -> bytes:
        """The first bytes of the kinds of values that there are; they depend on the goals only."""
        known = self.machine.first_bytes
        if self.goals not in known:
            known[self.goals] = self._first_bytes()
        return known[self.goals]

    def _first_bytes(self) -> bytes:
        types, found = self.types(), set[int]()
        if any(not kind.strings.is_empty for kind in types):
            found.add(0x22)
        if any(kind.objects for kind in types):
            found.add(0x7B)
        if any(kind.arrays for kind in types):
            found.add(0x5B)
        found |= {ord(word[0]) for kind in types for word in kind.words}
        number = self.number
        if isinstance(number, Lex):
            found |= number.first_bytes()
        elif number is not None:
            found |= {byte for byte in b"-0123456789" if number.step(byte) is not None}
        return bytes(found)

    def _step(self, byte: int) -> State | None:
        if byte == 0x22:
            return self._strings()
        if byte in b"tfn":
            words: dict[bytes, set[int]] = {}
            for i, kind in enumerate(self.types()):
                for word in kind.words:
                    words.setdefault(word.encode(), set()).add(i)
            return self._literals({word: frozenset(met) for word, met in words.items()}, byte)
        if byte in b"-0123456789":
            number = self.number
            return None if number is None else number.step(byte)
        if byte == 0x5B:
            return self.machine.open_array([kind.arrays for kind in self.types()], self.end)
        if byte == 0x7B:
            return self.machine.open_object([kind.objects for kind in self.types()], self.end)
        return None

    def _having(self, holds: Callable[[Type], bool]) -> Survivors:
        return frozenset(i for i, kind in enumerate(self.types()) if holds(kind))

    def _literals(self, outcomes: dict[bytes, Survivors], byte: int) -> State | None:
        return Literals.of(self.machine, outcomes, self.end).step(byte) if outcomes else None

    def _strings(self) -> State | None:
        sets = [kind.strings for kind in self.types()]
        if all(texts.finite is not None for texts in sets):
            return self._literals(_outcomes(sets, json_text), 0x22)
        different = tuple(dict.fromkeys(texts for texts in sets if not texts.is_empty))
        if not different:
            return None
        if len(different) == 1 and different[0].language is None:
            free, texts = free_string(), different[0]
            met = self._having(lambda kind: not kind.strings.is_empty)
            budget = None if texts.is_any else (texts.low, MANY if texts.high is None else texts.high)
            use = self.machine.made(LexemeUse, free, (frozenset(), met), self.end)
            return self.machine.made(Lex, use, free.start, budget, b'"' if self.end.keeps_text else None)
        lexeme, members = string_lexeme(tuple(texts.as_language() for texts in different))
        return self._lexeme(lexeme, members, sets, different, b'"')

    def _number(self) -> State | None:
        """Before a number."""
        sets = [kind.numbers for kind in self.types()]
        if all(texts.finite is not None for texts in sets):
            outcomes = _outcomes(sets, str.encode)
            return Literals.of(self.machine, outcomes, self.end) if outcomes else None
        different = tuple(dict.fromkeys(texts for texts in sets if not texts.is_empty))
        if not different:
            return None
        lexeme, members = number_lexeme(tuple(texts.as_language() for texts in different))
        return self._lexeme(lexeme, members, sets, different, b"")

    def _lexeme(
        self,
        lexeme: JsonLexeme,
        members: Sequence[frozenset[int]],
        sets: list[Texts],
        different: tuple[Texts, ...],
        written: bytes,
    ) -> State:
        """A lexeme's first state, its labels' members turned into the numbers of goals."""
        numbers = {texts: i for i, texts in enumerate(different)}
        of = [numbers.get(texts) for texts in sets]
        outcomes = tuple(frozenset(i for i, number in enumerate(of) if number in member) for member in members)
        use = self.machine.made(LexemeUse, lexeme, outcomes, self.end)
        return self.machine.made(Lex, use, lexeme.start, None, written if self.end.keeps_text else None)


def _outcomes(sets: list[Texts], write: Callable[[str], bytes]) -> dict[bytes, Survivors]:
    """Each text that some set has, with the sets that have it."""
    found: dict[str, set[int]] = {}
    for i, texts in enumerate(sets):
        for text in texts.finite or ():
            found.setdefault(text, set()).add(i)
    return {write(text): frozenset(met) for text, met in found.items()}
