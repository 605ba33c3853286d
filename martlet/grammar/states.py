"""What the parts of constrained decoding agree on (read `vocabulary.py` next, then `matcher.py`).

    schema, regex, grammar  →  Machine of States  →  Matcher (a Constraint)  →  bit masks in the sampler

A front end compiles to a *state*: an immutable object that says where each next byte leads. Masks, rollback, forced text
and the end of the answer follow from that, so that `matcher.py` writes them once for every language.

**Dead ends cannot happen, by one rule**: a state exists only if some text leads from it to an accepting state. Whoever
makes states keeps the rule; whoever reads them relies on it.

**Lexemes make masks cheap.** A state inside a token of the language (a string, a number, a key) names its automaton and
where it stands in it. What a vocabulary's tokens do inside an automaton is computed once and kept; only tokens that
leave it are followed state by state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DEAD",
    "MANY",
    "Constraint",
    "Dfa",
    "Lexeme",
    "Limits",
    "Plain",
    "State",
    "Tree",
    "bytes_or",
    "n_mask_words",
    "some_bytes",
]

Tree = dict[int, Any]
MANY = 1 << 30  # characters: no bound
DEAD = 0  # the state of every Dfa that nothing leaves


@dataclass(frozen=True, slots=True, eq=False)
class Dfa:
    """A deterministic automaton over bytes; two are the same only if they are one object.

    `table[q, b]` is the state after byte b, 0 where no text goes on. `accept[q]` is 0 where no text ends, otherwise a
    label: 1 for a plain language, and for a union of languages whatever its maker says (which of them the text is in).
    Trimmed: every state but 0 can reach an accepting one; a language without texts has start 0.
    """

    table: NDArray[np.int32]  # [states, 256]
    accept: NDArray[np.int32]  # [states]
    start: int
    final: NDArray[np.bool_] = field(init=False)  # [states]: where a text ends and none goes on

    def __post_init__(self) -> None:
        object.__setattr__(self, "final", (self.accept > 0) & ~self.table.any(axis=1))

    @property
    def is_empty(self) -> bool:
        """Whether no text at all is in the language."""
        return self.start == DEAD

    def run(self, text: bytes) -> int:
        """The state after `text`, 0 if it is no beginning of a text of the language."""
        state = self.start
        for byte in text:
            state = int(self.table[state, byte])
        return state

    def accepts(self, text: bytes) -> int:
        """The label of `text`, 0 if it is not in the language."""
        return int(self.accept[self.run(text)])


@dataclass(frozen=True, slots=True, eq=False)
class Lexeme:
    """An automaton as it stands in a language, with the bytes that can come after it.

    Where the automaton goes on with a byte, it does: a byte of `follow` is looked at only where it does not.
    Bytes of `blank` among them are white space, which only other bytes of `follow` can come after. `counted` is the automaton's state from which every byte begins a character, save the one that ends the text; states
    with a `budget` have it.
    """

    dfa: Dfa
    follow: frozenset[int]
    counted: int = DEAD
    blank: frozenset[int] = frozenset()
    endless: bool = False  # a JSON string, which goes on as long as its budget allows


class State(Protocol):
    """A point in a text of a language. Immutable; equal states are one object, as far as their maker can tell."""

    @property
    def accepts(self) -> bool:
        """Whether the text may end here."""

    @property
    def lexeme(self) -> tuple[Lexeme, int] | None:
        """The lexeme that the text is inside, and its automaton's state; None between lexemes, or where none is named."""

    @property
    def budget(self) -> tuple[int, int] | None:
        """Of a state inside a lexeme: at least and at most how many characters must come before its end; None is free.

        From any state of the automaton any number of characters must be possible.
        """

    def step(self, byte: int) -> State | None:
        """The state after one more byte, None if no text goes on so."""

    def exit(self, label: int) -> State | None:
        """Of a state with a lexeme: the state after the whole lexeme ended with `label`, None if it may not end so.

        `step` must agree: where the automaton accepts with `label` and does not go on with a byte, step(byte) is
        exit(label).step(byte).
        """

    def detours(self) -> Tree | None:
        """Texts that end the lexeme otherwise than by its label, as a tree: byte → subtree, -1 → the text's name.

        The automaton ends with each of them too; its label does not count then. Outside of a lexeme they are all the texts
        that can follow, and none is the beginning of another. Mostly there are none.
        """

    def detour(self, name: Any) -> State | None:
        """The state after a detour, None if it is not allowed."""

    def split(self) -> tuple[bytes, State] | None:
        """Of a state before a lexeme or something else: the bytes of that, and a state inside the lexeme, at its beginning.

        No byte goes on with both. None where there is no such lexeme; then its bytes are followed one by one.
        """

    @property
    def is_json(self) -> bool:
        """Whether the text is inside JSON."""

    def parts(self) -> tuple[State, ...] | None:
        """States that allow together just the texts that this one does; None where it is one of a piece."""

    def twin(self) -> tuple[State, Callable[[Any], State]] | None:
        """A state from which the same texts lead to `reached` states, and what each of these stands for here.

        For parts of a language that stand in many places: what tokens do inside them is then worked out once.
        """

    @property
    def reached(self) -> Any:
        """Of the end of a twin's text: what to ask the twin for, else None. No byte leads on from there."""

    def next_bytes(self) -> bytes | None:
        """The bytes for which step is not None, in order, if that is cheaper to say than to try all 256; or None."""


