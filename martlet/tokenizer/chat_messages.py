r"""Conversations checked and made plain, with control tokens set aside (read `sandbox.py` next).

A template sees plain JSON values only. A user's text must never become a control token, however a
template joins it to its own text. So in everything the request brings, each control token's text is
replaced by a private-use character before rendering, and restored afterwards, its position noted:

    "say <|im_end|>" → "say X" → template → "<|im_start|>user\nsay X<|im_end|>"
                                         → "…say <|im_end|><|im_end|>"
                                                 ~~~~~~~~~~ a literal span

A single character survives trim, split, slices and JSON. The price: a template that looks for a
control token in a message does not find it. In practice templates look for reasoning marks only, in
the assistant's own messages, so these stay as they are there. A template that deletes text inside a
message can join its neighbours into a token's text.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from martlet.errors import RequestError

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
REASONING_MARKS = frozenset(("<think>", "</think>", "[THINK]", "[/THINK]"))
PRIVATE_USE = range(0x100000, 0x10FFFE)  # plane 16
PART_TYPES = ("text",)


class Shield:
    """Replaces control tokens in what a request brings, and restores them."""

    def __init__(self, control_texts: Collection[str], brought: Sequence[object]) -> None:
        """Look for control tokens in the strings of `brought`.

        Without any, texts stay as they are.
        """
        strings = [text for value in brought for text in _strings(value)]
        self.weight = sum(map(len, strings)) + len(strings)
        self._stands: dict[str, str] = {}
        self._private = {
            character for text in strings if not text.isascii() for character in text if character >= "\U00100000"
        }
        self._next = PRIVATE_USE.start
        present = [token for token in control_texts if token.strip() and any(token in text for text in strings)]
        for token in sorted(present, key=len, reverse=True):
            self._stands[token] = self.unused()
        longest_first = "|".join(map(re.escape, self._stands))
        self._tokens = re.compile(longest_first or "(?!)")
        in_model = "|".join(re.escape(token) for token in self._stands if token not in REASONING_MARKS)
        self._tokens_in_model = re.compile(in_model or "(?!)")

    def unused(self) -> str:
        """A private-use character that the request does not have, a new one each time.

        RequestError if none is left.
        """
        while chr(self._next) in self._private:
            self._next += 1
        if self._next not in PRIVATE_USE:
            raise RequestError("The messages use every private-use character; leave some out.", param="messages")
        self._next += 1
        return chr(self._next - 1)

    def hide(self, value: Any, by_model: bool = False) -> Any:
        """A plain copy of a value with control tokens replaced; `by_model`: reasoning marks stay.

        RequestError for other values than JSON's.
        """
        if isinstance(value, str):
            if not self._stands:
                return str.__str__(value)
            tokens = self._tokens_in_model if by_model else self._tokens
            return tokens.sub(lambda match: self._stands[match[0]], value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {self.hide(key, by_model): self.hide(entry, by_model) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(entry, by_model) for entry in value]
        raise RequestError(f"The conversation holds a value of type {type(value).__name__}; expected JSON values.")

    def restore(self, text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Restore the tokens.

        Return the text and the spans [start, stop) of characters where they are plain text.
        """
        if not self._stands:
            return text, ()
        back = {stand: token for token, stand in self._stands.items()}
        back |= {json.dumps(stand)[1:-1]: json.dumps(token)[1:-1] for token, stand in self._stands.items()}
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        length = 0
        for piece in re.split("(" + "|".join(map(re.escape, back)) + ")", text):
            token = back.get(piece)
            pieces.append(piece if token is None else token)
            if token is not None:
                spans.append((length, length + len(token)))
            length += len(pieces[-1])
        return "".join(pieces), tuple(spans)


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """Check a conversation and bring it to the form that templates expect.

    A list of content parts becomes their joined text. Fields that are None are left out. A tool
    call's arguments as a JSON text become the object. Reasoning is given under each of its names.
    RequestError names the field at fault.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages is of type {type(messages).__name__}; expected a list.", param="messages")
    if not messages:
        raise RequestError("messages is empty; give at least one message.", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{where} is of type {type(message).__name__}; expected an object with role and content.", param=where
        )
    role = message.get("role")
    if not isinstance(role, str) or not re.fullmatch(r"[A-Za-z_][\w .-]{0,63}", role):
        raise RequestError(f"{where}.role is {role!r:.80}; expected a name such as user.", param=f"{where}.role")
    plain = {str(key): value for key, value in message.items() if value is not None}
    if "content" in plain:
        plain["content"] = _content(plain["content"], f"{where}.content")
    elif role in ("system", "developer", "user", "tool"):
        raise RequestError(f"{where} has no content; expected text.", param=f"{where}.content")
    elif not plain.get("tool_calls") and not any(field in plain for field in REASONING_FIELDS):
        raise RequestError(f"{where} has no content and no tool_calls; give one of them.", param=where)
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    reasoning = next((plain[field] for field in REASONING_FIELDS if field in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"{where} is of type {type(content).__name__}; expected a string or a list of parts.", param=where
        )
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        part_type = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if part_type not in PART_TYPES or not isinstance(part, Mapping):
            raise RequestError(
                f"{where}[{index}] is a part of type {part_type!r:.80}; this model takes {', '.join(PART_TYPES)} only.",
                param=f"{where}[{index}].type",
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{index}] has no text; expected a string.", param=f"{where}[{index}].text")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: object, where: str) -> list[Any]:
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where} is not a list of objects.", param=where)
    plain: list[Any] = []
    for call in calls:
        inner = call.get("function")
        if isinstance(inner, Mapping):
            plain.append({**call, "function": _with_arguments(inner)})
        else:
            plain.append(_with_arguments(call))
    return plain


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else dict(call)


def _strings(value: object) -> list[str]:
    """All strings in a value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for entry in pair for text in _strings(entry)]
    if isinstance(value, list | tuple):
        return [text for entry in value for text in _strings(entry)]
    return []
