"""`Grammars` that are loaded for the first form: an engine that holds no answer to one starts a tenth of a second sooner.

Read `grammars.py` next.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from martlet.structured import Structured

if TYPE_CHECKING:
    from martlet.grammar.grammars import Grammars
    from martlet.grammar.matcher import Grammar, Matcher

__all__ = ["LazyGrammars"]


class LazyGrammars:
    """Does as `Grammars(*arguments)` does; threads may share it."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        self._loaded: Grammars | None = None
        self._lock = threading.Lock()

    def compile(self, asked: Structured) -> Grammar:
        """Return the grammar; RequestError says what cannot be held to, or is too much."""
        return self._grammars().compile(asked)

    def matcher(self, asked: Structured) -> Matcher:
        """Return a constraint at the beginning of an answer."""
        return self._grammars().matcher(asked)

    def _grammars(self) -> Grammars:
        with self._lock:
            if self._loaded is None:
                from martlet.grammar.grammars import Grammars

                self._loaded = Grammars(*self._arguments)
            return self._loaded
