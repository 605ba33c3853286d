r"""GBNF, llama.cpp's grammar format, as rules (read `rules.py` next).

    root ::= "yes" | "no" [.!]{1,3}     # a comment
    word ::= [a-z\u00e0-\u00ff]+ other? (nested | groups)* .

A rule ends with its line, except inside brackets and after a bar. Tokens by name or number
(`<think>`, `<[12]>`) are not supported: a grammar here is about text. Format: llama.cpp's
grammars/README.md.
"""

import re

from martlet.errors import RequestError
from martlet.grammar.codepoints import ANY, LAST, complement, unite
from martlet.grammar.regex_parse import Chars, Repeat
from martlet.grammar.rules import Ref, Rule, choice, flat, literal

_DEEPEST = 60
_MOST_REPEATS = 10_000
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\n\r]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\n\r]*)*")
_BOUNDS = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_ESCAPES = {"n": 10, "r": 13, "t": 9, "\\": 92, '"': 34, "[": 91, "]": 93, "-": 45, "^": 94, "/": 47, "'": 39}
_HEX = {"x": 2, "u": 4, "U": 8}


def gbnf_rules(text: str) -> dict[str, Rule]:
    """Return the rules of a grammar by name; RequestError says what is wrong, and in which line."""
    return _Parser(text).rules()


class _Parser:
    """Reads a grammar from beginning to end; `at` is the next character's index."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def wrong(self, what: str, at: int | None = None) -> RequestError:
        """The error for an invalid grammar, with the line."""
        index = self.at if at is None else at
        line = self.text.count("\n", 0, index) + 1
        return RequestError(f"GBNF grammar, line {line}: {what}.", code="invalid_grammar")

    def space(self, lines: bool) -> None:
        """Pass white space and comments; `lines` passes line ends too."""
        match = (_SPACE_AND_LINES if lines else _SPACE).match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def take(self, literal_text: str) -> bool:
        """Pass a text if it comes next; whether it did."""
        if self.text.startswith(literal_text, self.at):
            self.at += len(literal_text)
            return True
        return False

    def rules(self) -> dict[str, Rule]:
        rules: dict[str, Rule] = {}
        self.space(lines=True)
        while self.at < len(self.text):
            start = self.at
            name = self.name()
            self.space(lines=False)
            if not self.take("::="):
                raise self.wrong("'::=' is expected after a rule's name")
            self.space(lines=True)
            body = self.alternatives(0)
            if name in rules:
                raise self.wrong(f"the rule {name!r} is there twice", start)
            rules[name] = body
            self.space(lines=False)
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                raise self.wrong(f"{self.text[self.at]!r} is not expected here")
            self.space(lines=True)
        return rules

    def name(self) -> str:
        match = _NAME.match(self.text, self.at)
        if match is None:
            raise self.wrong("a rule's name is expected")
        self.at = match.end()
        return match.group()

    def alternatives(self, depth: int) -> Rule:
        if depth > _DEEPEST:
            raise self.wrong(f"more than {_DEEPEST} groups inside one another")
        rows = [self.row(depth)]
        while self.take("|"):
            self.space(lines=True)
            rows.append(self.row(depth))
        return choice(rows)

    def row(self, depth: int) -> Rule:
        """Read one alternative, which may be empty."""
        items: list[Rule] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in "|)\r\n":
                break
            items.append(self.repeated(self.item(character, depth)))
            self.space(lines=depth > 0)
        return flat(items)

    def item(self, character: str, depth: int) -> Rule:
        start = self.at
        if character == '"':
            return self.literal()
        if character == "[":
            return self.character_class()
        if character == ".":
            self.at += 1
            return Chars(ANY)
        if character == "(":
            self.at += 1
            self.space(lines=True)
            inner = self.alternatives(depth + 1)
            if not self.take(")"):
                raise self.wrong("a '(' that nothing closes", start)
            return inner
        if character in "<!":
            raise self.wrong("tokens by name or number are not supported; write their text")
        if character in "*+?{":
            raise self.wrong("nothing to repeat")
        if _NAME.match(self.text, self.at) is None:
            raise self.wrong(f"{character!r} is not expected here")
        return Ref(self.name())

    def repeated(self, item: Rule) -> Rule:
        """Read the quantifiers after an item."""
        while True:
            self.space(lines=False)
            bounds: tuple[int, int | None] | None = None
            for mark, known in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
                if self.take(mark):
                    bounds = known
            if bounds is None and self.text.startswith("{", self.at):
                match = _BOUNDS.match(self.text, self.at)
                if match is None:
                    raise self.wrong("{m}, {m,} or {m,n} is expected")
                low = int(match[1])
                bounds = low, (int(match[3]) if match[3] else None if match[2] else low)
                if max(low, bounds[1] or 0) > _MOST_REPEATS or (bounds[1] is not None and bounds[1] < low):
                    raise self.wrong(f"repetitions go from few to more, and to {_MOST_REPEATS:,} at most")
                self.at = match.end()
            if bounds is None:
                return item
            item = Repeat(item, *bounds)  # type: ignore[arg-type]

    def literal(self) -> Rule:
        start = self.at
        self.at += 1
        characters = []
        while not self.take('"'):
            if self.at >= len(self.text) or self.text[self.at] in "\r\n":
                raise self.wrong("a '\"' that nothing closes", start)
            characters.append(chr(self.character()))
        return literal("".join(characters))

    def character_class(self) -> Rule:
        start = self.at
        self.at += 1
        negative = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            if self.at >= len(self.text):
                raise self.wrong("a '[' that nothing closes", start)
            first = last = self.character()
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                last = self.character()
                if last < first:
                    raise self.wrong("a range whose end comes before its beginning")
            ranges.append((first, last))
        members = unite(ranges)
        return Chars(complement(members) if negative else members)

    def character(self) -> int:
        """Read one character, perhaps escaped."""
        if self.at >= len(self.text):
            raise self.wrong("the grammar ends inside a text or class")
        character = self.text[self.at]
        self.at += 1
        if character != "\\":
            return ord(character)
        letter = self.text[self.at : self.at + 1]
        self.at += 1
        if letter in _HEX and letter:
            digits = self.text[self.at : self.at + _HEX[letter]]
            if not re.fullmatch(rf"[0-9a-fA-F]{{{_HEX[letter]}}}", digits) or int(digits, 16) > LAST:
                raise self.wrong(f"{_HEX[letter]} hexadecimal digits of a character are expected after \\{letter}")
            self.at += _HEX[letter]
            value = int(digits, 16)
            if 0xD800 <= value < 0xE000:
                raise self.wrong("half a surrogate pair, which is no character")
            return value
        if letter not in _ESCAPES or not letter:
            raise self.wrong(f"the escape '\\{letter}' has no meaning")
        return _ESCAPES[letter]
