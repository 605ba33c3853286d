r"""From languages of characters to automata over bytes: as plain UTF-8, or inside a JSON string.

Both are one construction. The spellings of an alphabet's characters make a tree of bytes, with
equal branches shared, whose leaves are the alphabet's classes. A state of the result is a state of
the language and a node of that tree. In JSON a character may stand for itself, as a short escape
(\n) or by number (\u00e9, \ud83d\ude00); the caller chooses which spellings are in the language.
UTF-8 is strict as in RFC 3629: nothing overlong, no surrogates. JSON strings follow RFC 8259.
"""

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from martlet.errors import RequestError
from martlet.grammar.codepoints import LAST, Alphabet
from martlet.grammar.language import Language
from martlet.grammar.states import Dfa

MOST_BYTE_STATES = 100_000
_SHORT = MappingProxyType({"b": 8, "t": 9, "n": 10, "f": 12, "r": 13, '"': 0x22, "\\": 0x5C, "/": 0x2F})
_HEX = tuple((digit, f"{digit:x}{digit:X}".encode()) for digit in range(16))


class Escapes(NamedTuple):
    """The optional escapes a JSON string may use.

    A mandatory escape always has at least one spelling.
    """

    slash: bool = False  # "\\/"
    # "\\u0041" for any character, not only for control characters that have no short escape.
    numbers: bool = False


FEWEST = Escapes()
Branch = tuple[bool, int]  # (True, class) or (False, node)


