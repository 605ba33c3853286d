"""From token ids back to text, piece by piece.

    ids → bytes → whole characters → text that can no longer be part of a stop string → the caller

Each stage holds back only what may still change, so the joined pieces are the whole text, and the
work is linear in its length. Stop strings are found by the automaton of Aho and Corasick (CACM
18:6, 1975). Read `chat_template.py` next for the way from messages to ids.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from martlet.errors import RequestError


class TokenBytes(Protocol):
    """The methods of a tokenizer that streaming needs."""

    strips_space: bool

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """The bytes that a token adds to the text.

        For a control token they are empty if `special` is False.
        """

    def is_added(self, token: int) -> bool:
        """Whether a token is a control token or a user-defined one."""


class Detokenizer:
    """Turns ids into text as they arrive; the joined text equals `Tokenizer.decode` of all ids.

    Invalid UTF-8 becomes U+FFFD exactly as in `bytes.decode(errors="replace")` of the whole.
    `after` is the prompt's last token: where the text goes on in the middle, the first token's
    leading space belongs to it. A character that the prompt left unfinished is not completed.
    """

    def __init__(self, tokenizer: TokenBytes, *, skip_special: bool = True, after: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._special = not skip_special
        self._fresh = tokenizer.strips_space and (after is None or tokenizer.is_added(after))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_inside_character(self) -> bool:
        """Whether the last bytes begin a character that is not complete."""
        return bool(self._decoder.getstate()[0])

    def feed(self, token: int) -> str:
        """Return the characters that this token completes."""
        piece = self._tokenizer.token_bytes(token, special=self._special)
        if self._tokenizer.is_added(token):
            self._fresh = self._tokenizer.strips_space
        elif self._fresh:
            piece = piece.removeprefix(b" ")
            self._fresh = False
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Return what is left at the end: U+FFFD for a character that was cut, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopChecker:
    """Finds stop strings in a text that arrives in pieces, and passes on what cannot belong to one.

    The first match to be complete wins, wherever the pieces' borders lie; of matches complete at
    the same character, the longest. So the result is that of reading character by character.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include` lets the stop string itself through as well. RequestError for an empty one."""
        if not all(stops):
            raise RequestError("A stop string is empty; leave it out, or give at least one character.", param="stop")
        self._include = include
        self._next: list[dict[str, int]] = [{}]  # a state is a prefix of a stop string; 0 is empty
        self._depth = [0]
        self._match: list[str | None] = [None]  # the longest stop string that ends there
        for stop in stops:
            self._insert(stop)
        self._fail = self._link()
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return (text that may be shown, the stop string or None).

        After a match no more text is passed on.
        """
        if self._matched is not None:
            return "", self._matched
        held = len(self._held)
        text = self._held + text
        for at in range(held, len(text)):
            self._state = self._step(self._state, text[at])
            stop_string = self._match[self._state]
            if stop_string is not None:
                self._held, self._matched = "", stop_string
                stop = at + 1
                return text[: stop if self._include else stop - len(stop_string)], stop_string
        shown = len(text) - self._depth[self._state]
        self._held = text[shown:]
        return text[:shown], None

    def finish(self) -> str:
        """Return the text held back, now that nothing follows."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._next[state][character]
        self._match[state] = stop

    def _link(self) -> list[int]:
        """For each state, the state of its longest proper suffix, breadth first."""
        self._fail = [0] * len(self._next)
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                fail = self._step(self._fail[state], character) if state else 0
                self._fail[child] = fail
                if self._match[child] is None:
                    self._match[child] = self._match[fail]
                queue.append(child)
        return self._fail

    def _step(self, state: int, character: str) -> int:
        while character not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][character]


@dataclass(frozen=True, slots=True)
class Delta:
    """New text, and how many more tokens it completes, whose log-probabilities belong to it.

    The last `hidden` of these tokens left no text: they belong to a stop string, or follow it.
    """

    text: str = ""
    tokens: int = 0
    stop: str | None = None
    hidden: int = 0


class TextStream:
    """A detokenizer and a stop checker in a row, counting the tokens whose text is out.

    A token counts once all of its text is out; a token that begins a character counts with the
    character. At the end, or at a stop string, all remaining tokens count, so every token counts
    exactly once.
    """

    def __init__(self, detokenizer: Detokenizer, stopper: StopChecker | None = None) -> None:
        self._detokenizer = detokenizer
        self._stopper = stopper
        self._decoded = 0  # characters
        self._shown = 0
        self._ends: deque[int] = deque()  # ends of the texts of tokens not counted yet
        self._begin = 0  # where the first of these texts begins

    def feed(self, token: int) -> Delta:
        """Take a token; return what can be shown now."""
        text = self._detokenizer.feed(token)
        self._decoded += len(text)
        self._ends.append(self._decoded + self._detokenizer.is_inside_character)
        return self._release(text)

    def finish(self) -> Delta:
        """Return the remaining text at the end."""
        delta = self._release(self._detokenizer.finish())
        rest = self._stopper.finish() if self._stopper is not None and delta.stop is None else ""
        left, self._ends = len(self._ends), deque()
        return Delta(delta.text + rest, delta.tokens + left, delta.stop, delta.hidden)

    def _release(self, text: str) -> Delta:
        stop = None
        if self._stopper is not None:
            text, stop = self._stopper.feed(text)
        self._shown += len(text)
        tokens = hidden = 0
        while self._ends and (stop is not None or self._ends[0] <= self._shown):
            hidden += stop is not None and self._begin >= self._shown
            self._begin = self._ends.popleft()
            tokens += 1
        return Delta(text, tokens, stop, hidden)
