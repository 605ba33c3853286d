"""The rule by which guesses are taken: the model's own draws decide, and a guess is right if it is what was drawn.

Of a span that verifies a draft, row 0 has the logits after the last known id, row i those after guess i - 1:

    draw from row 0;   as long as the guess after the row drawn from is what was drawn: draw from the next row

Each row is drawn from with the random numbers of its own position (`sampler.py`), so every token is the one that would
have come without guesses; whatever guesses, the tokens have the model's distribution (docs/speculation.md says how this
compares with rejection sampling, arXiv:2211.17192).
"""

from __future__ import annotations

from collections.abc import Callable

from martlet.types import Span

__all__ = ["verify"]


def verify(span: Span, token: int, draw: Callable[[int], int | None]) -> None:
    """Go on after `token`, drawn from row 0: `draw` takes the next one from the row it is given; None ends it."""
    for row, guess in enumerate(span.draft, 1):
        if guess != token:
            return
        drawn = draw(row)
        if drawn is None:
            return
        token = drawn
