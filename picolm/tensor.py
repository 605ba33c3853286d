"""The arithmetic: matrix products over threads, RMSNorm, softmax, RoPE, SiLU, attention with an online softmax.

Functions take the *order* of their float32 sums. `fast` leaves it to BLAS and NumPy. `sse` and `scalar` are the orders of picoLM built
for x86 and built without SIMD: each operation is rounded by itself, sums run in one or several lanes (`quant.ordered_sum`), expf
is glibc's (`libm.py`): every bit is defined, whatever the number of threads. docs/picolm.md lists the operations.

Differences from the C: products of many tokens at once; threads stay alive; RoPE also pairs the halves of a head, and may turn a part of
it; attention takes tiles of keys, and a sliding window. Read next: `quant.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import numpy as np
from numpy.typing import NDArray

from picolm.gguf import Weight
from picolm.libm import F32, expf
from picolm.quant import Order, dot_in_order, fp16_to_fp32, ordered_sum, vec_dot

F16 = NDArray[np.float16]

BAND = 1 << 18  # weights a thread takes at a time: a megabyte as float32, which stays in its cache
TILE = 256  # positions that attention takes at a time


class Team:
    """Threads that share matrix products, and the order of sums they keep."""

    def __init__(self, threads: int = 1, order: Order = "fast") -> None:
        self.threads, self.order = threads, order
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        for _ in range(threads - 1):
            Thread(target=lambda: [share() for share in iter(self._todo.get, None)], daemon=True).start()

    def each(self, work: Callable[[int], None], n: int) -> None:
        """Do work(0) to work(n - 1): who is free takes the next, the caller too; it does not wait for threads that wake too late."""
        numbers = iter(range(n))
        finished: SimpleQueue[BaseException | None] = SimpleQueue()

        def share() -> None:
            for i in numbers:
                try:
                    work(i)
                    finished.put(None)
                except BaseException as error:
                    finished.put(error)

        for _ in range(min(self.threads, n) - 1):
            self._todo.put(share)
        share()
        for _ in range(n):
            if (error := finished.get()) is not None:
                raise error


def matmul(x: F32, weights: list[Weight], team: Team) -> list[F32]:
    """x · wᵀ for each of some matrices: [tokens, cols] to [tokens, rows]. A band of rows is dequantised, multiplied,
    dropped; bands do not depend on the number of threads, so neither does a bit of the result."""
    out = [np.empty((len(x), w.rows), np.float32) for w in weights]
    bands = []
    for w, y in zip(weights, out, strict=True):
        step = max(16, BAND // w.cols // 16 * 16) * (1 if len(x) == 1 or w.held is None else 8)
        bands += [(w, y, start, min(start + step, w.rows)) for start in range(0, w.rows, step)]

    def work(i: int) -> None:
        w, y, start, stop = bands[i]
        if team.order == "fast" and w.held is not None and len(x) == 1:  # faster than BLAS's matrix-vector product
            np.einsum("ij,j->i", w.held[start:stop], x[0], out=y[0, start:stop])
        elif team.order == "fast" and len(x) == 1:
            y[0, start:stop] = vec_dot(w.raw[start:stop], x[0], w.type, team.order)
        elif team.order == "fast":
            np.matmul(x, w.numbers(start, stop).T, out=y[:, start:stop])
        else:
            dot = dot_in_order(w.raw[start:stop], w.type, team.order)
            for token, row in enumerate(x):
                y[token, start:stop] = dot(row)

    # BLAS with threads of its own must not be called by several: they would wait for each other (`__main__.py` gives it one).
    alone = team.order == "fast" and len(x) > 1 and os.environ.get("OPENBLAS_NUM_THREADS") != "1"
    (Team() if alone else team).each(work, len(bands))
    return out


def rmsnorm(x: F32, weight: F32, eps: float, order: Order) -> F32:
    """x divided by its root mean square, times a weight."""
    lanes = 4 if order == "sse" and x.shape[-1] >= 4 else 1
    total: F32 = np.einsum("...i,...i->...", x, x) if order == "fast" else ordered_sum(x * x, lanes)
    scale: F32 = np.divide(np.float32(1), np.sqrt(np.asarray(total / np.float32(x.shape[-1]) + np.float32(eps))))
    return (x * scale[..., None]) * weight


def softmax(x: F32) -> F32:
    """Exponentials of what is below the maximum, divided by their sum; always in the C's order."""
    e = expf(x - x.max())
    return e * (np.float32(1) / ordered_sum(e, 1))


