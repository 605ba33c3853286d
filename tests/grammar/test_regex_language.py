"""Regular expressions as languages: against Python's `re` where the dialects agree, and by hand
where they do not.
"""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.errors import RequestError
from martlet.grammar.language import Language, literals
from martlet.grammar.regex import regex_language
from martlet.grammar.utf8 import Escapes, to_bytes, to_json

# Both dialects mean the same by these, on texts without line ends.
SAME = [
    "abc",
    "a|b*",
    "[a-c]{2,4}",
    "^a.*z$",
    r"\d{3}-\d{4}",
    "^(?!.*foo).*$",
    r"^(?=.*[A-Z])(?=.*\d).{3,}$",
    "(?:(?!ab).)*",
    r"\bab\b",
    r"a\B",
    "(?<=a)b",
    "(?<!a)b",
    "(a|b)*a(a|b){3}",
    "",
    "a$|^b",
    "(ab?)+",
    "(?i)aBz",
    "(?P<x>a+?)b??",
    "(a*)*",
    "((a|b)?c?){2}",
    "[^a-]+",
    "x{0}",
    "a{,2}",
]


@pytest.mark.parametrize("pattern", SAME)
@pytest.mark.parametrize("search", [False, True])
def test_agrees_with_re(pattern: str, search: bool) -> None:
    language = regex_language(pattern, search)
    automaton = to_bytes(language)
    known = re.compile(pattern)
    draw = random.Random(pattern)
    for _ in range(400):
        text = "".join(draw.choice("abczfoA1 -2") for _ in range(draw.randrange(9)))
        expected = (known.search if search else known.fullmatch)(text) is not None
        assert language.accepts(text) == expected, text
        assert bool(automaton.accepts(text.encode())) == expected, text


