"""The operations of a model, and what a backend must provide.

A model is written once, against the `Backend` Protocol. An `Array` is opaque outside its backend:
the decoder passes it on and takes column views of it, nothing else. The first dimension of every
activation is a `Rows` domain, whose size is known only when a step runs. So a backend may run
`capture`'s function once, keep the operations as a program, and replay it for every later step.

Shape letters: T tokens of the step, B sequences, L rows that need logits, H heads, G KV heads,
D head dimensions, C hidden, F ffn, V vocabulary, P page size, E experts, S chosen experts.
`reference.py` defines every operation. Read `runtime/sampling.py` next.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from martlet.errors import UnsupportedError
from martlet.machine import memory_available
from martlet.quant.table import RawTensor
from martlet.spec import Activation, Attention, Rope, Routing

Array = Any  # opaque outside its backend
Weight = Any  # a packed matrix, opaque outside its backend
F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


class Rows(Enum):
    """A domain of rows. `StepLimits.most` is its largest size, `StepInputs.n_rows` the step's."""

    TOKENS = "T"
    LOGITS = "L"


class Ability(StrEnum):
    """What a backend may lack; the value names it in errors."""

    SECTIONS = "programs that run in sections"  # chunks of prompts that pause between layers
    LORA = "low-rank adapters"
    HEADS = "draft heads"  # `feed`, `argmax`, `advance`
    PACKED = "packed files"  # `packed_file`


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a backend can do and how much memory it takes, known before it is made."""

    name: str
    kv_types: frozenset[str]  # names in KV_TYPES
    packed_bytes: Callable[[Sequence[RawTensor]], int]  # size of the weight that `pack` would make
    features: frozenset[Ability]
    value_bytes: float = 4.0  # memory for one activation value, with all forms that are kept of it
    row_tile: int = 4  # rows that a product computes in little more time than one row
    memory_available: Callable[[], int | None] = memory_available  # in bytes; None: unknown

    def require(self, feature: Ability) -> None:
        """Raise UnsupportedError, naming the ability, if the backend lacks it."""
        if feature not in self.features:
            raise UnsupportedError(f"the {self.name} backend lacks {feature}", sorted(self.features))

    def require_kv_type(self, dtype: str) -> None:
        """Raise UnsupportedError, listing the types there are, if pages cannot have this one."""
        if dtype not in self.kv_types:
            raise UnsupportedError(f"the {self.name} backend has no KV type {dtype!r}", sorted(self.kv_types))


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that a program must take."""

    max_tokens: int  # T
    max_seqs: int  # B
    max_logits: int  # L
    max_pages_per_seq: int
    layered_rows: int = 0  # rows of a chunk that passes the layers in several steps; 0: none does

    def most(self, rows: Rows) -> int:
        """The largest size of a domain."""
        return {Rows.TOKENS: self.max_tokens, Rows.LOGITS: self.max_logits}[rows]


@dataclass(frozen=True, slots=True)
class RecentPages:
    """How many float16 pages a q4 cache has for the newest positions.

    Pages 0 … kept - 1 last from step to step. The `passing` pages after them are used within one
    layer only, so caches of one shape may share them.
    """

    kept: int
    passing: int


def _none() -> I32:
    return np.zeros(0, np.int32)


