"""Separates an answer's text into reasoning, content and tool calls (read `calls.py` next).

A whole reply is joined from the parts of a stream, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from martlet.server.tools.call_formats import ReasoningFormat, ToolFormat
from martlet.server.tools.calls import CallParser, held_back
from martlet.server.tools.parts import Arguments, Call, Content, Part, Reasoning


class ReplyParser:
    """Separates the text of one answer; without formats all of it is content."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        tools: ToolFormat | None = None,
        *,
        prompt: str = "",
        new_id: Callable[[int], str] | None = None,
        schemas: Mapping[str, Any] | None = None,
    ) -> None:
        """The end of `prompt` shows whether the template has opened the reasoning.

        `schemas` has the tools' parameters, by their names.
        """
        self._reasoning = _Splitter(reasoning, prompt) if reasoning is not None else None
        self._calls = CallParser(tools, new_id, schemas) if tools is not None else None

    def feed(self, text: str) -> list[Part]:
        """Parse more text; return the parts that are certain."""
        if self._reasoning is None:
            return self._content(text)
        thought, text = self._reasoning.feed(text)
        return [*([Reasoning(thought)] if thought else []), *self._content(text)]

    def finish(self) -> list[Part]:
        """Return the rest at the end of the answer."""
        parts: list[Part] = []
        if self._reasoning is not None:
            thought, text = self._reasoning.finish()
            parts = [*([Reasoning(thought)] if thought else []), *self._content(text)]
        return parts if self._calls is None else [*parts, *self._calls.finish()]

    def _content(self, text: str) -> list[Part]:
        if not text:
            return []
        return [Content(text)] if self._calls is None else [*self._calls.feed(text)]


class _Splitter:
    """Splits the reasoning from the start of an answer; white space around it is dropped."""

    def __init__(self, form: ReasoningFormat, prompt: str) -> None:
        self._form = form
        self._inside = prompt.rstrip().endswith(form.start)
        self._done = False
        self._buffer = ""
        self._started = False  # a character of the reasoning, or of the content after it, was returned

    def feed(self, text: str, final: bool = False) -> tuple[str, str]:
        """Return (reasoning, content)."""
        if self._done and self._started:
            return "", text
        self._buffer += text
        if not self._inside and not self._done:
            rest = self._buffer.lstrip()
            if rest.startswith(self._form.start):
                self._inside, self._buffer = True, rest[len(self._form.start) :]
            elif final or not self._form.start.startswith(rest):
                self._done = self._started = True
                return "", self._take(len(self._buffer))
            else:
                return "", ""
        thought = self._thought(final) if self._inside else ""
        return thought, self._after() if self._done else ""

    def finish(self) -> tuple[str, str]:
        """Return the rest at the end of the answer."""
        return self.feed("", final=True)

    def _thought(self, final: bool) -> str:
        if not self._started:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(self._form.end)
        if at >= 0:
            thought = self._take(at).rstrip()
            self._take(len(self._form.end))
            self._inside, self._done, self._started = False, True, False
            return thought
        end = len(self._buffer) - (0 if final else held_back(self._buffer, (self._form.end,)))
        thought = self._take(len(self._buffer[:end].rstrip()))
        self._started = self._started or bool(thought)
        return thought

    def _after(self) -> str:
        self._buffer = self._buffer.lstrip()
        self._started = bool(self._buffer)
        return self._take(len(self._buffer))

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken


def delta_of(part: Part, with_reasoning: bool = True) -> dict[str, Any] | None:
    """A part as a chat chunk's delta; None for unwanted reasoning."""
    match part:
        case Reasoning(text):
            return {"reasoning_content": text} if with_reasoning else None
        case Content(text):
            return {"content": text}
        case Call(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


@dataclass(slots=True)
class Parts:
    """The parts of a whole answer, joined."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[Call, str]] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Parts:
        """Join parts."""
        joined = cls()
        for part in parts:
            match part:
                case Reasoning(text):
                    joined.reasoning += text
                case Content(text):
                    joined.content += text
                case Call():
                    joined.calls.append((part, ""))
                case Arguments(index, text):
                    call, so_far = joined.calls[index]
                    joined.calls[index] = call, so_far + text
        return joined

    def message(self, with_reasoning: bool = True) -> dict[str, Any]:
        """As a chat message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
                for call, arguments in self.calls
            ]
        if self.reasoning and with_reasoning:
            message["reasoning_content"] = self.reasoning
        return message
