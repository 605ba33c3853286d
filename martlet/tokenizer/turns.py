"""A chat's own tokens, kept: the next prompt reuses them instead of tokenizing the text anew.

A model may spell a text in other tokens than the tokenizer would. A prompt tokenized from text then
leaves the cached prefix there, and everything after is computed again. So the ids of each answer
are kept with their text, and a prompt that begins with exactly that text takes the ids:

    turn 1   [prompt 1][answer]
    turn 2   [prompt 1][answer]<|im_end|> … new message …  bracketed ids are taken, the rest encoded

The text must be the same to the character, and so must its literal spans: a message's text never
becomes a control token. What follows must begin with a control token, since no token can span that
border. A template that rewrites earlier turns (drops their reasoning, say) is encoded from its
text. Read `chat_template.py` first.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from martlet.tokenizer.chat_template import ChatTemplate, RenderedChat
from martlet.tokenizer.detok import Detokenizer
from martlet.tokenizer.tokenizer import Tokenizer

MAX_CHARACTERS = 16 << 20  # kept in all
LAST_TOKENS = 8  # that may add nothing to the text: an end token, a stop string's tokens
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A prompt and its answer, without the token that ended it."""

    prompt: str
    spans: Spans
    prompt_ids: tuple[int, ...]
    answer: str
    answer_ids: tuple[int, ...]
    salt: str  # only requests of the same cache salt share turns


class TurnMemory:
    """The turns of the last conversations, at most MAX_CHARACTERS of text.

    The oldest are forgotten first.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # By salt and whole text, prompt and answer.
        self._turns: OrderedDict[tuple[str, str], _Turn] = OrderedDict()
        self._size = 0

    def note(
        self, rendered: RenderedChat, prompt_ids: Sequence[int], answer_ids: Sequence[int], answer: str, salt: str = ""
    ) -> None:
        """Keep the answer to a prompt, unless its text differs from that of its ids."""
        ids = self._ids_of(answer, answer_ids, prompt_ids[-1])
        if not ids:
            return
        key = salt, rendered.text + answer
        self._forget(key)
        self._turns[key] = _Turn(rendered.text, rendered.literal_spans, tuple(prompt_ids), answer, ids, salt)
        self._size += len(key[1])
        while self._size > MAX_CHARACTERS:
            self._forget(next(iter(self._turns)))

    def prompt_ids(self, template: ChatTemplate, rendered: RenderedChat, salt: str = "") -> list[int]:
        """The ids of a prompt: taken from the longest turn it continues, the rest encoded."""
        best: list[int] = []
        end = 0
        # A copy: another thread may note a turn meanwhile.
        for turn in reversed(list(self._turns.values())):
            if turn.salt != salt or len(turn.prompt) + len(turn.answer) <= end:
                continue
            continued = self._continued(turn, rendered)
            if continued is not None and continued[0] > end:
                end, best = continued
        if not best:
            return template.prompt_ids(rendered)
        rest = RenderedChat(
            rendered.text[end:],
            tuple((start - end, stop - end) for start, stop in rendered.literal_spans if start >= end),
        )
        return best + self._tokenizer.encode(
            rest.text, add_special=False, parse_special=True, literal_spans=rest.literal_spans
        )

    def is_rewritten(self, rendered: RenderedChat, messages: Sequence[Mapping[str, Any]], salt: str = "") -> bool:
        """Whether the template wrote a kept answer differently from how it was generated."""
        said = {str(m.get("content")) for m in messages if isinstance(m, Mapping) and m.get("role") == "assistant"}
        return any(
            turn.salt == salt
            and turn.answer in said
            and rendered.text.startswith(turn.prompt)
            and not rendered.text.startswith(turn.answer.rstrip(), len(turn.prompt))
            for turn in list(self._turns.values())
        )

    def _continued(self, turn: _Turn, rendered: RenderedChat) -> tuple[int, list[int]] | None:
        """The length of text that a turn covers, and its ids.

        None if the text does not continue it.
        """
        start = len(turn.prompt)
        if not rendered.text.startswith(turn.prompt) or _until(rendered.literal_spans, start) != turn.spans:
            return None
        for answer in dict.fromkeys((turn.answer, turn.answer.rstrip())):  # many templates trim
            end = start + len(answer)
            if rendered.text[start:end] == answer and self._is_border(rendered, end):
                ids = self._ids_of(answer, turn.answer_ids, turn.prompt_ids[-1])
                if ids is not None:
                    return end, [*turn.prompt_ids, *ids]
        return None

    def _is_border(self, rendered: RenderedChat, at: int) -> bool:
        """Whether the text ends at `at`, or a control token of the template begins there."""
        if at == len(rendered.text):
            return True
        if any(start <= at < stop for start, stop in rendered.literal_spans):
            return False
        return any(rendered.text.startswith(self._tokenizer.token_text(i), at) for i in self._tokenizer.special_ids)

    def _ids_of(self, text: str, ids: Sequence[int], after: int) -> tuple[int, ...] | None:
        """The ids up to the id that completes `text`.

        The ids after it added nothing to the text.
        """
        detokenizer = Detokenizer(self._tokenizer, after=after)
        pieces = [detokenizer.feed(token) for token in ids]
        length = sum(map(len, pieces))
        for count in range(len(ids), max(-1, len(ids) - LAST_TOKENS - 1), -1):
            if length == len(text):
                # Ids behind it whose pieces are empty (an end token, half a character) are left out
                # as well.
                while count and not pieces[count - 1]:
                    count -= 1
                return tuple(ids[:count]) if "".join(pieces[:count]) == text else None
            length -= len(pieces[count - 1]) if count else 0
        return None

    def _forget(self, key: tuple[str, str]) -> None:
        if self._turns.pop(key, None) is not None:
            self._size -= len(key[1])


def _until(spans: Spans, end: int) -> Spans:
    """The spans before `end`, cut there."""
    return tuple((start, min(stop, end)) for start, stop in spans if start < end)