def _nothing() -> F32:
    return np.zeros((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one step computes, flattened from its spans.

    Arrays that a program has no use for are empty.
    """

    ids: I32  # [T], row t's token
    positions: I32  # [T], its position in its sequence
    slots: I32  # [T], where its key and value go: page * page_size + offset
    span_starts: I32  # [B + 1]; sequence b has rows span_starts[b] : span_starts[b + 1]
    page_table: I32  # [B, n], each sequence's page numbers in order of position
    logit_rows: I32  # [L], rows that need logits
    # [T] and [B, n]: as `slots` and `page_table`, of a q4 cache's float16 pages (`RecentPages`).
    recent_slots: I32 = field(default_factory=_none)
    recent_table: I32 = field(default_factory=_none)  # only pages of the rows' own groups count
    lora_slots: I32 = field(default_factory=_none)  # [T], slots in the tables of `lora`; < 0: none
    feed: F32 = field(default_factory=_nothing)  # [T, W], what the operation `feed` gives
    least: float = 0.0  # `advance` goes on while some chain's probability is at least this

    def n_rows(self, rows: Rows) -> int:
        """A domain's size in this step."""
        return {Rows.TOKENS: self.ids.size, Rows.LOGITS: self.logit_rows.size}[rows]


class Program(Protocol):
    """A captured step."""

    def run(self, inputs: StepInputs, first: int = 0, stop: int | None = None) -> Any:
        """Run the step and return what the captured function returned: Arrays for `download`.

        A step with sections runs those from `first` up to `stop` - 1; None: all that are left. The
        result is complete when the last section has run. A run from `first` > 0 continues the run
        that stopped there: with the same inputs, and no other run of this program in between.
        """


class Backend(Protocol):
    """One of the four plug-in points.

    Operations write their last argument, `out`, and return nothing.

    Activations are float32 [rows, width]. "In place" means that `out` may be the input's array.
    Calls that change pages, weights or adapters come between two runs of programs.
    """

    name: str
    abilities: Abilities

    def fingerprint(self) -> str:
        """Text that differs wherever results may differ in a bit: processor, versions, source."""

    # -- memory ------------------------------------------------------------------------------------
    def upload(self, values: NDArray[Any]) -> Array:
        """Copy a small constant (a norm's weight, a bias) to the backend, as float32."""

    def download(self, array: Array) -> F32:
        """A copy of an activation of the step that ran last: float32 [rows, width]."""

    def view(self, array: Array) -> F32:
        """As `download`, without a copy where possible; read-only, valid until the next run."""

    def empty(self, rows: Rows, width: int) -> Array:
        """Memory for an activation [rows, width]; only inside `capture`'s function."""

    def columns(self, array: Array, start: int, stop: int) -> Array:
        """The view array[:, start:stop]."""

    def pack(self, tensors: Sequence[RawTensor]) -> Weight:
        """Pack matrices [n_i, K], of any block types, by rows into one weight [Σ n_i, K].

        `docs/formats.md` says what packing loses, if anything.
        """

    def weight_bytes(self, weight: Weight) -> int:
        """Bytes that a packed weight occupies."""

    def kv_cache(
        self,
        n_pages: int,
        page_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: str,
        recent: RecentPages | None = None,
    ) -> Array:
        """Zeroed key and value pages of one layer. q4 needs `recent`.

        Raises UnsupportedError for a type or a size that the backend does not have.
        """

    def page_bytes(self, cache: Array) -> int:
        """Bytes of one page of this layer: keys, values, scales."""

    def copy_page(self, cache: Array, source: int, target: int) -> None:
        """Make page `target` equal to page `source`, bit for bit."""

    def read_page(self, cache: Array, page: int, out: U8) -> None:
        """Copy a page to `out`, uint8 [page_bytes], in the backend's own order."""

    def write_page(self, cache: Array, page: int, data: U8) -> None:
        """Restore a page from what `read_page` gave, uint8 [page_bytes]."""

    def lora_table(self, n_slots: int, k: int, n: int) -> Array:
        """Slots for low-rank updates of a product [rows, k] → [rows, n], all empty at first."""

    def set_lora(self, table: Array, slot: int, a: F32 | None, b: F32 | None) -> None:
        """Fill a slot with a [r, k] and b [n, r], or empty it with None."""

    def close(self) -> None:
        """Free everything and stop the threads. Idempotent."""

    # -- capture -----------------------------------------------------------------------------------
    def capture(self, step: Callable[[], Any], limits: StepLimits) -> Program:
        """A program of the operations that `step` calls; `step` returns the Arrays to hand out."""

    def section(self) -> None:
        """Begin the next section, numbered from 0. Only inside `capture`'s function."""

    # -- operations --------------------------------------------------------------------------------
    def embed(self, table: Weight, scale: float, out: Array) -> None:
        """out[t] = table[ids[t]] * scale, with the step's ids; table [V, C], out [T, C]."""

    def feed(self, out: Array) -> None:
        """out[t] = the step's feed[t], [T, W].

        At most once in a program, before others write `out`.
        """

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """out = x / sqrt(mean(x²) + eps) * weight, by groups of W columns; in place allowed.

        weight [W]; x, out [rows, n * W]: n is 1 for a layer's norm, H or G for a norm of heads.
        """

    def linear(
        self, x: Array, weight: Weight, out: Array, bias: Array | None = None, residual: Array | None = None
    ) -> None:
        """out = x @ weightᵀ (+ bias) (+ residual); `out` may be `residual`.

        x [rows, K], weight [N, K], bias [N], residual and out [rows, N].
        """

    def lora(self, x: Array, table: Array, out: Array) -> None:
        """out += (x @ aᵀ) @ bᵀ with a and b of each row's slot.

        Rows without a slot keep their bits.

        x [rows, K], out [rows, N].
        """

    def rope(self, x: Array, head_dim: int, rope: Rope, out: Array) -> None:
        """Rotate each head by its row's position, in half-split pairs.

        In place allowed. [T, n * D].
        """

    def kv_write(self, k: Array, v: Array, cache: Array) -> None:
        """Write row t of k and v, [T, G * D], to the step's slot t of the cache.

        A q4 cache takes rows to `recent_slots`, and compresses the pages that the step fills.
        """

    def attention(self, q: Array, cache: Array, spec: Attention, out: Array, sinks: Array | None = None) -> None:
        """Causal attention of each row over its sequence's pages; q, out [T, H * D].

        Row t at position p sees positions max(0, p - window + 1) … p, whose keys are in the cache.
        In a q4 cache it sees those from p // RECENT_TOKENS * RECENT_TOKENS on in float16. `sinks`
        [H], uploaded, are scores without a position: they take part in the softmax, and add
        nothing to the output.
        """

    def act_mul(self, gate_up: Array, activation: Activation, out: Array, groups: int = 1) -> None:
        """out = act(gate) * up (`Activation`), by groups: each of gate_up's is gate, then up.

        gate_up [rows, groups * 2F], out [rows, groups * F].
        """

    def route(self, scores: Array, routing: Routing, bias: Array | None, out: Array) -> None:
        """Choose each row's experts: out = their numbers, the best first, then their weights.

        scores [rows, E], bias [E], which counts in the choice only, out [rows, 2S].
        """

    def expert_linear(
        self, x: Array, choice: Array, weights: Sequence[Weight], out: Array, bias: Array | None = None
    ) -> None:
        """out's part s = x's part s @ weights[e]ᵀ (+ bias[e]), e a row's expert number s.

        x [rows, S * K], or [rows, K] for all parts; choice [rows, 2S] as `route` makes it; E
        weights [N, K]; bias [E, N], uploaded; out [rows, S * N].
        """

    def combine(self, y: Array, choice: Array, out: Array) -> None:
        """out = Σ over s, in order, of weight s of `choice` [rows, 2S] times part s of y.

        y [rows, S * C], out [rows, C].
        """

    def gate(self, x: Array, scores: Array, out: Array) -> None:
        """out = x * sigmoid(scores); in place allowed.

        x, out [rows, width]; scores [rows, n], each for width / n neighbouring columns.
        """

    def add(self, x: Array, y: Array, scale: float, out: Array) -> None:
        """out = x + scale * y, all [rows, width]; in place allowed."""

    def take_logit_rows(self, x: Array, out: Array) -> None:
        """out[l] = x[logit_rows[l]]; x [T, C], out [L, C]."""

    def scale_cap(self, x: Array, scale: float, cap: float | None, out: Array) -> None:
        """out = x * scale, then cap * tanh(out / cap) if there is a cap.

        In place allowed. [rows, width].
        """

    def choose(self, logits: Array, out: Array) -> None:
        """out[l, 0] = the lowest column of the largest logits[l].

        -1 if that is infinite or any is NaN.

        logits [L, V], out [L, 1]. Greedy sampling can stay on a device: ids come back, not rows of
        logits. On a CPU the sampler reads the logits in place, so no program calls this there.
        """

    def argmax(self, logits: Array, ids: Array, before: Array | None, out: Array) -> None:
        """out[l] = (token, p, p * before[l, 2]): the likeliest token, its probability, the chain's.

        logits [L, N]; ids [N], an uploaded constant, has each column's token; before and out [L,
        3]. Of equal logits the first counts; without `before` the third value is p.
        """

    def advance(self, guesses: Array, x: Array, page_size: int) -> Array:
        """Go on with a next step: sequence l's row is token guesses[l, 0], one position further.

        guesses [L, 3], with a row for each sequence. All operations after this belong to the new
        step and use arrays made after it; the result is x [L, C] as an array [T, C] of that step.
        Where no guesses[l, 2] reaches `least`, the rest of the program may be skipped. Programs
        that advance hand out arrays [L, width] only, and have no q4 caches.
        """


class PacksToFile(Protocol):
    """A backend with the ability PACKED."""

    def packed_file(self, folder: Path, name: str) -> AbstractContextManager[Any]:
        """Within it, `pack` takes weights from the file `name` in `folder`, or writes a new one.

        A file that cannot be had is a warning.
        """