def silu(x: F32, order: Order, at: F32 | None = None) -> F32:
    """x / (1 + e^-x), or with another exponent in the place of x."""
    at = x if at is None else at
    with np.errstate(over="ignore"):
        y: F32 = np.divide(x, np.float32(1) + (np.exp(-at) if order == "fast" else expf(-at)))
    return y


def gelu(x: F32, order: Order) -> F32:
    """The tanh form, x · (1 + tanh u)/2 = x / (1 + e^-2u) with u = √(2/π) · (x + 0.044715 x³). Gemma's; not in the C."""
    return silu(x, order, np.float32(2 * 0.7978845608028654) * (x + np.float32(0.044715) * (x * x * x)))


def rope(x: F32, cos: F32, sin: F32, halves: bool) -> F32:
    """Turn pairs of each head [tokens, heads, dim] by angles [tokens, pairs]: neighbours, or (`halves`) i and i + pairs."""
    pairs = cos.shape[-1]
    a, b = (slice(0, pairs), slice(pairs, 2 * pairs)) if halves else (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
    c, s, out = cos[:, None], sin[:, None], x.copy()
    out[..., a] = x[..., a] * c - x[..., b] * s
    out[..., b] = x[..., a] * s + x[..., b] * c
    return out


def attention(q: F32, keys: F16, values: F16, begin: int, reach: int, order: Order) -> F32:
    """Softmax(q·k / √dim) · v without a table of scores: sums that are rescaled whenever a larger score comes.

    q [tokens, heads, dim] from position `begin` on, each looking back `reach` positions (0: to the first); keys and values
    [positions, kv heads, dim]."""
    reach = reach or begin + len(q)
    if order != "fast":
        return np.stack([_attention_in_order(row, keys, values, begin + i, reach) for i, row in enumerate(q)])
    tokens, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    scaled = (q / np.sqrt(np.float32(dim))).reshape(tokens, kv_heads, group, dim)
    grouped = scaled.transpose(1, 0, 2, 3).reshape(kv_heads, -1, dim)
    best = np.full((kv_heads, tokens * group, 1), -1e30, np.float32)
    total = np.zeros_like(best)
    acc = np.zeros((kv_heads, tokens * group, dim), np.float32)
    positions = np.repeat(np.arange(begin, begin + tokens), group)[:, None]
    first = max(0, begin - reach + 1)
    for start in range(first // TILE * TILE, begin + tokens, TILE):
        stop = min(start + TILE, begin + tokens)
        scores = grouped @ fp16_to_fp32(keys[start:stop]).transpose(1, 2, 0)
        where = np.arange(start, stop)
        if stop > begin + 1 or start < begin + tokens - reach:
            scores[:, (where > positions) | (where <= positions - reach)] = -np.inf
        new_best = np.maximum(best, scores.max(-1, keepdims=True))
        np.exp(scores - new_best, out=scores)
        rescale = np.exp(best - new_best)
        total = total * rescale + scores.sum(-1, keepdims=True)
        acc = acc * rescale + scores @ fp16_to_fp32(values[start:stop]).transpose(1, 0, 2)
        best = new_best
    mean: F32 = np.divide(acc, total)
    return mean.reshape(kv_heads, tokens, group, dim).transpose(1, 0, 2, 3).reshape(tokens, heads * dim)


def _attention_in_order(q: F32, keys: F16, values: F16, position: int, reach: int) -> F32:
    """One token, position after position, as the C does it, for all heads side by side."""
    heads, dim = q.shape
    group = heads // keys.shape[1]
    first = max(0, position - reach + 1)
    k = np.repeat(fp16_to_fp32(keys[first : position + 1]), group, axis=1)
    scores: F32 = np.divide(ordered_sum(k * q, 1), np.sqrt(np.float32(dim)))
    best = np.full(heads, -1e30, np.float32)
    total = np.zeros(heads, np.float32)
    acc: F32 = np.zeros((heads, dim), np.float32)
    for score, value in zip(scores, values[first : position + 1], strict=True):
        v = np.repeat(fp16_to_fp32(value), group, axis=0)
        larger = score > best
        e = expf(np.where(larger, best - score, score - best))
        keep, add = np.where(larger, e, np.float32(1)), np.where(larger, np.float32(1), e)
        total = total * keep + add
        acc = np.add(acc * keep[:, None], add[:, None] * v)
        best = np.where(larger, score, best)
    return (acc * (np.float32(1) / total)[:, None]).reshape(-1)
