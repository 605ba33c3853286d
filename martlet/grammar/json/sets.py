"""Sets of scalars: the words, strings and numbers that a schema allows, with their exact algebra.

A set is a list of texts, or a language with bounds on the number of characters. Lists stay lists
and bounds stay numbers as long as possible: an automaton is made only where the algebra needs it.
The texts of numbers are what stands in the JSON; the texts of strings stand between the quotation
marks, unescaped. Read `shapes.py` next.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np

from martlet.errors import RequestError
from martlet.grammar.json.schema_nodes import Node
from martlet.grammar.language import Language, literals
from martlet.grammar.numbers import Digits, number_language
from martlet.grammar.regex import regex_language

WORDS = frozenset({"null", "true", "false"})

MOST_BOUNDED = 40_000  # states of a pattern with a bound on its length


@dataclass(frozen=True, slots=True)
class Texts:
    """A set: the texts `finite`, or those of `language` (None: all) within bounds of length."""

    finite: frozenset[str] | None = None
    language: Language | None = None
    low: int = 0
    high: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the set is empty, as far as known without an automaton.

        `settled` knows for sure.
        """
        if self.finite is not None:
            return not self.finite
        return (self.high is not None and self.high < self.low) or (
            self.language is not None and self.language.is_empty
        )

    @property
    def is_any(self) -> bool:
        """Whether every text is in the set."""
        return self.finite is None and self.language is None and self.low == 0 and self.high is None

    def __contains__(self, text: str) -> bool:
        if self.finite is not None:
            return text in self.finite
        if len(text) < self.low or (self.high is not None and len(text) > self.high):
            return False
        return self.language is None or self.language.accepts(text)

    def __and__(self, other: Texts) -> Texts:
        if self.is_any or other.is_empty:
            return other
        if other.is_any or self.is_empty or self == other:
            return self
        if self.finite is not None:
            return Texts(frozenset(text for text in self.finite if text in other))
        if other.finite is not None:
            return other & self
        languages = [texts.language for texts in (self, other) if texts.language is not None]
        language = languages[0] & languages[1] if len(languages) == 2 else (languages[0] if languages else None)
        highs = [texts.high for texts in (self, other) if texts.high is not None]
        return Texts(None, language, max(self.low, other.low), min(highs, default=None)).settled()

    def __or__(self, other: Texts) -> Texts:
        if self.is_empty or other.is_any or self == other:
            return other
        if other.is_empty or self.is_any:
            return self
        if self.finite is not None and other.finite is not None:
            return Texts(self.finite | other.finite)
        return Texts(None, self.as_language() | other.as_language()).settled()

    def __invert__(self) -> Texts:
        if self.is_any:
            return NO_TEXT
        if self.is_empty:
            return ANY_TEXT
        return Texts(None, ~self.as_language()).settled()

    def settled(self) -> Texts:
        """The same set with the bounds inside the language; an empty set becomes NO_TEXT."""
        if self.finite is not None or self.language is None:
            return NO_TEXT if self.is_empty else self
        language = self.as_language()
        if language.is_empty:
            return NO_TEXT
        return ANY_TEXT if language.is_everything else Texts(None, language)

    def as_language(self) -> Language:
        """The set as one automaton."""
        if self.finite is not None:
            return _literals(self.finite)
        if self.language is None:
            return _lengths(self.low, self.high)
        if self.low == 0 and self.high is None:
            return self.language
        return _bounded(self.language, self.low, self.high)


NO_TEXT = Texts(frozenset())
ANY_TEXT = Texts()


@lru_cache(maxsize=512)
def _literals(texts: frozenset[str]) -> Language:
    return literals(sorted(texts))


@lru_cache(maxsize=512)
def _lengths(low: int, high: int | None) -> Language:
    return Language.lengths(low, high)


@lru_cache(maxsize=512)
def _bounded(language: Language, low: int, high: int | None) -> Language:
    """The texts of a language with `low` to `high` characters: an automaton for every length."""
    n, last = len(language.table), low if high is None else high
    if n * (last + 1) > MOST_BOUNDED:
        raise RequestError(
            f"A pattern of {n:,} states with lengths up to {last:,} is more than {MOST_BOUNDED:,} states: lower one.",
            code="grammar_too_large",
        )
    ends = np.zeros((last + 1, n), np.bool_)  # [characters, states]: whether a text may end
    ends[low:] = language.accepting
    alive = ends.copy()
    for count in reversed(range(last + 1)):
        after = count if high is None and count == last else count + 1
        while after <= last:
            more = alive[count] | alive[after][language.table].any(axis=1)
            if after > count or np.array_equal(more, alive[count]):
                alive[count] |= more
                break
            alive[count] = more
    alive[:, 0] = False
    numbers = np.zeros(alive.shape, np.int32)
    numbers[alive] = np.arange(1, np.count_nonzero(alive) + 1)
    if numbers[0, language.start] != 1:
        return Language.nothing() if not numbers[0, language.start] else language & _lengths(low, high)
    following = np.zeros((last + 1, n), np.int32)
    following[:-1] = numbers[1:]
    following[-1] = numbers[-1] if high is None else 0
    rows = following[:, language.table][alive]  # [states, classes]
    table = np.concatenate([np.zeros((1, rows.shape[1]), np.int32), rows]).astype(np.int32)
    return Language(language.alphabet, table, np.concatenate([[False], ends[alive]]))


