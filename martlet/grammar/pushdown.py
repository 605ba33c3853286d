"""A context-free grammar as an automaton with a stack, byte by byte (read `network.py` first).

    rules → a network a rule: nodes, and edges that take a terminal, call a rule, or nothing
          → places: the threads that a text may be in, each a node and a stack of nodes to return to
          → states: a place, and where in its terminals' automaton the text is; a few of them at once if it is ambiguous

The terminals that can come next at a place are one automaton, labelled by which of them end where:
so most states are inside one lexeme, and its masks are computed once (`vocabulary.py`). Where a
terminal can end and also go on with the same byte, the state is both, and its masks are found step
by step.

Places and stacks are interned. Every node can reach its rule's end, every rule has a text: no state
is a dead end. More than MOST_THREADS ways of reading one text are not followed: those with the
longest stacks are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from martlet.errors import RequestError
from martlet.grammar.network import Network
from martlet.grammar.rules import Rule, simplified
from martlet.grammar.states import Dfa, Lexeme, Plain, State

__all__ = ["grammar_state"]

MOST_THREADS = 128
_MOST_UNION = 50_000  # states of the automaton of a place's terminals


def grammar_state(rules: Mapping[str, Rule], root: str = "root") -> State:
    """Return the first state of a grammar's texts.

    RequestError for what is wrong with it, or too much.
    """
    try:
        network = Network(simplified(rules, root), root)
    except RecursionError:
        raise RequestError("The grammar's groups are nested too deeply.", code="grammar_too_large") from None
    if not network.productive(root):
        raise RequestError(
            "The grammar has no text at all: its rules lead to each other for ever.", code="invalid_grammar"
        )
    machine = _Machine(network)
    return machine.begin()


Thread = tuple[int, int, int]  # terminal, node after it, stack


class _Machine:
    """Makes places and states, each once."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.stacks: list[tuple[int, int]] = [(-1, -1)]  # (node to return to, the stack below); 0 is empty
        self._stack_numbers: dict[tuple[int, int], int] = {}
        self._places: dict[tuple[frozenset[Thread], bool], _Place] = {}
        self._states: dict[frozenset[tuple[_Place, int]], _State] = {}
        self._lexemes: dict[tuple[int, frozenset[int]], Lexeme] = {}
        self.union = lru_cache(maxsize=4096)(self._union)

    def begin(self) -> State:
        """The first state."""
        place = self.place([(self.network.entry[self.network.root], 0)])
        return self.state(frozenset(((place, place.start),)))

    def push(self, node: int, below: int) -> int:
        """A stack with one more node.

        Where that node is only an end there is nothing to come back for.
        """
        network = self.network
        if network.ends[node] and not network.takes[node] and not network.calls[node]:
            return below
        key = node, below
        number = self._stack_numbers.get(key)
        if number is None:
            number = self._stack_numbers[key] = len(self.stacks)
            self.stacks.append(key)
        return number

    def place(self, begun: list[tuple[int, int]]) -> _Place:
        """The place of threads that are at these (node, stack)."""
        network = self.network
        threads: dict[Thread, None] = {}
        accepts = False
        seen = set(begun)
        ahead = list(begun)
        while ahead:
            node, stack = ahead.pop()
            for terminal, after in network.takes[node]:
                threads[terminal, after, stack] = None
            more = [(network.entry[name], self.push(after, stack)) for name, after in network.calls[node]]
            if network.ends[node]:
                if stack == 0:
                    accepts = True
                else:
                    more.append(self.stacks[stack])
            for key in more:
                if key not in seen:
                    seen.add(key)
                    ahead.append(key)
        kept = sorted(threads, key=lambda thread: thread[2])[:MOST_THREADS]
        found = frozenset(kept), accepts
        made = self._places.get(found)
        if made is None:
            made = self._places[found] = _Place(self, tuple(kept), accepts)
        return made

    def state(self, configs: frozenset[tuple[_Place, int]]) -> _State:
        """The state of these (place, automaton's state)."""
        made = self._states.get(configs)
        if made is None:
            made = self._states[configs] = _State(self, tuple(configs))
        return made

    def lexeme(self, dfa: Dfa, follow: frozenset[int]) -> Lexeme:
        """The lexeme of an automaton with what follows."""
        key = id(dfa), follow
        made = self._lexemes.get(key)
        if made is None:
            made = self._lexemes[key] = Lexeme(dfa, follow)
        return made

    def _union(self, terminals: frozenset[int]) -> tuple[Dfa, list[frozenset[int]]]:
        """The automaton of several terminals, and for each of its labels the terminals that end
        there.

        Its first state is one that nothing leads back to.
        """
        order = sorted(terminals)
        dfas = [self.network.terminals[t] for t in order]
        labels: list[frozenset[int]] = [frozenset()]
        numbers: dict[frozenset[int], int] = {frozenset(): 0}
        keys = [tuple(dfa.start for dfa in dfas)]
        at: dict[tuple[int, ...], int] = {}
        rows: list[np.ndarray] = [np.zeros(256, np.int32)]
        accept = [0]
        for key in keys:
            table = np.stack([dfa.table[q] for dfa, q in zip(dfas, key, strict=True)])  # [terminals, 256]
            different, inverse = np.unique(table, axis=1, return_inverse=True)
            ids = []
            for column in different.T.tolist():
                after = tuple(column)
                if not any(after):
                    ids.append(0)
                    continue
                if after not in at:
                    keys.append(after)
                    at[after] = len(keys)
                ids.append(at[after])
            rows.append(np.array(ids, np.int32)[inverse.ravel()])
            ended = frozenset(t for t, dfa, q in zip(order, dfas, key, strict=True) if dfa.accept[q])
            if ended not in numbers:
                numbers[ended] = len(labels)
                labels.append(ended)
            accept.append(numbers[ended])
            if len(keys) > _MOST_UNION:
                raise RequestError("The grammar's terminals are too many at one place.", code="grammar_too_large")
        return Dfa(np.stack(rows), np.array(accept, np.int32), 1), labels


