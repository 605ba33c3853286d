"""Regular expressions → languages, without backtracking (read `language.py` first).

A pattern becomes a nondeterministic automaton of character classes and *conditions*, and that a
deterministic automaton by the subset construction. A thread of that walk carries its promises:
`(?=…)` starts an automaton of its own that must accept what remains, `(?!…)` its complement. So
look-ahead is exact anywhere, also in loops. Look-behind is an automaton that runs from the start.
"""

import time
from functools import lru_cache

from martlet.errors import RequestError
from martlet.grammar.codepoints import ANY, Alphabet, Ranges, alphabet_of
from martlet.grammar.language import Language, build
from martlet.grammar.regex_parse import WORD, Anchor, Chars, Choice, Look, Node, Repeat, Row, parse

_MOST_NODES = 50_000  # of the nondeterministic automaton
_MOST_SECONDS = 3.0  # of making it deterministic
_MOST_LOOKS = 32


@lru_cache(maxsize=512)
def regex_language(pattern: str, search: bool = False) -> Language:
    """Return the texts that a pattern matches; with `search`, the texts with a match anywhere.

    RequestError names what is wrong in the pattern, not supported, or too much.
    """
    return _language(parse(pattern), search, search)


def node_language(node: Node) -> Language:
    """Return the texts that a tree matches as a whole."""
    return _language(node, False, False)


def _language(node: Node, free_start: bool, free_end: bool) -> Language:
    """The language of a tree, with any text allowed before or after it if asked for."""
    anything = Repeat(Chars(ANY), 0, None)
    return _Deterministic(_Automaton(Row((anything, node)) if free_start else node, free_end)).language()


# A state; promises: (number of the look-ahead, its state).
Thread = tuple[int, frozenset[tuple[int, int]]]
_NO_PROMISES: frozenset[tuple[int, int]] = frozenset()


class _Automaton:
    """A nondeterministic automaton.

    `free[s]` are the states that s becomes without a character, under a condition or none;
    `moves[s]` is the set of characters it takes, and the state after it.
    """

    def __init__(self, root: Node, free_end: bool) -> None:
        self.free: list[list[tuple[int, Anchor | int | None]]] = []
        self.moves: list[tuple[Ranges, int] | None] = []
        self.aheads: list[Language] = []
        self.behinds: list[Language] = []
        self.has_words = False
        self.final = self._new()  # with a free end, it never leaves this state
        if free_end:
            self.moves[self.final] = ANY, self.final
        self.first = self._add(root, self.final)

    def _new(self) -> int:
        if len(self.free) >= _MOST_NODES:
            raise RequestError(
                f"The pattern has more than {_MOST_NODES:,} parts when its repetitions are written out: use fewer.",
                code="grammar_too_large",
            )
        self.free.append([])
        self.moves.append(None)
        return len(self.free) - 1

    def _add(self, node: Node, after: int) -> int:
        """Add a tree that goes on to state `after`; return its first state."""
        if isinstance(node, Row):
            for item in reversed(node.items):
                after = self._add(item, after)
            return after
        if isinstance(node, Repeat):
            return self._add_repeat(node, after)
        state = self._new()
        if isinstance(node, Chars):
            self.moves[state] = node.ranges, after
        elif isinstance(node, Choice):
            self.free[state] += [(self._add(option, after), None) for option in node.options]
        elif isinstance(node, Anchor):
            self.has_words |= node.condition in ("word", "inside")
            self.free[state].append((after, node))
        else:
            self.free[state].append((after, self._look(node)))
        return state

    def _add_repeat(self, node: Repeat, after: int) -> int:
        if node.high is None:
            loop = self._new()
            self.free[loop] += [(self._add(node.item, loop), None), (after, None)]
            at = loop
        else:
            at = after
            for _ in range(node.high - node.low):
                state = self._new()
                self.free[state] += [(self._add(node.item, at), None), (after, None)]
                at = state
        for _ in range(node.low):
            at = self._add(node.item, at)
        return at

    def _look(self, node: Look) -> int:
        """Number of a look-ahead from 0 up, of a look-behind from -1 down."""
        if len(self.aheads) + len(self.behinds) >= _MOST_LOOKS:
            raise RequestError(
                f"The pattern looks ahead or behind more than {_MOST_LOOKS} times.", code="grammar_too_large"
            )
        if node.ahead and _has_anchor(node.item, ("start", "word", "inside")):
            raise RequestError(
                "A look-ahead with '^' or '\\b' in it is not supported in a regular expression.",
                code="unsupported_regex",
            )
        if not node.ahead and _has_anchor(node.item, ("end", "word", "inside")):
            raise RequestError(
                "A look-behind with '$' or '\\b' in it is not supported in a regular expression.",
                code="unsupported_regex",
            )
        language = _language(node.item, not node.ahead, node.ahead)
        language = ~language if node.negative else language
        if node.ahead:
            self.aheads.append(language)
            return len(self.aheads) - 1
        self.behinds.append(language)
        return -len(self.behinds)