def word_leaf(node: Node, positive: bool) -> frozenset[str]:
    """The words `null`, `true`, `false` that a node's own keywords allow, or those they exclude."""
    allowed = frozenset() if node.never else WORDS
    if node.types is not None:
        allowed &= frozenset(word for word in WORDS if ("null" if word == "null" else "boolean") in node.types)
    if node.values is not None:
        names = {None: "null", True: "true", False: "false"}
        allowed &= {names[value] for value in node.values if value is None or isinstance(value, bool)}
    return allowed if positive else WORDS - allowed


def string_leaf(node: Node, positive: bool) -> Texts:
    """The strings that a node's own keywords allow, or those they exclude."""
    if node.never or (node.types is not None and "string" not in node.types):
        return NO_TEXT if positive else ANY_TEXT
    demands = [Texts(None, language) for language in node.patterns]
    if node.values is not None:
        demands.append(Texts(frozenset(value for value in node.values if isinstance(value, str))))
    if node.min_length or node.max_length is not None:
        demands.append(Texts(None, None, node.min_length, node.max_length))
    if positive:
        texts = ANY_TEXT
        for demand in sorted(demands, key=lambda demand: demand.finite is None):
            texts = texts & demand
        return texts.settled() if texts.finite is None else texts
    texts = NO_TEXT
    for demand in demands:
        texts = texts | ~demand
    return texts


def number_text(value: Any) -> list[str]:
    """How a number is written: as in the schema, and an integral one also without fraction."""
    if isinstance(value, Decimal):
        return [str(value)]
    text = json.dumps(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return [str(int(value)), text]
    return [text]


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


@lru_cache(maxsize=16)
def all_numbers(digits: Digits) -> Language:
    """Every number without exponent."""
    return number_language(integer=False, digits=Digits(digits.before, digits.after, False))


def number_leaf(node: Node, positive: bool, digits: Digits) -> Texts:
    """The numbers that a node's own keywords allow, or those they exclude, as they may be written.

    Each set holds only valid numbers to generate. Numbers with an exponent are in it only where no
    keyword constrains them.
    """
    if node.never or (node.types is not None and "number" not in node.types):
        return NO_TEXT if positive else Texts(None, number_language(integer=False, digits=digits))
    if positive:
        language = number_language(
            integer=node.integer, low=node.low, high=node.high, multiple=node.multiple, digits=digits
        )
        allowed = Texts(None, language).settled()
        if node.values is not None:
            texts = {text for value in node.values if is_number(value) for text in number_text(value)}
            free = node.low is None and node.high is None and node.multiple is None
            if not node.integer and free:
                return Texts(frozenset(texts))
            wide = number_language(
                integer=node.integer, low=node.low, high=node.high, multiple=node.multiple, zeros=True
            )
            return Texts(frozenset(texts)) & Texts(None, wide)
        return allowed
    out = NO_TEXT
    if node.integer or node.low is not None or node.high is not None or node.multiple is not None:
        wide = number_language(integer=node.integer, low=node.low, high=node.high, multiple=node.multiple, zeros=True)
        out = Texts(None, all_numbers(digits) - wide - regex_language(r"-0(\.0+)?")).settled()
    if node.values is not None:
        spellings = [_spellings(value) for value in node.values if is_number(value)]
        named = regex_language("|".join(spellings)) if spellings else Language.nothing()
        out = out | Texts(None, all_numbers(digits) - named).settled()
    return out


def _spellings(value: Any) -> str:
    """A pattern of all spellings of a number without exponent."""
    plain = f"{Decimal(repr(value) if isinstance(value, float) else value):f}"
    whole, _, fraction = plain.partition(".")
    fraction = fraction.rstrip("0")
    tail = rf"\.{fraction}0*" if fraction else r"(\.0+)?"
    sign = "-?" if not fraction and whole.lstrip("-") == "0" else ""
    return sign + re.escape(whole.lstrip("-") if sign else whole) + tail
