"""How much a chat template may do: steps, processor time and sizes (read `sandbox.py` first).

Why counting and not a watchdog: signals reach the main thread only, a thread cannot be stopped from
outside during a long call of C code, and a process for each render costs more than the render. So
`sandbox.py` asks before each operation that could be long or large:

    a step     an iteration, a call, a filter, an operator: counted, and the thread's clock is read
    a value    every new value is weighed; each value and their sum have a limit
    growth     an operation whose result can be far larger than its inputs is computed ahead
"""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

MAX_STEPS = 1_000_000
MAX_SECONDS = 3.0  # of processor time of the rendering thread
STEPS_A_LOOK = 16  # steps between looks at the clock
VALUE_WEIGHT = 1 << 20  # characters and items of a value, beyond 4 times the request's
TOTAL_VALUES = 8  # weight of everything made, in largest values
MAX_NUMBER = 10_000  # of a width, a precision, a count
MAX_BITS = 1 << 14  # of a whole number

_WIDTH = re.compile(r"\d{5,}|%[^a-zA-Z%]*\*|:[^{}]*\{")


class TemplateLimitError(Exception):
    """A template asked for more than a template may."""


class Budget:
    """What a rendering has used and may use. `given` is the weight of what the request brought."""

    def __init__(self, given: int) -> None:
        self._max_weight = VALUE_WEIGHT + 4 * given
        self._left = TOTAL_VALUES * self._max_weight
        self._steps = 0
        self._until = time.thread_time() + MAX_SECONDS
        # A container by id, kept alive so that its id stays unique.
        self._weights: dict[int, tuple[object, int]] = {}

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS:,} steps")
        if self._steps % STEPS_A_LOOK == 0 and time.thread_time() > self._until:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} seconds")

    def weigh(self, value: object) -> int:
        """Characters and items of a value, shared values counted each time: its printing cost."""
        if isinstance(value, str | bytes | range):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 8
        if not isinstance(value, list | tuple | dict):
            return 1
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        items = value if not isinstance(value, dict) else [*value.keys(), *value.values()]
        weight = 1 + sum(1 + self.weigh(item) for item in items)
        self._weights[id(value)] = (value, weight)
        return weight

    def made(self, value: Any) -> Any:
        """Charge for a value that an operation made; return it, or raise TemplateLimitError."""
        weight = self.weigh(value)
        self.expect(weight)
        self._left -= 4 * len(value) if isinstance(value, list | tuple | dict) else weight
        if self._left < 0:
            raise TemplateLimitError("the values that it makes are too large in sum")
        return value

    def expect(self, weight: int) -> None:
        """Refuse a value of this weight before it is made."""
        if weight > self._max_weight:
            raise TemplateLimitError(
                f"it makes a value of {weight:,} characters or items; at most {self._max_weight:,} fit"
            )

    def operator(self, sign: str, left: Any, right: Any) -> None:
        """Refuse an operator whose result would be too large."""
        if sign == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, str | bytes | list | tuple) and isinstance(count, int):
                    self.expect((self.weigh(value) + 1) * max(count, 0))
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if sign == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TemplateLimitError(f"it computes a number of {bits:,} bits")
        if sign == "%" and isinstance(left, str):
            check_format(left)

    def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a text method or filter whose result would be too large.

        The first argument is its subject.
        """
        if name in _TAKES_NUMBERS:
            for value in (*args[1:], *kwargs.values()):
                if isinstance(value, int) and abs(value) > MAX_NUMBER:
                    raise TemplateLimitError(f"{name} is given {value:,}; at most {MAX_NUMBER:,} is allowed")
        growth = _GROWTH.get(name)
        if growth is not None:
            self.expect(growth(self, *args, **kwargs))


def check_format(text: str) -> None:
    """Refuse a format text whose widths are large, or taken from its arguments."""
    if _WIDTH.search(text):
        raise TemplateLimitError("a format has a width of five digits or more, or one that is computed")


def _replace(budget: Budget, text: Any, old: Any, new: Any, count: Any = None) -> int:
    return str(text).count(str(old)) * budget.weigh(new)


def _join(budget: Budget, items: Any, separator: Any = "", attribute: Any = None) -> int:
    if isinstance(separator, list | tuple):  # the method: the separator is the subject
        items, separator = separator, items
    return budget.weigh(items) + (len(items) if hasattr(items, "__len__") else 0) * budget.weigh(separator)


def _expandtabs(budget: Budget, text: str, tabsize: int = 8) -> int:
    return text.count("\t") * tabsize


def _indent(budget: Budget, text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> int:
    return (str(text).count("\n") + 1) * (width if isinstance(width, int) else budget.weigh(width))


def _format(budget: Budget, text: Any, *args: Any, **kwargs: Any) -> int:
    check_format(str(text))
    return str(text).count("%") * sum(budget.weigh(value) for value in (*args, *kwargs.values()))


_GROWTH: Mapping[str, Callable[..., int]] = {
    "expandtabs": _expandtabs,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
}
_TAKES_NUMBERS = frozenset(
    ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "tojson", "truncate", "zfill")
)
