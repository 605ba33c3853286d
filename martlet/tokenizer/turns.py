"""A chat's own tokens, kept: the next turn's prompt repeats them instead of cutting the text anew (read `chat_template.py` first).

A model may spell a text in other tokens than the tokenizer would. If the next prompt is tokenized from text, it leaves
the cached path there, and everything after is computed again. So the ids of each answer are kept with the text that
they made, and a prompt that begins with that very text takes the ids:

    turn 1   [prompt 1][answer]
    turn 2   [prompt 1][answer]<|im_end|> … the new message …        the bracketed ids are taken, the rest is encoded

The text must be the same to the character, and so must be which parts of it are literal: what a message says never
becomes a control token. What follows must begin with a control token, for there no token can span the border. A
template that rewrites earlier turns (drops their reasoning, say) is encoded from its text as ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from martlet.tokenizer.chat_template import ChatTemplate, RenderedChat
from martlet.tokenizer.detok import Detokenizer
from martlet.tokenizer.tokenizer import Tokenizer

__all__ = ["TurnMemory"]

MAX_CHARACTERS = 16 << 20  # kept in all
LAST_TOKENS = 8  # that may have added nothing to the text: the end of the answer, what a stop string cut off
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A prompt and the answer to it, with the token that ended it left out."""

    prompt: str
    spans: Spans
    prompt_ids: tuple[int, ...]
    answer: str
    answer_ids: tuple[int, ...]
    salt: str  # turns are shared between requests of one cache salt only


class TurnMemory:
    """The turns of the last conversations, at most MAX_CHARACTERS of text; the oldest are forgotten first."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._turns: OrderedDict[tuple[str, str], _Turn] = OrderedDict()  # by salt and whole text, prompt and answer
        self._size = 0

    def note(
        self,
        rendered: RenderedChat,
        prompt_ids: Sequence[int],
        answer_ids: Sequence[int],
        answer: str,
        salt: str = "",
    ) -> None:
        """Keep the answer to a prompt. One whose text is not that of its ids, to a character, is not kept."""
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
        """The ids of a prompt: those of the longest turn that it goes on from, and the rest encoded."""
        best: list[int] = []
        end = 0
        for turn in reversed(list(self._turns.values())):  # a copy: another thread may note a turn meanwhile
            if turn.salt != salt or len(turn.prompt) + len(turn.answer) <= end:
                continue
            found = self._continued(turn, rendered)
            if found is not None and found[0] > end:
                end, best = found
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
        """Whether the template wrote an answer that is kept here otherwise than it was generated."""
        said = {str(m.get("content")) for m in messages if isinstance(m, Mapping) and m.get("role") == "assistant"}
        return any(
            turn.salt == salt
            and turn.answer in said
            and rendered.text.startswith(turn.prompt)
            and not rendered.text.startswith(turn.answer.rstrip(), len(turn.prompt))
            for turn in list(self._turns.values())
        )

    def _continued(self, turn: _Turn, rendered: RenderedChat) -> tuple[int, list[int]] | None:
        """How much of the text a turn stands for, and its ids; None if the text does not go on from it."""
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
        """Whether a control token of the template begins at `at`, or nothing does."""
        if at == len(rendered.text):
            return True
        if any(start <= at < stop for start, stop in rendered.literal_spans):
            return False
        return any(rendered.text.startswith(self._tokenizer.token_text(i), at) for i in self._tokenizer.special_ids)

    def _ids_of(self, text: str, ids: Sequence[int], after: int) -> tuple[int, ...] | None:
        """The ids up to the one that completes `text`: those that follow added nothing that was kept."""
        detokenizer = Detokenizer(self._tokenizer, after=after)
        pieces = [detokenizer.feed(token) for token in ids]
        length = sum(map(len, pieces))
        for count in range(len(ids), max(-1, len(ids) - LAST_TOKENS - 1), -1):
            if length == len(text):
                # Ids behind it whose pieces are empty (an end token, half a character) are left out as well.
                while count and not pieces[count - 1]:
                    count -= 1
                return tuple(ids[:count]) if "".join(pieces[:count]) == text else None
            length -= len(pieces[count - 1]) if count else 0
        return None

    def _forget(self, key: tuple[str, str]) -> None:
        if self._turns.pop(key, None) is not None:
            self._size -= len(key[1])


def _until(spans: Spans, end: int) -> Spans:
    """The spans that lie before `end`; one that crosses it counts up to there."""
    return tuple((start, min(stop, end)) for start, stop in spans if start < end)
