"""Rejection sampling of guesses (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1), for drafters that draw at random.

The engine does not use it: it samples each row as if nothing had been guessed, which gives the same tokens as without
guesses and not only the same distribution (docs/speculation.md). This is the rule for whoever needs the most guesses accepted
and can do without that.

    accept a guess x, drawn from q, with probability min(1, p(x) / q(x)); else draw from max(0, p - q), scaled to sum to 1

Whatever q is, the token then has the distribution p. Of one guess min(p, q) summed up is accepted on average.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["accepted_share", "residual", "verify"]

F64 = NDArray[np.float64]


def verify(p: F64, q: F64, guess: int, accept_u: float, draw_u: float) -> tuple[int, bool]:
    """The token of a row, and whether it is the accepted guess.

    p, q: float64 [V], the model's and the drafter's probabilities after all sampling steps, each of sum 1; `guess` was drawn
    from q. `accept_u`, `draw_u`: uniform in [0, 1), independent of each other and of the guess.
    """
    assert q[guess] > 0.0, "a guess that its drafter cannot have drawn"
    if accept_u * q[guess] < p[guess]:
        return guess, True
    cumulative = np.cumsum(residual(p, q))
    return int(np.searchsorted(cumulative, draw_u * cumulative[-1], side="right")), False


def residual(p: F64, q: F64) -> F64:
    """What a token is drawn from after its guess was refused, [V]."""
    left = np.maximum(p - q, 0.0)
    total = left.sum()
    return left / total if total > 0.0 else p


def accepted_share(p: F64, q: F64) -> float:
    """How often a guess drawn from q is accepted."""
    return float(np.minimum(p, q).sum())
