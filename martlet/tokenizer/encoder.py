"""From a text without added tokens to ids: normalise, split into words, look each word up (read `tokenizer.py` next).

`byte_level_encoder` and `char_encoder` make the two kinds: symbols that are bytes (GPT-2 and after), and symbols that
are characters with bytes as the last resort (SentencePiece and its tokenizer.json form).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

from martlet.errors import RequestError
from martlet.tokenizer.bpe import BYTE_CHARS, Word, WordCache, byte_level, merge
from martlet.tokenizer.split import Step

__all__ = ["Normalize", "TextEncoder", "byte_level_encoder", "byte_tokens", "char_encoder", "unchanged"]

Normalize = Callable[[str, bool], str]
"""(text, whether it starts the whole text) → normalised text."""


def unchanged(text: str, _first: bool) -> str:
    """The normaliser of tokenizers that have none."""
    return text


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """The stages between added tokens and ids."""

    normalize: Normalize
    split: Step
    words: Mapping[str, Word]

    def encode(self, normalized: str) -> list[int]:
        """Ids of a normalised text."""
        return list(chain.from_iterable(map(self.words.__getitem__, self.split(normalized))))


def byte_level_encoder(
    split: Step,
    ids: Mapping[str, int],
    ranks: Mapping[str, int],
    *,
    joint: str = " ",
    whole_words: bool = False,
    unk: int | None = None,
    normalize: Normalize = unchanged,
    mapped: bool = False,
) -> TextEncoder:
    """Byte-level BPE. `mapped`: `split` already returns words in the alphabet of bytes."""

    def encode_word(word: str) -> Word:
        text = word if mapped else byte_level(word)
        if whole_words and text in ids:
            return (ids[text],)
        symbols = merge(list(text), ranks, joint)
        try:
            return tuple([ids[symbol] for symbol in symbols])
        except KeyError:
            return tuple([_byte_level_id(char, ids, unk) for symbol in symbols for char in _known(symbol, ids)])

    return TextEncoder(normalize, split, WordCache(encode_word))


def _known(symbol: str, ids: Mapping[str, int]) -> list[str]:
    """The symbol if it is a token, else its bytes: a file may list merges whose result is no token."""
    return [symbol] if symbol in ids else list(symbol)


def _byte_level_id(symbol: str, ids: Mapping[str, int], unk: int | None) -> int:
    found = ids.get(symbol, unk)
    if found is None:
        byte = BYTE_CHARS.index(symbol) if symbol in BYTE_CHARS else -1
        raise RequestError(
            f"The vocabulary has no token for byte 0x{byte:02X} ({symbol!r}) and no unknown token; "
            "leave that character out, or use a complete file of this model.",
            param="prompt",
        )
    return found


def byte_tokens(texts_to_ids: Mapping[str, int]) -> tuple[int | None, ...]:
    """The ids of `<0x00>` … `<0xFF>`, None for the missing ones."""
    return tuple(texts_to_ids.get(f"<0x{byte:02X}>") for byte in range(256))


def char_encoder(
    split: Step,
    ids: Mapping[str, int],
    ranks: Mapping[str, int],
    *,
    joint: str,
    bytes_: tuple[int | None, ...],
    unk: int | None,
    fuse_unk: bool = False,
    whole_words: bool = False,
    normalize: Normalize = unchanged,
) -> TextEncoder:
    """BPE over characters; what is no token becomes byte tokens, or else the unknown token (`fuse_unk`: one a run)."""

    def encode_word(word: str) -> Word:
        if whole_words and word in ids:
            return (ids[word],)
        symbols = merge(list(word), ranks, joint)
        try:
            return tuple([ids[symbol] for symbol in symbols])
        except KeyError:
            return _with_fallback(symbols)

    def _with_fallback(symbols: list[str]) -> Word:
        out: list[int] = []
        run = False  # the last symbol was unknown
        for symbol in symbols:
            found = ids.get(symbol)
            if found is not None:
                out.append(found)
                run = False
                continue
            as_bytes = [bytes_[byte] for byte in symbol.encode("utf-8")]
            known = [token for token in as_bytes if token is not None]
            if len(known) == len(as_bytes):
                out.extend(known)
                run = False
            elif unk is None:
                raise RequestError(
                    f"The vocabulary has no token for {symbol!r}, not the byte tokens {_byte_names(symbol)} and no "
                    "unknown token; leave that character out, or use a complete file of this model.",
                    param="prompt",
                )
            elif not (run and fuse_unk):
                out.append(unk)
                run = True
        return tuple(out)

    return TextEncoder(normalize, split, WordCache(encode_word))


def _byte_names(symbol: str) -> str:
    return " ".join(f"<0x{byte:02X}>" for byte in symbol.encode("utf-8"))
