"""Lark's EBNF as rules, as vLLM and SGLang take it (read `rules.py` next).

    ?start: expr                       // "?", "!" and "-> name" shape parse trees: no effect here
    expr: term (("+" | "-") term)*
    NUMBER: /[0-9]+/ | "0x" ("0".."9" | "a".."f"i)~1..8
    %import common.WS
    %ignore WS

Names in capitals are terminals. Ignored text may stand before the first and after each terminal, up
to 16 characters of it, so that white space comes to an end. Priorities choose between parse trees
and change no text, so they are read and not used. Templates, %declare, %extend, %override, and
imports from elsewhere than `common` are refused by name. Format:
https://lark-parser.readthedocs.io/en/stable/grammar.html
"""

import ast
import re
from types import MappingProxyType

from martlet.errors import RequestError
from martlet.grammar.regex_parse import Chars, Repeat, parse
from martlet.grammar.rules import Ref, Rule, choice, flat, literal, replaced

MOST_IGNORED = 16  # characters in a row
_DEEPEST = 60
_MOST_REPEATS = 10_000
_STATEMENT = re.compile(r"^[ \t]*(?:[?!]{0,2}[A-Za-z_]\w*(?:\.-?\d+)?(?:\{[^}]*\})?[ \t]*:|%)", re.M)
_HEAD = re.compile(r"[ \t]*[?!]{0,2}([A-Za-z_]\w*)(?:\.-?\d+)?(\{[^}]*\})?[ \t]*:")
_TOKEN = re.compile(
    r'(?P<string>"(?:[^"\\\n]|\\.)*"i?)|(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imslux]*)|(?P<name>[?!]?[A-Za-z_]\w*)'
    r"|(?P<number>-?\d+)|(?P<mark>->|\.\.|[|()\[\]*+?~{},.%<>@])|(?P<space>[ \t\r\n]+|//[^\n]*|\#[^\n]*)"
)
# Lark's own `common` grammar, as regular expressions.
_COMMON = MappingProxyType(
    {
        "DIGIT": "[0-9]",
        "HEXDIGIT": "[a-fA-F0-9]",
        "INT": "[0-9]+",
        "SIGNED_INT": "[+-]?[0-9]+",
        "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
        "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
        "SIGNED_FLOAT": r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
        "NUMBER": r"[0-9]+([eE][+-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
        "SIGNED_NUMBER": r"[+-]?([0-9]+([eE][+-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
        "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
        "LCASE_LETTER": "[a-z]",
        "UCASE_LETTER": "[A-Z]",
        "LETTER": "[A-Za-z]",
        "WORD": "[A-Za-z]+",
        "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
        "WS_INLINE": r"[ \t]+",
        "WS": r"[ \t\f\r\n]+",
        "CR": r"\r",
        "LF": r"\n",
        "NEWLINE": r"(\r?\n)+",
        "SH_COMMENT": r"#[^\n]*",
        "CPP_COMMENT": r"//[^\n]*",
        "C_COMMENT": r"/\*([^*]|\*+[^*/])*\*+/",
        "SQL_COMMENT": r"--[^\n]*",
    }
)


def lark_rules(text: str) -> tuple[dict[str, Rule], str]:
    """Return a grammar's rules by name, and the first rule's name.

    RequestError says what is wrong.
    """
    bodies, ignored, imported = _statements(text)
    terminals: dict[str, Rule] = {name: parse(pattern) for name, pattern in imported.items()}
    terminals |= {name: _Body(name, body).parse() for name, body in bodies.items() if _is_terminal(name)}
    rules: dict[str, Rule] = {name: _inlined(rule, terminals, 0) for name, rule in terminals.items()}
    between: Rule | None = None
    if ignored:
        between = Ref(" ignored")
        skipped = [_inlined(_Body("%ignore", body).parse(), terminals, 0) for body in ignored]
        rules[" ignored"] = _bounded(skipped)
    rules |= {name: _Body(name, body, between).parse() for name, body in bodies.items() if not _is_terminal(name)}
    if "start" not in rules:
        raise RequestError("The Lark grammar has no rule 'start', with which it begins.", code="invalid_grammar")
    if between is None:
        return rules, "start"
    rules[" start"] = flat([between, Ref("start")])
    return rules, " start"


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _bounded(bodies: list[Rule]) -> Rule:
    """Ignored text, bounded: a number of single characters, and at most two longer texts."""
    singles = [body.item if isinstance(body, Repeat) else body for body in bodies]
    plain = [body for body in singles if isinstance(body, Chars)]
    others = [body for body, single in zip(bodies, singles, strict=True) if not isinstance(single, Chars)]
    rows: list[Rule] = []
    if plain:
        rows.append(Repeat(choice(list(plain)), 0, MOST_IGNORED))  # type: ignore[arg-type]
    if others:
        rows += [Repeat(flat([choice(others), *rows]), 0, 2)]  # type: ignore[arg-type]
    return flat(rows)


