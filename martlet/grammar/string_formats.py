"""The formats of JSON Schema as languages, each after the standard it names.

A date exists (no February 30th, February 29th in leap years only), a leap second is written at
23:59 UTC only, an address has the right number of groups. What a standard leaves to a registry
(whether a country or a host exists) is not looked up. `idn-` formats and `regex` are not regular,
or need tables that are not here: they are missing. Read `regex.py` first.
"""

from functools import lru_cache
from types import MappingProxyType

from martlet.grammar.language import Language
from martlet.grammar.regex import regex_language

# RFC 3339. Leap years: divisible by 4, but centuries only if divisible by 400.
_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAYS = r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_DATE = rf"(\d{{4}}-{_DAYS}|{_LEAP}-02-29)"
_ZONE = r"([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_TIME = rf"(([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?{_ZONE}|23:59:60(\.\d+)?([zZ]|[+-]00:00))"
# RFC 3339, appendix A: from the largest unit given down to the smallest, without gaps.
_CLOCK = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
_DURATION = rf"P(\d+W|\d+Y(\d+M(\d+D)?)?({_CLOCK})?|\d+M(\d+D)?({_CLOCK})?|\d+D({_CLOCK})?|{_CLOCK})"
_UUID = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
# RFC 1123: labels of at most 63, a name of at most 253 characters. Counting to both takes 30,000
# states, so some names of many long labels are left out: there are at most 3 labels, or 9 of at
# most 27 characters, or 31 of at most 7.
_HOST = "({})".format(
    "|".join(
        rf"[a-zA-Z0-9]([a-zA-Z0-9-]{{0,{size - 2}}}[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]{{0,{size - 2}}}[a-zA-Z0-9])?){{0,{count - 1}}}"
        for count, size in ((3, 63), (9, 27), (31, 7))
    )
)
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_H16 = r"[0-9a-fA-F]{1,4}"
_LS32 = rf"({_H16}:{_H16}|{_IPV4})"
# RFC 4291 by RFC 3986's grammar: eight groups, or fewer with one "::" for the groups of zeros.
_IPV6 = "({})".format(
    "|".join(
        (
            rf"({_H16}:){{6}}{_LS32}",
            rf"::({_H16}:){{5}}{_LS32}",
            rf"({_H16})?::({_H16}:){{4}}{_LS32}",
            rf"(({_H16}:){{0,1}}{_H16})?::({_H16}:){{3}}{_LS32}",
            rf"(({_H16}:){{0,2}}{_H16})?::({_H16}:){{2}}{_LS32}",
            rf"(({_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}",
            rf"(({_H16}:){{0,4}}{_H16})?::{_LS32}",
            rf"(({_H16}:){{0,5}}{_H16})?::{_H16}",
            rf"(({_H16}:){{0,6}}{_H16})?::",
        )
    )
)
# RFC 5321: a dot-atom or a quoted string, then a host's name or an address in brackets.
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r'"([\x20\x21\x23-\x5b\x5d-\x7e]|\\[\x20-\x7e])*"'
_EMAIL = rf"({_ATOM}(\.{_ATOM})*|{_QUOTED})@({_LABEL}(\.{_LABEL})*|\[({_IPV4}|IPv6:{_IPV6})\])"
# RFC 3986 and 3987.
_PERCENT = r"%[0-9a-fA-F]{2}"
_UNRESERVED = r"a-zA-Z0-9._~\-"
_SUB = r"!$&'()*+,;="
_UCS = (
    r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    + "".join(rf"\u{{{plane:x}0000}}-\u{{{plane:x}fffd}}" for plane in range(1, 14))
    + r"\u{e1000}-\u{efffd}"
)
_PRIVATE = r"\ue000-\uf8ff\u{f0000}-\u{ffffd}\u{100000}-\u{10fffd}"


def _uri(more: str, private: str, relative: bool) -> str:
    """The pattern of a URI (`more`, `private` empty) or an IRI; `relative` allows a reference."""
    char = rf"([{_UNRESERVED}{_SUB}:@{more}]|{_PERCENT})"
    name = rf"([{_UNRESERVED}{_SUB}{more}]|{_PERCENT})"
    user = rf"([{_UNRESERVED}{_SUB}:{more}]|{_PERCENT})"
    future = rf"[vV][0-9a-fA-F]+\.[{_UNRESERVED}{_SUB}:]+"
    authority = rf"({user}*@)?(\[({_IPV6}|{future})\]|{name}*)(:\d*)?"
    rooted = rf"//{authority}(/{char}*)*|/({char}+(/{char}*)*)?"
    scheme = r"[a-zA-Z][a-zA-Z0-9+.-]*:"
    # Of a relative path: no colon, or it would be a scheme.
    first = rf"([{_UNRESERVED}{_SUB}@{more}]|{_PERCENT})"
    tail = rf"(\?({char}|[/?{private}])*)?(#({char}|[/?])*)?"
    whole = rf"{scheme}({rooted}|{char}+(/{char}*)*)?"
    return rf"({whole}|({rooted}|{first}+(/{char}*)*)?){tail}" if relative else rf"{whole}{tail}"


_POINTER = r"(/([^~/]|~[01])*)*"
# RFC 6570.
_VARIABLE = rf"([a-zA-Z0-9_]|{_PERCENT})(\.?([a-zA-Z0-9_]|{_PERCENT}))*(:[1-9]\d{{0,3}}|\*)?"
_LITERAL = rf"""([^\x00-\x20\x7f"'%<>\\^`{{|}}]|{_PERCENT})"""
_TEMPLATE = rf"({_LITERAL}|\{{[+#./;?&=,!@|]?{_VARIABLE}(,{_VARIABLE})*\}})*"

FORMATS = MappingProxyType(
    {
        "date": _DATE,
        "time": _TIME,
        "date-time": rf"{_DATE}[tT]{_TIME}",
        "duration": _DURATION,
        "uuid": _UUID,
        "email": _EMAIL,
        "hostname": _HOST,
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uri": _uri("", "", relative=False),
        "uri-reference": _uri("", "", relative=True),
        "iri": _uri(_UCS, _PRIVATE, relative=False),
        "iri-reference": _uri(_UCS, _PRIVATE, relative=True),
        "uri-template": _TEMPLATE,
        "json-pointer": _POINTER,
        "relative-json-pointer": rf"(0|[1-9]\d*)(#|{_POINTER})",
    }
)


@lru_cache(maxsize=len(FORMATS))
def format_language(name: str) -> Language | None:
    """Return the texts of a format, None for a name that is not in FORMATS."""
    pattern = FORMATS.get(name)
    return None if pattern is None else regex_language(pattern)
