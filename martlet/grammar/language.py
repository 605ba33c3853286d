"""Regular languages of Unicode text: deterministic automata over classes of characters, and their
algebra.

State 0 is dead; state 1 is where a text begins (0, if the language is empty). States are numbered
breadth first and no two are equivalent, so two languages are equal exactly if their tables are.
Unions, intersections, differences and complements are exact, which makes `allOf`, `not` and lengths
of JSON Schema exact. `utf8.py` turns a language into an automaton over bytes. Read `regex.py` next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import reduce
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from martlet.errors import RequestError
from martlet.grammar.codepoints import ANY, Alphabet, alphabet_of, merged, unite

I32 = NDArray[np.int32]
Bools = NDArray[np.bool_]

K = TypeVar("K", bound=Hashable)
MOST_STATES = 20_000  # of an automaton over characters


class Language:
    """A set of texts. Immutable, compared by its texts.

    `table` is int32 [states, classes], `accepting` bool [states].
    """

    __slots__ = ("_key", "accepting", "alphabet", "table")

    def __init__(self, alphabet: Alphabet, table: I32, accepting: Bools) -> None:
        self.alphabet = alphabet
        self.table = table  # [states, classes]
        self.accepting = accepting  # [states]
        self._key = (alphabet, table.tobytes(), accepting.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Language) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Language({len(self.table)} states, {self.alphabet.n_classes} classes)"

    # -- some languages ----------------------------------------------------------------------------
    @classmethod
    def nothing(cls) -> Language:
        return cls.characters(())

    @classmethod
    def everything(cls) -> Language:
        """The language of all texts."""
        return cls.lengths(0, None)

    @classmethod
    def characters(cls, ranges: Iterable[tuple[int, int]]) -> Language:
        """The texts of one character from a set of ranges."""
        alphabet, (members,) = alphabet_of([unite(ranges)])
        return build(alphabet, 0, lambda n, c: 1 if n == 0 and c in members else None, lambda n: n == 1)

    @classmethod
    def literal(cls, text: str) -> Language:
        """The language of one text."""
        return literals((text,))

    @classmethod
    def lengths(cls, low: int, high: int | None) -> Language:
        """The texts of `low` to `high` characters; RequestError if that takes too many states."""
        last = low if high is None else high + 1
        if last >= MOST_STATES:
            raise _too_large(f"a length of up to {last:,} characters")
        alphabet, _ = alphabet_of([ANY])
        return build(
            alphabet,
            0,
            lambda n, c: n + 1 if n < last else (n if high is None else None),
            lambda n: n >= low and (high is None or n <= high),
        )

    # -- questions ---------------------------------------------------------------------------------
    @property
    def start(self) -> int:
        """The state in which a text begins."""
        return min(1, len(self.table) - 1)

    @property
    def is_empty(self) -> bool:
        """Whether no text belongs."""
        return len(self.table) == 1

    @property
    def is_everything(self) -> bool:
        """Whether every text belongs."""
        return len(self.table) == 2 and bool(self.accepting[1]) and bool((self.table[1] == 1).all())

    @property
    def accepts_empty(self) -> bool:
        """Whether the empty text belongs."""
        return bool(self.accepting[self.start])

    def accepts(self, text: str) -> bool:
        state = self.start
        for character in text:
            state = self.table[state, self.alphabet.class_of(ord(character))]
        return bool(self.accepting[state])

    # -- algebra -----------------------------------------------------------------------------------
    def __and__(self, other: Language) -> Language:
        return self._combine(other, lambda a, b: a and b)

    def __or__(self, other: Language) -> Language:
        return self._combine(other, lambda a, b: a or b)

    def __sub__(self, other: Language) -> Language:
        return self._combine(other, lambda a, b: a and not b)

    def __xor__(self, other: Language) -> Language:
        return self._combine(other, lambda a, b: a != b)

    def __invert__(self) -> Language:
        return Language.everything() - self

    def _combine(self, other: Language, keeps: Callable[[bool, bool], bool]) -> Language:
        alphabet, (mine, others) = common_alphabet((self, other))
        left, right = self.table.tolist(), other.table.tolist()
        a, b = self.accepting.tolist(), other.accepting.tolist()
        # Whether a dead side leaves the other a chance.
        alive = (keeps(True, False), keeps(False, True))

        def step(pair: tuple[int, int], c: int) -> tuple[int, int] | None:
            p, q = left[pair[0]][mine[c]], right[pair[1]][others[c]]
            if (p == 0 and not alive[1]) or (q == 0 and not alive[0]) or (p == 0 and q == 0):
                return None
            return p, q

        return build(alphabet, (self.start, other.start), step, lambda pair: keeps(a[pair[0]], b[pair[1]]))

    def __add__(self, other: Language) -> Language:
        """Texts made of a text of this language followed by a text of the other."""
        alphabet, (mine, others) = common_alphabet((self, other))
        left, right = self.table.tolist(), other.table.tolist()
        ends, fits = self.accepting.tolist(), other.accepting.tolist()
        Key = tuple[int, frozenset[int]]

        def enter(p: int, after: set[int]) -> Key | None:
            after.discard(0)
            if ends[p] and other.start:
                after.add(other.start)
            return (p, frozenset(after)) if p or after else None

        def step(key: Key, c: int) -> Key | None:
            return enter(left[key[0]][mine[c]], {right[q][others[c]] for q in key[1]})

        first = enter(self.start, set())
        return build(alphabet, first, step, lambda key: any(fits[q] for q in key[1]))

    def star(self) -> Language:
        """Texts made of any number of texts of this language."""
        rows, ends, start = self.table.tolist(), self.accepting.tolist(), self.start

        def step(key: frozenset[int], c: int) -> frozenset[int] | None:
            after = {rows[q][c] for q in key} - {0}
            if any(ends[q] for q in after):
                after.add(start)
            return frozenset(after) or None

        # The start is a state of its own (-1): it accepts, and nothing leads back to it.
        def first(key: frozenset[int], c: int) -> frozenset[int] | None:
            return step(frozenset((start,)) if key == {-1} else key, c)

        return build(self.alphabet, frozenset((-1,)), first, lambda key: key == {-1} or any(ends[q] for q in key))

    def repeat(self, low: int, high: int | None = None) -> Language:
        """Texts made of `low` to `high` texts of this language (None: any number from `low` on)."""
        once = self | Language.literal("")
        tail = self.star() if high is None else reduce(lambda done, _: done + once, range(high - low), _EMPTY)
        return reduce(lambda done, _: self + done, range(low), tail)


def build(
    alphabet: Alphabet,
    first: K | None,
    step: Callable[[K, int], K | None],
    accepts: Callable[[K], bool],
    most_states: int = MOST_STATES,
) -> Language:
    """Explore an automaton from state `first` and return its language, minimised.

    `step` says where a class leads; None is dead. RequestError if there are too many states.
    """
    keys: list[K] = [] if first is None else [first]
    numbers: dict[K, int] = dict.fromkeys(keys, 1)
    rows: list[list[int]] = [[0] * alphabet.n_classes]
    for key in keys:
        row = []
        for c in range(alphabet.n_classes):
            after = step(key, c)
            if after is None:
                row.append(0)
                continue
            number = numbers.get(after)
            if number is None:
                numbers[after] = number = len(numbers) + 1
                keys.append(after)
            row.append(number)
        rows.append(row)
        if len(keys) > most_states:
            raise _too_large(f"more than {most_states:,} states")
    accepting = np.array([False, *map(accepts, keys)])
    return _minimal(alphabet, np.array(rows, np.int32), accepting)


def _minimal(alphabet: Alphabet, table: I32, accepting: Bools) -> Language:
    """Merge equivalent states and classes, and number both canonically."""
    table = _merge(table, accepting)
    groups = table[:, -1]
    first_of = np.zeros(groups.max() + 1, np.int64)
    first_of[groups[::-1]] = np.arange(len(groups))[::-1]
    small, ends = table[first_of, :-1], accepting[first_of]
    order = [int(groups[0])]
    if len(groups) > 1 and groups[1] != groups[0]:
        order.append(int(groups[1]))
    # Distinct classes in the order of the characters, then the states breadth first.
    columns: dict[bytes, int] = {}
    names: dict[int, int] = {}
    kept: list[int] = []
    for number in alphabet.classes:
        if number not in names:
            column = small[:, number].tobytes()
            if column not in columns:
                columns[column] = len(columns)
                kept.append(number)
            names[number] = columns[column]
    small = small[:, kept]
    rows = small.tolist()
    seen = set(order)
    for group in order:
        for after in rows[group]:
            if after not in seen:
                seen.add(after)
                order.append(after)
    rank = np.zeros(len(small), np.int32)
    rank[order] = np.arange(len(order))
    reduced = merged(alphabet.starts, [names[number] for number in alphabet.classes])
    return Language(reduced, np.ascontiguousarray(rank[small[order]]), ends[order])


def _merge(table: I32, accepting: Bools) -> I32:
    """Group equivalent states: int32 [states, classes + 1], each state's own group last.

    Moore's refinement (1956). It starts from each state's distance to acceptance, and to death when
    one class repeats: lengths and counters, which are long chains, are then told apart at once.
    """
    columns = table.T.tolist()
    to_end = _distances(columns, np.flatnonzero(accepting).tolist())
    dead = [state for state, distance in enumerate(to_end) if distance < 0]
    to_death = [_distances([column], dead) for column in columns]
    group = _numbered(list(zip(to_end, *to_death, strict=True)))
    group[dead] = group[0]
    mix = np.random.default_rng(1).integers(1, 2**62, table.shape[1] + 1, dtype=np.uint64) | np.uint64(1)
    n_groups = int(group.max()) + 1
    while True:
        # Sums of products of random odd numbers stand for whole rows: 64 bits make collisions
        # negligible.
        label = (group.astype(np.uint64) + np.uint64(1)) * mix[-1]
        scrambled = (label ^ (label >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (scrambled[table] * mix[:-1]).sum(axis=1, dtype=np.uint64) + label
        group = np.unique(mixed, return_inverse=True)[1]
        if (n_now := int(group.max()) + 1) == n_groups:
            return np.concatenate((group[table], group[:, None]), axis=1).astype(np.int32)
        n_groups = n_now


def _distances(columns: list[list[int]], targets: list[int]) -> list[int]:
    """Return each state's number of steps to the nearest target; -1 where none can be reached."""
    before: list[list[int]] = [[] for _ in columns[0]]
    for column in columns:
        for state, after in enumerate(column):
            before[after].append(state)
    distance = [-1] * len(before)
    for state in targets:
        distance[state] = 0
    queue = list(targets)
    for state in queue:
        for earlier in before[state]:
            if distance[earlier] < 0:
                distance[earlier] = distance[state] + 1
                queue.append(earlier)
    return distance