def _has_anchor(node: Node, conditions: tuple[str, ...]) -> bool:
    if isinstance(node, Anchor):
        return node.condition in conditions
    if isinstance(node, Row | Choice):
        return any(_has_anchor(item, conditions) for item in (node.items if isinstance(node, Row) else node.options))
    return isinstance(node, Repeat | Look) and _has_anchor(node.item, conditions)


# A state of the deterministic automaton: its threads, the last character's category, the
# look-behinds' states.
Key = tuple[frozenset[Thread], int, tuple[int, ...]]
_NONE, _WORD, _OTHER = 0, 1, 2  # no character; a word character; another


class _Deterministic:
    """The subset construction."""

    def __init__(self, nfa: _Automaton) -> None:
        self.nfa = nfa
        self.alphabet, self.classes, self.in_look = _alphabet(nfa)
        word = self.alphabet_word
        self.categories = [_WORD if c in word else _OTHER for c in range(self.alphabet.n_classes)]
        self.rows = [look.table.tolist() for look in (*nfa.aheads, *nfa.behinds)]
        self.universal = [_universal_states(look) for look in nfa.aheads]
        self.deadline = time.thread_time() + _MOST_SECONDS
        self._closed: dict[tuple[Key, int], list[Thread]] = {}

    @property
    def alphabet_word(self) -> frozenset[int]:
        """Classes of word characters, where word boundaries matter."""
        return frozenset(
            c for c, ranges in enumerate(self.alphabet.sets()) if ranges[0] in WORD or _in_word(ranges[0][0])
        )

    def language(self) -> Language:
        """Return the language of the automaton."""
        behinds = tuple(look.start for look in self.nfa.behinds)
        first: Key = frozenset(((self.nfa.first, _NO_PROMISES),)), _NONE, behinds
        return build(self.alphabet, first, self.step, self.accepts)

    def step(self, key: Key, c: int) -> Key | None:
        """The state after a character of class c."""
        category = self.categories[c]
        threads: set[Thread] = set()
        before = self.closure(key, category)
        if self.nfa.moves[self.nfa.final] is not None and (self.nfa.final, _NO_PROMISES) in before:
            return _accepted(self.nfa)
        for state, promises in before:
            move = self.nfa.moves[state]
            if move is None or c not in self.classes[state]:
                continue
            kept = self.keep(promises, c) if promises else promises
            if kept is not None:
                threads.add((move[1], kept))
        if not threads:
            return None
        offset = len(self.nfa.aheads)
        behinds = tuple(self.rows[offset + i][q][self.in_look[offset + i][c]] for i, q in enumerate(key[2]))
        return frozenset(threads), category if self.nfa.has_words else _OTHER, behinds

    def keep(self, promises: frozenset[tuple[int, int]], c: int) -> frozenset[tuple[int, int]] | None:
        """Promises after a character: None if one is broken; promises kept for good are dropped."""
        kept = []
        for look, q in promises:
            after = self.rows[look][q][self.in_look[look][c]]
            if after == 0:
                return None
            if after not in self.universal[look]:
                kept.append((look, after))
        return frozenset(kept)

    def closure(self, key: Key, following: int) -> list[Thread]:
        """All threads before a character of category `following` (_NONE: before the end)."""
        reached = self._closed.get((key, following))
        if reached is not None:
            return reached
        if time.thread_time() > self.deadline:
            raise RequestError(
                f"The pattern took more than {_MOST_SECONDS:g} s to compile: make it simpler.", code="grammar_too_large"
            )
        threads, last, behinds = key
        reached = list(threads)
        seen = set(threads)
        for state, promises in reached:
            for after, condition in self.nfa.free[state]:
                kept = self.pass_(condition, promises, (last, following), behinds)
                if kept is not None and (after, kept) not in seen:
                    seen.add((after, kept))
                    reached.append((after, kept))
        self._closed[key, following] = reached
        return reached

    def pass_(
        self,
        condition: Anchor | int | None,
        promises: frozenset[tuple[int, int]],
        around: tuple[int, int],
        behinds: tuple[int, ...],
    ) -> frozenset[tuple[int, int]] | None:
        """The promises of a thread after a condition, None if it does not hold."""
        if condition is None:
            return promises
        if isinstance(condition, Anchor):
            last, following = around
            boundary = (last == _WORD) != (following == _WORD)
            holds = {"start": last == _NONE, "end": following == _NONE, "word": boundary, "inside": not boundary}
            return promises if holds[condition.condition] else None
        if condition < 0:
            look = -1 - condition
            return promises if self.nfa.behinds[look].accepting[behinds[look]] else None
        start = self.nfa.aheads[condition].start
        if start == 0:
            return None
        return promises if start in self.universal[condition] else promises | {(condition, start)}

    def accepts(self, key: Key) -> bool:
        """Whether a text may end here."""
        return any(
            state == self.nfa.final and all(self.nfa.aheads[look].accepting[q] for look, q in promises)
            for state, promises in self.closure(key, _NONE)
        )