def _statements(text: str) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """The rules' bodies by name, the ignored bodies, and the imported terminals."""
    starts = [match.start() for match in _STATEMENT.finditer(text)]
    if text[: starts[0] if starts else len(text)].strip() and not re.fullmatch(
        r"(\s|//[^\n]*|#[^\n]*)*", text[: starts[0] if starts else len(text)]
    ):
        raise RequestError("The Lark grammar begins with something that is no rule.", code="invalid_grammar")
    if not starts:
        raise RequestError("The grammar is empty: it has no rule.", code="invalid_grammar")
    bodies: dict[str, str] = {}
    ignored: list[str] = []
    terminals: dict[str, str] = {}
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        statement = text[start:end]
        head = _HEAD.match(statement)
        if head is None:
            _directive(statement.strip(), ignored, terminals)
            continue
        name = head[1]
        if head[2]:
            raise _wrong(name, "templates are not supported")
        if name in bodies:
            raise _wrong(name, "it is there twice")
        bodies[name] = statement[head.end() :]
    return bodies, ignored, terminals


def _directive(statement: str, ignored: list[str], terminals: dict[str, str]) -> None:
    if statement.startswith("%ignore"):
        ignored.append(statement.removeprefix("%ignore"))
        return
    single = re.fullmatch(r"%import\s+common\s*\.\s*(\w+)(?:\s*->\s*(\w+))?\s*(?://.*|#.*)?", statement, re.S)
    several = re.fullmatch(r"%import\s+common\s*\(([\w\s,]+)\)\s*", statement)
    names = [(single[1], single[2] or single[1])] if single else []
    if several:
        names = [(name.strip(), name.strip()) for name in several[1].split(",") if name.strip()]
    if not names:
        raise RequestError(f"Lark grammar: {statement[:60]!r} is not supported.", code="invalid_grammar")
    for name, own in names:
        if name not in _COMMON:
            raise RequestError(f"Lark grammar: common has no {name!r} here.", code="invalid_grammar")
        terminals[own] = _COMMON[name]


def _wrong(name: str, what: str) -> RequestError:
    return RequestError(f"Lark grammar, rule {name!r}: {what}.", code="invalid_grammar")


def _inlined(rule: Rule, rules: dict[str, Rule], depth: int) -> Rule:
    """A terminal with the terminals it uses written out."""
    if depth > _DEEPEST:
        raise RequestError("Lark grammar: a terminal leads to itself; only rules may.", code="invalid_grammar")

    def change(ref: Ref) -> Rule:
        if ref.name not in rules or not _is_terminal(ref.name):
            raise RequestError(
                f"Lark grammar: a terminal uses {ref.name!r}, which is no terminal of it.", code="invalid_grammar"
            )
        return _inlined(rules[ref.name], rules, depth + 1)

    return replaced(rule, change)


