"""A tokenizer from a GGUF file's metadata, keys `tokenizer.ggml.*` (`from_json.py` reads a
tokenizer.json).

Keys and defaults follow GGUF's specification (ggml/docs/gguf.md); where it is silent, llama.cpp's
loader.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.errors import FormatError, UnsupportedError
from martlet.tokenizer.encoder import TextEncoder, byte_level_words, byte_tokens, char_words, missing_bytes, unchanged
from martlet.tokenizer.split import SPACE, PreTokenizer, isolate, pipeline, pre_tokenizer, word_splitter
from martlet.tokenizer.vocab import AddedToken, SpecialIds, TokenType, Vocab, build_vocab, checked_id, end_of_generation

PREFIX = "tokenizer.ggml."
SPECIAL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables and settings that make a `Tokenizer`."""

    name: str  # of the model: "gpt2", "llama", "BPE" …
    pre: str | None  # the pre-tokenizer's name, None without one
    vocab: Vocab
    encoder: TextEncoder
    special: SpecialIds
    before: tuple[int, ...]  # ids that `add_special` puts before and after a text
    after: tuple[int, ...]
    byte_level: bool  # token texts are in GPT-2's alphabet of bytes
    byte_fallback: bool  # tokens <0x00> … <0xFF> are bytes, ▁ is a space
    strips_space: bool  # decoding drops the space that encoding put in front


def tables_from_gguf(metadata: Mapping[str, Any], *, pre: str | None, source: str) -> Tables:
    """Read a tokenizer; `pre` overrides the pre-tokenizer's name.

    FormatError or UnsupportedError, with `source` as the file, if it is unusable.
    """
    model = metadata.get(PREFIX + "model")
    readers = {"gpt2": _byte_level_tables, "llama": _scored_tables}
    if model is None:
        raise _missing(source, "model", "the model of the tokenizer")
    if not isinstance(model, str) or model not in readers:
        raise UnsupportedError(f"Tokenizer model {model!r} is not supported", sorted(readers))
    texts = _array(metadata, "tokens", "the vocabulary", source)
    types = metadata.get(PREFIX + "token_type")
    type_bytes = bytes([TokenType.NORMAL]) * len(texts) if types is None else _type_bytes(types, source)
    return readers[model](metadata, build_vocab(texts, type_bytes, source=source), pre, source)


def _array(metadata: Mapping[str, Any], key: str, what: str, source: str) -> list[Any]:
    """An array of the metadata as a list; FormatError where it is missing or no array."""
    value = metadata.get(PREFIX + key)
    if value is None:
        raise _missing(source, key, what)
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise FormatError(
            source, f"{PREFIX}{key} is {type(value).__name__}; expected an array. Convert the model again."
        )
    return value if isinstance(value, list) else list(value)


def _missing(source: str, key: str, what: str) -> FormatError:
    return FormatError(
        source,
        f"there is no {PREFIX}{key} ({what}) in its metadata, and no text can be encoded. Convert the model again.",
    )


def _type_bytes(types: Any, source: str) -> bytes:
    try:
        type_bytes = np.asarray(types, dtype=np.int64).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        raise FormatError(source, f"{PREFIX}token_type holds other things than integers.") from None
    type_bytes = np.where((type_bytes < 0) | (type_bytes > max(TokenType)), int(TokenType.UNDEFINED), type_bytes)
    return type_bytes.astype(np.uint8).tobytes()


def _special_ids(metadata: Mapping[str, Any], vocab: Vocab, defaults: Mapping[str, int]) -> SpecialIds:
    """Ids by role; where the file is silent, `defaults` that are control tokens."""

    def read(name: str) -> int | None:
        key = f"{PREFIX}{name}_token_id"
        if key in metadata:
            return checked_id(metadata[key], key, vocab)
        default = defaults.get(name)
        usable = default is not None and default < len(vocab.texts) and vocab.types[default] in SPECIAL_TYPES
        return default if usable else None

    bos, eos, pad, unk = read("bos"), read("eos"), read("padding"), read("unknown")
    ends = end_of_generation(vocab, (eos, read("eot"), read("eom")))
    return SpecialIds(bos, eos, pad, unk, ends)


