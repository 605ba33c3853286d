"""Options, each declared once (read `config.py` next, which declares the engine's).

An option is a field of a frozen dataclass, made with `option(default, help, …)`. The field gives
the type and the default; the record beside it gives the range, the choices, the words of the help,
the environment variable and the names on the command line. From that record come

    the check and its error text   `Option.checked`
    the command line               `commands/arguments.py`
    the tables in docs/options.md  `tools/write_options_page.py`
"""

import math
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from martlet.errors import RequestError, nearest, shown

_MOST_SHOWN = 200  # characters of a wrong value
_SCALES = ((30, "G"), (20, "M"), (10, "K"), (0, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The record of an option. `options_of` fills in the last four fields from the dataclass."""

    help: str  # one line, without the default
    low: float | None = None  # the least value
    high: float | None = None  # the greatest value
    above: float | None = None  # in place of `low`: the value is greater than this
    choices: tuple[str, ...] = ()
    unit: str = ""  # of a number: bytes, seconds, milliseconds
    path: str = ""  # what the path leads to: "a folder", "a file to write"
    expected: str = ""  # what a right value is, where type, range and choices do not say it
    # in place of the type's check: (name, value) → the value to keep
    check: Callable[[str, Any], Any] | None = None
    environment: str = ""  # the variable that sets it
    group: str = ""  # of the command line's help; "": it is not on the command line
    flag: str = ""  # on the command line; "": --name-with-hyphens
    more_flags: tuple[str, ...] = ()  # further names, among them llama.cpp's
    metavar: str = ""
    default_help: str = ""  # in place of the default's value: "physical cores"
    name: str = ""
    type: Any = str  # without None
    is_optional: bool = False  # None has a meaning of its own
    default: Any = field(default_factory=lambda: MISSING)  # MISSING: there is none

    @property
    def flags(self) -> tuple[str, ...]:
        """The names on the command line, short ones first."""
        flags = (*self.more_flags, self.flag or f"--{self.name.replace('_', '-')}")
        return tuple(sorted(flags, key=lambda flag: flag.startswith("--")))

    @property
    def wanted(self) -> str:
        """What a right value is, for an error text: "a whole number from 1 to 1,024"."""
        if self.expected:
            return self.expected
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.path:
            return f"the path of {self.path}"
        if self.type is bool:
            return "true or false"
        if self.type in (int, float):
            number = "a whole number" if self.type is int else "a number"
            return number + (f" of {self.unit}" if self.unit else "") + self._range()
        return "a text that is not empty"

    def _range(self) -> str:
        low, high, above = (None if x is None else _figure(x) for x in (self.low, self.high, self.above))
        if low is not None:
            return f", {low} or more" if high is None else f" from {low} to {high}"
        limits = [f"{word} {limit}" for word, limit in (("above", above), ("up to", high)) if limit is not None]
        return f" {' and '.join(limits)}" if limits else ""

    @property
    def shown_default(self) -> str:
        """The default for a reader: "16", "4G", "yes"; "" where None or nothing is the default."""
        if self.default_help:
            return self.default_help
        value = None if self.default is MISSING else self.default
        if value is None or value is False or value in ((), ""):
            return ""
        if value is True:
            return "yes"
        if self.unit == "bytes":
            shift, letter = next(scale for scale in _SCALES if value % (1 << scale[0]) == 0)
            return f"{value >> shift}{letter}"
        if isinstance(value, tuple):
            return " ".join(map(repr, value)) if any(len(item) < 2 for item in value) else ";".join(value)
        if isinstance(value, int) and value >= 10_000:
            return f"{value:,}"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def checked(self, value: Any) -> Any:
        """The value to keep: int for NumPy's, str for a Path. RequestError names the option."""
        if value is self.default or (value is None and self.is_optional):
            return value
        if self.check is not None:
            return self.check(self.name, value)
        if self.path:
            return self._checked_path(value)
        if self.type is int:
            return self._checked_int(value)
        if self.type is float:
            return self._checked_float(value)
        if not isinstance(value, self.type) or (self.choices and value not in self.choices) or value == "":
            raise self.refusal(value)
        return value

    def _checked_int(self, value: Any) -> int:
        # 5.0 and "5" are no whole numbers
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise self.refusal(value)
        number = operator.index(value)
        if not self._is_within(number):
            raise self.refusal(value)
        return number

    def _checked_float(self, value: Any) -> float:
        if isinstance(value, bool | str):
            raise self.refusal(value)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise self.refusal(value) from None
        if not math.isfinite(number) or not self._is_within(number):
            raise self.refusal(value)
        return number

    def _is_within(self, number: float) -> bool:
        return (
            (self.low is None or number >= self.low)
            and (self.high is None or number <= self.high)
            and (self.above is None or number > self.above)
        )

    def _checked_path(self, value: Any) -> str:
        text = str(value) if isinstance(value, Path) else value
        try:
            if isinstance(text, str) and text and b"\0" not in os.fsencode(text):
                return text
        except UnicodeEncodeError:
            pass
        raise self.refusal(value)

    def refusal(self, value: object) -> RequestError:
        """The error for a wrong value: name, value, what is expected, and the nearest choice."""
        return refuse(self.name, value, self.wanted, self.choices)

    def from_environment(self, text: str) -> Any:
        """The value of the environment variable's text; RequestError names the variable."""
        text = text.strip()
        if self.type is bool:
            if text.lower() not in ("0", "1", "true", "false", "yes", "no"):
                raise RequestError(f"{self.environment} is {text!r}; expected 1 or 0.", param=self.name)
            return text.lower() in ("1", "true", "yes")
        if self.type is int:
            if not (text.isascii() and text.isdigit()):
                raise RequestError(f"{self.environment} is {text!r}; expected {self.wanted}.", param=self.name)
            return int(text)
        return text


def option(default: Any = MISSING, help: str = "", **record: Any) -> Any:
    """A dataclass field that is an option; `record` holds further fields of `Option`."""
    return field(default=default, metadata={"option": Option(help=help, **record)})


@cache
def options_of(settings: type) -> Mapping[str, Option]:
    """The options of a dataclass by name, in the order of declaration."""
    hints = get_type_hints(settings)
    options = {}
    for spec in fields(settings):
        if "option" in spec.metadata:
            members = _members(hints[spec.name])
            [type_] = [hint for hint in members if hint is not NoneType]
            is_literal = get_origin(type_) is Literal
            record = spec.metadata["option"]
            options[spec.name] = replace(
                record,
                name=spec.name,
                type=str if is_literal else get_origin(type_) or type_,
                choices=get_args(type_) if is_literal else record.choices,
                is_optional=NoneType in members,
                default=spec.default,
            )
    return MappingProxyType(options)


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union; of any other type, itself."""
    return get_args(hint) if get_origin(hint) is UnionType or isinstance(hint, UnionType) else (hint,)


def refuse(name: str, value: object, expected: str, known: tuple[str, ...] = ()) -> RequestError:
    """The error for a wrong value; with `known`, it names the nearest of them."""
    hint = nearest(value, known) if isinstance(value, str) else ""
    return RequestError(f"{name} is {shown(value, _MOST_SHOWN)}; expected {expected}.{hint}", param=name)


def _figure(number: float) -> str:
    """A bound for a reader: "1,024", "0.01", "2^62", "2^64 - 1"."""
    if number != int(number):
        return f"{number:g}"
    sign, size = "-" if number < 0 else "", abs(int(number))
    if size < 1 << 31:
        return f"{int(number):,}"
    exponent = (size + 1).bit_length() - 1
    return f"{sign}2^{exponent}" if size == 1 << exponent else f"{sign}2^{exponent} - 1"
