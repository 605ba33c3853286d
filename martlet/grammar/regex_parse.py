r"""Regular expressions as text → a tree (read `regex.py` next).

The dialect is ECMAScript's with its `u` flag, as JSON Schema has it, plus what Python adds without
changing its meaning: `(?P<name>…)`, `(?i:…)`, `(?s)`, `\A`, `\Z`. \d, \w and \b are ASCII as in
ECMAScript; \s knows Unicode's white space. Back-references are not regular and are refused by name;
so is what other dialects read differently (possessive and atomic groups, multi-line anchors).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from martlet.errors import RequestError
from martlet.grammar.codepoints import LAST, Ranges, complement, fold_case, property_set, unite

_DEEPEST = 60
_MOST_REPEATS = 1 << 16


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Row:
    """Items one after another."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any of several alternatives."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """An item `low` to `high` times; None: no upper bound."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """A zero-width condition: "start", "end", "word" (boundary) or "inside" (no boundary)."""

    condition: str


@dataclass(frozen=True, slots=True)
class Look:
    """A look-ahead or look-behind, positive or `negative`."""

    item: Node
    ahead: bool
    negative: bool


Node = Chars | Row | Choice | Repeat | Anchor | Look

DIGIT: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES = (0x20, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF)
SPACE: Ranges = unite(((9, 13), *((c, c) for c in _SPACES)))
NEWLINE: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_CLASSES = MappingProxyType(
    {"d": DIGIT, "D": complement(DIGIT), "w": WORD, "W": complement(WORD), "s": SPACE, "S": complement(SPACE)}
)
_CONTROLS = MappingProxyType({"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0, "a": 7, "e": 27})


def parse(pattern: str) -> Node:
    """Return the tree of a pattern; RequestError says what is wrong with it, and where."""
    parser = _Parser(pattern)
    node = parser.choice(0)
    if parser.at < len(pattern):
        raise parser.wrong("a ')' that nothing opens")
    return node


class _Parser:
    """Reads a pattern from left to right; `at` is the next character's index."""

    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self.at = 0
        self.ignores_case = False
        self.dot_is_all = False

    def wrong(self, what: str, at: int | None = None) -> RequestError:
        """The error for an invalid pattern."""
        index = self.at if at is None else at
        return RequestError(f"Regular expression {self.text[:80]!r}, character {index}: {what}.", code="invalid_regex")

    def refuse(self, what: str, at: int) -> RequestError:
        """The error for something this engine does not support."""
        return RequestError(
            f"Regular expression {self.text[:80]!r}, character {at}: {what} is not supported.", code="unsupported_regex"
        )

    def peek(self, count: int = 1) -> str:
        """The next `count` characters, fewer at the end."""
        return self.text[self.at : self.at + count]

    def take(self, literal: str) -> bool:
        """Pass a text if it comes next; whether it did."""
        if self.text.startswith(literal, self.at):
            self.at += len(literal)
            return True
        return False

    # -- structure ---------------------------------------------------------------------------------
    def choice(self, depth: int) -> Node:
        """Read alternatives up to the closing bracket or the end."""
        if depth > _DEEPEST:
            raise self.wrong(f"more than {_DEEPEST} groups inside one another")
        options = [self.row(depth)]
        while self.take("|"):
            options.append(self.row(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def row(self, depth: int) -> Node:
        items: list[Node] = []
        while self.at < len(self.text) and self.peek() not in "|)":
            start = self.at
            item = self.atom(depth)
            items.append(self.repeated(item, start) if item is not None else Row(()))
        items = [item for item in items if item != Row(())]
        return items[0] if len(items) == 1 else Row(tuple(items))

    def repeated(self, item: Node, start: int) -> Node:
        """Read the quantifier after an item, if there is one."""
        bounds = self.quantifier()
        if bounds is None:
            return item
        if isinstance(item, Anchor) and self.text[start] != "(":
            raise self.wrong("nothing to repeat: an assertion stands before the quantifier", start)
        self.take("?")  # lazy quantifiers change the match, not the language
        if self.peek() == "+":
            raise self.refuse("a possessive quantifier", self.at)
        if self.quantifier() is not None:
            raise self.wrong("nothing to repeat: a quantifier follows another", start)
        return Repeat(item, *bounds)

    def quantifier(self) -> tuple[int, int | None] | None:
        """Read a quantifier; None if there is none here."""
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(mark):
                return bounds
        if self.peek() != "{":
            return None
        end = self.text.find("}", self.at)
        low, comma, high = self.text[self.at + 1 : max(end, 0)].partition(",")
        if end < 0 or not _is_count(low, comma) or (high and not _is_count(high, "")):
            return None  # a literal brace
        if max(len(low), len(high)) > 6 or max(int(low or 0), int(high or 0)) > _MOST_REPEATS:
            raise self.wrong(f"more than {_MOST_REPEATS:,} repetitions")
        least = int(low or 0)
        most = int(high) if high else (None if comma else least)
        if most is not None and most < least:
            raise self.wrong(f"from {least} to {most} repetitions: the second is less than the first")
        self.at = end + 1
        return least, most

    def atom(self, depth: int) -> Node | None:
        """Read one item; None for flags, which are no item."""
        start = self.at
        character = self.text[self.at]
        if character in "*+?" or (character == "{" and self.quantifier() is not None):
            raise self.wrong("nothing to repeat", start)
        self.at += 1
        if character == "(":
            return self.group(depth, start)
        if character == "[":
            return Chars(self.cased(self.bracket(start)))
        if character == ".":
            return Chars(((0, LAST),) if self.dot_is_all else complement(NEWLINE))
        if character in "^$":
            return Anchor("start" if character == "^" else "end")
        if character == "\\":
            return self.escape(start)
        return self.single(ord(character))

    def cased(self, ranges: Ranges) -> Ranges:
        """A set under the flag for case."""
        return fold_case(ranges) if self.ignores_case else ranges

    def single(self, codepoint: int) -> Node:
        return Chars(self.cased(unite(((codepoint, codepoint),))))

    # -- groups ------------------------------------------------------------------------------------
    def group(self, depth: int, start: int) -> Node | None:
        """Read what follows an opening bracket."""
        if not self.take("?"):
            return self.inside(depth, start)
        for mark, ahead, negative in (("=", True, False), ("!", True, True), ("<=", False, False), ("<!", False, True)):
            if self.take(mark):
                return Look(self.inside(depth, start), ahead, negative)
        if self.take(":"):
            return self.inside(depth, start)
        if self.take("P=") or self.take("P>"):
            raise self.refuse("a reference to a group", start)
        if self.take("P<") or self.take("<"):
            name, closed, _ = self.text[self.at :].partition(">")
            if not closed or not name.isidentifier():
                raise self.wrong("a group's name is expected, and '>' after it")
            self.at += len(name) + 1
            return self.inside(depth, start)
        if self.peek() in (">", "|", "(", "#", "R", "&"):
            raise self.refuse(f"a group that begins with '(?{self.peek()}'", start)
        return self.flags(depth, start)

    def inside(self, depth: int, start: int) -> Node:
        """Read a group's inside and its end; flags set inside end with the group."""
        kept = self.ignores_case, self.dot_is_all
        node = self.choice(depth + 1)
        self.ignores_case, self.dot_is_all = kept
        if not self.take(")"):
            raise self.wrong("a '(' that nothing closes", start)
        return node

    def flags(self, depth: int, start: int) -> Node | None:
        on = True
        kept = self.ignores_case, self.dot_is_all
        while (letter := self.peek()) and letter in "isaumx-":
            if letter in "mx":
                raise self.refuse(f"the flag {letter!r}", self.at)
            if letter == "-":
                on = False
            elif letter == "i":
                self.ignores_case = on
            elif letter == "s":
                self.dot_is_all = on
            self.at += 1  # "a" and "u" change nothing here
        if self.take(")"):
            return None
        if self.take(":"):
            node = self.choice(depth + 1)
            self.ignores_case, self.dot_is_all = kept
            if self.take(")"):
                return node
        raise self.wrong("a group that begins with '(?' and goes on with nothing known", start)

    # -- escapes and classes -----------------------------------------------------------------------
    def escape(self, start: int) -> Node:
        """Read what follows a backslash outside of a class."""
        letter = self.peek()
        anchors = {"b": "word", "B": "inside", "A": "start", "Z": "end", "z": "end"}
        if letter in anchors and letter:
            self.at += 1
            return Anchor(anchors[letter])
        if letter.isdigit() and letter != "0":
            raise self.refuse("a back-reference", start)
        if letter == "k":
            raise self.refuse("a back-reference", start)
        ranges = self.escaped_set(start)
        return Chars(self.cased(ranges if ranges is not None else _single(self.escaped(start))))

    def escaped_set(self, start: int) -> Ranges | None:
        r"""Read \d, \p{…} and the like after the backslash; None if it is no set."""
        letter = self.peek()
        if letter in _CLASSES and letter:
            self.at += 1
            return _CLASSES[letter]
        if letter not in ("p", "P"):
            return None
        self.at += 1
        if self.take("{"):
            name, closed, _ = self.text[self.at :].partition("}")
            if not closed:
                raise self.wrong("a '{' that nothing closes", start)
            self.at += len(name) + 1
        else:
            name = self.peek()
            self.at += 1
        try:
            ranges = property_set(name)
        except RequestError as error:
            raise self.wrong(str(error).rstrip("."), start) from None
        return ranges if letter == "p" else complement(ranges)

    def escaped(self, start: int) -> int:
        """Read the single character that an escape stands for."""
        letter = self.peek()
        if not letter:
            raise self.wrong("a backslash at the end", start)
        self.at += 1
        if letter == "0" and self.peek().isdigit():
            raise self.refuse("an octal escape", start)
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter == "x":
            return self.hexadecimal(2, start)
        if letter == "c" and self.peek().isascii() and self.peek().isalpha():
            self.at += 1
            return ord(self.text[self.at - 1]) & 31
        if letter == "U":
            return self.hexadecimal(8, start)
        if letter == "u":
            return self.unicode(start)
        if letter.isascii() and letter.isalnum():
            raise self.wrong(f"the escape '\\{letter}' has no meaning here", start)
        return ord(letter)

    def unicode(self, start: int) -> int:
        r"""Read \uXXXX, a surrogate pair of them, or \u{…}."""
        if self.take("{"):
            digits, closed, _ = self.text[self.at :].partition("}")
            if not closed or len(digits) > 8:
                raise self.wrong("hexadecimal digits and '}' are expected", start)
            value = self.hexadecimal(len(digits), start)
            self.at += 1
            return value
        value = self.hexadecimal(4, start)
        if 0xD800 <= value < 0xDC00 and self.take("\\u"):
            low = self.hexadecimal(4, start)
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + ((value - 0xD800) << 10) + (low - 0xDC00)
        if 0xD800 <= value < 0xE000:
            raise self.wrong("half a surrogate pair, which is no character", start)
        return value

    def hexadecimal(self, count: int, start: int) -> int:
        """Read exactly `count` hexadecimal digits."""
        digits = self.peek(count)
        if len(digits) < count or not count or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise self.wrong(f"{count or 1} hexadecimal digits are expected", start)
        self.at += count
        if int(digits, 16) > LAST:
            raise self.wrong("there is no such character", start)
        return int(digits, 16)

    def bracket(self, start: int) -> Ranges:
        """Read a class after its opening bracket."""
        negative = self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            if self.at >= len(self.text):
                raise self.wrong("a '[' that nothing closes", start)
            begin = self.at
            first = self.member()
            if not isinstance(first, int):
                ranges += first
                continue
            if self.peek() == "-" and self.peek(2) not in ("-]", "-"):
                before = self.at
                self.at += 1
                last = self.member()
                if isinstance(last, int):
                    if last < first:
                        raise self.wrong("a range whose end comes before its beginning", begin)
                    ranges.append((first, last))
                    continue
                self.at = before  # before a set, '-' stands for itself
            ranges.append((first, first))
        members = unite(ranges)
        return complement(self.cased(members)) if negative else members

    def member(self) -> int | Ranges:
        """Read one character or set of a class."""
        start = self.at
        self.at += 1
        if self.text[start] != "\\":
            return ord(self.text[start])
        if self.take("b"):
            return 8
        if self.peek().isdigit() and self.peek() != "0":
            raise self.refuse("an octal escape", start)
        ranges = self.escaped_set(start)
        return self.escaped(start) if ranges is None else ranges


def _single(codepoint: int) -> Ranges:
    return unite(((codepoint, codepoint),))


def _is_count(digits: str, comma: str) -> bool:
    return (digits.isascii() and digits.isdigit()) or (not digits and bool(comma))
