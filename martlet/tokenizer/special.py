"""Find added tokens (control tokens, user-defined tokens) in a text (read `tokenizer.py` next).

The match is the leftmost, and the longest there. Control tokens are found only with
`parse_special`, and never where they touch a literal span, which keeps a user's text from closing
its turn in a chat prompt.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from martlet.tokenizer.vocab import AddedToken

LiteralSpans = Sequence[tuple[int, int]]
"""Ascending, disjoint ranges [start, stop) of characters where control tokens are plain text."""

SIMPLE_TOKENS = 512  # up to here a single pattern is small
SIMPLE_CHARS = 64
PREFIX_CHARS = 2  # a token is looked up where its first characters match
_SPACE = re.compile(r"\s*")


class AddedTokenFinder:
    """Splits texts at the added tokens."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        usable = [token for token in tokens if token.text]
        self._all = _Index(usable)
        plain = [token for token in usable if not token.special]
        self._plain = self._all if len(plain) == len(usable) else _Index(plain)

    def split(self, text: str, parse_special: bool, literal: LiteralSpans = ()) -> list[str | int]:
        """Return the pieces of `text` in order: ids for added tokens, texts between them."""
        index = self._all if parse_special else self._plain
        if index.prefixes is None:
            return [text] if text else []
        if index.alone is not None and not (parse_special and literal):
            ids = index.ids
            return [ids.get(piece, piece) for piece in index.alone.split(text) if piece]
        pieces: list[str | int] = []
        done = at = 0
        while (start := index.prefixes.search(text, at)) is not None:
            at = start.start()
            token = index.longest(text, at)
            if token is not None and token.special and _touches(literal, at, at + len(token.text)):
                token = self._plain.longest(text, at)
            if token is None:
                at += 1
                continue
            stop = at + len(token.text)
            if token.single_word and _inside_word(text, at, stop):
                at = stop  # no shorter token is tried, as in the `tokenizers` library
                continue
            if token.lstrip:
                at = done + len(text[done:at].rstrip())
            if at > done:
                pieces.append(text[done:at])
            pieces.append(token.id)
            if token.rstrip:
                stop = _end_of_space(text, stop)
            done = at = stop
        if done < len(text):
            pieces.append(text[done:])
        return pieces


class _Index:
    """Tokens by text, and the lengths to try after each prefix.

    `alone` finds few tokens without conditions at C speed, which vocabularies with newlines need.
    """

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        self.tokens = {token.text: token for token in reversed(tokens)}
        self.ids = {text: token.id for text, token in self.tokens.items()}
        self.alone = re.compile(f"({_longest(sorted(self.tokens))})") if _simple(tokens) else None
        lengths: dict[str, set[int]] = defaultdict(set)
        for text in self.tokens:
            lengths[text[:PREFIX_CHARS]].add(len(text))
        self.lengths = {prefix: sorted(sizes, reverse=True) for prefix, sizes in lengths.items()}
        by_size = sorted(self.lengths, key=len, reverse=True)
        self.prefixes = re.compile("|".join(map(re.escape, by_size))) if tokens else None

    def longest(self, text: str, at: int) -> AddedToken | None:
        """The longest token that begins at `at`."""
        for n in range(PREFIX_CHARS, 0, -1):
            for size in self.lengths.get(text[at : at + n], ()):
                if (token := self.tokens.get(text[at : at + size])) is not None:
                    return token
        return None


def _simple(tokens: Sequence[AddedToken]) -> bool:
    """Whether one small pattern can find the tokens."""
    plain = not any(token.lstrip or token.rstrip or token.single_word for token in tokens)
    return plain and 0 < len(tokens) <= SIMPLE_TOKENS and max(len(token.text) for token in tokens) <= SIMPLE_CHARS


def _longest(texts: Sequence[str]) -> str:
    """The pattern of a trie: it matches the longest of `texts` (sorted, distinct)."""
    branches: list[str] = []
    for _, group in groupby(texts, key=lambda text: text[:1]):
        same = list(group)
        low, high = same[0], same[-1]  # in sorted order these differ first
        stem = low[: next((i for i, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))]
        rest = [text[len(stem) :] for text in same]
        if stem:
            optional = "?" if rest[0] == "" else ""
            rest = rest[1:] if optional else rest
            branches.append(re.escape(stem) + (f"(?:{_longest(rest)}){optional}" if rest else ""))
    return "|".join(branches)


def _inside_word(text: str, start: int, stop: int) -> bool:
    """Whether a word character stands on either side."""
    return bool(re.match(r"\w", text[stop : stop + 1]) or (start and re.match(r"\w", text[start - 1])))


def _end_of_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # it matches nothing at all too
    return match.end()


def _touches(literal: LiteralSpans, start: int, stop: int) -> bool:
    i = bisect_right(literal, start, key=lambda span: span[1])  # first span that ends after `start`
    return i < len(literal) and literal[i][0] < stop