class _Tree:
    """Nodes by number, each a mapping of bytes to branches; equal nodes are shared.

    The root is made last.
    """

    def __init__(self, alphabet: Alphabet) -> None:
        self.alphabet = alphabet
        self.nodes: list[dict[int, Branch]] = []
        self._numbers: dict[frozenset[tuple[int, Branch]], int] = {}
        self._uniform: dict[tuple[str, int, int], Branch] = {}

    def node(self, branches: dict[int, Branch]) -> Branch | None:
        """Return the node of these branches; None if there are none."""
        if not branches:
            return None
        number = self._numbers.setdefault(frozenset(branches.items()), len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(branches)
        return False, number

    def class_of_all(self, first: int, last: int) -> int | None:
        """Return the class of all characters in a range; None if they are of several classes."""
        starts = self.alphabet.starts
        at = bisect_right(starts, first)
        return self.alphabet.classes[at - 1] if at == len(starts) or starts[at] > last else None

    def digits(
        self, spelling: str, depth: int, first: int, limits: tuple[int, int], digits: list[tuple[int, bytes]]
    ) -> Branch | None:
        """Return the branch for `depth` further digits, after which the number so far is `first`.

        Each digit is from `digits`; only characters within `limits` count. A range of one class is
        made once.
        """
        span: int = len(digits) ** depth
        low, high = limits
        if first > high or first + span - 1 < low:
            return None
        if depth == 0:
            return True, self.alphabet.class_of(first)
        within = first >= low and first + span - 1 <= high
        same = self.class_of_all(first, first + span - 1) if within else None
        if same is not None and (spelling, depth, same) in self._uniform:
            return self._uniform[spelling, depth, same]
        branches: dict[int, Branch] = {}
        for value, spellings in digits:
            after = self.digits(spelling, depth - 1, first + value * (span // len(digits)), limits, digits)
            if after is not None:
                branches.update(dict.fromkeys(spellings, after))
        made = self.node(branches)
        if same is not None and made is not None:
            self._uniform[spelling, depth, same] = made
        return made


_TAIL = [(value, bytes((0x80 + value,))) for value in range(64)]
# (first byte's base, numbers of first bytes, bytes that follow, the lowest and the highest
# character)
_LEADS = (
    (0xC0, 32, 1, (0x80, 0x7FF)),
    (0xE0, 16, 2, (0x800, 0xD7FF)),
    (0xE0, 16, 2, (0xE000, 0xFFFF)),
    (0xF0, 5, 3, (0x10000, LAST)),
)


def _utf8(tree: _Tree, raw: Callable[[int], bool]) -> dict[int, Branch]:
    """The branches of a root under which every character stands for itself.

    `raw` says which ASCII characters may.
    """
    root: dict[int, Branch] = {c: (True, tree.alphabet.class_of(c)) for c in range(128) if raw(c)}
    for base, count, depth, limits in _LEADS:
        for value in range(count):
            after = tree.digits("utf8", depth, value << 6 * depth, limits, _TAIL)
            if after is None:
                continue
            if base + value in root:  # 0xED: before the surrogates; nothing after them begins so
                assert limits[0] == 0xE000
                continue
            root[base + value] = after
    return root


@lru_cache(maxsize=256)
def _plain_tree(alphabet: Alphabet) -> tuple[list[dict[int, Branch]], int]:
    tree = _Tree(alphabet)
    root = tree.node(_utf8(tree, lambda _: True))
    assert root is not None
    return tree.nodes, root[1]


@lru_cache(maxsize=256)
def _json_tree(alphabet: Alphabet, escapes: Escapes) -> tuple[list[dict[int, Branch]], int]:
    tree = _Tree(alphabet)
    root = _utf8(tree, lambda c: c >= 0x20 and c not in b'"\\')
    short: dict[int, Branch] = {
        ord(letter): (True, alphabet.class_of(c)) for letter, c in _SHORT.items() if letter != "/" or escapes.slash
    }
    number = _numbers(tree) if escapes.numbers else _control_numbers(tree)
    if number is not None:
        short[ord("u")] = number
    escape = tree.node(short)
    assert escape is not None
    root[ord("\\")] = escape
    made = tree.node(root)
    assert made is not None
    return tree.nodes, made[1]


def _control_numbers(tree: _Tree) -> Branch | None:
    r"""The branch after \u for control characters that have no short escape."""
    tens: dict[int, Branch] = {}
    for ten in (0, 1):
        ones: dict[int, Branch] = {}
        for digit, spellings in _HEX:
            if 16 * ten + digit not in _SHORT.values():
                ones.update(dict.fromkeys(spellings, (True, tree.alphabet.class_of(16 * ten + digit))))
        after = tree.node(ones)
        if after is not None:
            tens[0x30 + ten] = after
    zero = tree.node(tens)
    for _ in range(2):
        zero = tree.node({0x30: zero}) if zero is not None else None
    return zero


def _numbers(tree: _Tree) -> Branch | None:
    r"""The branch after \u for any character; those above U+FFFF are two surrogates."""
    hexadecimal = list(_HEX)
    first: dict[int, Branch] = {}
    for digit, spellings in _HEX:
        if digit != 0xD:
            after = tree.digits("hex", 3, digit << 12, (0, 0xFFFF), hexadecimal)
        else:
            second: dict[int, Branch] = {}
            for low in range(8):
                low_digit = tree.digits("hex", 2, 0xD000 + (low << 8), (0, 0xD7FF), hexadecimal)
                if low_digit is not None:
                    second.update(dict.fromkeys(_HEX[low][1], low_digit))
            for high in range(4):
                pair = _pairs(tree, 0x10000 + (high << 18), 2)
                second.update(dict.fromkeys(_HEX[8 + high][1], pair))
            after = tree.node(second)
        if after is not None:
            first.update(dict.fromkeys(spellings, after))
    return tree.node(first)


def _pairs(tree: _Tree, first: int, depth: int) -> Branch:
    """The branch inside a high surrogate with `depth` digits to come.

    `first` is the least character there.
    """
    same = tree.class_of_all(first, first + (1024 << 4 * depth) - 1)
    if same is not None and ("pair", depth, same) in tree._uniform:
        return tree._uniform["pair", depth, same]
    branches: dict[int, Branch] = {}
    if depth:
        for digit, spellings in _HEX:
            after = _pairs(tree, first + (digit << 10 + 4 * (depth - 1)), depth - 1)
            branches.update(dict.fromkeys(spellings, after))
        made = tree.node(branches)
    else:
        for quarter in range(4):
            rest = tree.digits("hex", 2, first + (quarter << 8), (0x10000, LAST), list(_HEX))
            assert rest is not None
            branches.update(dict.fromkeys(_HEX[0xC + quarter][1], rest))
        made = tree.node(branches)
        for spelling in (b"dD", b"u", b"\\"):
            assert made is not None
            made = tree.node(dict.fromkeys(spelling, made))
    assert made is not None
    if same is not None:
        tree._uniform["pair", depth, same] = made
    return made


def to_bytes(language: Language) -> Dfa:
    """Return the automaton of a language's texts in UTF-8.

    RequestError if it has too many states.
    """
    return _expand(language, *_plain_tree(language.alphabet))


def to_json(language: Language, escapes: Escapes = FEWEST) -> Dfa:
    """Return the automaton of a language's texts as they stand inside a JSON string."""
    return _expand(language, *_json_tree(language.alphabet, escapes))


def _expand(language: Language, nodes: list[dict[int, Branch]], root: int) -> Dfa:
    """Join a language and a tree: states of the language stand for themselves at the root."""
    table, n_states = language.table, len(language.table)
    under = _classes_under(nodes)
    # numbers[node][q]: the state of (q, node); pairs with the same successors share a state
    numbers: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {root: np.arange(n_states)}
    examples: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {root: np.arange(n_states)}
    total = n_states
    for node in range(len(nodes)):
        if node == root:
            continue
        rows = np.ascontiguousarray(table[:, under[node]])
        keys = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        alive = rows[first].any(axis=1)
        ids = np.zeros(len(first), np.int64)
        ids[alive] = total + np.arange(np.count_nonzero(alive))
        total += int(np.count_nonzero(alive))
        numbers[node], examples[node] = ids[inverse], first[alive]
        if total > MOST_BYTE_STATES:
            raise RequestError(
                f"The pattern needs more than {MOST_BYTE_STATES:,} states over bytes: make its repetitions fewer.",
                code="grammar_too_large",
            )
    out = np.zeros((total, 256), np.int32)
    for node, branches in enumerate(nodes):
        states = examples[node]
        target = numbers[node][states]
        for byte, (is_class, to) in branches.items():
            out[target, byte] = table[states, to] if is_class else numbers[to][states]
    accept = np.zeros(total, np.int32)
    accept[:n_states] = language.accepting
    return Dfa(out, accept, language.start)


def _classes_under(nodes: list[dict[int, Branch]]) -> list[list[int]]:
    """For each node the classes of its leaves; a node's branches are made before it."""
    under: list[set[int]] = []
    for branches in nodes:
        classes: set[int] = set()
        for is_class, to in set(branches.values()):
            classes |= {to} if is_class else under[to]
        under.append(classes)
    return [sorted(classes) for classes in under]
