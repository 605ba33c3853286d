"""A tokenizer's tokens as bytes in a trie, and what an automaton does to all of them.

    Vocabulary   the trie, shared by all grammars of a tokenizer
    Region       the tokens below a node that stay inside a lexeme from a state of it on,
                 and the tokens that leave it
    Suffixes     what a token may hold after a lexeme's end: few different texts, many tokens

Tokens without a text (control tokens, unused ids) are in no trie, and so in no mask. Read
`masks.py` next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.grammar.states import Lexeme, Tree, n_mask_words
from martlet.grammar.walk import MOST_LISTED, Walker
from martlet.tokenizer.tokenizer import Tokenizer

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
Bools = NDArray[np.bool_]
# Nodes with names; ranks where their tokens begin and end.
Endings = tuple[list[tuple[int, Any]], I32, I32]

MOST_INSIDE = 20_000
NOTHING = 0  # the suffix of a token that ends where the lexeme does
NEVER = 1  # the suffix of a token that nothing allows
MOST_CACHED_BYTES = 96 << 20


class Vocabulary:
    """The trie of a tokenizer's tokens.

    `tokens[t]` are the bytes that id t adds to a text; None or b"" keeps it out of every mask.
    `n_vocab` is the width of the logits, where that is more than the number of tokens. `kernels` is
    a store of compiled kernels (`ops/cpu/store.py`); without it the walk runs in Python, which is
    the definition and too slow to serve.
    """

    def __init__(
        self, tokens: Sequence[bytes | None], eos_ids: Sequence[int], *, n_vocab: int | None = None, kernels: Any = None
    ) -> None:
        self.tokens = tokens
        self.n_vocab = max(n_vocab or 0, len(tokens))
        self.n_words = n_mask_words(self.n_vocab)
        self.eos_ids = tuple(sorted(set(eos_ids)))
        present = [(text, token) for token, text in enumerate(tokens) if text and token not in self.eos_ids]
        present.sort()
        self.flat = np.frombuffer(b"".join(text or b"" for text in tokens), np.uint8)
        self.starts = np.concatenate([[0], np.cumsum([len(text or b"") for text in tokens])]).astype(np.int64)
        self.longest = max((len(text) for text, _ in present), default=0)
        self._build([text for text, _ in present], np.array([token for _, token in present], np.int32))
        self.walker = Walker(self.byte, self.end, self.depth, self.first, self.sorted_tokens, self.n_words, kernels)
        self._children: dict[int, dict[int, int]] = {}
        self._tokens_at: dict[int, list[int]] = {}
        self._suffixes: dict[tuple[frozenset[int], frozenset[int]], Suffixes] = {}
        self._regions: dict[tuple[Lexeme, int, int], Region] = {}
        self._cached_bytes = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, n_vocab: int | None = None, kernels: Any = None) -> Vocabulary:
        """The vocabulary of a tokenizer; control tokens and unused ids are in no mask."""
        tokens = [
            None if token in tokenizer.unused_ids else tokenizer.token_bytes(token, special=False)
            for token in range(tokenizer.vocab_size)
        ]
        return cls(tokens, sorted(tokenizer.eog_ids), n_vocab=n_vocab, kernels=kernels)

    def _build(self, texts: list[bytes], ids: I32) -> None:
        """Build the trie of the sorted `texts` in depth-first order, as flat arrays.

        Node 0 is the root.
        """
        lengths = np.array([len(text) for text in texts], np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        flat = np.frombuffer(b"".join(texts), np.uint8)
        common = np.zeros(len(texts), np.int64)  # bytes shared with the text before
        same = np.arange(1, len(texts))
        for k in range(self.longest):
            same = same[(lengths[same] > k) & (lengths[same - 1] > k)]
            same = same[flat[starts[same] + k] == flat[starts[same - 1] + k]]
            if not same.size:
                break
            common[same] = k + 1
        new = lengths - common  # nodes that a text adds
        n_before = np.concatenate([[0], np.cumsum(new)])
        text_of = np.repeat(np.arange(len(texts)), new)
        inside = np.arange(n_before[-1]) - n_before[text_of] + common[text_of]
        self.byte = np.concatenate([[0], flat[starts[text_of] + inside]]).astype(np.uint8)  # [N]
        self.depth = np.concatenate([[0], inside + 1]).astype(np.int32)  # [N]
        n_nodes = len(self.byte)
        self.end = np.full(n_nodes, n_nodes, np.int32)
        for depth in range(1, self.longest + 1):
            own = np.nonzero(self.depth == depth)[0]
            stops = np.append(np.nonzero(self.depth <= depth)[0], n_nodes)
            self.end[own] = stops[np.searchsorted(stops, own, side="right")]
        # A text's node is the last node it added; an equal text has the node of the text before it.
        node_of = np.maximum.accumulate(np.where(new > 0, n_before[1:], 0)) if len(texts) else new
        self.first = np.zeros(n_nodes + 1, np.int32)  # tokens of all nodes before this one
        np.add.at(self.first, node_of + 1, 1)
        self.first = np.cumsum(self.first).astype(np.int32)
        self.sorted_tokens = ids
        self.rank = np.full(self.n_vocab, -1, np.int32)  # of a token in `sorted_tokens`
        self.rank[ids] = np.arange(len(ids))

    def children(self, node: int) -> dict[int, int]:
        """A node's children: byte → node."""
        children = self._children.get(node)
        if children is None:
            children, child, stop = {}, node + 1, int(self.end[node])
            while child < stop:
                children[int(self.byte[child])] = child
                child = int(self.end[child])
            self._children[node] = children
        return children

    def find(self, node: int, text: bytes) -> int | None:
        """The node that `text` leads to from a node; None if there is none."""
        for byte in text:
            child = self.children(node).get(byte)
            if child is None:
                return None
            node = child
        return node

    def tokens_at(self, node: int) -> list[int]:
        """The tokens whose bytes end at a node."""
        ids = self._tokens_at.get(node)
        if ids is None:
            ids = self._tokens_at[node] = self.sorted_tokens[self.first[node] : self.first[node + 1]].tolist()
        return ids

    def endings(self, node: int, tree: Tree) -> Endings:
        """Where the texts of a tree end below a node: (node, name) pairs, and their tokens' ranks.

        `lows` int32 [n] and `highs` int32 [n + 1] bound the ranks of the tokens that begin with
        each text; `highs` has a first 0 in front, for ranks below every text.
        """
        ends: list[tuple[int, Any]] = []
        ahead: list[tuple[int, Tree]] = [(node, tree)]
        while ahead:
            at, texts = ahead.pop()
            children = self.children(at)
            for byte, below in texts.items():
                if byte < 0:
                    ends.append((at, below))
                elif byte in children:
                    ahead.append((children[byte], below))
        ends.sort(key=lambda ending: ending[0])
        lows = np.array([self.first[at] for at, _ in ends], np.int32)
        highs = np.array([0, *(self.first[self.end[at]] for at, _ in ends)], np.int32)
        return ends, lows, highs

    def region(self, lexeme: Lexeme, state: int, node: int) -> Region:
        """What the tokens below `node` do from a lexeme's `state` on; kept for the next time."""
        key = (lexeme, state, node)
        region = self._regions.get(key)
        if region is None:
            region = Region(self, lexeme, state, node)
            self._cached_bytes += region.n_bytes
            if self._cached_bytes > MOST_CACHED_BYTES:
                self._regions.clear()
                self._cached_bytes = region.n_bytes
            self._regions[key] = region
        return region

    def suffixes(self, lexeme: Lexeme) -> Suffixes:
        """The suffixes of tokens that may come after a lexeme; kept."""
        key = (lexeme.follow, lexeme.blank)
        suffixes = self._suffixes.get(key)
        if suffixes is None:
            suffixes = self._suffixes[key] = Suffixes(self, *key)
        return suffixes


