"""A tokenizer's tokens as bytes in a trie, and what an automaton does to all of them (read `matcher.py` next).

    Vocabulary   the trie, shared by all grammars of a tokenizer
    Region       the tokens below one node that stay inside a lexeme from one of its states on, and those that leave it
    Suffixes     what may stand in a token after a lexeme's end: few different texts, however many tokens end in them

Tokens without a text (control tokens, unused ids) are in no trie and so in no mask.
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

__all__ = ["NOTHING", "Endings", "Exits", "Region", "Suffixes", "Vocabulary", "share_a_text"]

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
Bools = NDArray[np.bool_]
Endings = tuple[list[tuple[int, Any]], I32, I32]  # nodes with texts' names; ranks: where their tokens begin, and end

MOST_INSIDE = 20_000
NOTHING = 0  # the suffix of a token that ends where the lexeme does
NEVER = 1  # of one that nothing allows
MOST_CACHED_BYTES = 96 << 20


class Vocabulary:
    """`tokens[t]` are the bytes that id t adds to a text, None or b"" where it has none that a grammar may use.

    `n_vocab` is the width of the logits, if that is more than the number of tokens. `kernels` is a compiled-kernel store
    (`ops/cpu/store.py`); without one the walk is done in Python, which is the definition and far too slow to serve.
    """

    def __init__(
        self,
        tokens: Sequence[bytes | None],
        eos_ids: Sequence[int],
        *,
        n_vocab: int | None = None,
        kernels: Any = None,
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
        """The trie of the sorted `texts` in depth-first order, as flat arrays; node 0 is the root."""
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
        # A text's node is the last that it added, or, where it equals the text before, that one's.
        node_of = np.maximum.accumulate(np.where(new > 0, n_before[1:], 0)) if len(texts) else new
        self.first = np.zeros(n_nodes + 1, np.int32)  # tokens of all nodes before this one
        np.add.at(self.first, node_of + 1, 1)
        self.first = np.cumsum(self.first).astype(np.int32)
        self.sorted_tokens = ids
        self.rank = np.full(self.n_vocab, -1, np.int32)  # of a token in `sorted_tokens`
        self.rank[ids] = np.arange(len(ids))

    def children(self, node: int) -> dict[int, int]:
        """byte → child, of a node."""
        found = self._children.get(node)
        if found is None:
            found, child, stop = {}, node + 1, int(self.end[node])
            while child < stop:
                found[int(self.byte[child])] = child
                child = int(self.end[child])
            self._children[node] = found
        return found

    def find(self, node: int, text: bytes) -> int | None:
        """The node that `text` leads to from a node."""
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
        """Where below a node the texts of a tree end. `highs` has one more, the first: below the first of `lows` is none."""
        found: list[tuple[int, Any]] = []
        ahead: list[tuple[int, Tree]] = [(node, tree)]
        while ahead:
            at, texts = ahead.pop()
            children = self.children(at)
            for byte, below in texts.items():
                if byte < 0:
                    found.append((at, below))
                elif byte in children:
                    ahead.append((children[byte], below))
        found.sort(key=lambda ending: ending[0])
        lows = np.array([self.first[at] for at, _ in found], np.int32)
        highs = np.array([0, *(self.first[self.end[at]] for at, _ in found)], np.int32)
        return found, lows, highs

    def region(self, lexeme: Lexeme, state: int, node: int) -> Region:
        """What the tokens below `node` do from `state` of a lexeme's automaton on; kept for the next time."""
        key = (lexeme, state, node)
        found = self._regions.get(key)
        if found is None:
            found = Region(self, lexeme, state, node)
            self._cached_bytes += found.n_bytes
            if self._cached_bytes > MOST_CACHED_BYTES:
                self._regions.clear()
                self._cached_bytes = found.n_bytes
            self._regions[key] = found
        return found

    def suffixes(self, lexeme: Lexeme) -> Suffixes:
        """The ends of tokens that may come after a lexeme."""
        key = (lexeme.follow, lexeme.blank)
        found = self._suffixes.get(key)
        if found is None:
            found = self._suffixes[key] = Suffixes(self, *key)
        return found


class Suffixes:
    """All different ends of tokens that begin with a byte of `follow`, as a small trie of dicts.

    After bytes of `blank` there must be another of `follow`. What is none of them has the number NEVER.
    """

    def __init__(self, vocabulary: Vocabulary, follow: frozenset[int], blank: frozenset[int]) -> None:
        numbers: dict[bytes, int] = {b"": NOTHING, b"\0": NEVER}
        starts, flat = vocabulary.starts, vocabulary.flat
        n_tokens = len(starts) - 1
        self._starts = (starts[:-1] + np.arange(n_tokens)).astype(np.int32)  # each token has a place more, for its end
        self._at = np.full(len(flat) + n_tokens, NEVER, np.int32)  # token's start + offset → suffix
        self._at[starts[1:] + np.arange(n_tokens)] = NOTHING
        last = np.zeros(len(flat) + 1, np.bool_)
        last[starts[1:] - 1] = True
        may = np.append(np.isin(flat, sorted(follow)), False)
        white = np.nonzero(np.append(np.isin(flat, sorted(blank)), False) & may)[0]
        while (wrong := white[may[white] & ~last[white] & ~may[white + 1]]).size:
            may[wrong] = False
        places = np.nonzero(may)[0]
        owners = np.searchsorted(starts, places, side="right") - 1
        for place, token in zip(places.tolist(), owners.tolist(), strict=True):
            text = vocabulary.tokens[token]
            assert text is not None
            self._at[place + token] = numbers.setdefault(text[place - int(starts[token]) :], len(numbers))
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
        """Of the suffixes below a node, from a state of a lexeme on: those that stay, and labels with what is left.

        What is left begins with the number of the suffix that ends where the lexeme does, if there is one.
        """
        key = (lexeme, state, id(node))
        found = self._inside.get(key)
        if found is not None:
            return found
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
        """The suffixes of tokens from offsets on."""
        found: I32 = self._at[self._starts[tokens] + offsets]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Exits:
    """Tokens that leave a lexeme with one label: what they go on with, and their characters before it."""

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
        """The tokens that go on with one of `suffixes` (by number) and have as many characters as the budget says."""
        chosen = suffixes[self.suffix]
        if budget is not None:
            chosen &= (self.count >= budget[0]) & (self.count <= budget[1])
        return self.token[chosen]


class Region:
    """Tokens below a node that stay in a lexeme, and `exits`: label → those that leave it."""

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
        """The tokens that stay and have at most `most` characters: as ids, and as a mask if they are many."""
        if most is None or most >= self.most_count:
            return self.ids, self.mask
        found = self._masks.get(most)
        if found is None:
            ids = self.ids[self._counts <= most]
            mask = None
            if len(ids) > MOST_LISTED:
                mask = np.zeros(self._vocabulary.n_words, np.uint32)
                self._vocabulary.walker.fill(mask, self._vocabulary.walker.prepared(None, ids))
            found = self._masks[most] = (ids, mask)
        return found


def share_a_text(texts: Tree | None, suffixes: Tree) -> bool:
    """Whether a text of one tree leads to a node of another."""
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
