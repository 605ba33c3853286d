"""How many different strings or numbers a set has, and which, if they are few.

A language whose automaton has no cycle is finite: its texts are counted state by state. A number
with several spellings (0.5, 0.50) counts once. See `array_writer.py`.
"""

from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache

from martlet.grammar.codepoints import Ranges
from martlet.grammar.json.sets import Texts
from martlet.grammar.language import Language
from martlet.grammar.regex import regex_language

MOST_VALUES = 64  # longer lists are not made
ENDLESS = 10**12  # from here on a number counts as infinite
_ONE_WAY = r"-?(0|[1-9]\d*)(\.\d*[1-9])?"
_HALVES = 0xE000 - 0xD800  # surrogates: in a class with U+D7FF, but no characters


def n_strings(texts: Texts) -> int | None:
    """The number of texts; None if it is infinite, or nearly so."""
    if texts.finite is not None:
        return len(texts.finite)
    if texts.language is None and texts.high != 0:
        return None
    return _count(texts.as_language())


def n_numbers(texts: Texts) -> int | None:
    """The number of different numbers; None if it is infinite, or nearly so.

    RequestError if counting is too much.
    """
    if texts.finite is not None:
        return len({Decimal(text) for text in texts.finite})
    return _count(_one_way(texts.as_language()))


def few_strings(texts: Texts) -> list[str] | None:
    """All texts in order, None if they are too many to list."""
    if texts.finite is not None:
        return sorted(texts.finite)
    if texts.language is None and texts.high != 0:
        return None
    return _listed(texts.as_language())


def few_numbers(texts: Texts) -> list[str] | None:
    """All numbers, each in one spelling; None if they are too many to list."""
    return sorted(texts.finite) if texts.finite is not None else _listed(_one_way(texts.as_language()))


@lru_cache(maxsize=64)
def _one_way(numbers: Language) -> Language:
    """The numbers without redundant zeros, and without -0."""
    return numbers & (regex_language(_ONE_WAY) - Language.literal("-0"))


@lru_cache(maxsize=256)
def _count(language: Language) -> int | None:
    sizes = [sum(map(_size, ranges)) for ranges in language.alphabet.sets()]
    rows = language.table.tolist()
    counts: list[int | None] = [None] * len(rows)
    counts[0] = 0
    opened = {language.start}
    path: list[tuple[int, Iterator[int]]] = [(language.start, iter(rows[language.start]))]
    while path:
        state, ahead = path[-1]
        after = next((after for after in ahead if counts[after] is None), None)
        if after is not None:
            if after in opened:
                return None
            opened.add(after)
            path.append((after, iter(rows[after])))
            continue
        path.pop()
        opened.discard(state)
        more = sum(size * (counts[after] or 0) for size, after in zip(sizes, rows[state], strict=True))
        counts[state] = min(more + bool(language.accepting[state]), ENDLESS)
    count = counts[language.start]
    return None if count == ENDLESS else count


def _size(ends: tuple[int, int]) -> int:
    first, last = ends
    return last - first + 1 - (_HALVES if first <= 0xD7FF < last else 0)


@lru_cache(maxsize=256)
def _listed(language: Language) -> list[str] | None:
    number = _count(language)
    if number is None or number > MOST_VALUES:
        return None
    members = [_characters(ranges) for ranges in language.alphabet.sets()] if number else []
    texts, ahead = [], [("", language.start)] if number else []
    while ahead:
        text, state = ahead.pop()
        if language.accepting[state]:
            texts.append(text)
        for number, after in enumerate(language.table[state].tolist()):
            if after:
                ahead += [(text + character, after) for character in members[number]]
    return sorted(texts)


def _characters(ranges: Ranges) -> list[str]:
    """The characters of a class; empty for a class too large for a short list."""
    if sum(map(_size, ranges)) > MOST_VALUES:
        return []
    return [chr(c) for first, last in ranges for c in range(first, last + 1) if not 0xD800 <= c < 0xE000]
