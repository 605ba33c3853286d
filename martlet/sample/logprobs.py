"""Log-probabilities, in float64 (read `sampler.py` next).

What they are of is the caller's choice: of the model's own logits ("raw"), or of the candidates left after all steps
("processed"), which are the probabilities that the token was drawn with. Rows are taken one at a time: nothing of the
size of a prompt times the vocabulary is ever held.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from martlet.errors import SampleError
from martlet.sample.logits import Candidates
from martlet.types import TokenLogprobs

__all__ = ["candidate_logprobs", "token_logprobs"]

F64 = NDArray[np.float64]


def token_logprobs(logits: NDArray[np.float32], token_id: int, top: int) -> TokenLogprobs:
    """Log-probability of a token under softmax(logits), its rank, and the `top` best (all of them for -1).

    `logits` is [V]. Equal tokens rank by id. Tokens of probability 0 are not listed. Raises SampleError for NaN logits.
    """
    return candidate_logprobs(Candidates(np.arange(len(logits)), logits.astype(np.float64)), token_id, top)


def candidate_logprobs(c: Candidates, token_id: int, top: int) -> TokenLogprobs:
    """The same among candidates, of which the token is one."""
    best = c.logits.max()
    if not np.isfinite(best):
        raise SampleError(f"The model's logits are not usable: their maximum is {best}.")
    log_total = float(best) + math.log(np.exp(c.logits - best).sum())
    at = int(np.searchsorted(c.ids, token_id))
    own = c.logits[at]
    rank = 1 + int(np.count_nonzero(c.logits > own)) + int(np.count_nonzero(c.logits[:at] == own))
    listed = tuple((int(c.ids[i]), float(c.logits[i]) - log_total) for i in _best(c.logits, top))
    return TokenLogprobs(token_id, float(own) - log_total, rank, listed)


def _best(logits: F64, top: int) -> NDArray[np.int64]:
    """Indices of the `top` highest, best first, equals in order of index."""
    if top == 0:
        return np.empty(0, np.int64)
    n = len(logits) if top < 0 else min(top, len(logits))
    border = np.partition(logits, len(logits) - n)[len(logits) - n]
    at = np.flatnonzero((logits >= border) & (logits > -np.inf))
    return at[np.argsort(-logits[at], kind="stable")][:n]
