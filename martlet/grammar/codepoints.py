"""Sets of Unicode characters as ranges, and alphabets: the character classes of a language.

A set is a tuple of ranges (first, last), ascending, with gaps between them. Surrogates are no
characters: a set holds all of them if it holds U+D7FF, else none, so they never cost a range of
their own. Read `language.py` next.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import regex

from martlet.errors import RequestError

Ranges = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
ANY: Ranges = ((0, LAST),)
_SURROGATES = (0xD800, 0xDFFF)


class Alphabet(NamedTuple):
    """Interval i holds the characters from starts[i] to starts[i + 1] - 1, of class classes[i]."""

    starts: tuple[int, ...]
    classes: tuple[int, ...]

    @property
    def n_classes(self) -> int:
        """Number of classes; they are numbered in the order in which they first appear."""
        return max(self.classes) + 1

    def class_of(self, codepoint: int) -> int:
        """Return the class of a character."""
        return self.classes[bisect_right(self.starts, codepoint) - 1]

    def sets(self) -> list[Ranges]:
        """Return the characters of each class."""
        sets: list[list[tuple[int, int]]] = [[] for _ in range(self.n_classes)]
        ends = (*self.starts[1:], LAST + 1)
        for start, end, number in zip(self.starts, ends, self.classes, strict=True):
            sets[number].append((start, end - 1))
        return [tuple(ranges) for ranges in sets]


def unite(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the set of all characters in any of the ranges, which may overlap."""
    merged: list[tuple[int, int]] = []
    low, high = _SURROGATES
    for first, last in sorted(ranges):
        pieces = ((first, min(last, low - 1)), (max(first, high + 1), last)) if first <= high else ((first, last),)
        for start, end in pieces:
            if start > end:
                continue
            if start == high + 1 and not (merged and merged[-1][1] >= low - 1):
                merged.append((start, end))
            elif merged and (start <= merged[-1][1] + 1 or (start == high + 1 and merged[-1][1] == low - 1)):
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
            if merged[-1][1] == low - 1:
                merged[-1] = (merged[-1][0], high)
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Return all characters that are not in a set."""
    gaps: list[tuple[int, int]] = []
    at = 0
    for first, last in ranges:
        if first > at:
            gaps.append((at, first - 1))
        at = last + 1
    if at <= LAST:
        gaps.append((at, LAST))
    return unite(gaps)


def alphabet_of(sets: Sequence[Ranges]) -> tuple[Alphabet, list[frozenset[int]]]:
    """Return the coarsest alphabet that separates the sets, and the classes of each set."""
    starts = sorted({0}.union(*({first, last + 1} for ranges in sets for first, last in ranges)) - {LAST + 1})
    points = np.array(starts)
    inside = np.zeros((len(sets), len(starts)), np.bool_)
    for i, ranges in enumerate(sets):
        bounds = np.array([bound for first, last in ranges for bound in (first, last + 1)], np.int64)
        inside[i] = np.searchsorted(bounds, points, side="right") & 1
    numbers: dict[bytes, int] = {}
    columns = np.ascontiguousarray(inside.T)
    classes = [numbers.setdefault(column.tobytes(), len(numbers)) for column in columns]
    members: list[set[int]] = [set() for _ in sets]
    for column, number in zip(columns, classes, strict=True):
        for i in np.flatnonzero(column).tolist():
            members[i].add(number)
    return merged(starts, classes), [frozenset(classes_of) for classes_of in members]


def merged(starts: Sequence[int], classes: Sequence[int]) -> Alphabet:
    """Return an alphabet in which neighbouring intervals of one class are joined."""
    keep = [i for i in range(len(starts)) if i == 0 or classes[i] != classes[i - 1]]
    return Alphabet(tuple(starts[i] for i in keep), tuple(classes[i] for i in keep))


@lru_cache(maxsize=64)
def property_set(name: str) -> Ranges:
    r"""Return the characters of the Unicode property \p{name}; RequestError if there is none."""
    if not regex.fullmatch(r"[A-Za-z_ ]+([=:][A-Za-z0-9_ ]+)?", name):
        raise RequestError(f"There is no Unicode property {name!r:.60}.")
    try:
        pattern = regex.compile(rf"\p{{{name}}}+")
    except regex.error:
        raise RequestError(f"There is no Unicode property {name!r:.60}.") from None
    return unite((match.start(), match.end() - 1) for match in pattern.finditer(_all_characters()))


def _all_characters() -> str:
    """Every code point at its own index; U+FFFF, without properties, stands for the surrogates."""
    codes = np.arange(LAST + 1, dtype="<u4")
    codes[_SURROGATES[0] : _SURROGATES[1] + 1] = 0xFFFF
    return codes.tobytes().decode("utf-32-le")


@lru_cache(maxsize=1)
def _cased() -> dict[int, tuple[int, ...]]:
    """For each character with another case: all characters equal to it but for case."""
    groups: dict[str, list[int]] = {}
    for codepoint in range(0x1E944):  # beyond it nothing has a case
        character = chr(codepoint)
        if character.lower() != character or character.upper() != character:
            groups.setdefault(character.casefold(), []).append(codepoint)
    return {codepoint: tuple(group) for group in groups.values() if len(group) > 1 for codepoint in group}


def fold_case(ranges: Ranges) -> Ranges:
    """Return the set with the other cases of its characters."""
    if all(last < 128 for _, last in ranges):  # the common case, without the table
        letters = [c for first, last in ranges for c in range(first, last + 1) if chr(c).isalpha()]
        others = [0x212A] * (not {75, 107}.isdisjoint(letters)) + [0x17F] * (not {83, 115}.isdisjoint(letters))
        return unite((*ranges, *((c, c) for c in (*(letter ^ 32 for letter in letters), *others))))
    others = [other for c, group in _cased().items() if _holds(ranges, c) for other in group]
    return unite((*ranges, *((c, c) for c in others)))


def _holds(ranges: Ranges, codepoint: int) -> bool:
    at = bisect_right(ranges, (codepoint, LAST)) - 1
    return at >= 0 and codepoint <= ranges[at][1]
