"""From a text without added tokens to ids: normalise, split into words, look each word up.

Words come in two forms. In `byte_level_words` symbols are bytes (GPT-2 and later); in `char_words`
they are characters, with bytes as the last resort (SentencePiece and its tokenizer.json form). Read
`tokenizer.py` next.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from martlet.errors import RequestError
from martlet.tokenizer.bpe import BYTE_CHARS, Word, WordCache, byte_level, merge
from martlet.tokenizer.split import Step

Normalize = Callable[[str], str]
Lead = Callable[[str, bool], str]


def unchanged(text: str) -> str:
    """The normaliser of tokenizers without a normaliser."""
    return text


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """The stages between added tokens and ids.

    `lead` marks spaces, given whether the piece starts the text.
    """

    normalize: Normalize
    split: Step
    words: WordCache
    lead: Lead | None = None

    def cut(self, normalized: str, first: bool) -> list[str]:
        """The words of a normalised text."""
        return self.split(normalized if self.lead is None else self.lead(normalized, first))

    def ids(self, words: Iterable[str | int]) -> Iterator[int]:
        """The ids of words; an id stands for itself."""
        return chain.from_iterable(map(self.words.__getitem__, words))


def byte_level_words(
    ids: Mapping[str, int],
    ranks: Mapping[str, int],
    *,
    joint: str = " ",
    whole_words: bool = False,
    unk: int | None = None,
    mapped: bool = False,
) -> WordCache:
    """Words whose symbols are bytes. `mapped`: they arrive in the alphabet of bytes.

    A byte without a token becomes `unk`; with `unk` None it is left out, and `missing_bytes` warns.
    """

    def encode_word(word: str) -> Word:
        text = word if mapped else byte_level(word)
        if whole_words and text in ids:
            return (ids[text],)
        symbols = merge(list(text), ranks, joint)
        try:
            return tuple([ids[symbol] for symbol in symbols])
        except KeyError:  # a byte without a token, or a merge whose result has none
            tokens = [ids.get(char, unk) for symbol in symbols for char in ([symbol] if symbol in ids else symbol)]
            return tuple([token for token in tokens if token is not None])

    return WordCache(encode_word)


def missing_bytes(ids: Mapping[str, int]) -> str | None:
    """A warning if bytes have no token and are lost, as in the model's own tokenizer."""
    possible = (*range(0xC0), *range(0xC2, 0xF5))  # in UTF-8
    missing = [f"0x{byte:02X}" for byte in possible if BYTE_CHARS[byte] not in ids]
    if not missing:
        return None
    return f"The vocabulary has no tokens for the bytes {' '.join(missing)}; characters with them are lost in encoding."


def byte_tokens(ids: Mapping[str, int]) -> tuple[int | None, ...]:
    """The ids of `<0x00>` … `<0xFF>`, None for the missing ones."""
    return tuple(ids.get(f"<0x{byte:02X}>") for byte in range(256))


def char_words(
    ids: Mapping[str, int],
    ranks: Mapping[str, int],
    *,
    joint: str,
    bytes_: tuple[int | None, ...],
    unk: int | None,
    fuse_unk: bool = False,
    whole_words: bool = False,
) -> WordCache:
    """Words whose symbols are characters.

    A symbol without a token becomes byte tokens, else `unk` (once for a run with `fuse_unk`), else
    a RequestError.
    """

    def encode_word(word: str) -> Word:
        if whole_words and word in ids:
            return (ids[word],)
        symbols = merge(list(word), ranks, joint)
        try:
            return tuple([ids[symbol] for symbol in symbols])
        except KeyError:
            return with_fallback(symbols)

    def with_fallback(symbols: list[str]) -> Word:
        out: list[int] = []
        unknown_before = False
        for symbol in symbols:
            known = [ids[symbol]] if symbol in ids else _as_bytes(symbol, bytes_)
            if known is not None:
                out += known
            elif unk is None:
                raise _no_token(symbol)
            elif not (fuse_unk and unknown_before):
                out.append(unk)
            unknown_before = known is None
        return tuple(out)

    return WordCache(encode_word)


def _as_bytes(symbol: str, bytes_: tuple[int | None, ...]) -> list[int] | None:
    """The byte tokens of a symbol, None if any of them is missing."""
    tokens = [bytes_[byte] for byte in symbol.encode("utf-8")]
    known = [token for token in tokens if token is not None]
    return known if len(known) == len(tokens) else None


def _no_token(symbol: str) -> RequestError:
    names = " ".join(f"<0x{byte:02X}>" for byte in symbol.encode("utf-8"))
    return RequestError(
        f"The vocabulary has no token for {symbol!r}, not the byte tokens {names} and no unknown token; "
        "leave that character out, or use a complete file of this model.",
        param="prompt",
    )
