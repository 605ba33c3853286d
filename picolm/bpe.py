"""Byte-level BPE's two tables: the letters that stand for bytes, and how text is split into words before merging.

Tokens are spelled in printable letters, one a byte: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and on (space is
`Ġ`). Merges never cross the words that a regular expression cuts. It speaks of letters and numbers of all scripts; here every
character is first replaced by an ASCII one of its class, so that `re` can do it. Source: GPT-2's `encoder.py`, tokenizer.json of the others.

Differences from the C: it has none of this, and encodes such vocabularies without their spaces. Read next: `sampler.py`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

__all__ = ["BYTE_OF_LETTER", "LETTER_OF_BYTE", "SPLITTERS"]

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_REST = [b for b in range(256) if b not in _PRINTABLE]
LETTER_OF_BYTE = {b: chr(b) for b in _PRINTABLE} | {b: chr(0x100 + i) for i, b in enumerate(_REST)}
BYTE_OF_LETTER = {letter: bytes([b]) for b, letter in LETTER_OF_BYTE.items()}

_GPT2 = r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
_QWEN2 = r"'(?i:s|t|re|ve|m|ll|d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _ascii(character: str) -> str:
    """An ASCII character of the same class."""
    kind = unicodedata.category(character)[0]
    if kind in "LN":
        return "a" if kind == "L" else "0"
    return "\v" if character.isspace() else "#"


def _cut(pattern: re.Pattern[str], text: str) -> list[str]:
    plain = text if text.isascii() else "".join(c if c.isascii() else _ascii(c) for c in text)
    return [text[m.start() : m.end()] for m in pattern.finditer(plain)]


def _words(pattern: str) -> Callable[[str], list[str]]:
    compiled = re.compile(pattern)
    return lambda text: _cut(compiled, text)


def _single_digits(text: str) -> list[str]:
    """SmolLM2's rule: numbers are cut digit by digit first, then GPT-2's rule applies to each part."""
    gpt2, parts, last = re.compile(_GPT2), [], 0
    for i, character in enumerate(text):
        if unicodedata.category(character)[0] == "N":
            parts += [text[last:i], character]
            last = i + 1
    return [word for part in [*parts, text[last:]] for word in _cut(gpt2, part)]


SPLITTERS = {"gpt-2": _words(_GPT2), "smollm": _single_digits, "qwen2": _words(_QWEN2), "default": _words(_GPT2)}
