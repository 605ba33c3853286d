"""A context-free grammar as an automaton with a stack, byte by byte (read `network.py` first).

    rules → a network for each rule: nodes, and edges that take a terminal, call a rule, or nothing
          → item sets: the items a text may be in, each a terminal, a node and a stack to return to
          → states: an item set with its terminals' automaton state; several if ambiguous

The terminals that may come next in an item set are one automaton, labelled by which of them end
where. So most states are inside one lexeme, whose masks are computed once (`vocabulary.py`). Where
a terminal can end and also go on with the same byte, the state is both, and its masks are found
byte by byte.

Item sets and stacks are interned. Every node can reach its rule's end and every rule has a text, so
no state is a dead end. More than MOST_ITEMS readings of one text are not followed: the longest
stacks are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from martlet.errors import RequestError
from martlet.grammar.network import Network
from martlet.grammar.rules import Rule, simplified
from martlet.grammar.states import Dfa, Lexeme, Plain, State

MOST_ITEMS = 128
_MOST_UNION = 50_000  # states of the automaton of a item_set's terminals


def grammar_state(rules: Mapping[str, Rule], root: str = "root") -> State:
    """Return the first state of a grammar's texts.

    RequestError says what is wrong with it, or too much.
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


Item = tuple[int, int, int]  # terminal, node after it, stack


