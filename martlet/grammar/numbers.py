"""JSON numbers as languages: bounds and multiples, exactly, for integers and decimals.

A number is read digit by digit. The automaton's state keeps only how the number compares with the
first digits of a bound, or its remainder. Nothing is rounded: 0.1 is a tenth, not the nearest
double. Numbers with a bound or a multiple are written without exponent. Read `language.py` first.
"""

from decimal import Decimal
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from martlet.errors import RequestError
from martlet.grammar.codepoints import alphabet_of
from martlet.grammar.language import Language, build
from martlet.grammar.regex import regex_language

_MOST_DIGITS = 400  # of a bound: a double has 309 before the point at most
_MOST_REMAINDERS = 20_000


class Bound(NamedTuple):
    """A limit, and whether the limit itself is excluded."""

    value: Decimal
    exclusive: bool = False


class Digits(NamedTuple):
    """The most digits before and after the point; None: any number."""

    before: int | None = None
    after: int | None = None
    exponent: bool = True  # whether an exponent may follow, where nothing else forbids it


_PLAIN = Digits()


@lru_cache(maxsize=512)
def number_language(
    *,
    integer: bool,
    low: Bound | None = None,
    high: Bound | None = None,
    multiple: Decimal | None = None,
    digits: Digits = _PLAIN,
    zeros: bool = False,
) -> Language:
    """Return the JSON numbers within bounds that are a multiple of `multiple`.

    With `zeros` an integer may also be written 1.0. An integer is never written -0. RequestError if
    a bound is invalid, or if the automaton is too large.
    """
    for bound in (low, high):
        if bound is not None:
            _digits_of(bound.value)  # refuses a value that is no bound
    numbers = regex_language(_pattern(integer, digits, zeros))
    if low is not None or high is not None or multiple is not None:
        numbers = numbers & regex_language(_DECIMAL)
    if low is not None:
        numbers = numbers & _at_least(low)
    if high is not None:
        numbers = numbers & _at_most(high)
    return numbers if multiple is None else numbers & _multiples(multiple)


def _pattern(integer: bool, digits: Digits, zeros: bool) -> str:
    rest = "*" if digits.before is None else f"{{0,{digits.before - 1}}}"
    if integer:
        return rf"(0|-?[1-9]\d{rest})" + (r"(\.0+)?" if zeros else "")
    after = "+" if digits.after is None else f"{{1,{digits.after}}}"
    point = rf"(\.\d{after})?" if digits.after != 0 else ""
    return rf"-?(0|[1-9]\d{rest}){point}" + (r"([eE][+-]?\d{1,3})?" if digits.exponent else "")


_MAGNITUDE = r"(0|[1-9]\d*)(\.\d+)?"
_DECIMAL = f"-?{_MAGNITUDE}"
_SYMBOLS = ".0123456789"
_ALPHABET, _MEMBERS = alphabet_of([((ord(symbol), ord(symbol)),) for symbol in _SYMBOLS])
_SYMBOL_OF = MappingProxyType(
    {number: symbol for symbol, members in zip(_SYMBOLS, _MEMBERS, strict=True) for number in members}
)


def _at_least(bound: Bound) -> Language:
    equal = set() if bound.exclusive else {0}
    if bound.value > 0:
        return _compared(bound.value, {1} | equal)
    return regex_language(_MAGNITUDE if bound.value or not bound.exclusive else _POSITIVE) | (
        Language.literal("-") + _compared(-bound.value, {-1} | equal)
    )


_POSITIVE = rf"(?=.*[1-9]){_MAGNITUDE}"


def _at_most(bound: Bound) -> Language:
    equal = set() if bound.exclusive else {0}
    minus = Language.literal("-")
    if bound.value < 0:
        return minus + _compared(-bound.value, {1} | equal)
    below = regex_language(_MAGNITUDE if bound.value or not bound.exclusive else _POSITIVE)
    return (minus + below) | _compared(bound.value, {-1} | equal)


def _digits_of(value: Decimal) -> tuple[str, str]:
    """The digits before and after the point of a magnitude, without redundant zeros."""
    if not value.is_finite():
        raise RequestError(f"{value} is not finite: it cannot be a bound or a multiple.", code="invalid_schema")
    if abs(value.adjusted()) > _MOST_DIGITS or len(value.as_tuple().digits) > _MOST_DIGITS:
        raise RequestError(f"A number of more than {_MOST_DIGITS:,} digits is too long.", code="grammar_too_large")
    before, _, after = f"{value:f}".partition(".")
    return before.lstrip("0") or "0", after.rstrip("0")


def _order(digit: str, other: str) -> int:
    return (digit > other) - (digit < other)


def _compared(value: Decimal, wanted: set[int]) -> Language:
    """Magnitudes whose comparison with `value` is in `wanted`: -1 below it, 0 equal, 1 above."""
    before, after = _digits_of(abs(value))
    length, depth = len(before), len(after)

    def whole(count: int, order: int) -> int:
        """The order by the digits before the point; more digits are greater."""
        return order if count == length else (1 if count > length else -1)

    # A key is (digits read, order so far, whether the point was read).
    def step(key: tuple[int, int, bool], c: int) -> tuple[int, int, bool] | None:
        count, order, fraction = key
        symbol = _SYMBOL_OF.get(c)
        if symbol is None or (symbol == "." and fraction):
            return None
        if symbol == ".":
            return 0, whole(count, order), True
        if fraction:
            order = order or _order(symbol, after[count] if count < depth else "0")
            return (0 if order else min(count + 1, depth)), order, True
        return min(count + 1, length + 1), order or (_order(symbol, before[count]) if count < length else 0), False

    def accepts(key: tuple[int, int, bool]) -> bool:
        count, order, fraction = key
        order = order if fraction else whole(count, order)
        if order == 0 and (count if fraction else 0) < depth:
            order = -1  # the value has further digits that are not all zero
        return order in wanted

    return build(_ALPHABET, (0, 0, False), step, accepts) & regex_language(_MAGNITUDE)


def _multiples(value: Decimal) -> Language:
    """Decimals that are an integral multiple of `value`."""
    if value <= 0:
        raise RequestError(f"multipleOf is {value}; expected a number above 0.", code="invalid_schema")
    before, after = _digits_of(value)
    n_decimals, modulus = len(after), int(before + after)
    if modulus * (n_decimals + 1) > _MOST_REMAINDERS:
        raise RequestError(
            f"multipleOf {value} needs too many remainders: more than {_MOST_REMAINDERS:,}.", code="grammar_too_large"
        )

    # A key is (remainder of the digits so far, digits after the point; None before the point).
    def step(key: tuple[int, int | None], c: int) -> tuple[int, int | None] | None:
        rest, count = key
        symbol = _SYMBOL_OF.get(c)
        if symbol is None or (symbol == "." and count is not None):
            return None
        if symbol == ".":
            return rest, 0
        if count == n_decimals:
            return key if symbol == "0" else None
        return (10 * rest + int(symbol)) % modulus, None if count is None else count + 1

    def accepts(key: tuple[int, int | None]) -> bool:
        rest, count = key
        return bool(rest * 10 ** (n_decimals - (count or 0)) % modulus == 0)

    first: tuple[int, int | None] = (0, None)
    return regex_language("-?") + (build(_ALPHABET, first, step, accepts) & regex_language(_MAGNITUDE))
