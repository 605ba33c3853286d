"""Rules as a network: nodes are positions in rules; edges take a terminal, call a rule, or take
nothing.

A terminal is as much of a rule as is regular. Nodes that lead to no text are removed, and with them
every dead end. Read `rules.py` first, and `pushdown.py` next, which runs the network.
"""

from collections.abc import Mapping

from martlet.errors import RequestError
from martlet.grammar.language import Language
from martlet.grammar.regex import node_language
from martlet.grammar.regex_parse import Choice, Repeat, Row
from martlet.grammar.rules import Ref, Rule, flat, refs
from martlet.grammar.states import Dfa
from martlet.grammar.utf8 import to_bytes

_MOST_NODES = 50_000


class Network:
    """A recursive transition network; nodes are numbers.

    `takes[n]` are (terminal, node after), `calls[n]` (rule, node after), `skips[n]` nodes reached
    at once.
    """

    def __init__(self, rules: Mapping[str, Rule], root: str) -> None:
        self.takes: list[list[tuple[int, int]]] = []
        self.calls: list[list[tuple[str, int]]] = []
        self.skips: list[list[int]] = []
        self.terminals: list[Dfa] = []
        self._numbers: dict[Rule, tuple[int | None, bool]] = {}
        self.root = root
        self.entry: dict[str, int] = {}
        self.final: dict[str, int] = {}
        for name, rule in rules.items():
            self.final[name] = self._new()
            self.entry[name] = self._add(rule, self.final[name])
        self._finals = frozenset(self.final.values())
        self._productive = self._find_productive()
        self._trim()

    def _new(self) -> int:
        if len(self.takes) >= _MOST_NODES:
            raise RequestError(
                "The grammar is too large when its repetitions are written out.", code="grammar_too_large"
            )
        self.takes.append([])
        self.calls.append([])
        self.skips.append([])
        return len(self.takes) - 1

    def _add(self, rule: Rule, after: int) -> int:
        """Add a rule's body that goes on to node `after`; return its first node."""
        if not refs(rule):
            return self._add_terminal(rule, after)
        node = self._new()
        if isinstance(rule, Ref):
            self.calls[node].append((rule.name, after))
        elif isinstance(rule, Row):
            return self._add_row(rule, after)
        elif isinstance(rule, Choice):
            plain: list[Rule] = [option for option in rule.options if not refs(option)]
            if plain:
                self.skips[node].append(self._add_terminal(Choice(tuple(plain)), after))  # type: ignore[arg-type]
            self.skips[node] += [self._add(option, after) for option in rule.options if refs(option)]
        elif isinstance(rule, Repeat):
            return self._add_repeat(rule, after)
        return node

    def _add_row(self, row: Row, after: int) -> int:
        """Add a row from its end on; neighbours without references become one terminal."""
        plain: list[Rule] = []
        for item in reversed(row.items):
            if not refs(item):
                plain.insert(0, item)
                continue
            if plain:
                after, plain = self._add_terminal(flat(plain), after), []
            after = self._add(item, after)
        return self._add_terminal(flat(plain), after) if plain else after

    def _add_repeat(self, rule: Repeat, after: int) -> int:
        if rule.high is None:
            at = self._new()
            self.skips[at] += [self._add(rule.item, at), after]
        else:
            at = after
            for _ in range(rule.high - rule.low):
                node = self._new()
                self.skips[node] += [self._add(rule.item, at), after]
                at = node
        for _ in range(rule.low):
            at = self._add(rule.item, at)
        return at

    def _add_terminal(self, rule: Rule, after: int) -> int:
        number, is_empty = self._terminal(rule)
        node = self._new()
        if number is not None:
            self.takes[node].append((number, after))
        if is_empty:
            self.skips[node].append(after)
        return node

    def _terminal(self, rule: Rule) -> tuple[int | None, bool]:
        """A terminal's number (None: only the empty text), and whether it has the empty text."""
        known = self._numbers.get(rule)
        if known is None:
            language = node_language(rule)  # type: ignore[arg-type]  # it has no references
            rest = language - Language.literal("") if language.accepts_empty else language
            number = None
            if not rest.is_empty:
                number = len(self.terminals)
                self.terminals.append(to_bytes(rest))
            known = self._numbers[rule] = number, language.accepts_empty
        return known

    # -- productive rules --------------------------------------------------------------------------
    def productive(self, rule: str) -> bool:
        """Whether a rule has a text."""
        return rule in self._productive

    def _find_productive(self) -> set[str]:
        known: set[str] = set()
        while True:
            alive = self._alive(known)
            more = {name for name, entry in self.entry.items() if name not in known and entry in alive}
            if not more:
                return known
            known |= more

    def _alive(self, known: set[str]) -> set[int]:
        """Nodes from which an end can be reached, if the rules `known` have texts."""
        before: list[list[int]] = [[] for _ in self.takes]
        for node in range(len(self.takes)):
            for after in (
                *self.skips[node],
                *(after for _, after in self.takes[node]),
                *(after for name, after in self.calls[node] if name in known),
            ):
                before[after].append(node)
        alive = set(self.final.values())
        ahead = list(alive)
        while ahead:
            for node in before[ahead.pop()]:
                if node not in alive:
                    alive.add(node)
                    ahead.append(node)
        return alive

    def _trim(self) -> None:
        """Remove edges that lead to no text, and follow the edges that take nothing."""
        alive = self._alive(self._productive)
        n = len(self.takes)
        takes: list[list[tuple[int, int]]] = []
        calls: list[list[tuple[str, int]]] = []
        ends: list[bool] = []
        for node in range(n):
            reached, ahead = {node}, [node]
            while ahead:
                for after in self.skips[ahead.pop()]:
                    if after not in reached and after in alive:
                        reached.add(after)
                        ahead.append(after)
            takes.append(list(dict.fromkeys(t for at in sorted(reached) for t in self.takes[at] if t[1] in alive)))
            calls.append(
                list(
                    dict.fromkeys(
                        c
                        for at in sorted(reached)
                        for c in self.calls[at]
                        if c[1] in alive and c[0] in self._productive
                    )
                )
            )
            ends.append(not reached.isdisjoint(self._finals))
        self.takes, self.calls, self.ends = takes, calls, ends
