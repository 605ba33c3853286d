"""The quality that a KV type costs, position by position (read `commands/kvcheck.py` next).

Two KV types compute the same text beside each other on one loaded model. The next-token
distributions of each position are compared: Kullback-Leibler divergence of the second from the
first, whether both have the same best token, and the log-probability of the token that follows.
Perplexity alone hides errors that users see: they grow with depth, and some best tokens change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from martlet.config import PAGE_SIZE
from martlet.kv_types import KvTypes, parse_kv_types
from martlet.models.decoder import forward
from martlet.models.weights import Model
from martlet.ops.interface import Array, Backend, Program, StepLimits
from martlet.runtime.f16_window import F16Window, recent_pages
from martlet.runtime.flatten import PageTable, StepBuffers
from martlet.types import PageId, SeqId, Span

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
ROWS = 128  # a step's
KEPT_PROGRAMS = 2  # two precisions are compared
LOGIT_BYTES = 64 << 20  # of a step's logits, at most
ONLY = SeqId(0)


class Lens(Protocol):
    """A source of next-token logits for every position of a text."""

    def logits(self, types: KvTypes, ids: Sequence[int]) -> Iterator[F32]:
        """The logits of all positions of a text, float32 [rows, V] for each step."""


class KvLens:
    """Runs texts of up to `context` tokens through a model; a cache for each layer and KV type."""

    def __init__(self, ops: Backend, model: Model, context: int, rows: int = ROWS) -> None:
        """A step computes up to `rows` positions, fewer for a large vocabulary."""
        rows = min(rows, max(1, LOGIT_BYTES // (4 * model.spec.vocab)))
        self.n_layers = len(model.spec.layers)
        self._ops, self._model = ops, model
        self._n_pages = -(-context // PAGE_SIZE)
        self._limits = StepLimits(rows, 1, rows, self._n_pages)
        self._recent = recent_pages(self._limits, PAGE_SIZE)
        self._caches: dict[tuple[int, str], Array] = {}
        self._programs: dict[str, Program] = {}  # those used last

    def logits(self, types: KvTypes, ids: Sequence[int]) -> Iterator[F32]:
        program = self._program(types)
        buffers = StepBuffers(self._limits, PAGE_SIZE, F16Window(self._recent, PAGE_SIZE))
        tables = {ONLY: PageTable()}
        pages = tuple(PageId(number) for number in range(self._n_pages))
        for start in range(0, len(ids), self._limits.max_tokens):
            count = min(self._limits.max_tokens, len(ids) - start)
            new = pages[: -(-len(ids) // PAGE_SIZE)] if start == 0 else ()
            span = Span(ONLY, start, count, tuple(ids[start : start + count]), new, count)
            yield self._ops.download(program.run(buffers.fill((span,), tables)))

    def _program(self, types: KvTypes) -> Program:
        program = self._programs.pop(str(types), None)
        if program is None:
            while len(self._programs) >= KEPT_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            caches = [self._cache(layer, types.of(layer).name) for layer in range(self.n_layers)]
            program = self._ops.capture(lambda: forward(self._ops, self._model, caches), self._limits)
        self._programs[str(types)] = program
        return program

    def _cache(self, layer: int, dtype: str) -> Array:
        if (layer, dtype) not in self._caches:
            mixer = self._model.spec.layers[layer].mixer
            shape = (self._n_pages, PAGE_SIZE, mixer.n_kv_heads, mixer.head_dim)
            recent = self._recent if dtype == "q4" else None
            self._caches[layer, dtype] = self._ops.kv_cache(*shape, dtype, recent)
        return self._caches[layer, dtype]


@dataclass(frozen=True, slots=True)
class Compared:
    """Arrays [T - 1]: an entry for each position but the last, on the token that follows it."""

    positions: NDArray[np.int64]
    kld: F64  # of the second precision's distribution from the first's, in nats
    agree: NDArray[np.bool_]  # both have the same best token
    loss: F64  # negative log-probability of the token that follows, first precision
    other_loss: F64  # and second

    def between(self, first: int, stop: int) -> Compared:
        """The positions first … stop - 1."""
        chosen = (self.positions >= first) & (self.positions < stop)
        return Compared(*(array[chosen] for array in self._arrays()))

    @property
    def perplexities(self) -> tuple[float, float]:
        """Of the first precision and of the second."""
        return float(np.exp(self.loss.mean())), float(np.exp(self.other_loss.mean()))

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return self.positions, self.kld, self.agree, self.loss, self.other_loss


def join(texts: Sequence[Compared]) -> Compared:
    """Several texts' positions as one."""
    return Compared(*(np.concatenate(arrays) for arrays in zip(*(text._arrays() for text in texts), strict=True)))


