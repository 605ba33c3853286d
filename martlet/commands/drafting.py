"""Options for guessing tokens (docs/speculation.md). Read `options.py` next, which adds them to the commands that generate."""

from __future__ import annotations

from typing import Any

__all__ = ["add_draft_options"]


def add_draft_options(group: Any) -> None:
    """Who guesses, and how; settings of the engine."""
    group.add_argument(
        "--draft",
        metavar="HOW",
        help="guess tokens and verify several in a step: auto (the default: where it pays), ngram (the same), off,"
        " mtp for the model's own layers that predict further tokens, model=NAME for a smaller model of the same vocabulary,"
        " or eagle=PATH or medusa=PATH for a head that was trained for the model (eagle=smollm2-135m comes with Martlet)",
    )
