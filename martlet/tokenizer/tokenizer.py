"""The tokenizer: text to token ids and back.

    text → added tokens cut out (special.py) → normalised, split, merged (encoder.py) → ids

Callers can rely on three rules. Control tokens in a text are plain characters unless
`parse_special` is set, and always inside `literal_spans`. `decode` gives back what was encoded.
Only caches change after construction. Read `encoder.py` for encoding, `detok.py` for streaming
back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from martlet.errors import RequestError
from martlet.tokenizer.bpe import text_bytes, token_text_bytes
from martlet.tokenizer.from_gguf import Tables, tables_from_gguf
from martlet.tokenizer.from_json import tables_from_hf
from martlet.tokenizer.special import AddedTokenFinder, LiteralSpans
from martlet.tokenizer.split import SPACE
from martlet.tokenizer.vocab import TokenType

CONTROL = (TokenType.CONTROL, TokenType.UNKNOWN)


class Tokenizer:
    """Encodes text to ids and decodes ids to text, for one model."""

    def __init__(self, tables: Tables) -> None:
        vocab, special = tables.vocab, tables.special
        self.name = tables.name
        self.pre = tables.pre
        self.vocab_size = len(vocab.texts)
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = special.bos, special.eos, special.pad, special.unk
        self.eog_ids = special.ends
        self.special_ids = frozenset(vocab.of_type(*CONTROL))
        self.unused_ids = frozenset(vocab.of_type(TokenType.UNUSED))
        self.add_bos = bool(tables.before)
        self.add_eos = bool(tables.after)
        self.strips_space = tables.strips_space
        self.notes = tuple(vocab.notes)  # warnings of little weight, shown on request
        self.warnings = (*vocab.warnings, *vocab.notes)
        self._tables = tables
        self._encoder = tables.encoder
        self._texts = vocab.texts
        self._types = vocab.types
        self.texts_alone: Mapping[int, str] = _TextsAlone(self)
        self._added = {token.id: token for token in vocab.added}
        self._bytes: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})  # known already, without and with `special`
        early = [token for token in vocab.added if not token.normalized]
        late = [token for token in vocab.added if token.normalized]
        self._finder = AddedTokenFinder(early)
        self._late_finder = AddedTokenFinder(late) if late else None

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], pre: str | None = None, *, source: str = "GGUF metadata"
    ) -> Tokenizer:
        """Build from a GGUF file's metadata; `pre` overrides `tokenizer.ggml.pre`.

        FormatError or UnsupportedError, with `source` as the file, if it is unusable.
        """
        return cls(tables_from_gguf(metadata, pre=pre, source=source))

    @classmethod
    def from_hf(
        cls,
        tokenizer_json: Mapping[str, Any],
        tokenizer_config: Mapping[str, Any] | None = None,
        pre: str | None = None,
        *,
        eos_ids: Iterable[int] = (),
        source: str = "tokenizer.json",
    ) -> Tokenizer:
        """Build from a parsed tokenizer.json and tokenizer_config.json.

        `pre` replaces the file's pre-tokenizer by one of GGUF's names. `eos_ids` are further ids
        that end an answer (generation_config.json's `eos_token_id`). FormatError or
        UnsupportedError if it is unusable.
        """
        return cls(tables_from_hf(tokenizer_json, tokenizer_config or {}, pre=pre, eos_ids=eos_ids, source=source))

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, literal_spans: LiteralSpans = ()
    ) -> list[int]:
        """Return the ids of `text`.

        `add_special` adds the model's beginning and end tokens. `parse_special` turns the texts of
        control tokens into these tokens, except where they touch one of `literal_spans`: ascending,
        disjoint ranges [start, stop) of characters. The remaining text is encoded as a whole, so a
        span's borders split no token. RequestError for text that is not Unicode (lone surrogates),
        or that a file's pattern is too slow on.
        """
        if not text.isascii():
            _refuse_surrogates(text)
        words: list[str | int] = []
        first = True
        try:
            for piece in self._finder.split(text, parse_special, literal_spans):
                if isinstance(piece, int):
                    words.append(piece)
                else:
                    words += self._words(piece, first)
                first = False
        except TimeoutError:
            raise _too_slow(text) from None
        ids = self._encoder.ids(words)
        return [*self._tables.before, *ids, *self._tables.after] if add_special else list(ids)

    def _words(self, text: str, first: bool) -> Sequence[str | int]:
        """The words of a text without the added tokens that are found before normalising."""
        encoder = self._encoder
        normalized = encoder.normalize(text)
        if self._late_finder is None:
            return encoder.cut(normalized, first)
        words: list[str | int] = []
        for piece in self._late_finder.split(normalized, parse_special=False):
            words += [piece] if isinstance(piece, int) else encoder.cut(piece, first)
            first = False
        return words

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`, without control tokens if `skip_special`.

        Invalid UTF-8 becomes U+FFFD.
        """
        pieces: list[bytes] = []
        fresh = self.strips_space  # the next piece starts with encoding's space
        for token in ids:
            piece = self.token_bytes(token, special=not skip_special)
            if token in self._added:
                fresh = self.strips_space
            elif fresh:
                piece = piece.removeprefix(b" ")
                fresh = False
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """Return the bytes that a token adds to the text.

        For a control token they are empty if `special` is False. RequestError for an unknown id.
        """
        known = self._bytes[special]
        piece = known.get(token)
        if piece is None:
            piece = known[token] = self._make_bytes(token, special)
        return piece

    def _make_bytes(self, token: int, special: bool) -> bytes:
        text = self.token_text(token)
        token_type = self._types[token]
        if token_type in CONTROL:
            return text_bytes(text) if special else b""
        if token in self._added:
            return text_bytes(text)
        if self._tables.byte_level:
            return token_text_bytes(text)
        if token_type == TokenType.BYTE and self._tables.byte_fallback:
            return bytes([int(text[3:5], 16)])
        return text_bytes(text.replace(SPACE, " "))

    def has_same_tokens(self, other: Tokenizer) -> bool:
        """Whether all ids in both vocabularies mean the same; one may have more ids."""
        n = min(self.vocab_size, other.vocab_size)
        return list(self._texts[:n]) == list(other._texts[:n]) and self.eog_ids == other.eog_ids

    def is_added(self, token: int) -> bool:
        return token in self._added

    def token_text(self, token: int) -> str:
        """Return a token's text as the vocabulary writes it.

        RequestError for an id outside of it.
        """
        if not 0 <= token < self.vocab_size:
            raise RequestError(
                f"Token id {token} is outside the vocabulary; expected 0 to {self.vocab_size - 1}.", param="prompt"
            )
        return self._texts[token]


class _TextsAlone(dict[int, str]):
    """token → its text alone, control tokens included: `decode` of it, remembered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._decode = tokenizer.decode

    def __missing__(self, token: int) -> str:
        text = self[token] = self._decode([token])
        return text


def _too_slow(text: str) -> RequestError:
    return RequestError(
        f"A pattern of the tokenizer's own file took too long on a text of {len(text):,} characters; shorten the text, "
        "or use another file of this model.",
        param="prompt",
    )


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text has half a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start}; it is "
            "not Unicode text. Send both halves, or leave it out.",
            param="prompt",
            code="invalid_unicode",
        ) from None
