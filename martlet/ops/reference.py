"""The definition of every operation, in plain NumPy float32.

Read `models/decoder.py` for their use.

Every kernel is checked against these functions. Each docstring gives the formula, the shapes, and a
bound on this code's own error against exact arithmetic on the same inputs. u is 2⁻²⁴, one rounding
in float32; products may add in any order (BLAS does), so a sum of n of them has the bound of any
order, n u Σ|x w| (Higham, Accuracy and Stability, section 3.1). Shape letters as in `interface.py`.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.kv_types import KV_TYPES, RECENT_TOKENS
from martlet.ops import kv_pages
from martlet.ops.interface import Abilities, Ability, RecentPages, Rows, StepInputs, StepLimits
from martlet.ops.kv_codes import q4_keys, q4_values, rounded_q8
from martlet.ops.kv_pages import by_page
from martlet.quant.ggml import decode
from martlet.quant.table import RawTensor
from martlet.spec import Activation, Attention, Rope, Routing, Scoring

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
TINY = np.float32(1e-20)  # the least sum that weights of experts are divided by
Updates = dict[int, tuple[F32, F32]]  # of one product, by slot


@dataclass(slots=True)
class ReferenceCache:
    """Pages of one layer: keys and values [n_pages * P, G, D].

    Of types with codes, float32 values that the codes stand for.
    """

    keys: NDArray[Any]
    values: NDArray[Any]
    page_size: int
    dtype: str = "f32"
    recent: ReferenceCache | None = None  # of q4: the newest positions

    @property
    def parts(self) -> tuple[U8, ...]:
        """The bytes of each array, by page."""
        n_pages = len(self.keys) // self.page_size
        return by_page(self.keys, n_pages), by_page(self.values, n_pages)


class ReferenceProgram:
    """A step that is run anew each time; in sections, when the last one is."""

    def __init__(self, backend: ReferenceBackend, step: Callable[[], Any]) -> None:
        self._backend, self._step = backend, step

    def run(self, inputs: StepInputs, first: int = 0, stop: int | None = None) -> Any:
        """Run the step on `inputs`, unless more sections are to come."""
        if stop is not None:
            return None
        self._backend.inputs = inputs
        return self._step()


def _packed_bytes(tensors: Sequence[RawTensor]) -> int:
    return sum(4 * math.prod(tensor.shape) for tensor in tensors)  # decoded to float32


class ReferenceBackend:
    """NumPy arrays; a "program" is the function itself."""

    name = "reference"
    abilities = Abilities(
        name, frozenset(KV_TYPES), _packed_bytes, frozenset({Ability.SECTIONS, Ability.LORA, Ability.HEADS})
    )

    def __init__(self) -> None:
        self.inputs: StepInputs | None = None  # of the step that runs

    def fingerprint(self) -> str:
        """NumPy's version and the processor, by which its BLAS chooses its order of sums."""
        return f"reference {np.__version__} {platform.machine()} {platform.processor()}"

    # -- memory ------------------------------------------------------------------------------------
    def upload(self, values: NDArray[Any]) -> F32:
        return np.array(values, np.float32)

    def download(self, array: F32) -> F32:
        return array.copy()

    def view(self, array: F32) -> F32:
        return array

    def empty(self, rows: Rows, width: int) -> F32:
        """Zeros [rows of this step, width]."""
        return np.zeros((self._step.n_rows(rows), width), np.float32)

    def columns(self, array: F32, start: int, stop: int) -> F32:
        return array[:, start:stop]

    def pack(self, tensors: Sequence[RawTensor]) -> F32:
        """The matrices as float32 [sum n_i, k], stacked by rows."""
        return np.concatenate([decode(tensor) for tensor in tensors])

    def kv_cache(
        self,
        n_pages: int,
        page_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: str,
        recent: RecentPages | None = None,
    ) -> ReferenceCache:
        self.abilities.require_kv_type(dtype)
        shape, element = (n_pages * page_size, n_kv_heads, head_dim), np.float16 if dtype == "f16" else np.float32
        cache = ReferenceCache(np.zeros(shape, element), np.zeros(shape, element), page_size, dtype)
        if dtype == "q4":
            assert recent is not None
            assert RECENT_TOKENS % page_size == 0
            cache.recent = self.kv_cache(recent.kept + recent.passing, page_size, n_kv_heads, head_dim, "f16")
        return cache

    def page_bytes(self, cache: ReferenceCache) -> int:
        return kv_pages.page_bytes(cache.parts)

    def copy_page(self, cache: ReferenceCache, source: int, target: int) -> None:
        kv_pages.copy_page(cache.parts, source, target)

    def read_page(self, cache: ReferenceCache, page: int, out: U8) -> None:
        kv_pages.read_page(cache.parts, page, out)

    def write_page(self, cache: ReferenceCache, page: int, data: U8) -> None:
        kv_pages.write_page(cache.parts, page, data)

    def lora_table(self, n_slots: int, k: int, n: int) -> Updates:
        return {}

    def set_lora(self, table: Updates, slot: int, a: F32 | None, b: F32 | None) -> None:
        table.pop(slot, None)
        if a is not None and b is not None:
            table[slot] = a, b

    def weight_bytes(self, weight: F32) -> int:
        return weight.nbytes

    def close(self) -> None:
        """Nothing to free."""

    def capture(self, step: Callable[[], Any], limits: StepLimits) -> ReferenceProgram:
        return ReferenceProgram(self, step)

    def section(self) -> None:
        """Nothing: all sections are run together."""

    @property
    def _step(self) -> StepInputs:
        assert self.inputs is not None, "operations are called inside a program's run"
        return self.inputs

    # -- operations --------------------------------------------------------------------------------
    def embed(self, table: F32, scale: float, out: F32) -> None:
        """out[t] = table[ids[t]] * scale; table [V, C], out [T, C].

        Error: 2u relative (the scale is float32).
        """
        out[:] = table[self._step.ids] * np.float32(scale)

    def feed(self, out: F32) -> None:
        """out[t] = feed[t], the step's; out [T, W]. Exact."""
        out[:] = self._step.feed

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32) -> None:
        """out = x / sqrt(mean(x²) + eps) * weight by groups of W columns (arXiv:1910.07467).

        x, out [rows, n * W], weight [W]. Error: (W/2 + 5) u relative.
        """
        groups = x.reshape(len(x), x.shape[1] // weight.size, weight.size)
        mean = np.mean(groups * groups, axis=-1, keepdims=True)
        out[:] = (groups / np.sqrt(mean + np.float32(eps)) * weight).reshape(x.shape)

    def linear(self, x: F32, weight: F32, out: F32, bias: F32 | None = None, residual: F32 | None = None) -> None:
        """out[r, i] = Σⱼ x[r, j] weight[i, j] (+ bias[i]) (+ residual[r, i]).

        X [rows, K], weight [N, K].

        Error: (K + 2) u (Σⱼ |x weight| + |bias| + |residual|).
        """
        product = x @ weight.T
        if bias is not None:
            product += bias
        out[:] = product if residual is None else product + residual

    def lora(self, x: F32, table: Updates, out: F32) -> None:
        """out[r] += b (a x[r]) with row r's own a [R, K] and b [N, R] (LoRA, arXiv:2106.09685).

        X [rows, K], out [rows, N].

        Error: (K + R + 2) u (|b| |a| |x[r]| + |out|).
        """
        step = self._step
        slots = step.lora_slots if len(x) == step.ids.size else step.lora_slots[step.logit_rows]
        for row, slot in enumerate(slots.tolist()):
            if slot in table:
                a, b = table[slot]
                out[row] += b @ (a @ x[row])

    def rope(self, x: F32, head_dim: int, rope: Rope, out: F32) -> None:
        """(a, b) = (x[i], x[i + dims/2]) becomes (a cos − b sin, b cos + a sin) (arXiv:2104.09864).

        The angle is position · frequency i, in float64; what lies beyond `dims` is copied. x, out
        [T, n * D]. Error: 3u magnitude (|a| + |b|).
        """
        # float64 [T, dims/2]
        angles = self._step.positions[:, None] * np.array(rope.inverse_frequencies)
        cos = (np.cos(angles) * rope.magnitude).astype(np.float32)[:, None, :]
        sin = (np.sin(angles) * rope.magnitude).astype(np.float32)[:, None, :]
        heads = x.reshape(len(x), x.shape[1] // head_dim, head_dim)
        half = rope.dims // 2
        first, second, rest = np.split(heads, [half, rope.dims], axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin, rest]
        out[:] = np.concatenate(turned, axis=-1).reshape(x.shape)

    def kv_write(self, k: F32, v: F32, cache: ReferenceCache) -> None:
        """Row t of k and v, [T, G * D], to slot t.

        float16 saturates at its largest value; error 2⁻¹¹ relative.

        q8 and q4 lose what `kv_codes.py` says; q4 keeps float16 and makes codes of the pages that
        the step has filled.
        """
        shape = (k.shape[0], *cache.keys.shape[1:])
        if cache.recent is not None:
            self._put(k.reshape(shape), v.reshape(shape), cache.recent, self._step.recent_slots)
            self._compress(cache, cache.recent)
            return
        keys, values = k.reshape(shape), v.reshape(shape)
        if cache.dtype == "q8":
            keys, values = rounded_q8(keys), rounded_q8(values)
        self._put(keys, values, cache, self._step.slots)

    def _put(self, k: F32, v: F32, cache: ReferenceCache, slots: I32) -> None:
        most = np.finfo(cache.keys.dtype).max
        cache.keys[slots] = np.clip(k, -most, most)
        cache.values[slots] = np.clip(v, -most, most)

    def _compress(self, cache: ReferenceCache, recent: ReferenceCache) -> None:
        """Make codes of every page whose last position is in the step."""
        step, size = self._step, cache.page_size
        for b, pages in enumerate(step.page_table):
            rows = step.positions[step.span_starts[b] : step.span_starts[b + 1]]
            for page in sorted({int(p) // size for p in rows if p % size == size - 1}):
                source = slice(step.recent_table[b, page] * size, (step.recent_table[b, page] + 1) * size)
                target = slice(pages[page] * size, (pages[page] + 1) * size)
                cache.keys[target] = q4_keys(recent.keys[source].astype(np.float32))
                cache.values[target] = q4_values(recent.values[source].astype(np.float32))

    def attention(self, q: F32, cache: ReferenceCache, spec: Attention, out: F32, sinks: F32 | None = None) -> None:
        """softmax(cap · tanh(scale · q kᵀ / cap) + mask) v by heads (arXiv:1706.03762, 2305.13245).

        q, out [T, H * D]; head h reads KV head h // (H / G). Row t at position p sees its own
        sequence's positions max(0, p − window + 1) … p. A head's sink, of `sinks` [H], adds e^sink
        to the softmax's sum (arXiv:2309.17453). Error, with S seen: (S + 4 + 2 (D + 4)
        max|scale| Σ|q k|) u max|v|.
        """
        step = self._step
        for first, stop, keys, values in self._visible(cache):  # [S, G, D]
            positions = np.arange(len(keys))
            # [T, G, H/G, D]
            queries = q[first:stop].reshape(stop - first, spec.n_kv_heads, -1, spec.head_dim)
            scores = np.einsum("tghd,sgd->ghts", queries, keys) * np.float32(spec.scale)
            if spec.softcap is not None:
                scores = np.float32(spec.softcap) * np.tanh(scores / np.float32(spec.softcap))
            behind = step.positions[first:stop, None] - positions  # [T, S], the distance back
            seen = behind >= 0
            if spec.window is not None:
                seen &= behind < spec.window
            scores = np.where(seen, scores, -np.inf)
            largest = scores.max(axis=-1, keepdims=True)
            weights = np.exp(scores - largest)
            total = weights.sum(axis=-1, keepdims=True)
            if sinks is not None:
                total += np.exp(sinks.reshape(spec.n_kv_heads, -1, 1, 1) - largest)
            weights /= total
            out[first:stop] = np.einsum("ghts,sgd->tghd", weights, values).reshape(stop - first, -1)

    def _visible(self, cache: ReferenceCache) -> Iterator[tuple[int, int, F32, F32]]:
        """Runs of rows that see the same numbers, with their keys and values, float32 [S, G, D]."""
        step, size = self._step, cache.page_size
        for b, pages in enumerate(step.page_table):
            first, stop = int(step.span_starts[b]), int(step.span_starts[b + 1])
            while first < stop:
                start, last = int(step.positions[first]), int(step.positions[stop - 1])
                if cache.recent is not None:
                    last = min(last, start // RECENT_TOKENS * RECENT_TOKENS + RECENT_TOKENS - 1)
                positions = np.arange(last + 1)
                slots = pages[positions // size] * size + positions % size
                keys, values = cache.keys[slots].astype(np.float32), cache.values[slots].astype(np.float32)
                if cache.recent is not None:
                    own = np.arange(start // RECENT_TOKENS * RECENT_TOKENS, last + 1)
                    slots = step.recent_table[b, own // size] * size + own % size
                    keys[own], values[own] = cache.recent.keys[slots], cache.recent.values[slots]
                yield first, first + last - start + 1, keys, values
                first += last - start + 1

    def act_mul(self, gate_up: F32, activation: Activation, out: F32, groups: int = 1) -> None:
        """out = act(gate) * up; gate_up [rows, groups * 2F] is gate, then up, in each group.

        out [rows, groups * F] (arXiv:2002.05202; `swiglu_oai` is another form). Error: 8u
        |gate up|, and with GELU 4u more where erf or tanh cancels the 1.
        """
        halves = gate_up.reshape(len(gate_up), groups, 2, out.shape[1] // groups)
        gate, up = halves[:, :, 0], halves[:, :, 1]
        if activation is Activation.SWIGLU_OAI:
            out[:] = swiglu_oai(gate, up).reshape(out.shape)
        else:
            out[:] = (ACTIVATIONS[activation](gate) * up).reshape(out.shape)

    def route(self, scores: F32, routing: Routing, bias: F32 | None, out: F32) -> None:
        """out[r] = the numbers of the S experts that rank first, then their weights.

        p = softmax(scores[r]) or sigmoid(scores[r]). Experts rank by p + bias, or by their scores
        where there is no bias; of equal ranks the lower number comes first, and NaN ranks last.
        Groups rank by the sum of their best `n_ranking` experts' ranks; experts of other than the
        best groups rank last. Weights are p of the chosen, divided by their sum if normalised,
        times the scale (arXiv:2401.04088, 2412.19437). scores [rows, E], bias [E], out [rows, 2S].
        Error: (E + 8) u relative in the weights; the numbers are those of this code where no two
        ranks are that close.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            if routing.scoring is Scoring.SIGMOID:
                p = 1 / (1 + np.exp(-scores))
            else:
                p = np.exp(scores - scores.max(axis=1, keepdims=True))
                p = p / p.sum(axis=1, keepdims=True)
        ranks = scores if bias is None else p + bias
        ranks = np.where(np.isnan(ranks), np.float32(-np.inf), ranks)
        if routing.n_groups > 1:
            groups = ranks.reshape(len(ranks), routing.n_groups, routing.n_experts // routing.n_groups)
            with np.errstate(over="ignore"):
                best = np.sort(groups, axis=2)[:, :, ::-1][:, :, : routing.n_ranking].sum(axis=2)
            last = np.argsort(-best, axis=1, kind="stable")[:, routing.n_groups_chosen :]
            np.put_along_axis(groups, last[:, :, None], -np.inf, axis=1)
        numbers = np.argsort(-ranks, axis=1, kind="stable")[:, : routing.n_chosen]
        weights = np.take_along_axis(p, numbers, axis=1)
        if routing.normalised:
            weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), TINY)
        out[:] = np.concatenate([numbers, weights * np.float32(routing.scale)], axis=1)

    def expert_linear(self, x: F32, choice: F32, weights: Sequence[F32], out: F32, bias: F32 | None = None) -> None:
        """out[r, s] = Σⱼ x[r, s, j] weights[e, :, j] (+ bias[e]), e = choice[r, s].

        x [rows, S * K] or, for all s, [rows, K]; choice [rows, 2S], E weights [N, K], bias [E, N],
        out [rows, S * N]. Error: as `linear`.
        """
        n, k = weights[0].shape
        experts = choice[:, : choice.shape[1] // 2].astype(np.intp)  # [rows, S]
        parts = np.broadcast_to(x.reshape(len(x), x.shape[1] // k, k), (*experts.shape, k))
        products = np.empty((*experts.shape, n), np.float32)
        for e in np.unique(experts):
            products[experts == e] = parts[experts == e] @ weights[e].T + (0 if bias is None else bias[e])
        out[:] = products.reshape(out.shape)

    def combine(self, y: F32, choice: F32, out: F32) -> None:
        """out[r] = Σₛ choice[r, S + s] y[r, s]; y [rows, S * C], choice [rows, 2S], out [rows, C].

        Error: (S + 1) u Σₛ |choice y|.
        """
        weights = choice[:, choice.shape[1] // 2 :]
        out[:] = np.einsum("rs,rsc->rc", weights, y.reshape(*weights.shape, out.shape[1]))

    def gate(self, x: F32, scores: F32, out: F32) -> None:
        """out = x sigmoid(scores), x and out [rows, n * w], scores [rows, n]. Error: 6u |x|."""
        shares = 1 / (1 + np.exp(-scores))
        out[:] = (x.reshape(*scores.shape, x.shape[1] // scores.shape[1]) * shares[:, :, None]).reshape(x.shape)

    def add(self, x: F32, y: F32, scale: float, out: F32) -> None:
        """out = x + scale * y, [rows, width]. Error: 2u (|x| + |scale y|)."""
        out[:] = x + np.float32(scale) * y

    def take_logit_rows(self, x: F32, out: F32) -> None:
        """out[l] = x[logit_rows[l]]; x [T, C], out [L, C]. Exact."""
        out[:] = x[self._step.logit_rows]

    def choose(self, logits: F32, out: F32) -> None:
        """out[l, 0] = the first i of the largest logits[l, i]; -1 if it is infinite or any is NaN.

        logits [L, V], out [L, 1]. Exact.
        """
        out[:, 0] = np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), -1)

    def argmax(self, logits: F32, ids: F32, before: F32 | None, out: F32) -> None:
        """out[l] = (ids[i], p, p · before[l, 2]), i the first largest of logits[l], p its softmax.

        logits [L, N], ids [N], before and out [L, 3].

        Error: (D + 4) u relative.
        """
        best = logits.argmax(axis=1)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
        out[:, 0], out[:, 1] = ids[best], 1 / shares
        out[:, 2] = out[:, 1] if before is None else out[:, 1] * before[:, 2]

    def advance(self, guesses: F32, x: F32, page_size: int) -> F32:
        """Make the inputs those of the next step, a row a sequence; returns x [L, C]. Exact."""
        step, rows = self._step, np.arange(len(x), dtype=np.int32)
        positions = step.positions[step.logit_rows] + 1
        slots = step.page_table[rows, positions // page_size] * page_size + positions % page_size
        ids, starts = guesses[:, 0].astype(np.int32), np.arange(len(x) + 1, dtype=np.int32)
        self.inputs = StepInputs(ids, positions, slots, starts, step.page_table, rows)
        return x

    def scale_cap(self, x: F32, scale: float, cap: float | None, out: F32) -> None:
        """out = x * scale, then cap * tanh(out / cap) with a cap, [rows, w]. Error: 5u relative."""
        scaled = x * np.float32(scale)
        out[:] = scaled if cap is None else np.float32(cap) * np.tanh(scaled / np.float32(cap))


def silu(x: F32) -> F32:
    """x / (1 + e^-x), float32 [...] (arXiv:1702.03118)."""
    with np.errstate(over="ignore"):
        result: F32 = x / (1 + np.exp(-x))
    return result


def gelu_tanh(x: F32) -> F32:
    """x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))), float32 [...] (arXiv:1606.08415)."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    result: F32 = np.float32(0.5) * x * (1 + np.tanh(inner))
    return result


def gelu(x: F32) -> F32:
    """x/2 · (1 + erf(x/√2)), float32 [...] (arXiv:1606.08415)."""
    erf = np.frompyfunc(math.erf, 1, 1)(x / np.float32(math.sqrt(2))).astype(np.float32)
    result: F32 = np.float32(0.5) * x * (1 + erf)
    return result


def swiglu_oai(gate: F32, up: F32) -> F32:
    """g / (1 + e^(−1.702 g)) (u + 1), g = min(gate, 7), u = up within ±7 (arXiv:2508.10925).

    gate, up and the result [rows, groups, F].
    """
    gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
    with np.errstate(over="ignore"):
        out: F32 = gate / (1 + np.exp(np.float32(-1.702) * gate)) * (up + 1)
    return out


ACTIVATIONS: dict[Activation, Callable[[F32], F32]] = {
    Activation.SILU: silu,
    Activation.GELU_TANH: gelu_tanh,
    Activation.GELU: gelu,
}