def compare(lens: Lens, types: KvTypes, other: KvTypes, ids: Sequence[int]) -> Compared:
    """Run a text with two precisions and compare position by position."""
    return join(list(_compared_steps(lens, types, other, ids)))


def _compared_steps(lens: Lens, types: KvTypes, other: KvTypes, ids: Sequence[int]) -> Iterator[Compared]:
    """The same, a step of each precision at a time."""
    start = 0
    for first, second in zip(lens.logits(types, ids), lens.logits(other, ids), strict=True):
        count = min(len(first), len(ids) - 1 - start)  # nothing follows the last position
        p, q = _log_softmax(first[:count]), _log_softmax(second[:count])
        following = np.array(ids[start + 1 : start + 1 + count], np.int64)
        rows = np.arange(count)
        yield Compared(
            start + rows,
            np.maximum((np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64), 0.0),
            p.argmax(axis=1) == q.argmax(axis=1),
            -p[rows, following].astype(np.float64),
            -q[rows, following].astype(np.float64),
        )
        start += len(first)


def _log_softmax(logits: F32) -> F32:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: F32 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return result


def choose_types(
    types: KvTypes, better: KvTypes, costs: Sequence[float], limit: float, measure: Callable[[KvTypes], float]
) -> tuple[KvTypes, float]:
    """Give the costliest layers the `better` types until the measured divergence is within `limit`.

    A layer that has as many bits already keeps its type. `costs` are the divergences of each layer
    alone. They nearly add up, so the first guess is the fewest layers without which the sum fits;
    measuring finds the rest. Returns the types and their divergence, which is above the limit only
    if even `better` in every layer is.
    """
    gain = [layer for layer in range(len(costs)) if better.of(layer).bits > types.of(layer).bits]
    order = sorted(gain, key=lambda layer: (-costs[layer], layer))
    count = next((n for n in range(len(order)) if sum(costs[layer] for layer in order[n:]) <= limit), len(order))
    while True:
        layers = {layer: better.of(layer).name for layer in order[:count]}
        chosen = KvTypes(types.usual, {**types.layers, **layers})
        divergence = measure(chosen)
        if divergence <= limit or count == len(order):
            return chosen, divergence
        count = min(len(order), count + max(1, count // 4))


def guard_types(
    types: KvTypes,
    base: KvTypes,
    outliers: Iterable[int],
    costs_of: Callable[[], Sequence[float]],
    limit: float,
    measure: Callable[[KvTypes], float],
) -> tuple[KvTypes, float]:
    """Types by layer with a divergence from `base` within `limit`: 4 bits become 8, and 8 `base`.

    `outliers` are the layers that 8 bits are too coarse for; `costs_of` measures each layer alone.
    Any change of a value costs something, since activations are rounded to codes after it. That
    share, the least cost of all layers, is subtracted, and the rest is scaled to the measured sum.
    Returns the types and their divergence.
    """
    divergence = measure(types)
    if divergence <= limit:
        return types, divergence
    costs = costs_of()
    has_q4 = any(types.of(layer).name == "q4" for layer in range(len(costs)))
    for better in [parse_kv_types("q8").guarded(outliers), base] if has_q4 else [base]:
        over = [cost - min(costs) for cost in costs]
        scale = divergence / (sum(over) or 1.0)
        types, divergence = choose_types(types, better, [scale * cost for cost in over], limit, measure)
        if divergence <= limit:
            break
    return types, divergence
