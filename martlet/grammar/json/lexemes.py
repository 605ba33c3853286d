"""The automata of JSON's own tokens: strings, names and numbers as lexemes.

A string's lexeme begins after its opening quotation mark and includes the closing one. A free
string may use every escape of RFC 8259. Where a schema constrains the text, and in names, every
text has one spelling, so that two spellings cannot be taken for two texts. Read `json_machine.py`
next.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from martlet.grammar.language import Language, common_alphabet
from martlet.grammar.states import Dfa, Lexeme, Tree
from martlet.grammar.utf8 import Escapes, to_bytes, to_json

QUOTE = 0x22
SURROGATE = re.compile("[\ud800-\udfff]")
BLANK = frozenset(b" \n\r\t")
ENDS = frozenset(b",]}") | BLANK
COLON = frozenset(b":") | BLANK


@dataclass(frozen=True, slots=True, eq=False)
class JsonLexeme:
    """A lexeme with two sets of states.

    `final` states accept and go no further; after a `universal` state of a string every text is
    allowed.
    """

    lexeme: Lexeme
    final: frozenset[int]
    universal: frozenset[int]

    @property
    def start(self) -> int:
        """The state in which it begins."""
        return self.lexeme.dfa.start


@lru_cache(maxsize=4)
def free_string() -> JsonLexeme:
    """Any string; the state of its content is counted."""
    return _closed(to_json(Language.everything(), Escapes(slash=True, numbers=True)), ENDS, counted=True)


@lru_cache(maxsize=4)
def free_key() -> JsonLexeme:
    return _closed(to_json(Language.everything()), COLON, counted=True)


@lru_cache(maxsize=256)
def string_lexeme(languages: tuple[Language, ...]) -> tuple[JsonLexeme, tuple[frozenset[int], ...]]:
    """Strings of any of the languages; for every label the languages it stands for (0: none)."""
    joined, sets = _joined(languages)
    universal = frozenset(_universal(joined)) if len(sets) == 2 else frozenset[int]()
    return _closed(_labelled(to_json(joined), joined, languages, sets), ENDS, universal=universal), tuple(sets)


@lru_cache(maxsize=256)
def key_lexeme(languages: tuple[Language, ...]) -> tuple[JsonLexeme, tuple[frozenset[int], ...]]:
    joined, sets = _joined(languages)
    return _closed(_labelled(to_json(joined), joined, languages, sets), COLON), tuple(sets)


@lru_cache(maxsize=256)
def number_lexeme(languages: tuple[Language, ...]) -> tuple[JsonLexeme, tuple[frozenset[int], ...]]:
    joined, sets = _joined(languages)
    dfa = _labelled(to_bytes(joined), joined, languages, sets)
    final = frozenset(np.nonzero((dfa.accept > 0) & ~dfa.table.any(axis=1))[0].tolist())
    return JsonLexeme(Lexeme(dfa, ENDS, blank=BLANK), final, frozenset()), tuple(sets)


@lru_cache(maxsize=4096)
def _written(name: str) -> bytes:
    """A name as it is written after its opening quotation mark."""
    return json_text(name)[1:]


def json_text(text: str) -> bytes:
    """A string as JSON; a lone surrogate, which UTF-8 cannot encode, becomes an escape."""
    written = json.dumps(text, ensure_ascii=False)
    return SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", written).encode()


def names_tree(machine: Any, names: tuple[str, ...]) -> Tree:
    """Names as they are written, with the closing quotation mark, as a tree of bytes."""
    root: Tree = {}
    for name in names:
        node = root
        for byte in _written(name):
            node = node.setdefault(byte, {})
        node[-1] = name
    return root


def _universal(language: Language) -> list[int]:
    """The states from which every text is in the language.

    In a minimal automaton there is at most one.
    """
    stays = (language.table == np.arange(len(language.table))[:, None]).all(axis=1)
    return [state for state in np.nonzero(stays & language.accepting)[0].tolist() if state]


def _joined(languages: Sequence[Language]) -> tuple[Language, list[frozenset[int]]]:
    """The union of several languages, not minimal: its states tell which of them a text is in."""
    if len(languages) == 1:
        return languages[0], [frozenset(), frozenset({0})]
    alphabet, classes = common_alphabet(languages)
    first = tuple(language.start for language in languages)
    numbers = {first: 1}
    keys, rows = [first], [[0] * alphabet.n_classes]
    for key in keys:
        row = []
        for c in range(alphabet.n_classes):
            after = tuple(
                int(language.table[q, classes[i][c]])
                for i, (language, q) in enumerate(zip(languages, key, strict=True))
            )
            if not any(after):
                row.append(0)
                continue
            if after not in numbers:
                numbers[after] = len(numbers) + 1
                keys.append(after)
            row.append(numbers[after])
        rows.append(row)
    members = [
        frozenset(i for i, q in enumerate(key) if languages[i].accepting[q]) for key in [(0,) * len(languages), *keys]
    ]
    joined = Language(alphabet, np.array(rows, np.int32), np.array([bool(member) for member in members]))
    return joined, [frozenset(), *dict.fromkeys(member for member in members if member)]


def _labelled(dfa: Dfa, joined: Language, languages: Sequence[Language], sets: list[frozenset[int]]) -> Dfa:
    """Give each accepting state the label of the languages that it is in."""
    if len(languages) == 1:
        return dfa
    _, classes = common_alphabet(languages)
    states = {1: tuple(language.start for language in languages)}
    todo = [1]
    for state in todo:
        for c, after in enumerate(joined.table[state].tolist()):
            if after and after not in states:
                states[after] = tuple(
                    int(language.table[q, classes[i][c]])
                    for i, (language, q) in enumerate(zip(languages, states[state], strict=True))
                )
                todo.append(after)
    accept = dfa.accept.copy()
    for state, joint in states.items():
        member = frozenset(i for i, q in enumerate(joint) if languages[i].accepting[q])
        accept[state] = sets.index(member) if member else 0
    return Dfa(dfa.table, accept, dfa.start)


def _closed(
    dfa: Dfa, follow: frozenset[int], *, counted: bool = False, universal: frozenset[int] = frozenset()
) -> JsonLexeme:
    """Add the closing quotation mark: for each label a state that only accepts."""
    n, labels = len(dfa.table), int(dfa.accept.max(initial=0))
    table = np.zeros((n + labels, 256), np.int32)
    table[:n] = dfa.table
    accepting = np.nonzero(dfa.accept)[0]
    table[accepting, QUOTE] = n - 1 + dfa.accept[accepting]
    accept = np.zeros(n + labels, np.int32)
    accept[n:] = np.arange(1, labels + 1)
    lexeme = Lexeme(Dfa(table, accept, dfa.start), follow, dfa.start if counted else 0, BLANK, endless=True)
    return JsonLexeme(lexeme, frozenset(range(n, n + labels)), universal)
