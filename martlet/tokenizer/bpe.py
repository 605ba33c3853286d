"""Byte-pair encoding: merge neighbouring symbols, lowest rank first (arXiv:1508.07909; read
`encoder.py` next).

One engine serves both sorts of tokenizer. Byte-level BPE ranks a pair by its position in the list
of merges; SentencePiece (arXiv:1808.06226) ranks it by the score of the token it makes. The pair of
lowest rank merges first, the leftmost of equals, until no neighbours have a rank. Words repeat, so
`WordCache` remembers them; any other word costs O(n log n).
"""

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from itertools import pairwise

Word = tuple[int, ...]

SHORT_SYMBOLS = 32  # up to here rescanning a list (C speed) beats a heap
CACHED_CHARS = 64  # longer words do not repeat
CACHED_WORDS = 1 << 16  # some 15 MB; cleared when full


def _byte_chars() -> list[str]:
    """GPT-2's alphabet: printable Latin-1 for itself, other bytes as U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


BYTE_CHARS = tuple(_byte_chars())
_TO_CHARS = {byte: char for byte, char in enumerate(BYTE_CHARS) if ord(char) != byte}
_TO_BYTES = {ord(char): byte for byte, char in enumerate(BYTE_CHARS)}
_LATIN = frozenset(BYTE_CHARS)


def byte_level(text: str) -> str:
    """Return `text` with each byte of its UTF-8 form as a character of GPT-2's alphabet."""
    return text.encode("utf-8").decode("latin-1").translate(_TO_CHARS)


def token_text_bytes(text: str) -> bytes:
    """Return the bytes of a byte-level token.

    A token with other characters stands for its own text.
    """
    if _LATIN.issuperset(text):
        return text.translate(_TO_BYTES).encode("latin-1")
    return text_bytes(text)


def text_bytes(text: str) -> bytes:
    """Return the UTF-8 bytes of a text whose invalid bytes are surrogates (PEP 383)."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # from JSON: half a pair
        return text.encode("utf-8", "surrogatepass")


class WordCache(dict[str | int, Word]):
    """word → ids, filled on demand by `encode_word`.

    `map(cache.__getitem__, words)` runs at C speed. An id among the words stands for itself.
    """

    def __init__(self, encode_word: Callable[[str], Word]) -> None:
        super().__init__()
        self._encode_word = encode_word

    def __missing__(self, word: str | int) -> Word:
        if isinstance(word, int):
            return (word,)
        ids = self._encode_word(word)
        if len(word) <= CACHED_CHARS:
            if len(self) >= CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids


def merge(symbols: list[str], ranks: Mapping[str, int], joint: str) -> list[str]:
    """Merge neighbours of lowest rank, leftmost first, until no pair has a rank.

    `ranks` maps left + joint + right to the rank of the pair. `symbols` may be changed.
    """
    if len(symbols) > SHORT_SYMBOLS:
        return _merge_long(symbols, ranks, joint)
    get = ranks.get
    none = len(ranks)  # above every rank
    pairs = [get(left + joint + right, none) for left, right in pairwise(symbols)]
    while pairs:
        best = min(pairs)
        if best == none:
            break
        i = pairs.index(best)
        symbols[i] += symbols.pop(i + 1)
        del pairs[i]
        if i < len(pairs):
            pairs[i] = get(symbols[i] + joint + symbols[i + 1], none)
        if i:
            pairs[i - 1] = get(symbols[i - 1] + joint + symbols[i], none)
    return symbols


def _merge_long(symbols: list[str], ranks: Mapping[str, int], joint: str) -> list[str]:
    """`merge` with a heap and a doubly linked list, for many symbols.

    A heap entry is rank · n + position, so integers order by rank and then from the left. An entry
    whose rank is no longer that of the pair at its position is stale and skipped.
    """
    get = ranks.get
    n = len(symbols)
    none = len(ranks)
    following = list(range(1, n + 1))  # n: no neighbour
    before = list(range(-1, n - 1))
    pair_rank = [get(left + joint + right, none) for left, right in pairwise(symbols)]
    pair_rank.append(none)
    heap = [rank * n + i for i, rank in enumerate(pair_rank) if rank != none]
    heapify(heap)
    while heap:
        rank, i = divmod(heappop(heap), n)
        if pair_rank[i] != rank:
            continue
        gone = following[i]
        symbols[i] += symbols[gone]
        symbols[gone] = ""
        pair_rank[gone] = none
        after = following[i] = following[gone]
        pair_rank[i] = none
        if after < n:
            before[after] = i
            rank = pair_rank[i] = get(symbols[i] + joint + symbols[after], none)
            if rank != none:
                heappush(heap, rank * n + i)
        left = before[i]
        if left >= 0:
            rank = pair_rank[left] = get(symbols[left] + joint + symbols[i], none)
            if rank != none:
                heappush(heap, rank * n + left)
    return [symbol for symbol in symbols if symbol]
