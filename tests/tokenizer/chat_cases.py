"""Conversations that the chat template tests render, and a stand-in for a tokenizer.

`python -m tests.tokenizer.chat_cases` writes tests/data/chat-templates/expected.json with what
transformers renders (or the words of the template's own error), for every published template in
that folder and every conversation here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from martlet.tokenizer.chat_template import ChatTemplate

FOLDER = Path(__file__).parent.parent / "data" / "chat-templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
BOS, EOS = "<|begin|>", "<|finish|>"
PINNED_DATE = (2025, 3, 14)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now, in °C & words <short>.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": 'Name of the city, e.g. "Zürich"'},
                "days": {"type": "integer", "description": "Days ahead", "default": 1},
                "units": {"type": "string", "enum": ["metric", "imperial"], "description": "Units"},
            },
            "required": ["city"],
        },
    },
}
ASK, ANSWER = {"role": "user", "content": " Why is the sky blue? \n"}, {"role": "assistant", "content": "Scattering."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abc123def", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abc123def", "name": "get_weather", "content": '{"temp": 21}'}

CASES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [ASK]},
    "system": {"messages": [{"role": "system", "content": "Be brief & <kind>."}, ASK]},
    "turns": {"messages": [ASK, ANSWER, {"role": "user", "content": "Ünïcode 🎉?"}]},
    "closed": {"messages": [ASK, ANSWER], "add_generation_prompt": False},
    "tools": {"messages": [ASK], "tools": [WEATHER]},
    "tool result": {"messages": [ASK, CALL, RESULT], "tools": [WEATHER]},
    "tool result answered": {"messages": [ASK, CALL, RESULT, ANSWER, ASK], "tools": [WEATHER]},
    "reasoning field": {
        "messages": [ASK, {"role": "assistant", "content": "42", "reasoning_content": "\nHm.\n"}, ASK],
    },
    "reasoning inline": {
        "messages": [ASK, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n42"}],
        "add_generation_prompt": False,
    },
    "thinking off": {"messages": [ASK], "enable_thinking": False, "thinking": False},
    "continue": {
        "messages": [ASK, {"role": "assistant", "content": "Sure, the"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


class CharTokenizer:
    """One id a character; control tokens are found where they are asked for and not literal."""

    def __init__(self, *control: str, bos: str | None = None, eos: str | None = None, add_bos: bool = False) -> None:
        self.control = [*control, *(text for text in (bos, eos) if text is not None)]
        self.special_ids = frozenset(range(len(self.control)))
        self.bos_id = None if bos is None else self.control.index(bos)
        self.eos_id = None if eos is None else self.control.index(eos)
        self.add_bos = add_bos

    def token_text(self, token: int) -> str:
        return self.control[token]

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        literal_spans: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        ids: list[int] = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        at = 0
        while at < len(text):
            literal = any(start <= at < stop for start, stop in literal_spans)
            control = next((token for token in self.special_ids if text.startswith(self.control[token], at)), None)
            if control is None or literal or not parse_special:
                ids.append(1000 + ord(text[at]))
                at += 1
            else:
                ids.append(control)
                at += len(self.control[control])
        return ids


def transformers_renders(name: str, case: dict[str, Any]) -> dict[str, str]:
    """What transformers renders, or the words of the template's error."""
    import copy
    from unittest import mock

    from transformers.utils import chat_template_utils as hf

    class Clock(hf.datetime):  # type: ignore[misc, name-defined]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(*PINNED_DATE)

    options = {"add_generation_prompt": True, "bos_token": BOS, "eos_token": EOS, **copy.deepcopy(case)}
    messages = options.pop("messages")
    with mock.patch.object(hf, "datetime", Clock):
        try:
            [text], _ = hf.render_jinja_template([messages], chat_template=source(name), **options)
        except Exception as error:
            return {"error": str(error)}
    return {"text": text}


def template(text: str | None, *control: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(text, CharTokenizer(*control, **options), now=lambda: datetime(*PINNED_DATE))


def render(text: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return template(text).render(messages or [{"role": "user", "content": "hi"}], **options).text


if __name__ == "__main__":
    expected = {name: {key: transformers_renders(name, case) for key, case in CASES.items()} for name in TEMPLATES}
    (FOLDER / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