class Plain:
    """What a state says unless it knows better: it is inside no lexeme. States may inherit it."""

    __slots__ = ()

    @property
    def accepts(self) -> bool:
        """Not the end."""
        return False

    @property
    def lexeme(self) -> tuple[Lexeme, int] | None:
        """None."""
        return None

    @property
    def budget(self) -> tuple[int, int] | None:
        """None."""
        return None

    def exit(self, label: int) -> State | None:
        """None."""
        return None

    def detours(self) -> Tree | None:
        """None."""
        return None

    def detour(self, name: Any) -> State | None:
        """None."""
        return None

    def split(self) -> tuple[bytes, State] | None:
        """None."""
        return None

    @property
    def is_json(self) -> bool:
        """No."""
        return False

    def parts(self) -> tuple[State, ...] | None:
        """None."""
        return None

    def twin(self) -> tuple[State, Callable[[Any], State]] | None:
        """None."""
        return None

    @property
    def reached(self) -> Any:
        """None."""
        return None

    def next_bytes(self) -> bytes | None:
        """Not known."""
        return None


class Constraint(Protocol):
    """What the engine asks of a constrained sequence. One object a sequence; not thread-safe, but may move between."""

    def mask(self, out: NDArray[np.uint32]) -> None:
        """Write the allowed next tokens: bit (t mod 32) of out[t div 32] is 1 for an allowed t. out: [ceil(V / 32)].

        End-of-sequence ids are among them exactly where `may_end`. There is always at least one.
        """

    def has_mask(self) -> bool:
        """Whether `mask` is quick: it only copies what was computed before."""

    def allows(self, token_id: int) -> bool:
        """Whether the mask has this token (cheaper than the mask)."""

    def advance(self, token_id: int) -> bool:
        """Take one token. False, and nothing changed, if it is not allowed. An end-of-sequence id ends the text.

        Beside what the mask allows it may take tokens that only a limit has left out.
        """

    def rollback(self, n_tokens: int) -> None:
        """Take the last `n_tokens` advances back."""

    def may_end(self) -> bool:
        """Whether the text is complete as it is."""

    def is_done(self) -> bool:
        """Whether nothing but the end can follow, or it has ended."""

    def forced(self) -> bytes:
        """The longest text that must follow whatever is chosen; b"" if there is a choice. The state stays as it is."""

    def is_limited(self) -> bool:
        """Whether a string, array or object was ended because it was too long."""

    def clone(self) -> Constraint:
        """Another one in the same state; what is computed once stays shared."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What compiling may take; beyond it the request is refused, with what was too much."""

    source_bytes: int = 1 << 20  # of the schema, pattern or grammar
    depth: int = 256  # nesting of the source
    dfa_states: int = 20_000  # of one automaton
    nodes: int = 50_000  # types or rules made while compiling
    seconds: float = 5.0


def n_mask_words(n_vocab: int) -> int:
    """Length of a mask for a vocabulary of `n_vocab` ids."""
    return (n_vocab + 31) // 32


def bytes_or(state: State, others: Iterable[int]) -> Iterable[int]:
    """The bytes with which a state goes on, or `others` if they are not known."""
    known = state.next_bytes()
    return others if known is None else known


def some_bytes(state: State, most: int) -> bytes:
    """Bytes with which a state goes on, `most` of them at most."""
    known = state.next_bytes()
    if known is not None:
        return known[:most]
    return bytes(islice((byte for byte in range(256) if state.step(byte) is not None), most))
