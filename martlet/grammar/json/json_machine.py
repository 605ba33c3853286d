"""JSON that meets a goal, byte by byte: the states of a matcher (read `containers.py` next).

JSON's structure is visible in its text: all alternatives of a schema open and close the same
brackets at the same bytes. So alternatives run side by side as *items* of one level, as in an
Earley parser. A value's *end* knows which items of the level around it depend on which goal. When
the value is complete, the items go on whose goal it met; all others are dropped. A value has
several goals only where the alternatives ask for different things.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from martlet.grammar.json.algebra import Goal, ValueSet
from martlet.grammar.json.lexemes import JsonLexeme, free_string, json_text, number_lexeme, string_lexeme
from martlet.grammar.json.scalars import ByteState, End, EnumState, LexemeState, LexemeUse, Linked, Survivors
from martlet.grammar.json.sets import Texts
from martlet.grammar.json.shapes import ArrayForm, ObjectForm
from martlet.grammar.json.writers import Writers
from martlet.grammar.states import MANY, State

S = TypeVar("S")
MOST_STATES = 300_000


@dataclass(frozen=True, slots=True)
class Spacing:
    """How many white space characters may stand between two of JSON's tokens."""

    after: int = 0  # a comma or a colon
    around: int = 0  # anywhere else
    characters: bytes = b" "


class Machine:
    """The states of one schema, interned: while they are kept, equal states are one object.

    `containers.py` completes it with arrays and objects.
    """

    def __init__(self, algebra: Writers, spacing: Spacing, ordered: bool) -> None:
        self.algebra, self.spacing, self.ordered = algebra, spacing, ordered
        self._interned: dict[tuple[Any, ...], Any] = {}
        self.first_bytes: dict[tuple[Goal, ...], bytes] = {}  # of values

    def intern(self, make: Callable[..., S], *args: Any) -> S:
        """`make(machine, *args)`, the same object for equal arguments."""
        key = (make, *args)
        state = self._interned.get(key)
        if state is None:
            if len(self._interned) > MOST_STATES:
                self._interned.clear()
            state = self._interned[key] = make(self, *args)
        interned: S = state
        return interned

    def release(self) -> None:
        """Cut the cycles between states and in the algebra; no state may be used afterwards.

        States lead to each other in circles. Without their links, reference counting frees them,
        and the garbage collector has nothing to look for.
        """
        interned, self._interned = self._interned, {}
        for state in interned.values():
            if isinstance(state, Linked):
                state.unlink()
        self.algebra.release()

    def gap(self, state: State, after: bool) -> State:
        """A state with the white space that may stand before it.

        `after`: it follows a comma or a colon.
        """
        most = self.spacing.after if after else self.spacing.around
        return self.intern(Space, state, most) if most else state

    def open_array(self, forms: list[tuple[ArrayForm, ...]], end: End) -> State | None:
        """The state after `[`; `forms` has the array forms of every goal."""
        raise NotImplementedError

    def open_object(self, forms: list[tuple[ObjectForm, ...]], end: End) -> State | None:
        """The state after `{`; `forms` has the object forms of every goal."""
        raise NotImplementedError

    def value(self, goals: tuple[Goal, ...], end: End) -> State:
        """The state before a value that must meet at least one of the goals."""
        return self.intern(Value, goals, end)


class Finished(ByteState):
    """After the whole text."""

    __slots__ = ()

    @property
    def accepts(self) -> bool:
        return True

    def _step(self, byte: int) -> State | None:
        return None

    def next_bytes(self) -> bytes:
        return b""


class Root:
    """The end of the whole text."""

    def __init__(self, machine: Machine) -> None:
        self._finished = Finished(machine)

    keeps_text = False

    def resume(self, met: Survivors, text: bytes = b"") -> State:
        return self._finished

    def sealed(self, met: Survivors) -> State:
        return self._finished


class Reached(ByteState):
    """The end of a value wherever it stands; `met` are the numbers of the goals it met."""

    __slots__ = ("met",)

    def __init__(self, machine: Machine, met: Survivors) -> None:
        super().__init__(machine)
        self.met = met

    @property
    def reached(self) -> Survivors:
        return self.met

    def _step(self, byte: int) -> State | None:
        return None

    def next_bytes(self) -> bytes:
        return b""


class Probe:
    """The end of a twin's value: it only says which goals were met."""

    keeps_text = False

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def resume(self, met: Survivors, text: bytes = b"") -> State:
        return self._machine.intern(Reached, met)

    def sealed(self, met: Survivors) -> State:
        return self._machine.intern(Reached, met)


class Space(ByteState):
    """At most `left` more characters of white space before a state."""

    __slots__ = ("left", "state")

    def __init__(self, machine: Machine, state: State, left: int) -> None:
        super().__init__(machine)
        self.state, self.left = state, left

    @property
    def accepts(self) -> bool:
        return self.state.accepts

    def _step(self, byte: int) -> State | None:
        if byte in self.machine.spacing.characters:
            return self.machine.intern(Space, self.state, self.left - 1) if self.left > 1 else self.state
        return self.state.step(byte)

    def next_bytes(self) -> bytes | None:
        known = self.state.next_bytes()
        return None if known is None else known + self.machine.spacing.characters


