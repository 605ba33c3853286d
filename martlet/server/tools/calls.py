"""Separates tool calls from streamed text (read `call_formats.py` first, which has the formats).

The result does not depend on the cuts between pieces: text is returned only when no continuation
could change its meaning, and calls are read character by character.

    TEXT ── start of calls ──▸ BETWEEN ── { ──▸ CALL ── its end ──▸ BETWEEN
      ▴                           │ anything else
      └───────────────────────────┘

Text that looks like a call but turns out to be none, before its name is known, is content again.
White space before and after calls is dropped.
"""

import ast
import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from martlet.server.tools.call_formats import ToolFormat
from martlet.server.tools.json_scan import CallScanner, ValueScanner
from martlet.server.tools.parts import Arguments, Call, Content, Part

_SEPARATORS = " \t\r\n,;[]"
_MAX_HEADER = 256  # characters of a name and its marks
_BARE_PYTHON = re.compile(r"\[\s*([A-Za-z_][\w.]*(\(.*)?)?", re.DOTALL)


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    most = min(len(text), max(map(len, marks), default=1) - 1)
    return next((n for n in range(most, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class CallParser:
    """Separates calls from text."""

    def __init__(
        self, form: ToolFormat, new_id: Callable[[int], str] | None = None, schemas: Mapping[str, Any] | None = None
    ) -> None:
        """`schemas` of the tools' parameters, by name: they say which arguments are no strings."""
        self._form = form
        self._schemas = schemas or {}
        self._new_id = new_id or (lambda length: secrets.token_hex(length)[:length])
        self._buffer = ""
        self._state: Callable[[], list[Part] | None] = self._bare if form.bare else self._text
        self._space = ""  # white space, dropped if a call follows it
        self._raw = ""  # the text since the start of a possible call
        self._open = form.bare  # a call may have begun since the last one
        self._goes_on = False  # text has followed the last call
        self._n_calls = 0
        self._scanner: CallScanner | None = None
        self._value: ValueScanner | None = None
        self._properties: Mapping[str, Any] = {}  # schemas of the arguments of a call in tags
        self._separator = "{"  # before the next of them
        self._looked_at = 0  # characters in which an argument's end was looked for
        self._final = False

    def feed(self, text: str) -> list[Part]:
        """Parse more text; return the parts that are certain."""
        self._buffer += text
        parts: list[Part] = []
        while (new_parts := self._state()) is not None:
            parts += new_parts
        return parts

    def finish(self) -> list[Part]:
        """Return the rest at the end of the answer. A call that was cut off stays cut off."""
        self._final = True
        parts = self.feed("")
        scanner = self._scanner
        if scanner is not None and not scanner.ready:
            self._raw += scanner.raw
        if self._raw:
            parts += self._shown(self._raw)
        if self._space and not self._n_calls:
            parts.append(Content(self._space))
        self._raw = self._space = ""
        return parts

    # -- states: each returns parts and continues, or None if it needs more text -------------------
    def _text(self) -> list[Part] | None:
        starts = [(at, mark) for mark in self._form.starts if (at := self._buffer.find(mark)) >= 0]
        if starts:
            at, mark = min(starts)
            shown, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
            self._raw, self._open = mark, True
            self._state = self._between
            return self._shown(shown)
        keep = 0 if self._final else held_back(self._buffer, self._form.starts)
        shown, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
        return self._shown(shown) if shown else None

    def _bare(self) -> list[Part] | None:
        """At the start of an answer that may consist only of calls."""
        rest = self._buffer.lstrip()
        if not rest and not self._final:
            return None
        if self._form.pythonic:
            return self._bare_python(rest)
        if rest.startswith("{"):
            self._state = self._between
        elif self._final or not any(start.startswith(rest) for start in self._form.starts) or rest in self._form.starts:
            self._state = self._text
        else:
            return None
        return []

    def _bare_python(self, rest: str) -> list[Part] | None:
        match = _BARE_PYTHON.match(rest)
        if match is not None and match.end() == len(rest):
            if not self._final:
                return None
            calls = _python_calls(rest)
            if calls:
                self._buffer = ""
                self._state = self._text
                return [part for name, arguments in calls for part in self._whole_call(name, arguments)]
        self._state = self._text
        return []

    def _between(self) -> list[Part] | None:
        """After the start of calls, or after a call: another call or text may follow."""
        rest = self._buffer
        for mark in (*self._form.ends, *self._form.starts):
            if rest.startswith(mark):
                self._open = self._open or mark in self._form.starts
                return self._skip(len(mark))
            if not self._final and mark.startswith(rest):  # also if the rest is empty
                return None
        if not rest:
            return None
        if rest[0] in _SEPARATORS:
            return self._skip(1)
        if rest[0] == "{":
            keys = self._form.name_keys, self._form.argument_keys, self._form.other_keys
            self._scanner = CallScanner(*keys, needs_arguments=self._form.bare)
            self._state = self._object
            return []
        if self._form.tags is not None:
            return self._tagged(rest)
        return self._named(rest) if self._form.header else self._no_call()

    def _skip(self, count: int) -> list[Part]:
        """Skip a mark or separator; it is content after all if no call follows."""
        if self._open:
            self._raw += self._buffer[:count]
        self._buffer = self._buffer[count:]
        return []

    def _named(self, rest: str) -> list[Part] | None:
        """A name in front of its arguments."""
        assert self._form.header is not None
        at = rest.find("{")
        if at < 0:
            return None if len(rest) <= _MAX_HEADER and not self._final else self._no_call()
        match = re.fullmatch(self._form.header, rest[:at])
        if match is None:
            return self._no_call()
        self._buffer = rest[at:]
        self._value = ValueScanner()
        self._state = self._arguments
        return [self._new_call(match[1])]

    def _tagged(self, rest: str) -> list[Part] | None:
        """A name in or after a tag, in front of arguments in tags."""
        assert self._form.tags is not None
        match = re.match(self._form.tags.name, rest)
        if match is None:
            return None if len(rest) <= _MAX_HEADER and not self._final else self._no_call()
        self._buffer, self._state = rest[match.end() :], self._tagged_arguments
        self._separator, self._looked_at = "{", 0
        schema = self._schemas.get(match[1])
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        return [self._new_call(match[1])]

    def _tagged_arguments(self) -> list[Part] | None:
        """Inside a call whose arguments are in tags, each known when its tag closes."""
        tags, rest = self._form.tags, self._buffer
        assert tags is not None
        if end := re.match(tags.end, rest):
            self._buffer, self._state = rest[end.end() :], self._text
            return [Arguments(self._n_calls - 1, "{}" if self._separator == "{" else "}")]
        close = rest.find(tags.close, max(0, self._looked_at - len(tags.close)))
        self._looked_at = len(rest)
        if close < 0:
            return None
        match = re.fullmatch(tags.argument, rest[: close + len(tags.close)], re.DOTALL)
        self._buffer, self._looked_at = rest[close + len(tags.close) :], 0
        if match is None:
            return []  # a stray tag
        value = _typed(match[2], self._properties.get(match[1]))
        text = f"{self._separator}{json.dumps(match[1], ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        self._separator = ", "
        return [Arguments(self._n_calls - 1, text)]

    def _object(self) -> list[Part] | None:
        """Inside a call that is a single object."""
        scanner = self._scanner
        assert scanner is not None
        parts: list[Part] = []
        known = scanner.ready
        for at, character in enumerate(self._buffer):
            scanner.feed(character)
            if scanner.failed or scanner.done:
                self._buffer = self._buffer[at + 1 :]
                break
        else:
            self._buffer = ""
        if scanner.failed:
            self._buffer = scanner.raw + self._buffer
            self._scanner = None
            return self._no_call()
        if scanner.ready and not known:
            assert scanner.name is not None
            parts.append(self._new_call(scanner.name))
        if arguments := scanner.take_arguments():
            parts.append(Arguments(self._n_calls - 1, arguments))
        if scanner.done:
            self._scanner = None
            self._state = self._between
            return parts
        return parts or None

    def _arguments(self) -> list[Part] | None:
        """Inside arguments that follow their call's name."""
        value = self._value
        assert value is not None
        start = len(value.text)
        for at, character in enumerate(self._buffer):
            value.feed(character)
            if value.done:
                self._buffer = self._buffer[at + 1 :]
                self._state = self._between
                break
        else:
            self._buffer = ""
        text = value.text[start:]
        return [Arguments(self._n_calls - 1, text)] if text else None

    def _no_call(self) -> list[Part]:
        """Return the text of what was no call, with the next character, as content."""
        self._state = self._text
        raw, self._raw = self._raw, ""
        first, self._buffer = self._buffer[:1], self._buffer[1:]
        return self._shown(raw + first)

    # -- parts -------------------------------------------------------------------------------------
    def _shown(self, text: str) -> list[Part]:
        """Content without the white space at its end, which waits for the next text."""
        text = self._space + text
        if self._n_calls and not self._goes_on:
            text = text.lstrip()
        content = text.rstrip()
        self._space = text[len(content) :]
        self._goes_on = self._goes_on or bool(content)
        return [Content(content)] if content else []

    def _new_call(self, name: str) -> Call:
        self._n_calls += 1
        self._raw, self._open, self._goes_on, self._space = "", False, False, ""
        return Call(self._n_calls - 1, f"call_{self._new_id(self._form.id_length)}", name)

    def _whole_call(self, name: str, arguments: str) -> list[Part]:
        call = self._new_call(name)
        return [call, Arguments(call.index, arguments)]


def _python_calls(text: str) -> list[tuple[str, str]]:
    """The calls of `[f(a=1), g()]`, with their arguments as JSON; an empty list for other text."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return []
        return [_python_call(element) for element in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("not a call with named arguments")
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False)


def _typed(text: str, schema: Any) -> Any:
    """An argument's text as its schema's type: JSON where that is no string, else the text."""
    types, literal = _types(schema), {"True": True, "False": False, "None": None}
    if "string" in types or not types:
        return None if "null" in types and text.strip() in ("null", "None") else text
    if text.strip() in literal:
        return literal[text.strip()]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def _types(schema: Any, choices: bool = True) -> set[str]:
    """The types that a schema, which may be anything, allows; those of its choices as well."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    types = {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
    for key in ("anyOf", "oneOf") if choices else ():
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            types |= _types(option, choices=False)
    return types
