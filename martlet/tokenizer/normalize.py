"""The normalisers of a tokenizer.json (read `from_json.py` next).

Each object of the file's `normalizer` becomes a function from text to text, with the meaning that
the `tokenizers` library documents.
"""

import unicodedata
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import regex

from martlet.errors import UnsupportedError
from martlet.tokenizer.bpe import byte_level
from martlet.tokenizer.split import file_pattern

TextMap = Callable[[str], str]


def normalizer(spec: Mapping[str, Any] | None) -> TextMap:
    """Return the function that `spec` describes; UnsupportedError for an unknown normaliser."""
    if spec is None:
        return _same
    name = spec.get("type")
    make = NORMALIZERS.get(str(name))
    if make is None:
        raise UnsupportedError(f"Normalizer {name!r} of tokenizer.json is not supported", sorted(NORMALIZERS))
    return make(spec)


def _same(text: str) -> str:
    return text


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"got {value!r}, expected a string")
    return value


def _replaced(text: str, *, old: str, new: str) -> str:
    return text.replace(old, new)


def _sequence(spec: Mapping[str, Any]) -> TextMap:
    maps = [normalizer(child) for child in spec["normalizers"]]
    return lambda text: reduce(lambda so_far, step: step(so_far), maps, text)


def _unicode(spec: Mapping[str, Any]) -> TextMap:
    return partial(unicodedata.normalize, spec["type"])


def _lowercase(_spec: Mapping[str, Any]) -> TextMap:
    # By character: no special case for a final sigma.
    return lambda text: "".join([char.lower() for char in text])


def _replace(spec: Mapping[str, Any]) -> TextMap:
    pattern, content = spec["pattern"], _text(spec["content"])
    if "String" in pattern:
        return partial(_replaced, old=_text(pattern["String"]), new=content)
    compiled = file_pattern(pattern["Regex"])
    return lambda text: compiled.sub(lambda _match: content, text)


def _prepend(spec: Mapping[str, Any]) -> TextMap:
    lead = _text(spec["prepend"])
    return lambda text: lead + text if text else text


def _strip(spec: Mapping[str, Any]) -> TextMap:
    left = r"^\s+" if spec.get("strip_left", True) else ""
    right = r"(?<!\s)\s+\Z|^\s+\Z" if spec.get("strip_right", True) else ""
    compiled = regex.compile("|".join(filter(None, (left, right))) or r"(?!)")
    return lambda text: str(compiled.sub("", text))


def _strip_accents(_spec: Mapping[str, Any]) -> TextMap:
    return lambda text: "".join([char for char in text if unicodedata.category(char)[0] != "M"])


def _byte_level(_spec: Mapping[str, Any]) -> TextMap:
    return byte_level


NORMALIZERS: Mapping[str, Callable[[Mapping[str, Any]], TextMap]] = {
    "Sequence": _sequence,
    "NFC": _unicode,
    "NFD": _unicode,
    "NFKC": _unicode,
    "NFKD": _unicode,
    "Lowercase": _lowercase,
    "Replace": _replace,
    "Prepend": _prepend,
    "Strip": _strip,
    "StripAccents": _strip_accents,
    "ByteLevel": _byte_level,
}
