"""What the parts of constrained decoding agree on (read `vocabulary.py` next, then `masks.py`).

    schema, pattern, grammar  →  states  →  Matcher (a Constraint)  →  bit masks in the sampler

A front end compiles to a *state*: an immutable object that says where each next byte leads. Masks,
rollback, forced text and the end of the answer follow from that; `matcher.py` writes them once for
every language.

**No state is a dead end, by one rule**: a state exists only if some text leads from it to an
accepting state. The makers of states keep the rule; their readers rely on it.

**Lexemes make masks cheap.** A state inside a token of the language (a string, a number, a key)
names its automaton and the automaton's state. What a vocabulary's tokens do inside an automaton is
computed once and kept; only tokens that leave it are followed state by state. README.md has the
words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tree = dict[int, Any]
MANY = 1 << 30  # characters: no bound
DEAD = 0  # the state of every Dfa that nothing leaves


@dataclass(frozen=True, slots=True, eq=False)
class Dfa:
    """A deterministic automaton over bytes; compared by identity.

    `table[q, b]` is the state after byte b, 0 where no text goes on. `accept[q]` is 0 where no text
    ends, otherwise a label: 1 for a plain language; for a union, its maker says which languages the
    text is in. Trimmed: every state but 0 can reach an accepting state; an empty language has start
    0.
    """

    table: NDArray[np.int32]  # [states, 256]
    accept: NDArray[np.int32]  # [states]
    start: int
    final: NDArray[np.bool_] = field(init=False)  # [states]: where a text ends and none goes on

    def __post_init__(self) -> None:
        object.__setattr__(self, "final", (self.accept > 0) & ~self.table.any(axis=1))

    @property
    def is_empty(self) -> bool:
        """Whether the language has no text."""
        return self.start == DEAD

    def run(self, text: bytes) -> int:
        """The state after `text`, 0 if no text of the language begins so."""
        state = self.start
        for byte in text:
            state = int(self.table[state, byte])
        return state

    def accepts(self, text: bytes) -> int:
        """The label of `text`, 0 if it is not in the language."""
        return int(self.accept[self.run(text)])


@dataclass(frozen=True, slots=True, eq=False)
class Lexeme:
    """An automaton as it stands in a language, with the bytes that may come after it.

    The automaton goes on with a byte where it can; only elsewhere does a byte of `follow` count.
    The bytes of `follow` in `blank` are white space, which only other bytes of `follow` may come
    after. From state `counted` every byte begins a character, save the byte that ends the text;
    states with a `budget` have it.
    """

    dfa: Dfa
    follow: frozenset[int]
    counted: int = DEAD
    blank: frozenset[int] = frozenset()
    endless: bool = False  # a JSON string, which goes on as long as its budget allows


class State(Protocol):
    """A point in a text of a language. Immutable; equal states are mostly one object."""

    @property
    def accepts(self) -> bool:
        """Whether the text may end here."""

    @property
    def lexeme(self) -> tuple[Lexeme, int] | None:
        """The lexeme that the text is inside, and its automaton's state.

        None outside of lexemes.
        """

    @property
    def budget(self) -> tuple[int, int] | None:
        """Inside a lexeme: the least and the most characters before its end; None: no bound.

        Every state of the automaton must allow any number of characters.
        """

    def step(self, byte: int) -> State | None:
        """The state after one more byte, None if no text goes on so."""

    def exit(self, label: int) -> State | None:
        """Inside a lexeme: the state after it ended with `label`, None if it may not end so.

        `step` must agree: where the automaton accepts with `label` and does not go on with a byte,
        step(byte) is exit(label).step(byte).
        """

    def reserved(self) -> Tree | None:
        """Texts that end the lexeme in a way of their own, as keywords do among identifiers.

        A tree: byte → subtree, and -1 → the text's name. The automaton ends with each of them too;
        its label does not count then. Outside of a lexeme they are all the texts that can follow,
        and none is the beginning of another. None: there are none.
        """

    def after_reserved(self, name: Any) -> State | None:
        """The state after a reserved text, None if it is not allowed."""

    def split(self) -> tuple[bytes, State] | None:
        """Before a lexeme or something else: the other first bytes, and the lexeme's first state.

        No byte goes on with both. None where there is no such lexeme; then bytes are followed one
        by one.
        """

    @property
    def is_json(self) -> bool:
        """Whether the text is inside JSON."""

    def alternatives(self) -> tuple[State, ...] | None:
        """States whose texts together are exactly the texts of this state.

        None: there are no such alternatives.
        """

    def twin(self) -> tuple[State, Callable[[Any], State]] | None:
        """A state with the same texts up to `reached` states, and what follows each of these here.

        It serves languages that stand in many contexts: what tokens do inside is worked out once.
        """

    @property
    def reached(self) -> Any:
        """At the end of a twin's text: what to ask the twin for; otherwise None.

        No byte leads on from there.
        """

    def next_bytes(self) -> bytes | None:
        """The bytes for which `step` is not None, in any order; None: try all 256."""


class Plain:
    """The defaults of a state outside of lexemes; states may inherit them."""

    __slots__ = ()

    @property
    def accepts(self) -> bool:
        return False

    @property
    def lexeme(self) -> tuple[Lexeme, int] | None:
        return None

    @property
    def budget(self) -> tuple[int, int] | None:
        return None

    def exit(self, label: int) -> State | None:
        return None

    def reserved(self) -> Tree | None:
        return None

    def after_reserved(self, name: Any) -> State | None:
        return None

    def split(self) -> tuple[bytes, State] | None:
        return None

    @property
    def is_json(self) -> bool:
        return False

    def alternatives(self) -> tuple[State, ...] | None:
        return None

    def twin(self) -> tuple[State, Callable[[Any], State]] | None:
        return None

    @property
    def reached(self) -> Any:
        return None

    def next_bytes(self) -> bytes | None:
        return None


class Constraint(Protocol):
    """What the engine asks of a constrained sequence: an object for each sequence.

    Not thread-safe, but it may move between threads.
    """

    def mask(self, out: NDArray[np.uint32]) -> None:
        """Write the allowed next tokens into `out`, uint32 [ceil(V / 32)].

        Bit (t mod 32) of out[t div 32] is 1 for an allowed t. End-of-sequence ids are allowed
        exactly where `may_end`. At least one token is always allowed.
        """

    def has_mask(self) -> bool:
        """Whether `mask` only copies what was computed before."""

    def allows(self, token_id: int) -> bool:
        """Whether the mask has this token (cheaper than the mask)."""

    def advance(self, token_id: int) -> bool:
        """Take one token. False, and nothing changed, if it is not allowed.

        An end-of-sequence id ends the text. A token that only a limit masks may be taken.
        """

    def rollback(self, n_tokens: int) -> None:
        """Take the last `n_tokens` advances back. ValueError if there are fewer."""

    def may_end(self) -> bool:
        """Whether the text is complete as it is."""

    def is_done(self) -> bool:
        """Whether only the end can follow, or the text has ended."""

    def forced(self) -> bytes:
        """The longest text that must follow whatever is chosen; b"" if there is a choice."""

    def is_limited(self) -> bool:
        """Whether a string, array or object was ended because it was too long."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What compiling may take; beyond it the request is refused, naming what was too much."""

    source_bytes: int = 1 << 20  # of the schema, pattern or grammar
    depth: int = 256  # nesting of the source
    nodes: int = 50_000  # types or rules made while compiling
    seconds: float = 5.0


def n_mask_words(n_vocab: int) -> int:
    """Number of uint32 words in a mask for `n_vocab` ids."""
    return (n_vocab + 31) // 32


def bytes_or(state: State, others: Iterable[int]) -> Iterable[int]:
    """The bytes with which a state goes on, or `others` if they are not known."""
    known = state.next_bytes()
    return others if known is None else known


def some_bytes(state: State, most: int) -> bytes:
    """At most `most` bytes with which a state goes on."""
    known = state.next_bytes()
    if known is not None:
        return known[:most]
    return bytes(islice((byte for byte in range(256) if state.step(byte) is not None), most))