class _Place:
    """The threads of a text between two terminals, all before their next one."""

    def __init__(self, machine: _Machine, threads: tuple[Thread, ...], accepts: bool) -> None:
        self.machine, self.threads, self.accepts = machine, threads, accepts
        self.dfa: Dfa | None = None
        self.start = 0
        self.labels: list[frozenset[int]] = []
        if threads:
            self.dfa, self.labels = machine.union(frozenset(thread[0] for thread in threads))
            self.start = self.dfa.start
        self._after: dict[int, _Place] = {}
        self._lexeme: Lexeme | None = None
        self._is_known = False

    @property
    def first(self) -> frozenset[int]:
        """The bytes with which it goes on."""
        return frozenset() if self.dfa is None else frozenset(np.flatnonzero(self.dfa.table[self.start]).tolist())

    def after(self, label: int) -> _Place:
        """The place after terminals have ended."""
        made = self._after.get(label)
        if made is None:
            ended = self.labels[label]
            begun = [(node, stack) for terminal, node, stack in self.threads if terminal in ended]
            made = self._after[label] = self.machine.place(list(dict.fromkeys(begun)))
        return made

    @property
    def lexeme(self) -> Lexeme | None:
        """The terminals' automaton with what follows.

        None if what follows may also be more of a terminal.
        """
        if not self._is_known and self.dfa is not None:
            self._is_known = True
            firsts = {label: self.after(label).first for label in range(1, len(self.labels))}
            clash = False
            for q in np.flatnonzero(self.dfa.accept).tolist():
                goes_on = np.flatnonzero(self.dfa.table[q]).tolist()
                clash = clash or not firsts[int(self.dfa.accept[q])].isdisjoint(goes_on)
            if not clash:
                self._lexeme = self.machine.lexeme(self.dfa, frozenset().union(*firsts.values()))
        return self._lexeme


class _State(Plain):
    """Where a text may be: mostly at one place."""

    __slots__ = ("_configs", "_machine", "_steps")

    def __init__(self, machine: _Machine, configs: tuple[tuple[_Place, int], ...]) -> None:
        self._machine, self._configs = machine, configs
        self._steps: dict[int, State | None] = {}

    @property
    def accepts(self) -> bool:
        """Whether the text may end here."""
        for place, q in self._configs:
            if q == place.start and place.accepts:
                return True
            if place.dfa is not None and place.dfa.accept[q] and place.after(int(place.dfa.accept[q])).accepts:
                return True
        return False

    @property
    def lexeme(self) -> tuple[Lexeme, int] | None:
        """The terminals that come next, as one automaton."""
        if len(self._configs) > 1:
            return None
        [(place, q)] = self._configs
        found = place.lexeme
        return None if found is None else (found, q)

    def exit(self, label: int) -> State | None:
        """The state after a terminal."""
        place = self._configs[0][0].after(label)
        return self._machine.state(frozenset(((place, place.start),)))

    def step(self, byte: int) -> State | None:
        """The state after one more byte."""
        if byte not in self._steps:
            self._steps[byte] = self._step(byte)
        return self._steps[byte]

    def _step(self, byte: int) -> State | None:
        configs: set[tuple[_Place, int]] = set()
        ahead = list(self._configs)
        for place, q in ahead:
            if place.dfa is None:
                continue
            after = int(place.dfa.table[q, byte])
            if after:
                configs.add((place, after))
            label = int(place.dfa.accept[q])
            if label:
                following = place.after(label)
                ahead.append((following, following.start))
        if not configs:
            return None
        if len(configs) > MOST_THREADS:
            configs = set(sorted(configs, key=lambda c: len(c[0].threads))[:MOST_THREADS])
        return self._machine.state(frozenset(configs))

    def next_bytes(self) -> bytes | None:
        """The bytes with which the text goes on."""
        found: set[int] = set()
        for place, q in self._configs:
            if place.dfa is not None:
                found |= set(np.flatnonzero(place.dfa.table[q]).tolist())
                if place.dfa.accept[q]:
                    found |= place.after(int(place.dfa.accept[q])).first
        return bytes(sorted(found))