PIECES = st.recursive(
    st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\w", r"\d", "^", "$", r"\b", r"\B"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
        inner.filter(lambda p: "^" not in p.replace("[^", "") and "\\" not in p).map(lambda p: f"(?!{p})"),
        inner.filter(lambda p: "^" not in p.replace("[^", "") and "\\" not in p).map(lambda p: f"(?={p})"),
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(PIECES, st.lists(st.text("abc1 ", min_size=1, max_size=7), min_size=5, max_size=20))
def test_random_patterns_agree_with_re(pattern: str, texts: list[str]) -> None:
    # (of an empty text it says that \\B does not match, unlike the standard)
    known = re.compile(pattern)
    for search in (False, True):
        language = regex_language(pattern, search)
        for text in texts:
            assert language.accepts(text) == bool((known.search if search else known.fullmatch)(text)), text


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        (r"\w", ["a", "_", "7"], ["é", "-"]),  # ASCII, as in ECMAScript
        (r"\s", [" ", "\u00a0", "\ufeff", "\u2028"], ["\u200b", "a"]),
        (".", ["a", "é", "😀", "\x85"], ["\n", "\r", "\u2028", ""]),
        ("(?s).", ["\n"], [""]),
        ("[^]", ["\n", "😀"], [""]),
        ("[]", [], ["", "a", "]"]),
        (r"\u00e9|\xe8|\u{1F600}|\ud83d\ude01|\cJ", ["é", "è", "😀", "😁", "\n"], ["e"]),
        (r"\p{Lu}\p{Script=Greek}\P{L}", ["Aα1", "Éβ-"], ["aα1", "Aa1", "Aαb"]),
        (r"[\p{L}\d_-]+", ["é9_-", "ж"], ["", " "]),
        (r"(?i)straße|ÉK", ["STRAßE", "straẞe", "éK", "é\u212a"], ["strasse"]),
        ("a{2", ["a{2"], ["aa"]),
        (r"[\w-.]", ["-", ".", "a"], [" "]),
        (r"\Aab\Z", ["ab"], ["xab"]),
        ("[😀-🙏]+", ["😀", "🙏😁"], ["🙐", ""]),
    ],
)
def test_dialect(pattern: str, inside: list[str], outside: list[str]) -> None:
    language = regex_language(pattern)
    assert [text for text in inside if not language.accepts(text)] == []
    assert [text for text in outside if language.accepts(text)] == []


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("foo**", "nothing to repeat"),  # fault STR-19
        ("*a", "nothing to repeat"),
        ("(a", "'('"),
        ("a)", "')'"),
        ("[a", "'['"),
        ("[b-a]", "range"),
        ("a{3,2}", "less than"),
        ("\\", "backslash"),
        (r"(a)\1", "back-reference"),
        (r"(?<x>a)\k<x>", "back-reference"),
        ("(?>a)", "'(?>'"),
        ("a++", "possessive"),
        ("(?m)^a", "'m'"),
        (r"\p{Nonsense}", "Nonsense"),
        (r"\ud800", "surrogate"),
        (r"\q", r"\q"),
        ("(?=^a)", "look-ahead"),
        ("a{1000}{1000}", "quantifier"),
        ("(a{1000}){1000}", "parts"),
        ("(a|b)*a(a|b){30}", "more than"),  # states, or seconds on a slow machine
        ("(" * 500 + ")" * 500, "groups"),
    ],
)
def test_refuses_by_name(pattern: str, says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        regex_language(pattern)


def test_algebra() -> None:
    a, ab = regex_language("a*"), regex_language("(a|b)*")
    assert a & ab == a
    assert a | ab == ab
    assert ~~a == a
    assert ab - a == ab & ~a
    assert a ^ ab == ab - a
    assert a + a == a
    assert regex_language("(ab){2,3}") == Language.literal("ab").repeat(2, 3)
    assert regex_language("(ab)*") == Language.literal("ab").star() == Language.literal("ab").repeat(0)
    assert regex_language("", search=True) == Language.everything() == ~Language.nothing()
    assert regex_language("x*").is_everything is False
    assert Language.everything().is_everything
    assert (a & regex_language("b+")).is_empty
    assert literals(["red", "green", "é"]) == regex_language("red|green|é")
    assert regex_language("[a-z]*") & Language.lengths(2, 3) == regex_language("[a-z]{2,3}")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=12), st.text(max_size=12))
def test_json_strings_say_what_the_text_is(text: str, other: str) -> None:
    language = literals([text])
    fewest, all_ = to_json(language), to_json(language, Escapes(slash=True, numbers=True))
    for candidate in (text, other):
        written = json.dumps(candidate, ensure_ascii=False)[1:-1].encode()
        numbered = "".join(f"\\u{unit:04X}" for unit in _utf16(candidate)).encode()
        assert bool(fewest.accepts(written)) == bool(all_.accepts(written)) == (candidate == text)
        assert bool(all_.accepts(json.dumps(candidate)[1:-1].encode())) == (candidate == text)
        assert bool(all_.accepts(numbered)) == (candidate == text)
    assert all_.accepts(json.dumps(text)[1:-1].replace("/", "\\/").encode())


def _utf16(text: str) -> list[int]:
    data = text.encode("utf-16-be")
    return [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]


@pytest.mark.parametrize(
    "number", [b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff", b"\xe0\x80\x80", b"\x80"]
)
def test_only_valid_utf8(number: bytes) -> None:
    assert not to_bytes(Language.everything()).accepts(number)


@pytest.mark.parametrize("text", [rb"\ud800", rb"\udc00", rb"\ud800\u0041", b"\n", b'"', rb"\x", b"\x1f"])
def test_only_valid_json_strings(text: bytes) -> None:
    assert not to_json(Language.everything(), Escapes(slash=True, numbers=True)).accepts(text)


def test_long_counters_are_quick_and_small() -> None:
    assert len(to_bytes(regex_language("^.{0,1000}$", search=True)).table) < 11_000
    assert len(regex_language(r"\w{1,1000}", search=True).table) == 3