def _added_tokens(vocab: Vocab, metadata: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    """Control, unknown and user-defined tokens.

    Phi-3's control tokens swallow the whitespace after them: its tokenizer.json says so, not GGUF.
    """
    phi3 = metadata.get("general.architecture") == "phi3" and metadata.get(PREFIX + "model") == "llama"
    plain = {"<unk>", "<s>", "<|endoftext|>"}
    ids = vocab.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    return tuple(
        AddedToken(
            token,
            vocab.texts[token],
            special=vocab.types[token] != TokenType.USER_DEFINED,
            rstrip=phi3 and vocab.types[token] == TokenType.CONTROL and vocab.texts[token] not in plain,
        )
        for token in ids
    )


def _ends_of_text(
    metadata: Mapping[str, Any], vocab: Vocab, special: SpecialIds, add_bos: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and after a text."""
    sides: list[tuple[int, ...]] = []
    for name, token, default in (("bos", special.bos, add_bos), ("eos", special.eos, False)):
        wanted = bool(metadata.get(f"{PREFIX}add_{name}_token", default))
        if wanted and token is None:
            vocab.warnings.append(f"The file asks to add {name} to every text but has no such token; none is added.")
        sides.append((token,) if wanted and token is not None else ())
    return sides[0], sides[1]


def _byte_level_tables(metadata: Mapping[str, Any], vocab: Vocab, pre: str | None, source: str) -> Tables:
    name, rules = _rules(metadata, vocab, pre)
    ranks = _merge_ranks(_array(metadata, "merges", "the order in which symbols join", source), source)
    special = _special_ids(metadata, vocab, {})
    vocab.added = _added_tokens(vocab, metadata)
    for token in vocab.added:
        if token.special:
            vocab.ids.pop(token.text, None)
    split = pipeline([isolate(pattern) for pattern in rules.patterns])
    words = byte_level_words(vocab.ids, ranks, whole_words=rules.whole_words)
    encoder = TextEncoder(unchanged, split, words)
    vocab.note(missing_bytes(vocab.ids))
    before, after = _ends_of_text(metadata, vocab, special, rules.add_bos)
    return Tables(
        "gpt2", name, vocab, encoder, special, before, after, byte_level=True, byte_fallback=False, strips_space=False
    )


def _rules(metadata: Mapping[str, Any], vocab: Vocab, pre: str | None) -> tuple[str, PreTokenizer]:
    name = pre if pre is not None else metadata.get(PREFIX + "pre")
    if name is None:
        name = "default"
        vocab.warnings.append(
            f"The file does not name its pre-tokenizer ({PREFIX}pre); 'default' is used, and answers may be worse. "
            "Pass the right name as `pre`, or get a newer file."
        )
    return str(name), pre_tokenizer(str(name))


def _merge_ranks(lines: list[Any], source: str) -> dict[str, int]:
    if lines and set(map(type, lines)) != {str}:
        raise FormatError(source, f"{PREFIX}merges holds other things than strings.")
    if " ".join(lines).count(" ") != max(2 * len(lines) - 1, 0):
        raise FormatError(source, f"an entry of {PREFIX}merges is not two symbols with a space between them.")
    # The first of doubles counts.
    return dict(zip(reversed(lines), range(len(lines) - 1, -1, -1), strict=True))


def _scores(metadata: Mapping[str, Any], source: str) -> NDArray[np.float64]:
    given = metadata.get(PREFIX + "scores")
    if not isinstance(given, np.ndarray):
        given = _array(metadata, "scores", "the order in which pieces join", source)
    try:
        return np.asarray(given, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        raise FormatError(source, f"{PREFIX}scores holds other things than numbers.") from None


def _score_ranks(
    texts: Sequence[str], scores: NDArray[Any], candidates: Iterable[int], *, source: str
) -> dict[str, int]:
    """Return the rank of each token that merging may make, from `scores`, float [V].

    0 is the best score; equal scores have equal ranks. FormatError for a score that is NaN.
    """
    ids = [token for token in candidates if len(texts[token]) > 1]
    if not ids:
        return {}
    values = np.asarray(scores, dtype=np.float64)[ids]
    if np.isnan(values).any():
        raise FormatError(source, "a token's score is not a number; expected one for each token. Get another file.")
    ranks = np.unique(-values, return_inverse=True)[1]
    return dict(zip([texts[token] for token in ids], ranks.tolist(), strict=True))


def _byte_types(types: bytes, bytes_: tuple[int | None, ...]) -> bytes:
    """Token types with BYTE for exactly the tokens <0x00> … <0xFF>, whatever the file says."""
    type_bytes = bytearray(types.replace(bytes([TokenType.BYTE]), bytes([TokenType.NORMAL])))
    for token in bytes_:
        if token is not None:
            type_bytes[token] = TokenType.BYTE
    return bytes(type_bytes)


def _scored_tables(metadata: Mapping[str, Any], vocab: Vocab, pre: str | None, source: str) -> Tables:
    if pre is not None:
        vocab.warnings.append(f"This tokenizer has no pre-tokenizer; pre={pre!r} is ignored.")
    scores = _scores(metadata, source)
    if len(scores) != len(vocab.texts):
        raise FormatError(source, f"{len(scores):,} scores for {len(vocab.texts):,} tokens; expected as many.")
    bytes_ = byte_tokens(vocab.ids)
    vocab.types = _byte_types(vocab.types, bytes_)
    special = _special_ids(metadata, vocab, {"bos": 1, "eos": 2, "unknown": 0})
    vocab.added = _added_tokens(vocab, metadata)
    for token in vocab.of_type(TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE, TokenType.UNUSED):
        vocab.ids.pop(vocab.texts[token], None)
    normal = vocab.of_type(TokenType.NORMAL, TokenType.UNDEFINED)
    ranks = _score_ranks(vocab.texts, scores, normal, source=source)
    prefix = bool(metadata.get(PREFIX + "add_space_prefix", True))

    def normalize(text: str) -> str:
        return (" " + text if prefix else text).replace(" ", SPACE)

    words = char_words(vocab.ids, ranks, joint="", bytes_=bytes_, unk=special.unk)
    encoder = TextEncoder(normalize, word_splitter(ranks), words)
    before, after = _ends_of_text(metadata, vocab, special, add_bos=True)
    return Tables(
        "llama", None, vocab, encoder, special, before, after, byte_level=False, byte_fallback=True, strips_space=prefix
    )