class _Body:
    """Reads the text after a rule's colon."""

    def __init__(self, name: str, text: str, between: Rule | None = None) -> None:
        self.name = name
        self.between = between
        self.tokens: list[tuple[str, str]] = []
        self.at = 0
        index = 0
        while index < len(text):
            match = _TOKEN.match(text, index)
            if match is None:
                raise _wrong(name, f"{text[index : index + 20]!r} is not expected")
            assert match.lastgroup is not None
            if match.lastgroup != "space":
                self.tokens.append((match.lastgroup, match.group()))
            index = match.end()

    def peek(self) -> tuple[str, str]:
        """The next token; ("", "") at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ("", "")

    def take(self, mark: str) -> bool:
        """Pass a mark if it is the next token; whether it was."""
        if self.peek() == ("mark", mark):
            self.at += 1
            return True
        return False

    def parse(self) -> Rule:
        rule = self.alternatives(0)
        if self.at < len(self.tokens):
            raise _wrong(self.name, f"{self.peek()[1]!r} is not expected")
        return rule

    def alternatives(self, depth: int) -> Rule:
        """Read alternatives, each with an optional alias."""
        if depth > _DEEPEST:
            raise _wrong(self.name, f"more than {_DEEPEST} groups inside one another")
        rows = []
        while True:
            items: list[Rule] = []
            while self.peek()[0] and self.peek()[1] not in ("|", ")", "]", "->"):
                items.append(self.repeated(self.item(depth)))
            rows.append(flat(items))
            if self.take("->"):
                self.at += 1
            if not self.take("|"):
                return choice(rows)

    def item(self, depth: int) -> Rule:
        group, text = self.peek()
        self.at += 1
        if group == "string":
            if self.take(".."):
                return self.terminal(self.range(text))
            return self.terminal(_string(self.name, text))
        if group == "regex":
            pattern, _, flags = text[1:].rpartition("/")
            if set(flags) & {"m", "x"}:
                raise _wrong(self.name, f"the flags {flags!r} are not supported")
            flagged = "".join(flag for flag in flags if flag in "is")
            return self.terminal(parse((f"(?{flagged})" if flagged else "") + pattern.replace("\\/", "/")))
        if group == "name":
            ref = Ref(text.lstrip("?!"))
            return self.terminal(ref) if _is_terminal(ref.name) else ref
        if text in ("(", "["):
            inner = self.alternatives(depth + 1)
            if not self.take(")" if text == "(" else "]"):
                raise _wrong(self.name, f"a {text!r} that nothing closes")
            return inner if text == "(" else Repeat(inner, 0, 1)  # type: ignore[arg-type]
        raise _wrong(self.name, f"{text!r} is not expected")

    def terminal(self, rule: Rule) -> Rule:
        """A terminal, followed in a rule by what is ignored."""
        return rule if self.between is None else flat([rule, self.between])

    def range(self, first: str) -> Rule:
        """Read the end of a range such as "a".."z"."""
        group, last = self.peek()
        self.at += 1
        low, high = _unquoted(self.name, first), _unquoted(self.name, last) if group == "string" else ""
        if len(low) != 1 or len(high) != 1 or low > high:
            raise _wrong(self.name, f"{first}..{last} is no range of characters")
        return Chars(((ord(low), ord(high)),))

    def repeated(self, item: Rule) -> Rule:
        """Read the quantifier after an item."""
        for mark, low, high in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self.take(mark):
                return Repeat(item, low, high)  # type: ignore[arg-type]
        if not self.take("~"):
            return item
        least = self.number()
        most = self.number() if self.take("..") else least
        if not 0 <= least <= most <= _MOST_REPEATS:
            raise _wrong(self.name, f"repetitions go from few to more, and to {_MOST_REPEATS:,} at most")
        return Repeat(item, least, most)  # type: ignore[arg-type]

    def number(self) -> int:
        group, text = self.peek()
        if group != "number" or len(text) > 9:
            raise _wrong(self.name, "a number is expected after '~'")
        self.at += 1
        return int(text)


def _unquoted(name: str, text: str) -> str:
    """The text of a string, with Python's escapes."""
    try:
        value = ast.literal_eval(text.removesuffix("i"))
    except (ValueError, SyntaxError):
        raise _wrong(name, f"{text[:40]} is no string") from None
    assert isinstance(value, str)
    if not all(ord(c) < 0xD800 or ord(c) > 0xDFFF for c in value):
        raise _wrong(name, "half a surrogate pair is no character")
    return value


def _string(name: str, text: str) -> Rule:
    return literal(_unquoted(name, text), ignores_case=text.endswith("i"))