class Value(ByteState):
    """Before a value that must meet at least one of its goals."""

    __slots__ = ("_numbers", "end", "goals")

    def __init__(self, machine: Machine, goals: tuple[Goal, ...], end: End) -> None:
        super().__init__(machine)
        self.goals, self.end = goals, end
        self._numbers: State | bool | None = False  # not known yet

    @property
    def number(self) -> State | None:
        """The state before a number; None if no number is allowed."""
        if isinstance(self._numbers, bool):
            self._numbers = self._number()
        return self._numbers

    def twin(self) -> tuple[State, Callable[[Any], State]] | None:
        """The same value before a `Probe`, and what follows it here."""
        if self.end.keeps_text or isinstance(self.end, Probe) or any(s.numbers.finite for s in self.value_sets()):
            return None  # a listed number ends only with the byte after it
        return self.machine.value(self.goals, self.machine.intern(Probe)), self.end.resume

    def value_sets(self) -> list[ValueSet]:
        """The values that meet each goal."""
        return [self.machine.algebra.value_set(goal) for goal in self.goals]

    def split(self) -> tuple[bytes, State] | None:
        """The first bytes of everything but numbers, and the number's lexeme."""
        number = self.number
        if not isinstance(number, LexemeState):
            return None
        return bytes(byte for byte in self.next_bytes() if byte not in b"-0123456789"), number

    def next_bytes(self) -> bytes:
        """The first bytes of the values allowed; they depend on the goals only."""
        known = self.machine.first_bytes
        if self.goals not in known:
            known[self.goals] = self._first_bytes()
        return known[self.goals]

    def _first_bytes(self) -> bytes:
        sets, first = self.value_sets(), set[int]()
        if any(not values.strings.is_empty for values in sets):
            first.add(0x22)
        if any(values.objects for values in sets):
            first.add(0x7B)
        if any(values.arrays for values in sets):
            first.add(0x5B)
        first |= {ord(word[0]) for values in sets for word in values.words}
        number = self.number
        if isinstance(number, LexemeState):
            first |= number.first_bytes()
        elif number is not None:
            first |= {byte for byte in b"-0123456789" if number.step(byte) is not None}
        return bytes(first)

    def _step(self, byte: int) -> State | None:
        if byte == 0x22:
            return self._strings()
        if byte in b"tfn":
            words: dict[bytes, set[int]] = {}
            for i, values in enumerate(self.value_sets()):
                for word in values.words:
                    words.setdefault(word.encode(), set()).add(i)
            return self._enum({word: frozenset(met) for word, met in words.items()}, byte)
        if byte in b"-0123456789":
            number = self.number
            return None if number is None else number.step(byte)
        if byte == 0x5B:
            return self.machine.open_array([values.arrays for values in self.value_sets()], self.end)
        if byte == 0x7B:
            return self.machine.open_object([values.objects for values in self.value_sets()], self.end)
        return None

    def _enum(self, outcomes: dict[bytes, Survivors], byte: int) -> State | None:
        return EnumState.of(self.machine, outcomes, self.end).step(byte) if outcomes else None

    def _strings(self) -> State | None:
        sets = [values.strings for values in self.value_sets()]
        if all(texts.finite is not None for texts in sets):
            return self._enum(_outcomes(sets, json_text), 0x22)
        different = tuple(dict.fromkeys(texts for texts in sets if not texts.is_empty))
        if not different:
            return None
        if len(different) == 1 and different[0].language is None:
            free, texts = free_string(), different[0]
            met = frozenset(i for i, own in enumerate(sets) if not own.is_empty)
            budget = None if texts.is_any else (texts.low, MANY if texts.high is None else texts.high)
            use = self.machine.intern(LexemeUse, free, (frozenset(), met), self.end)
            return self.machine.intern(LexemeState, use, free.start, budget, b'"' if self.end.keeps_text else None)
        lexeme, members = string_lexeme(tuple(texts.as_language() for texts in different))
        return self._lexeme(lexeme, members, sets, different, b'"')

    def _number(self) -> State | None:
        sets = [values.numbers for values in self.value_sets()]
        if all(texts.finite is not None for texts in sets):
            outcomes = _outcomes(sets, str.encode)
            return EnumState.of(self.machine, outcomes, self.end) if outcomes else None
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
        """A lexeme's first state.

        `members` says for each label which of the `different` sets its texts are in.
        """
        numbers = {texts: i for i, texts in enumerate(different)}
        of = [numbers.get(texts) for texts in sets]
        outcomes = tuple(frozenset(i for i, number in enumerate(of) if number in member) for member in members)
        use = self.machine.intern(LexemeUse, lexeme, outcomes, self.end)
        return self.machine.intern(LexemeState, use, lexeme.start, None, written if self.end.keeps_text else None)


def _outcomes(sets: list[Texts], write: Callable[[str], bytes]) -> dict[bytes, Survivors]:
    """Every text of the sets, as written, with the numbers of the sets that have it."""
    outcomes: dict[str, set[int]] = {}
    for i, texts in enumerate(sets):
        for text in texts.finite or ():
            outcomes.setdefault(text, set()).add(i)
    return {write(text): frozenset(met) for text, met in outcomes.items()}
