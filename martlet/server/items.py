"""The output items of a response, built from an answer's parts, and the events by which they grow (read `responses_api.py` first).

Format: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from martlet.server.tools.calls import Arguments, Call, Content
from martlet.server.tools.reply import Part, Reasoning

__all__ = ["ItemWriter"]

_TEXT = "output_text"
_THOUGHT = "reasoning_text"


class ItemWriter:
    """One item is open at a time: a message, a function call, or reasoning."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._kind: str | None = None  # of the open item

    def add(self, part: Part) -> list[dict[str, Any]]:
        """Take a part; return its events."""
        match part:
            case Reasoning(text):
                return [*self._opened("reasoning"), *self._more(_THOUGHT, text)]
            case Content(text):
                return [*self._opened("message"), *self._more(_TEXT, text)]
            case Call(_, call_id, name):
                item = {"type": "function_call", "id": _id("fc"), "call_id": call_id, "name": name, "arguments": ""}
                return [*self.close(), *self._open("function_call", {**item, "status": "in_progress"})]
            case Arguments(_, text):
                self.items[-1]["arguments"] += text
                return [self._at("response.function_call_arguments.delta", delta=text)]

    def close(self) -> list[dict[str, Any]]:
        """End the open item."""
        if self._kind is None:
            return []
        item, kind, self._kind = self.items[-1], self._kind, None
        item["status"] = "completed"
        events = []
        if kind == "function_call":
            events.append(
                self._at("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
            )
        else:
            part = item["content"][0]
            events.append(
                self._at(f"response.{part['type']}.done", content_index=0, text=part["text"], **_logprobs(part))
            )
            events.append(self._at("response.content_part.done", content_index=0, part=deepcopy(part)))
        return [*events, self._item("response.output_item.done")]

    def _opened(self, kind: str) -> Iterator[dict[str, Any]]:
        if self._kind == kind:
            return
        yield from self.close()
        if kind == "message":
            item: dict[str, Any] = {"type": "message", "id": _id("msg"), "status": "in_progress", "role": "assistant"}
            part: dict[str, Any] = {"type": _TEXT, "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": "reasoning", "id": _id("rs"), "status": "in_progress", "summary": []}
            part = {"type": _THOUGHT, "text": ""}
        yield from self._open(kind, {**item, "content": []})
        self.items[-1]["content"].append(part)
        yield self._at("response.content_part.added", content_index=0, part=deepcopy(part))

    def _open(self, kind: str, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._kind = kind
        self.items.append(item)
        yield self._item("response.output_item.added")

    def _more(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        part = self.items[-1]["content"][0]
        part["text"] += text
        yield self._at(f"response.{kind}.delta", content_index=0, delta=text, **_logprobs(part))

    def _item(self, name: str) -> dict[str, Any]:
        return {"type": name, "output_index": len(self.items) - 1, "item": deepcopy(self.items[-1])}

    def _at(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}


def _logprobs(part: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": []} if part["type"] == _TEXT else {}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
