"""JSON read character by character, for what must be passed on before it is whole (read `calls.py` next).

Format: https://www.rfc-editor.org/rfc/rfc8259
"""

from __future__ import annotations

import json

__all__ = ["CallScanner", "ValueScanner"]


class ValueScanner:
    """Finds where one value ends. An object, a list or a string ends with its last character, others before the next."""

    def __init__(self) -> None:
        self.text = ""
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, character: str) -> bool:
        """Take a character; False if the value has ended before it."""
        if self._in_string:
            self.text += character
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                self.done = self._depth == 0
            return True
        if self._depth == 0 and self.text and character in ",}] \t\r\n":
            self.done = True
            return False
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.done = self._depth == 0
        self.text += character
        return True


class CallScanner:
    """Reads `{"name": …, "arguments": {…}}`: the name when it is known, the arguments' own text as it comes.

    It is `ready` once it must be a call: it has a name, and arguments or its end. `failed`: it is none, and nothing of
    it was given out. A string in place of an object is unwrapped once it is whole.
    """

    def __init__(
        self,
        name_keys: tuple[str, ...],
        argument_keys: tuple[str, ...],
        other_keys: tuple[str, ...],
        *,
        needs_arguments: bool = False,
    ) -> None:
        self.raw = ""
        self.name: str | None = None
        self.ready = self.done = self.failed = False
        self._keys = name_keys, argument_keys, other_keys
        self._needs_arguments = needs_arguments
        self._key: str | None = None
        self._expect = "{"  # what comes next: { key : value ,
        self._value = ValueScanner()
        self._arguments = ""
        self._seen_arguments = False

    def feed(self, character: str) -> None:
        """Take a character."""
        self.raw += character
        if self._expect in ("key", "value"):
            if not self._value.text and (character in " \t\r\n" or (self._expect == "key" and character == "}")):
                self._end_if(character)
                return
            taken = self._value.feed(character)
            if taken and self._expect == "value" and self._key in self._keys[1] and not self._seen_arguments:
                self.ready = self.name is not None
                if self._value.text[0] in "{[":
                    self._arguments += character
            if self._value.done:
                self._ended(self._value.text)
                self._value = ValueScanner()
            if taken:
                return
        self._punctuation(character)

    def take_arguments(self) -> str:
        """The arguments' text since the last call; nothing before it is ready."""
        if not self.ready:
            return ""
        found, self._arguments = self._arguments, ""
        return found

    def _punctuation(self, character: str) -> None:
        if character in " \t\r\n":
            return
        if character in {"{": "{", ":": ":", ",": ",}"}.get(self._expect, ""):
            self._expect = {"{": "key", ":": "value", ",": "key", "}": "end"}[character]
            self._end_if(character)
        else:
            self._break_off()

    def _break_off(self) -> None:
        """This is no JSON, or no call: what was given out stays."""
        self.done, self.failed = self.ready, not self.ready

    def _end_if(self, character: str) -> None:
        if character != "}":
            return
        self.ready = self.name is not None and (self._seen_arguments or not self._needs_arguments)
        self._break_off()
        if self.done and not self._seen_arguments:
            self._arguments = "{}"

    def _ended(self, text: str) -> None:
        """A key or a value is whole."""
        names, arguments, others = self._keys
        if self._expect == "key":
            self._key = _string(text)
            self._expect = ":"
            if self._key not in (*names, *arguments, *others):
                self.failed = not self.ready
            return
        self._expect = ","
        if self._key in names and self.name is None:
            self.name = _string(text)
            self.ready = self._seen_arguments
            self.failed = not self.name
        elif self._key in arguments and not self._seen_arguments:
            self._seen_arguments = True
            if text[0] not in "{[":
                inner = _string(text)
                self._arguments = inner if inner is not None else "{}" if text == "null" else text


def _string(text: str) -> str | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, str) else None
