"""Log-probabilities, in float64 (read `sampler.py` next).

The caller chooses the distribution. "raw" is the softmax of the model's own logits; "allowed" is
the same, but lists only tokens that may be sampled; "processed" is that of the candidates left
after all steps, from which the token was drawn. Rows are taken one at a time: no array of prompt ×
vocabulary is ever held.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from martlet.errors import SampleError
from martlet.sample.logits import Candidates, highest, log_sum_exp
from martlet.types import TokenLogprobs

__all__ = ["candidate_logprobs", "token_logprobs"]


def token_logprobs(
    logits: NDArray[np.floating], token_id: int, top: int, ids: NDArray[np.int64] | None = None
) -> TokenLogprobs:
    """A token's log-probability under softmax(logits), its rank, and the `top` best tokens (-1:
    all).

    `logits` is float [V]. `ids`, int64 ascending, limits the best tokens listed; None: all. Ties
    rank by id. Tokens of probability 0 are not listed. SampleError for logits without a finite
    maximum.
    """
    best = float(logits.max())
    if not math.isfinite(best):
        raise SampleError(f"The model's logits are not usable: their maximum is {best}.")
    log_total = log_sum_exp(logits)
    own = logits[token_id]
    rank = 1 + int(np.count_nonzero(logits > own)) + int(np.count_nonzero(logits[:token_id] == own))
    listed_logits = logits if ids is None else logits[ids]
    at = highest(listed_logits, len(listed_logits) if top < 0 else top) if top else np.empty(0, np.int64)
    at = at[np.argsort(-listed_logits[at], kind="stable")]
    at = at if ids is None else ids[at]
    at = at[logits[at] > -np.inf]
    listed = tuple(zip(at.tolist(), (logits[at].astype(np.float64) - log_total).tolist(), strict=True))
    return TokenLogprobs(token_id, float(own) - log_total, rank, listed)


def candidate_logprobs(c: Candidates, token_id: int, top: int) -> TokenLogprobs:
    """The same among candidates, which must include the token."""
    entry = token_logprobs(c.logits, int(np.searchsorted(c.ids, token_id)), top)
    return TokenLogprobs(token_id, entry.logprob, entry.rank, _renamed(entry.top, c.ids))


def _renamed(top: tuple[tuple[int, float], ...], ids: NDArray[np.int64]) -> tuple[tuple[int, float], ...]:
    """Indices of candidates as token ids."""
    return tuple((int(ids[i]), logprob) for i, logprob in top)
