"""From states to masks: the code that every language shares.

A mask is what the tokens do from a state on. States are few, since they are interned and a text
comes back to them. So a mask is computed once and kept: bits that many states share, and the few
ids by which this state's mask differs. Read `states.py` first, then `matcher.py`.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.grammar.limit import without_commas
from martlet.grammar.states import Lexeme, State, Tree, bytes_or
from martlet.grammar.vocabulary import NOTHING, Endings, Exits, Suffixes, Vocabulary, share_a_text
from martlet.grammar.walk import Fill

U32 = NDArray[np.uint32]
MOST_MASKS = 20_000


class Masks:
    """A compiled language over one vocabulary: its first state and the masks known so far.

    All sequences share it.
    """

    def __init__(
        self,
        start: State,
        vocabulary: Vocabulary,
        *,
        name: str = "grammar",
        string_limit: int = 0,
        item_limit: int = 0,
        release: Callable[[], object] | None = None,
    ) -> None:
        self.start, self.vocabulary, self.name = start, vocabulary, name
        self.string_limit = string_limit  # bytes; 0: none
        self.item_limit = item_limit  # items of an array, properties of an object; 0: none
        self._release = release
        self._masks: OrderedDict[State, Fill] = OrderedDict()
        self._twins: dict[tuple[State, int], tuple[list[int], list[tuple[Any, Tree]]]] = {}
        self._exits: dict[tuple[Exits, State], NDArray[np.int32]] = {}
        self._suffixes: dict[tuple[State, frozenset[int], frozenset[int]], NDArray[np.bool_]] = {}
        self._endings: dict[tuple[int, int], tuple[Tree, Endings]] = {}

    def __del__(self) -> None:
        # States lead to each other in circles. Cut here, they do not wait for the garbage
        # collector, which would stop every answer while it looks through thousands of them.
        if self._release is not None:
            self._release()

    @cached_property
    def without_commas(self) -> U32:
        """The mask of tokens that do not carry a text beyond a comma, uint32 [words]."""
        return without_commas(self.vocabulary)

    def accepts(self, text: bytes) -> bool:
        """Whether a whole text is in the language."""
        state = self.start
        for byte in text:
            after = state.step(byte)
            if after is None:
                return False
            state = after
        return state.accepts

    def mask_of(self, state: State) -> Fill:
        """The mask of a state: bits that many states share (or None), and ids beside them."""
        mask = self._masks.get(state)
        if mask is None:
            mask = self._masks[state] = self._compute(state)
            if len(self._masks) > MOST_MASKS:
                self._masks.popitem(last=False)
        return mask

    def _compute(self, state: State) -> Fill:
        vocabulary = self.vocabulary
        shared: U32 | None = None
        rows: list[Any] = []
        ids: list[int] = list(vocabulary.eos_ids) if state.accepts else []
        ahead: list[tuple[int, State]] = [(0, state)]
        while ahead:
            node, state = ahead.pop()
            lexeme = state.lexeme
            if lexeme is not None:
                mask = self._inside(node, state, rows)
                if mask is not None:
                    shared = mask if shared is None else shared | mask
                continue
            tree = state.reserved()
            if tree is not None:
                self._listed(node, state, tree, ids, ahead)
                continue
            alternatives = state.alternatives()
            if alternatives is not None:
                ahead += [(node, alternative) for alternative in alternatives]
                continue
            children, split = vocabulary.children(node), state.split()
            if split is not None:
                ahead.append((node, split[1]))
            for byte in bytes_or(state, children) if split is None else split[0]:
                child = children.get(byte)
                after = None if child is None else state.step(byte)
                if child is None or after is None:
                    continue
                ids += vocabulary.tokens_at(child)
                if vocabulary.end[child] > child + 1:
                    ahead.append((child, after))
        rows.append(np.array(ids, np.int32))
        return vocabulary.walker.prepared(shared, np.concatenate(rows))

    def _inside(self, node: int, state: State, rows: list[Any]) -> U32 | None:
        """Add the tokens below a trie node from a state inside a lexeme on.

        Many tokens that stay are returned as a mask; few are added to `rows` as ids.
        """
        assert state.lexeme is not None
        lexeme, at = state.lexeme
        region = self.vocabulary.region(lexeme, at, node)
        budget = state.budget
        ids, mask = region.staying(None if budget is None else budget[1])
        if mask is None:
            rows.append(ids)
        leaving = []
        for label, exits in region.exits.items():
            after = state.exit(label)
            if after is not None:
                leaving.append(self._leaving(exits, lexeme, after, budget))
        tree = state.reserved()
        rows += self._with_reserved(node, state, leaving, tree) if tree else leaving
        return mask

    def _listed(self, node: int, state: State, tree: Tree, ids: list[int], ahead: list[tuple[int, State]]) -> None:
        """Add the tokens inside the texts of a tree.

        Where such a text ends, its state goes to `ahead`.
        """
        vocabulary = self.vocabulary
        inside = [(node, tree)]
        while inside:
            node, tree = inside.pop()
            children = vocabulary.children(node)
            for byte, below in tree.items():
                child = children.get(byte)
                if child is None:
                    continue
                if -1 not in below:
                    ids += vocabulary.tokens_at(child)
                    inside.append((child, below))
                    continue
                after = state.after_reserved(below[-1])
                if after is not None:
                    ids += vocabulary.tokens_at(child)
                    ahead.append((child, after))

    def _leaving(self, exits: Exits, lexeme: Lexeme, after: State, budget: tuple[int, int] | None) -> NDArray[np.int32]:
        """The tokens that leave a lexeme and that the next states allow, int32 [n]."""
        if budget is not None:
            return exits.allowed(self._suffixes_of(after, lexeme), budget)
        key = (exits, after)
        ids = self._exits.get(key)
        if ids is None:
            if len(self._exits) > MOST_MASKS:
                self._exits.clear()
            ids = self._exits[key] = self._going_on(exits, lexeme, after)
        return ids

    def _going_on(self, exits: Exits, lexeme: Lexeme, after: State) -> NDArray[np.int32]:
        """The same without a budget, not kept: what a twin has is kept with the twin."""
        twin = after.twin()
        if twin is None:
            return exits.allowed(self._suffixes_of(after, lexeme), None)
        suffixes = self.vocabulary.suffixes(lexeme)
        inside = self._leaving(exits, lexeme, twin[0], None)
        left = self._followed_once(twin[0], suffixes.root, suffixes)[1]
        numbers, _ = self._followed([(rest, twin[1](reached)) for reached, rest in left], suffixes)
        more = exits.having(numbers)
        return np.concatenate((inside, np.array(more, np.int32))) if more else inside

    def _with_reserved(self, node: int, state: State, leaving: list[Any], tree: Tree) -> list[Any]:
        """The tokens that leave a lexeme, where some texts are reserved.

        A token that begins with a reserved text is judged by the state after that text.
        """
        endings, lows, highs = self._endings_of(node, tree)
        if not endings:
            return leaving
        vocabulary = self.vocabulary
        allowed: list[int] = []
        for at, name in endings:
            after = state.after_reserved(name)
            if after is not None:
                allowed += [*vocabulary.tokens_at(at), *self._below(at, after)]
        kept: list[Any] = [np.array(allowed, np.int32)]
        for ids in leaving:
            rank = vocabulary.rank[ids]
            kept.append(ids[rank >= highs[np.searchsorted(lows, rank, side="right")]])
        return kept

    def _endings_of(self, node: int, tree: Tree) -> Endings:
        """Where the texts of a tree end below a node.

        The tree is kept too, so its id stays its own.
        """
        key = (node, id(tree))
        if key not in self._endings:
            if len(self._endings) > MOST_MASKS:
                self._endings.clear()
            self._endings[key] = tree, self.vocabulary.endings(node, tree)
        return self._endings[key][1]

    def _below(self, node: int, state: State) -> list[int]:
        """The tokens below a node that a state allows, followed byte by byte."""
        vocabulary = self.vocabulary
        ids: list[int] = []
        ahead = [(node, state)]
        while ahead:
            node, state = ahead.pop()
            children = vocabulary.children(node)
            for byte in bytes_or(state, children) if children else ():
                child = children.get(byte)
                after = None if child is None else state.step(byte)
                if child is not None and after is not None:
                    ids += vocabulary.tokens_at(child)
                    ahead.append((child, after))
        return ids

    def _suffixes_of(self, state: State, lexeme: Lexeme) -> NDArray[np.bool_]:
        """Which suffixes may follow a lexeme, bool [suffixes]."""
        key = (state, lexeme.follow, lexeme.blank)
        allowed = self._suffixes.get(key)
        if allowed is None:
            suffixes = self.vocabulary.suffixes(lexeme)
            numbers = [NOTHING, *self._followed([(suffixes.root, state)], suffixes)[0]]
            if len(self._suffixes) > MOST_MASKS:
                self._suffixes.clear()
            allowed = self._suffixes[key] = np.zeros(suffixes.n, np.bool_)
            allowed[numbers] = True
        return allowed

    def _followed(
        self, ahead: list[tuple[Tree, State]], suffixes: Suffixes
    ) -> tuple[list[int], list[tuple[Any, Tree]]]:
        """Which suffixes below tree nodes the states allow, by number.

        The second list is for suffixes that go beyond a twin's end: what was reached, and what is
        left.
        """
        numbers: list[int] = []
        beyond: list[tuple[Any, Tree]] = []
        while ahead:
            node, here = ahead.pop()
            if here.reached is not None:
                beyond.append((here.reached, node))
                continue
            twin, inside, alternatives = here.twin(), here.lexeme, here.alternatives()
            if alternatives is not None:
                ahead += [(node, alternative) for alternative in alternatives]
            elif twin is not None:
                staying, left = self._followed_once(twin[0], node, suffixes)
                numbers += staying
                ahead += [(rest, twin[1](reached)) for reached, rest in left]
            elif inside is not None and here.budget is None and not share_a_text(here.reserved(), node):
                staying, leaving = suffixes.inside(*inside, node)
                numbers += staying
                for label, rest in leaving:
                    after = here.exit(label)
                    if after is not None:
                        numbers += [rest[-1]] if -1 in rest else []
                        ahead.append((rest, after))
            else:
                for byte in bytes_or(here, node):
                    child = node.get(byte) if byte >= 0 else None
                    after = None if child is None else here.step(byte)
                    if child is not None and after is not None:
                        numbers += [child[-1]] if -1 in child else []
                        ahead.append((child, after))
        return numbers, beyond

    def _followed_once(self, state: State, tree: Tree, suffixes: Suffixes) -> tuple[list[int], list[tuple[Any, Tree]]]:
        """The same for one state, kept."""
        key = (state, id(tree))
        if key not in self._twins:
            if len(self._twins) > MOST_MASKS:
                self._twins.clear()
            self._twins[key] = self._followed([(tree, state)], suffixes)
        return self._twins[key]
