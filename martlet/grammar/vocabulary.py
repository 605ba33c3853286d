"""A tokenizer's tokens as bytes in a trie, and what an automaton does to all of them (read `matcher.py` next).

    Vocabulary   the trie, shared by all grammars of a tokenizer
    Region       the tokens below one node that stay inside a lexeme from one of its states on, and those that leave it
    Suffixes     what may stand in a token after a lexeme's end: few different texts, however many tokens end in them

Tokens without a text (control tokens, unused ids) are in no trie and so in no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.grammar.types import Lexeme, n_mask_words
from martlet.grammar.walk import Walker

__all__ = ["NOTHING", "Exits", "Region", "Suffixes", "Vocabulary"]

I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]
Bits = tuple[NDArray[np.intp], U32]  # words of a mask, and what to set in them

NOTHING = 0  # the suffix of a token that ends where the lexeme does
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
        self.starts = np.concatenate([[0], np.cumsum([len(text or b"") for text in tokens])]).astype(np.int64)
        self.longest = max((len(text) for text, _ in present), default=0)
        self._build([text for text, _ in present], np.array([token for _, token in present], np.int32))
        self.walker = Walker(self.byte, self.end, self.depth, self.first, self.sorted_tokens, self.n_words, kernels)
        self._children: dict[int, dict[int, int]] = {}
        self._suffixes: dict[frozenset[int], Suffixes] = {}
        self._regions: dict[tuple[Lexeme, int, int], Region] = {}
        self._cached_bytes = 0

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
        ids: list[int] = self.sorted_tokens[self.first[node] : self.first[node + 1]].tolist()
        return ids

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

    def suffixes(self, follow: frozenset[int]) -> Suffixes:
        """The ends of tokens that begin with one of the bytes `follow`."""
        found = self._suffixes.get(follow)
        if found is None:
            found = self._suffixes[follow] = Suffixes(self, follow)
        return found

    def bits(self, ids: I32) -> Bits:
        """Token ids as words of a mask and their bits."""
        if not ids.size:
            return np.zeros(0, np.intp), np.zeros(0, np.uint32)
        ids = np.sort(ids)
        words = (ids >> 5).astype(np.intp)
        starts = np.nonzero(np.diff(words, prepend=-1))[0]
        return words[starts], np.bitwise_or.reduceat(np.uint32(1) << (ids & 31).astype(np.uint32), starts)


class Suffixes:
    """All different ends of tokens that begin with a byte of `follow`, as a small trie of dicts."""

    def __init__(self, vocabulary: Vocabulary, follow: frozenset[int]) -> None:
        numbers: dict[bytes, int] = {b"": NOTHING}
        self._starts = vocabulary.starts
        self._at = np.zeros(int(self._starts[-1]) + 1, np.int32)  # token's start + offset → suffix
        for token in vocabulary.sorted_tokens.tolist():
            text, start = vocabulary.tokens[token], int(self._starts[token])
            assert text is not None
            for offset, byte in enumerate(text):
                if byte in follow:
                    self._at[start + offset] = numbers.setdefault(text[offset:], len(numbers))
        self.texts = list(numbers)
        self.root: dict[int, Any] = {}  # byte → child; the key -1 holds the suffix that ends there
        for text, number in numbers.items():
            node = self.root
            for byte in text:
                node = node.setdefault(byte, {})
            node[-1] = number

    def at(self, tokens: I32, offsets: I32) -> I32:
        """The suffixes of tokens from offsets on."""
        lengths = self._starts[tokens + 1] - self._starts[tokens]
        return np.where(offsets < lengths, self._at[self._starts[tokens] + offsets], NOTHING).astype(np.int32)


class Exits:
    """Tokens that leave a lexeme with one label, by what they go on with."""

    def __init__(self, suffix: I32, token: I32, count: I32) -> None:
        order = np.argsort(suffix, kind="stable")
        self.token, self.count = token[order], count[order]
        self.suffixes, starts = np.unique(suffix[order], return_index=True)
        self.range = {
            number: (start, stop)
            for number, start, stop in zip(
                self.suffixes.tolist(), starts.tolist(), [*starts.tolist()[1:], len(order)], strict=True
            )
        }

    def tokens_with(self, suffixes: Sequence[int], least: int | None = None, most: int | None = None) -> list[I32]:
        """The tokens that go on with one of `suffixes` and have `least` to `most` characters before it."""
        parts: list[I32] = []
        for number in suffixes:
            place = self.range.get(number)
            if place is None:
                continue
            start, stop = place
            part = self.token[start:stop]
            if most is not None:
                count = self.count[start:stop]
                part = part[(count >= (least or 0)) & (count <= most)]
            parts.append(part)
        return parts


class Region:
    """Tokens below a node that stay in a lexeme, and `exits`: label → those that leave it."""

    def __init__(self, vocabulary: Vocabulary, lexeme: Lexeme, state: int, node: int) -> None:
        staying, leaving, mask = vocabulary.walker.walk(lexeme, state, node)
        self.ids: I32 = np.ascontiguousarray(staying[:, 0])
        self._counts: I32 = np.ascontiguousarray(staying[:, 1])
        self.most_count = int(self._counts.max(initial=0))
        self.mask: U32 | None = mask.copy() if len(self.ids) > 512 else None
        self._masks: dict[int, tuple[I32, U32 | None]] = {}
        self.exits: dict[int, Exits] = {}
        self._vocabulary = vocabulary
        if len(leaving):
            numbers = vocabulary.suffixes(lexeme.follow).at(leaving[:, 0], leaving[:, 1])
            for label in np.unique(leaving[:, 2]).tolist():
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
            if len(ids) > 512:
                mask = np.zeros(self._vocabulary.n_words, np.uint32)
                words, bits = self._vocabulary.bits(ids)
                mask[words] = bits
            found = self._masks[most] = (ids, mask)
        return found