class _Machine:
    """Interns stacks, item sets and states."""

    def __init__(self, network: Network) -> None:
        self.network = network
        # (node to return to, the stack below); 0 is empty.
        self.stacks: list[tuple[int, int]] = [(-1, -1)]
        self._stack_numbers: dict[tuple[int, int], int] = {}
        self._item_sets: dict[tuple[frozenset[Item], bool], _ItemSet] = {}
        self._states: dict[frozenset[tuple[_ItemSet, int]], _State] = {}
        self._lexemes: dict[tuple[int, frozenset[int]], Lexeme] = {}
        self.union = lru_cache(maxsize=4096)(self._union)

    def begin(self) -> State:
        start = self.item_set([(self.network.entry[self.network.root], 0)])
        return self.state(frozenset(((start, start.start),)))

    def push(self, node: int, below: int) -> int:
        """A stack with one more node; a node that is only an end is not worth returning to."""
        network = self.network
        if network.ends[node] and not network.takes[node] and not network.calls[node]:
            return below
        key = node, below
        number = self._stack_numbers.get(key)
        if number is None:
            number = self._stack_numbers[key] = len(self.stacks)
            self.stacks.append(key)
        return number

    def item_set(self, begun: list[tuple[int, int]]) -> _ItemSet:
        """The item set of texts that have reached these (node, stack)."""
        network = self.network
        items: dict[Item, None] = {}
        accepts = False
        seen = set(begun)
        ahead = list(begun)
        while ahead:
            node, stack = ahead.pop()
            for terminal, after in network.takes[node]:
                items[terminal, after, stack] = None
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
        kept = sorted(items, key=lambda item: item[2])[:MOST_ITEMS]
        items_key = frozenset(kept), accepts
        made = self._item_sets.get(items_key)
        if made is None:
            made = self._item_sets[items_key] = _ItemSet(self, tuple(kept), accepts)
        return made

    def state(self, configs: frozenset[tuple[_ItemSet, int]]) -> _State:
        """The state of these (item set, automaton's state)."""
        made = self._states.get(configs)
        if made is None:
            made = self._states[configs] = _State(self, tuple(configs))
        return made

    def lexeme(self, dfa: Dfa, follow: frozenset[int]) -> Lexeme:
        """The lexeme of an automaton with the bytes that follow it."""
        key = id(dfa), follow
        made = self._lexemes.get(key)
        if made is None:
            made = self._lexemes[key] = Lexeme(dfa, follow)
        return made

    def _union(self, terminals: frozenset[int]) -> tuple[Dfa, list[frozenset[int]]]:
        """The automaton of several terminals, and for each label the terminals that end there.

        Nothing leads back to its first state. RequestError if it is too large.
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
            # [terminals, 256].
            table = np.stack([dfa.table[q] for dfa, q in zip(dfas, key, strict=True)])
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
                raise RequestError("The grammar's terminals are too many in one position.", code="grammar_too_large")
        return Dfa(np.stack(rows), np.array(accept, np.int32), 1), labels


class _ItemSet:
    """The items of a text between two terminals, all before their next terminal."""

    def __init__(self, machine: _Machine, items: tuple[Item, ...], accepts: bool) -> None:
        self.machine, self.items, self.accepts = machine, items, accepts
        self.dfa: Dfa | None = None
        self.start = 0
        self.labels: list[frozenset[int]] = []
        if items:
            self.dfa, self.labels = machine.union(frozenset(item[0] for item in items))
            self.start = self.dfa.start
        self._after: dict[int, _ItemSet] = {}
        self._lexeme: Lexeme | None = None
        self._is_known = False

    @property
    def first(self) -> frozenset[int]:
        """The bytes with which it goes on."""
        return frozenset() if self.dfa is None else frozenset(np.flatnonzero(self.dfa.table[self.start]).tolist())

    def after(self, label: int) -> _ItemSet:
        """The item set after the terminals of a label ended."""
        made = self._after.get(label)
        if made is None:
            ended = self.labels[label]
            begun = [(node, stack) for terminal, node, stack in self.items if terminal in ended]
            made = self._after[label] = self.machine.item_set(list(dict.fromkeys(begun)))
        return made

    @property
    def lexeme(self) -> Lexeme | None:
        """The terminals' automaton with what follows.

        None if a byte that follows a terminal may also continue it.
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
    """The readings of a text: mostly a single item set."""

    __slots__ = ("_configs", "_machine", "_steps")

    def __init__(self, machine: _Machine, configs: tuple[tuple[_ItemSet, int], ...]) -> None:
        self._machine, self._configs = machine, configs
        self._steps: dict[int, State | None] = {}

    @property
    def accepts(self) -> bool:
        for item_set, q in self._configs:
            if q == item_set.start and item_set.accepts:
                return True
            if (
                item_set.dfa is not None
                and item_set.dfa.accept[q]
                and item_set.after(int(item_set.dfa.accept[q])).accepts
            ):
                return True
        return False

    @property
    def lexeme(self) -> tuple[Lexeme, int] | None:
        if len(self._configs) > 1:
            return None
        [(item_set, q)] = self._configs
        lexeme = item_set.lexeme
        return None if lexeme is None else (lexeme, q)

    def exit(self, label: int) -> State | None:
        item_set = self._configs[0][0].after(label)
        return self._machine.state(frozenset(((item_set, item_set.start),)))

    def step(self, byte: int) -> State | None:
        if byte not in self._steps:
            self._steps[byte] = self._step(byte)
        return self._steps[byte]

    def _step(self, byte: int) -> State | None:
        configs: set[tuple[_ItemSet, int]] = set()
        ahead = list(self._configs)
        for item_set, q in ahead:
            if item_set.dfa is None:
                continue
            after = int(item_set.dfa.table[q, byte])
            if after:
                configs.add((item_set, after))
            label = int(item_set.dfa.accept[q])
            if label:
                following = item_set.after(label)
                ahead.append((following, following.start))
        if not configs:
            return None
        if len(configs) > MOST_ITEMS:
            configs = set(sorted(configs, key=lambda c: len(c[0].items))[:MOST_ITEMS])
        return self._machine.state(frozenset(configs))

    def next_bytes(self) -> bytes | None:
        ahead: set[int] = set()
        for item_set, q in self._configs:
            if item_set.dfa is not None:
                ahead |= set(np.flatnonzero(item_set.dfa.table[q]).tolist())
                if item_set.dfa.accept[q]:
                    ahead |= item_set.after(int(item_set.dfa.accept[q])).first
        return bytes(sorted(ahead))
