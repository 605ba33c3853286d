"""The answers of gpt-oss: channels, as OpenAI's harmony format writes them (read `reply.py` next).

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

`analysis` is reasoning; a message to a function is a call; all other text is content. Source:
OpenAI's "Harmony response format" and the model's chat template. As in `calls.py`, the result does
not depend on the cuts between pieces.
"""

import re
import secrets
from collections.abc import Callable

from martlet.server.tools.calls import held_back
from martlet.server.tools.parts import Arguments, Call, Content, Part, Reasoning

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADS = (START, CHANNEL, "assistant", "to=")  # how the text before a message may begin
MAX_HEAD = 512  # characters between two messages


class HarmonyParser:
    """Separates the messages of one answer."""

    def __init__(self, prompt: str = "", new_id: Callable[[int], str] | None = None) -> None:
        """The end of `prompt` shows whether the template has opened a message."""
        self._new_id = new_id or (lambda length: secrets.token_hex(length)[:length])
        self._buffer = ""
        self._n_calls = 0
        self._in_message = False
        self._kind: type[Reasoning | Content] | None = Content  # of the message; None: a call's
        self._fresh = True  # nothing of the message was returned
        opened = prompt.rpartition(f"{START}assistant")[2]
        if MESSAGE in opened and not any(end in opened for end in _ENDS):
            self._open_message(opened)

    def feed(self, text: str, final: bool = False) -> list[Part]:
        """Parse more text; return the parts that are certain."""
        self._buffer += text
        parts: list[Part] = []
        while (new := self._message(final) if self._in_message else self._head(final)) is not None:
            parts += new
        return parts

    def finish(self) -> list[Part]:
        """Return the rest at the end of the answer. A call that was cut off stays cut off."""
        return self.feed("", final=True)

    def _head(self, final: bool) -> list[Part] | None:
        """Before a message: its channel and its recipient."""
        at = self._buffer.find(MESSAGE)
        if at >= 0:
            head, self._buffer = self._buffer[:at], self._buffer[at + len(MESSAGE) :]
            return self._open_message(head)
        rest = self._buffer.lstrip()
        known = any(rest.startswith(head) or head.startswith(rest) for head in _HEADS)
        if not final and known and len(rest) <= MAX_HEAD:
            return None
        self._in_message, self._kind = True, Content  # the model does not keep to the format
        return [] if self._buffer else None

    def _open_message(self, head: str) -> list[Part]:
        recipient = _RECIPIENT.search(head)
        self._in_message, self._fresh, self._kind = True, True, Content
        if recipient is not None:
            self._kind, self._n_calls = None, self._n_calls + 1
            name = recipient[1].removeprefix("functions.")
            return [Call(self._n_calls - 1, f"call_{self._new_id(24)}", name)]
        if f"{CHANNEL}analysis" in head:
            self._kind = Reasoning
        return []

    def _message(self, final: bool) -> list[Part] | None:
        """In a message, up to a mark that ends it."""
        ends = [at for mark in _ENDS if (at := self._buffer.find(mark)) >= 0]
        at = min(ends, default=len(self._buffer) - (0 if final else held_back(self._buffer, _ENDS)))
        text, self._buffer = self._buffer[:at], self._buffer[at:]
        parts: list[Part] = []
        if text:
            parts.append(Arguments(self._n_calls - 1, text) if self._kind is None else self._kind(text))
        if not ends:
            return parts or None
        mark = next(mark for mark in _ENDS if self._buffer.startswith(mark))
        self._buffer = self._buffer if mark == START else self._buffer[len(mark) :]
        self._in_message = False
        return parts
