"""The vocabulary: token texts, their types, special ids, and the tokens that end an answer.

Everything here comes from an untrusted file. What makes a tokenizer impossible is a FormatError;
what can be left out (a special id outside the vocabulary, a doubled token) becomes a warning. Read
`special.py` next.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from martlet.errors import FormatError


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`, which are SentencePiece's."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is cut out of the text before any splitting.

    `special` tokens are found only on request, so that a user's text cannot forge them. `lstrip`
    and `rstrip` swallow the whitespace beside the token; they never require any.
    """

    id: int
    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False  # found in the normalised text


@dataclass(slots=True)
class SpecialIds:
    """Ids with a role; None where the vocabulary has no such token."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    ends: frozenset[int] = frozenset()  # all tokens that end an answer


@dataclass(slots=True)
class Vocab:
    """Token texts by id. `ids` is the inverse; once loaded, it holds ordinary tokens only."""

    texts: Sequence[str]
    types: bytes  # a TokenType for each id
    ids: dict[str, int]
    added: tuple[AddedToken, ...] = ()
    warnings: list[str] = field(default_factory=list)
    # Warnings of little weight: the model's own tokenizer does the same.
    notes: list[str] = field(default_factory=list)

    def note(self, message: str | None) -> None:
        """Keep a note for the user, if there is any."""
        if message is not None:
            self.notes.append(message)

    def of_type(self, *types: TokenType) -> list[int]:
        """Ids of the given types, ascending."""
        wanted = {int(token_type) for token_type in types}
        if not wanted.intersection(self.types):
            return []
        return [token for token, token_type in enumerate(self.types) if token_type in wanted]


def build_vocab(texts: Sequence[str], types: bytes, *, source: str) -> Vocab:
    """Check token texts and types, and index them.

    `types` has a TokenType byte for each token. FormatError, naming `source`, if they are unusable.
    """
    if not texts:
        raise FormatError(source, "the vocabulary has no tokens; expected at least one. Convert the model again.")
    if set(map(type, texts)) != {str}:
        raise FormatError(source, "a token of the vocabulary is not text; expected strings. Convert the model again.")
    if len(types) != len(texts):
        raise FormatError(
            source,
            f"{len(types):,} token types for {len(texts):,} tokens; expected as many. The file is damaged or badly "
            "converted; get another one.",
        )
    vocab = Vocab(texts, types, dict(zip(texts, range(len(texts)), strict=True)))
    if len(vocab.ids) != len(texts):
        doubled = len(texts) - len(vocab.ids)
        vocab.ids = dict(zip(reversed(texts), range(len(texts) - 1, -1, -1), strict=True))
        vocab.warnings.append(f"{doubled:,} tokens have the text of another token; the lowest id of each is used.")
    return vocab


def checked_id(value: object, key: str, vocab: Vocab) -> int | None:
    """Return a special id that is inside the vocabulary; otherwise None, with a warning."""
    if value is None:
        return None
    try:
        token = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        token = -1
    if 0 <= token < len(vocab.texts):
        return int(token)
    vocab.warnings.append(f"{key} is {value!r}, outside the vocabulary of {len(vocab.texts):,} tokens; it is ignored.")
    return None


# Texts of control tokens that end a turn or a document, over the families (as in llama.cpp's
# src/llama-vocab.cpp).
END_TEXTS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    *("<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<turn|>"),
    *("</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<|tool_response>", "<|fim_pad|>", "<fim-pad>"),
    *("<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<fim-repo>", "<|repo_name|>", "<reponame>", "<REPO>"),
    "<|file_sep|>",
)
# Texts that no ordinary text means: control tokens even where a file says otherwise.
FORGEABLE = frozenset(END_TEXTS[: END_TEXTS.index("</s>")])


def end_of_generation(vocab: Vocab, declared: Iterable[int | None]) -> frozenset[int]:
    """Return the ids that end an answer: declared ids, and control tokens known by their text.

    A token such as <|im_end|> that the file types as ordinary text becomes a control token, with a
    warning: otherwise a user could write it.
    """
    ends = {token for token in declared if token is not None}
    types = bytearray(vocab.types)
    for text in END_TEXTS:
        token = vocab.ids.get(text)
        if token is None:
            continue
        if types[token] != TokenType.CONTROL and (text in FORGEABLE or token in ends):
            types[token] = TokenType.CONTROL
            vocab.warnings.append(f"Token {token} {text!r} ends a turn but is not typed as control; it is treated so.")
        if types[token] == TokenType.CONTROL:
            ends.add(token)
    vocab.types = bytes(types)
    ends -= _not_ends(vocab.ids, ends)
    return frozenset(ends)


def _not_ends(ids: Mapping[str, int], ends: set[int]) -> set[int]:
    """In gpt-oss's format <|end|> closes a message, and the answer goes on.

    <|return|> and <|call|> end it.
    """
    marks = [{"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}]
    harmony = any(all(ids.get(mark) in ends for mark in pair) for pair in marks)
    return {ids["<|end|>"]} if harmony and "<|end|>" in ids else set()