class Suffixes:
    """All different ends of tokens that begin with a byte of `follow`, as a small trie of dicts.

    After bytes of `blank` another byte of `follow` must come. Every other end has the number NEVER.
    """

    def __init__(self, vocabulary: Vocabulary, follow: frozenset[int], blank: frozenset[int]) -> None:
        numbers: dict[bytes, int] = {b"": NOTHING, b"\0": NEVER}
        starts, flat = vocabulary.starts, vocabulary.flat
        n_tokens = len(starts) - 1
        self._starts = (starts[:-1] + np.arange(n_tokens)).astype(
            np.int32
        )  # every token has one more entry, for its end
        self._at = np.full(len(flat) + n_tokens, NEVER, np.int32)  # token's start + offset → suffix
        self._at[starts[1:] + np.arange(n_tokens)] = NOTHING
        last = np.zeros(len(flat) + 1, np.bool_)
        last[starts[1:] - 1] = True
        may = np.append(np.isin(flat, sorted(follow)), False)
        white = np.nonzero(np.append(np.isin(flat, sorted(blank)), False) & may)[0]
        while (wrong := white[may[white] & ~last[white] & ~may[white + 1]]).size:
            may[wrong] = False
        offsets = np.nonzero(may)[0]
        owners = np.searchsorted(starts, offsets, side="right") - 1
        for offset, token in zip(offsets.tolist(), owners.tolist(), strict=True):
            text = vocabulary.tokens[token]
            assert text is not None
            self._at[offset + token] = numbers.setdefault(text[offset - int(starts[token]) :], len(numbers))
        self.n = len(numbers)
        del numbers[b"\0"]
        self._inside: dict[tuple[Lexeme, int, int], tuple[list[int], list[tuple[int, Tree]]]] = {}
        self.root: Tree = {}  # byte → child; the key -1 holds the suffix that ends there
        for text, number in numbers.items():
            node = self.root
            for byte in text:
                node = node.setdefault(byte, {})
            node[-1] = number

    def inside(self, lexeme: Lexeme, state: int, node: Tree) -> tuple[list[int], list[tuple[int, Tree]]]:
        """What the suffixes below a node do from a lexeme's `state` on.

        Returns the numbers of suffixes that stay, and (label, what is left) of those that leave.
        What is left has key -1 if a suffix ends where the lexeme does.
        """
        key = (lexeme, state, id(node))
        known = self._inside.get(key)
        if known is not None:
            return known
        table, accept, final = lexeme.dfa.table, lexeme.dfa.accept, lexeme.dfa.final
        staying: list[int] = []
        leaving: list[tuple[int, Tree]] = []
        ahead = [(node, state)]
        while ahead:
            here, before = ahead.pop()
            outside: Tree = {}
            for byte, child in here.items():
                after = int(table[before, byte]) if byte >= 0 else 0
                if not after:
                    if byte >= 0:
                        outside[byte] = child
                elif final[after]:
                    leaving.append((int(accept[after]), child))
                else:
                    if -1 in child:
                        staying.append(child[-1])
                    ahead.append((child, after))
            if outside and accept[before]:
                leaving.append((int(accept[before]), outside))
        if len(self._inside) > MOST_INSIDE:
            self._inside.clear()
        self._inside[key] = staying, leaving
        return staying, leaving

    def at(self, tokens: I32, offsets: I32) -> I32:
        """The suffix numbers of tokens from byte offsets on: int32 [n] from two int32 [n]."""
        numbers: I32 = self._at[self._starts[tokens] + offsets]
        return numbers


