"""The steps between logits and a token: a function each, with formula and source.

A step takes candidates and returns candidates, always in ascending order of id. So ties go to the
lowest id without a rule of their own, and sums are always taken in the same order. Nothing is
sorted without need: a truncating step computes its threshold and keeps the candidates on the right
side of it. Exponentials are summed block by block, since page faults of a temporary float64 [V]
cost more than the arithmetic.

Log-probabilities are of a distribution that the caller chooses. "raw" is the softmax of the model's
own logits; "allowed" is the same, but lists only tokens that may be sampled; "processed" is that of
the candidates left after all steps, from which the token was drawn. Rows are taken one at a time:
no array of prompt × vocabulary is ever held. Read `random.py` next.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from martlet.errors import SampleError
from martlet.types import TokenLogprobs

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Keep = NDArray[np.int64] | NDArray[np.bool_]

_LOG_ZERO = -745.2  # exp of anything below is 0.0
_BUCKETS_PER_NAT = 16
_BUCKETS = 1024
_BLOCK = 8192  # 64 KiB of float64: stays in the nearest caches
_GROUPS = 64
_MAX_REPEAT = 1024  # tokens: longer repetitions count as this long in DRY, which bounds its work


class Candidates(NamedTuple):
    """Tokens that may still be sampled: `ids` int64 [n], ascending, and their `logits` float64 [n].

    The logits are owned: a penalty changes them in place.
    """

    ids: I64
    logits: F64

    def take(self, keep: Keep) -> Candidates:
        """The candidates of a mask, bool [n], or of ascending indices, int64 [k]."""
        return Candidates(self.ids[keep], self.logits[keep])

    def find(self, ids: I64) -> tuple[I64, NDArray[np.bool_]]:
        """Positions of the `ids` that are candidates, int64 [k], and which are, bool [m]."""
        at = np.searchsorted(self.ids, ids)
        present = self.ids.take(at, mode="clip") == ids if len(self.ids) else np.zeros(len(ids), np.bool_)
        return at[present], present

    def add(self, ids: I64, amount: float) -> None:
        """Add to the logits of distinct tokens, int64 [m], in place."""
        self.logits[self.find(ids)[0]] += amount


def _block_sums(logits: NDArray[np.floating], best: float) -> F64:
    """Σ exp(x - best) of every block of logits [n], float64 [blocks]."""
    starts = range(0, len(logits), _BLOCK)
    return np.array([np.exp(np.subtract(logits[at : at + _BLOCK], best, dtype=np.float64)).sum() for at in starts])


def log_sum_exp(logits: NDArray[np.floating]) -> float:
    """log Σ exp(x) over logits [n], shifted by the maximum against overflow."""
    best = float(logits.max())
    return best + math.log(_block_sums(logits, best).sum())


def log_softmax(logits: F64) -> F64:
    """x - log Σ exp(x), float64 [n]."""
    return logits - log_sum_exp(logits)


def highest(logits: NDArray[np.floating], k: int) -> I64:
    """Ascending indices of the k highest logits, int64 [min(k, n)]; ties go to the lowest indices.

    The k-th highest of the maxima of groups is a lower bound of the k-th highest logit, which
    leaves few to select from.
    """
    n = len(logits)
    if k >= n:
        return np.arange(n)
    at, x = None, logits
    if n >= 4 * _GROUPS * k:
        maxima = logits[: n // _GROUPS * _GROUPS].reshape(_GROUPS, -1).max(axis=0)
        at = np.flatnonzero(logits >= np.partition(maxima, len(maxima) - k)[len(maxima) - k])
        x = logits[at]
    border = np.partition(x, len(x) - k)[len(x) - k]
    kept = np.flatnonzero(x >= border)
    if len(kept) > k:
        kept = np.delete(kept, np.flatnonzero(x[kept] == border)[k - len(kept) :])
    return kept if at is None else at[kept]


def _best(c: Candidates) -> Candidates:
    """The best candidate alone; ties go to the lowest id."""
    at = int(c.logits.argmax())
    return Candidates(c.ids[at : at + 1], c.logits[at : at + 1])


# -- steps that change logits ----------------------------------------------------------------------


def repetition_penalty(c: Candidates, seen: I64, penalty: float) -> Candidates:
    """x → x / penalty if x > 0, else x · penalty, for every token of `seen`, int64 [m].

    Source: arXiv:1909.05858, section 4.1, which only divides. Multiplying negative logits, as all
    engines do, makes a penalty lower them too.
    """
    at, _ = c.find(seen)
    x = c.logits[at]
    c.logits[at] = np.where(x > 0, x / penalty, x * penalty)
    return c


def presence_frequency_penalty(c: Candidates, ids: I64, counts: I64, presence: float, frequency: float) -> Candidates:
    """x → x - presence - frequency · count for every generated token; `ids`, `counts` int64 [m].

    Source: OpenAI's API reference.
    """
    at, present = c.find(ids)
    c.logits[at] -= presence + frequency * counts[present]
    return c


def _repeats(ids: I64, limit: int) -> tuple[I64, I64]:
    """Positions after repetitions of the end of `ids`, and their lengths to `limit`; int64 [m]."""
    after = np.flatnonzero(ids[:-1] == ids[-1]) + 1
    lengths = np.ones(len(after), np.int64)
    alive = np.arange(len(after))
    for length in range(1, limit):
        before = after[alive] - 1 - length
        alive = alive[(before >= 0) & (ids[before] == ids[-1 - length])]
        if len(alive) == 0:
            break
        lengths[alive] += 1
    return after, lengths


def dry(
    c: Candidates, ids: I64, breakers: NDArray[np.bool_], multiplier: float, base: float, allowed: int
) -> Candidates:
    """x → x - multiplier · base^(n - allowed) for a token that lengthens a repetition of n ≥
    allowed tokens.

    `ids`, int64 [n], are the last tokens. A repetition never crosses a token of `breakers`, bool
    [V], and no breaker is penalised. Source: oobabooga/text-generation-webui PR 5677; the exponent
    is capped where float32 overflows, as in llama.cpp.
    """
    stops = np.flatnonzero(breakers[ids])
    room = len(ids) - 1 - int(stops[-1]) if len(stops) else len(ids)
    most = allowed + int(88.7228391 / math.log(base)) if base > 1.000001 else _MAX_REPEAT
    limit = min(room, most, _MAX_REPEAT)
    if limit < allowed:
        return c
    after, lengths = _repeats(ids, limit)
    after, lengths = after[lengths >= allowed], lengths[lengths >= allowed]
    tokens, inverse = np.unique(ids[after], return_inverse=True)
    longest = np.zeros(len(tokens), np.int64)
    np.maximum.at(longest, inverse, lengths)
    longest[breakers[tokens]] = 0
    at, present = c.find(tokens[longest > 0])
    c.logits[at] -= multiplier * base ** (longest[longest > 0][present] - allowed).astype(np.float64)
    return c


def ngram_followers(ids: I64, size: int) -> I64:
    """The tokens, int64 [m], that would complete an n-gram of `size` in `ids` again.

    Source: arXiv:1705.04304, section 2.5.
    """
    n_prefix = size - 1
    if len(ids) < size:
        return ids[:0]
    windows = np.lib.stride_tricks.sliding_window_view(ids, size)
    same = (windows[:, :n_prefix] == ids[len(ids) - n_prefix :]).all(axis=1)
    return np.unique(windows[same, n_prefix])


def temperature(c: Candidates, value: float, spread: float = 0.0, exponent: float = 1.0) -> Candidates:
    """x → x / T (arXiv:1503.02531, section 2), without candidates whose probability underflows.

    T = 0 keeps the best candidate. With a `spread`, T = low + (high - low) · (entropy / log
    n)^exponent, where low and high are value ∓ spread and low is at least 0: hot where the model is
    unsure (llama.cpp PR 4972).
    """
    if spread and len(c.ids) > 1:
        logp = log_softmax(c.logits)
        entropy = max(0.0, -float((np.exp(logp) * logp).sum())) / math.log(len(c.ids))
        low, high = max(0.0, value - spread), min(value + spread, sys.float_info.max)
        value = low + (high - low) * min(entropy, 1.0) ** exponent
    if value == 0:
        return _best(c)
    x = c.logits
    x -= x.max()
    with np.errstate(over="ignore"):  # -inf is right for a logit too far below the best
        x /= value
    return c if x.min() > _LOG_ZERO else c.take(x > _LOG_ZERO)


# -- steps that drop candidates --------------------------------------------------------------------


def top_k(c: Candidates, k: int) -> Candidates:
    """Keeps the k highest logits (arXiv:1805.04833, section 5.4)."""
    return c if k >= len(c.ids) else c.take(highest(c.logits, k))


def smallest_set(scores: F64, weights: F64, target: float) -> I64:
    """Ascending indices of the fewest items, lowest score first, whose weights sum to `target`.

    At least one item. `scores` float64 [n] are ≥ 0, in nats; `weights` float64 [n]. Equivalent to
    sorting by score and summing, in linear time: weights are summed by bucket of score, and only
    the bucket that reaches the target is sorted.
    """
    buckets = np.minimum(scores * _BUCKETS_PER_NAT, _BUCKETS - 1).astype(np.int64)
    held = np.cumsum(np.bincount(buckets, weights=weights))
    target = min(max(target, np.nextafter(0.0, 1.0)), held[-1])
    edge = int(np.searchsorted(held, target))
    inside = np.flatnonzero(buckets == edge)
    inside = inside[np.argsort(scores[inside], kind="stable")]
    reached = np.cumsum(weights[inside]) + (held[edge - 1] if edge else 0.0)
    n_inside = int(np.searchsorted(reached, target)) + 1
    return np.sort(np.concatenate((np.flatnonzero(buckets < edge), inside[:n_inside])))


def top_p(c: Candidates, share: float) -> Candidates:
    """Keeps the fewest tokens whose probabilities sum to `share` (nucleus, arXiv:1904.09751, 3.1).

    All tokens below (1 - share) · total / n weigh together less than the nucleus leaves over, so
    they cannot be in it. Half of that bound is used, so that rounding does not matter.
    """
    best = float(c.logits.max())
    total = float(_block_sums(c.logits, best).sum())
    if share < 1:
        c = c.take(c.logits >= best + math.log((1 - share) * total / len(c.ids) / 2))
    below_best = best - c.logits
    return c.take(smallest_set(below_best, np.exp(-below_best), share * total))


def typical_p(c: Candidates, share: float) -> Candidates:
    """Keeps the fewest tokens that sum to `share`, nearest the entropy first (arXiv:2202.00666)."""
    logp = log_softmax(c.logits)
    p = np.exp(logp)
    entropy = -float((p * logp).sum())
    return c.take(smallest_set(np.abs(logp + entropy), p, share))


def min_p(c: Candidates, ratio: float) -> Candidates:
    """Keeps p ≥ ratio · max p, that is x ≥ max x + log ratio (arXiv:2407.01082)."""
    return c.take(c.logits >= c.logits.max() + math.log(ratio))


def top_n_sigma(c: Candidates, n: float) -> Candidates:
    """Keeps x ≥ max x - n · σ, with σ the standard deviation of the logits (arXiv:2411.07641)."""
    x, mean = c.logits, c.logits.mean()
    squares = sum(float(np.square(x[at : at + _BLOCK] - mean).sum()) for at in range(0, len(x), _BLOCK))
    return c.take(x >= x.max() - n * math.sqrt(squares / len(x)))


def xtc(c: Candidates, probability: float, threshold: float, u: float) -> Candidates:
    """Exclude top choices: with `probability`, of the tokens with p ≥ threshold keep only the last.

    The last is the least probable. `u` is uniform in [0, 1). With fewer than two such tokens
    nothing changes, so a likely token always remains. Source: oobabooga/text-generation-webui#6335.
    """
    if u >= probability:
        return c
    with np.errstate(divide="ignore"):
        top = np.flatnonzero(c.logits >= log_sum_exp(c.logits) + np.log(threshold))
    if len(top) < 2:
        return c
    # Among ties the highest id is the least probable.
    last = len(top) - 1 - int(np.argmin(c.logits[top][::-1]))
    keep = np.ones(len(c.ids), np.bool_)
    keep[np.delete(top, last)] = False
    return c.take(keep)


def mirostat_keep(c: Candidates, mu: float) -> Candidates:
    """Mirostat v2: keeps tokens with surprise -log2 p ≤ mu, at least the best token.

    Source: arXiv:2007.14966, algorithm 2.
    """
    keep = c.logits >= log_sum_exp(c.logits) - mu * math.log(2)
    return c.take(keep) if keep.any() else _best(c)


def mirostat_mu(c: Candidates, token_id: int, mu: float, tau: float, eta: float) -> float:
    """mu after a token: mu - eta · (surprise - tau), its surprise among the kept candidates."""
    logp = float(c.logits[np.searchsorted(c.ids, token_id)]) - log_sum_exp(c.logits)
    return mu - eta * (-logp / math.log(2) - tau)


def draw(c: Candidates, u: float) -> int:
    """The token whose interval of cumulated probabilities, in order of id, contains `u` in [0, 1).

    The interval's block is located first, then the token in it.
    """
    best = float(c.logits.max())
    sums = np.cumsum(_block_sums(c.logits, best))
    sought = u * sums[-1]
    last = int(np.searchsorted(sums, sums[-1]))  # the last block of any weight
    block = min(int(np.searchsorted(sums, sought, side="right")), last)
    start = block * _BLOCK
    weights = np.exp(c.logits[start : start + _BLOCK] - best)
    cumulated = np.cumsum(weights)
    before = sums[block - 1] if block else 0.0
    at = int(np.searchsorted(cumulated, sought - before, side="right"))
    if at == len(weights):  # rounding: the two sums differ slightly
        at = int(np.flatnonzero(weights)[-1])
    return int(c.ids[start + at])


# -- log-probabilities, in float64 ----------------------------------------------------------------
def token_logprobs(
    logits: NDArray[np.floating], token_id: int, top: int, ids: NDArray[np.int64] | None = None
) -> TokenLogprobs:
    """A token's log-probability under softmax(logits), its rank, and the `top` best tokens.

    `logits` is float [V]; `top` -1: all. `ids`, int64 ascending, limits those listed. Ties rank by
    id. Tokens of probability 0 are not listed. SampleError without a finite maximum.
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