def _accepted(nfa: _Automaton) -> Key:
    """The state of a matched pattern with a free end: nothing that follows changes it."""
    return frozenset(((nfa.final, _NO_PROMISES),)), _OTHER, (0,) * len(nfa.behinds)


def _alphabet(nfa: _Automaton) -> tuple[Alphabet, list[frozenset[int]], list[list[int]]]:
    """The automaton's alphabet, each state's classes in it, its classes in each look's alphabet."""
    sets: dict[Ranges, int] = {WORD: 0} if nfa.has_words else {}
    for move in nfa.moves:
        if move is not None:
            sets.setdefault(move[0], len(sets))
    looks = (*nfa.aheads, *nfa.behinds)
    for look in looks:
        for ranges in look.alphabet.sets():
            sets.setdefault(ranges, len(sets))
    alphabet, members = alphabet_of(list(sets) or [ANY])
    nothing: frozenset[int] = frozenset()
    classes = [members[sets[move[0]]] if move is not None else nothing for move in nfa.moves]
    firsts: dict[int, int] = {}
    for start, c in zip(alphabet.starts, alphabet.classes, strict=True):
        firsts.setdefault(c, start)
    in_look = [[look.alphabet.class_of(firsts[c]) for c in range(alphabet.n_classes)] for look in looks]
    return alphabet, classes, in_look


def _universal_states(language: Language) -> frozenset[int]:
    """States from which every text is accepted; a minimal automaton has at most one."""
    table, accepting = language.table, language.accepting
    return frozenset(q for q in range(1, len(table)) if accepting[q] and (table[q] == q).all())


def _in_word(codepoint: int) -> bool:
    return any(first <= codepoint <= last for first, last in WORD)