@dataclass(frozen=True, slots=True, eq=False)
class Exits:
    """Tokens that leave a lexeme with one label: int32 [n] each.

    `suffix` is the number of what follows, `count` the characters before it.
    """

    suffix: I32
    token: I32
    count: I32
    _with: dict[int, list[int]] = field(init=False, default_factory=dict)

    def having(self, numbers: Iterable[int]) -> list[int]:
        """The tokens that go on with one of a few suffixes."""
        if not self._with:
            for number, token in zip(self.suffix.tolist(), self.token.tolist(), strict=True):
                self._with.setdefault(number, []).append(token)
        return [token for number in numbers for token in self._with.get(number, ())]

    def allowed(self, suffixes: Bools, budget: tuple[int, int] | None) -> I32:
        """The tokens with an allowed suffix (bool [suffixes]) and characters within the budget."""
        chosen = suffixes[self.suffix]
        if budget is not None:
            chosen &= (self.count >= budget[0]) & (self.count <= budget[1])
        return self.token[chosen]


class Region:
    """What the tokens below a node do from a lexeme's state on.

    `exits` holds the tokens that leave, by label.
    """

    def __init__(self, vocabulary: Vocabulary, lexeme: Lexeme, state: int, node: int) -> None:
        staying, leaving, self.mask = vocabulary.walker.walk(lexeme, state, node)
        self.ids: I32 = np.ascontiguousarray(staying[:, 0])
        self._counts: I32 = np.ascontiguousarray(staying[:, 1])
        self.most_count = int(self._counts.max(initial=0))
        self._masks: dict[int, tuple[I32, U32 | None]] = {}
        self.exits: dict[int, Exits] = {}
        self._vocabulary = vocabulary
        if len(leaving):
            numbers = vocabulary.suffixes(lexeme).at(leaving[:, 0], leaving[:, 1])
            possible = np.not_equal(numbers, NEVER)
            leaving, numbers = leaving[possible], numbers[possible]
            for label in np.flatnonzero(np.bincount(leaving[:, 2])).tolist():
                own = leaving[:, 2] == label
                self.exits[label] = Exits(numbers[own], leaving[own, 0], leaving[own, 3])
        self.n_bytes = 24 * len(leaving) + 8 * len(self.ids) + (4 * vocabulary.n_words if self.mask is not None else 0)

    def staying(self, most: int | None) -> tuple[I32, U32 | None]:
        """The tokens that stay with ≤ `most` characters: int32 [n], and a mask if they are many."""
        if most is None or most >= self.most_count:
            return self.ids, self.mask
        known = self._masks.get(most)
        if known is None:
            ids = self.ids[self._counts <= most]
            mask = None
            if len(ids) > MOST_LISTED:
                mask = np.zeros(self._vocabulary.n_words, np.uint32)
                self._vocabulary.walker.fill(mask, self._vocabulary.walker.prepared(None, ids))
            known = self._masks[most] = (ids, mask)
        return known


def share_a_text(texts: Tree | None, suffixes: Tree) -> bool:
    """Whether a text of the tree `texts` leads to a node of the tree `suffixes`."""
    ahead = [(texts or {}, suffixes)]
    while ahead:
        here, there = ahead.pop()
        for byte, below in here.items():
            if byte < 0:
                return True
            child = there.get(byte)
            if child is not None:
                ahead.append((below, child))
    return False
