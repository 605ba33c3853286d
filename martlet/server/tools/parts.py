"""What an answer's text is made of: the parts that parsers return (read `reply.py` next)."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The beginning of a call."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments, as JSON text."""

    index: int
    text: str


Part = Reasoning | Content | Call | Arguments


class Parser(Protocol):
    """Separates the text of one answer into parts."""

    def feed(self, text: str) -> list[Part]:
        """Parse more text; return the parts that are certain."""

    def finish(self) -> list[Part]:
        """Return the rest at the end of the answer."""
