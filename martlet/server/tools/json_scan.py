"""Reads JSON by character, so that incomplete values can be streamed (read `calls.py` next).

Format: https://www.rfc-editor.org/rfc/rfc8259
"""

import json


class ValueScanner:
    """Finds the end of a value.

    An object, a list or a string ends with its last character, other values before the next.
    """

    def __init__(self) -> None:
        self.text = ""
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, character: str) -> bool:
        """Add a character; False if the value ended before it."""
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
    """Reads `{"name": …, "arguments": {…}}`: the name, and the arguments' text as it arrives.

    `ready`: it must be a call, since it has a name, and arguments or its end. `failed`: it is no
    call, and nothing of it was returned. Arguments in a string are unwrapped once complete.
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
        self._expect = "{"  # the next element: { key : value , end
        self._value = ValueScanner()
        self._arguments = ""
        self._seen_arguments = False

    def feed(self, character: str) -> None:
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
        """The arguments' text since the last call of this method; "" until it is ready."""
        if not self.ready:
            return ""
        arguments, self._arguments = self._arguments, ""
        return arguments

    def _punctuation(self, character: str) -> None:
        if character in " \t\r\n":
            return
        if character in {"{": "{", ":": ":", ",": ",}"}.get(self._expect, ""):
            self._expect = {"{": "key", ":": "value", ",": "key", "}": "end"}[character]
            self._end_if(character)
        else:
            self._break_off()

    def _break_off(self) -> None:
        """End the scan: the text is no call, or no JSON after arguments that were returned."""
        self.done, self.failed = self.ready, not self.ready

    def _end_if(self, character: str) -> None:
        if character != "}":
            return
        self.ready = self.name is not None and (self._seen_arguments or not self._needs_arguments)
        self._break_off()
        if self.done and not self._seen_arguments:
            self._arguments = "{}"

    def _ended(self, text: str) -> None:
        """Handle a complete key or value."""
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
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
