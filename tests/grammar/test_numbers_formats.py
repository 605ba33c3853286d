"""Numbers within bounds, and the formats of JSON Schema: against exact arithmetic, the standards'
examples and Python's own.
"""

from __future__ import annotations

import datetime
import ipaddress
import random
from decimal import Decimal

import pytest

from martlet.errors import RequestError
from martlet.grammar.numbers import Bound, Digits, number_language
from martlet.grammar.string_formats import FORMATS, format_language


@pytest.mark.parametrize("seed", range(40))
def test_bounds_and_multiples_are_exact(seed: int) -> None:
    draw = random.Random(seed)
    low = Decimal(draw.randrange(-300, 300)) / 10 ** draw.choice([0, 1, 2])
    high = low + Decimal(draw.randrange(0, 300)) / 10 ** draw.choice([0, 1])
    bounds = [Bound(value, draw.random() < 0.5) if draw.random() < 0.8 else None for value in (low, high)]
    multiple = draw.choice([None, None, Decimal("0.5"), Decimal(3), Decimal("0.25"), Decimal(7)])
    integer = draw.random() < 0.4
    language = number_language(integer=integer, low=bounds[0], high=bounds[1], multiple=multiple)
    for _ in range(200):
        value = draw.choice(
            [low, high, Decimal(0), Decimal(draw.randrange(-4000, 4000)) / 10 ** draw.choice([0, 1, 2])]
        )
        text = f"{value:f}"
        least, most = bounds
        expected = (
            (least is None or value > least.value or (value == least.value and not least.exclusive))
            and (most is None or value < most.value or (value == most.value and not most.exclusive))
            and (multiple is None or value % multiple == 0)
            and not (integer and "." in text)
        )
        assert language.accepts(text) == expected, (text, bounds, multiple, integer)


def test_spelling_of_numbers() -> None:
    """Fault STR-09."""
    three = number_language(integer=True, low=Bound(Decimal(3)))
    assert [text for text in ("01", "2", "3", "30", "00", "3.0", "3e1") if three.accepts(text)] == ["3", "30"]
    free = number_language(integer=False)
    assert all(free.accepts(text) for text in ("0", "-0", "-0.0", "1e5", "1E+05", "12.50", "-7e-3"))
    assert not any(free.accepts(text) for text in ("00", "01", "1.", ".5", "+1", "1e", "-", "", "0x1", "1e1.5"))
    assert number_language(integer=True, zeros=True).accepts("12.00")
    short = number_language(integer=False, digits=Digits(3, 2, exponent=False))
    assert [text for text in ("999", "-1.25", "1000", "1.125", "1e1") if short.accepts(text)] == ["999", "-1.25"]


def test_nothing_fits() -> None:
    assert number_language(integer=True, low=Bound(Decimal("1.2")), high=Bound(Decimal("1.8"))).is_empty
    assert number_language(integer=False, low=Bound(Decimal(1), True), high=Bound(Decimal(1))).is_empty


@pytest.mark.parametrize("value", [Decimal("Infinity"), Decimal("1e100000"), Decimal("NaN")])
def test_absurd_bounds_are_refused(value: Decimal) -> None:
    with pytest.raises(RequestError):
        number_language(integer=False, low=Bound(value))


def test_large_multiples_are_refused() -> None:
    with pytest.raises(RequestError, match="remainders"):
        number_language(integer=True, multiple=Decimal(10**9 + 7))


CASES = {
    "date": (["2020-02-29", "2000-02-29", "1999-12-31"], ["2021-02-29", "1900-02-29", "2020-04-31", "2020-1-01"]),
    "time": (["23:59:60Z", "08:30:06.283185Z", "23:20:50+05:30"], ["24:00:00Z", "12:00:00", "12:00:60Z", "1:00:00Z"]),
    "date-time": (["1985-04-12T23:20:50.52Z", "1996-12-19t16:39:57-08:00"], ["1985-04-12 23:20:50Z", "1985-02-30T00:00:00Z"]),
    "duration": (["P4DT12H30M5S", "P4Y", "PT0S", "P1M", "P2W"], ["PT1D", "P", "P1YT", "P1Y1D", "P1D2H", "P2D1Y", "P1Y2W", "PT1H1S"]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638"]),
    "email": (["joe.bloggs@example.com", '"joe bloggs"@example.com', "te~st@[127.0.0.1]"], ["2962", ".test@x.com", "te..st@x.com", "a@", "a@[::1]"]),
    "hostname": (["www.example.com", "xn--4gbwdl.xn--wgbh1c", "a" * 63 + ".b"], ["-a.com", "a-.com", "a" * 64, "a_b", "", "a..b"]),
    "ipv4": (["192.168.0.1", "0.0.0.0"], ["127.0.0.0.1", "256.1.1.1", "01.1.1.1", "1.1.1"]),
    "ipv6": (["::1", "::", "::ffff:192.168.0.1", "1:2:3:4:5:6:7:8", "1::8"], ["12345::", "1:1:1:1:1:1:1:1:1", "::1::", "1", ":2:3:4::8"]),
    "uri": (["http://foo.bar/?baz=qux#quux", "urn:oasis:names", "mailto:a@b.c", "http://[::1]:80/", "ftp://u@h/%20"], ["//foo.bar/", "\\\\WINDOWS", "abc", "http:// x", "http://a/<b>", "http://a/%2"]),
    "uri-reference": (["/abc", "#frag", "", "a/b", "//x/y"], ["\\\\x", "#a\\b", "1:b"]),
    "iri": (["http://ƒøø.ßår/?∂éœ=πîx#πîüx"], ["/abc", "âππ"]),
    "uri-template": (["http://x/d{?term:1,q*}", "/{a}"], ["http://x/{term", "{}", "{a,}"]),
    "json-pointer": (["", "/foo/bar~0/baz~1/%a", "/"], ["a", "/foo~", "/~2"]),
    "relative-json-pointer": (["1", "0/foo", "2/0/a", "0#"], ["/foo", "-1/foo", "01/a", "0##"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_formats(name: str) -> None:
    language = format_language(name)
    assert language is not None
    inside, outside = CASES[name]
    assert [text for text in inside if not language.accepts(text)] == []
    assert [text for text in outside if language.accepts(text)] == []


def test_every_format_has_examples() -> None:
    assert set(FORMATS) - set(CASES) == {"iri-reference"}  # made of the two that have
    assert format_language("color") is None


def test_dates_are_those_of_the_calendar() -> None:
    language = format_language("date")
    assert language is not None
    for year in (1, 4, 100, 400, 1900, 2000, 2023, 2024):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    datetime.date(year, month, day)
                except ValueError:
                    assert not language.accepts(text), text
                else:
                    assert language.accepts(text), text


def test_addresses_are_those_of_the_standard_library() -> None:
    language = format_language("ipv6")
    assert language is not None
    draw = random.Random(1)
    for _ in range(3000):
        text = "".join(draw.choice([":", ":", "::", "1", "ab", "1.2.3.4"]) for _ in range(draw.randrange(1, 14)))
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            assert not language.accepts(text), text
        else:
            assert language.accepts(text), text