def _numbered(features: list[tuple[int, ...]]) -> NDArray[np.int64]:
    numbers: dict[tuple[int, ...], int] = {}
    return np.array([numbers.setdefault(feature, len(numbers)) for feature in features])


def literals(texts: Iterable[str]) -> Language:
    """Return the language of a list of texts: a tree of their prefixes, minimised."""
    tree: list[dict[int, int]] = [{}]
    ends: set[int] = set()
    for text in texts:
        at = 0
        for character in text:
            following = tree[at].get(ord(character))
            if following is None:
                following = tree[at][ord(character)] = len(tree)
                tree.append({})
                if len(tree) > 10 * MOST_STATES:
                    raise _too_large(f"more than {10 * MOST_STATES:,} characters in a list of texts")
            at = following
        ends.add(at)
    used = sorted({codepoint for node in tree for codepoint in node})
    alphabet, members = alphabet_of([((codepoint, codepoint),) for codepoint in used])
    names = {min(classes): codepoint for codepoint, classes in zip(used, members, strict=True)}
    return build(alphabet, 0, lambda at, c: tree[at].get(names.get(c, -1)), lambda at: at in ends, 10 * MOST_STATES)


def common_alphabet(languages: Sequence[Language]) -> tuple[Alphabet, list[list[int]]]:
    """Return the coarsest common refinement of the alphabets, and each language's classes in it."""
    starts = sorted({start for language in languages for start in language.alphabet.starts})
    numbers: dict[tuple[int, ...], int] = {}
    classes = [
        numbers.setdefault(tuple(language.alphabet.class_of(start) for language in languages), len(numbers))
        for start in starts
    ]
    return merged(starts, classes), [list(column) for column in zip(*numbers, strict=True)]


def _too_large(what: str) -> RequestError:
    return RequestError(
        f"The pattern needs {what}: make its repetitions or alternatives fewer.", code="grammar_too_large"
    )


_EMPTY = Language.literal("")
