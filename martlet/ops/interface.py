"""The operations that a model is made of, and what a backend must provide (read `reference.py` next: the definition).

A model is written once, against this Protocol. An `Array` is opaque outside its backend: the decoder passes it on and
takes column views of it, nothing else. The first dimension of every activation is a `Rows` domain, whose size is known
only when a step runs: a backend may therefore run `capture`'s function once, keep the operations as a program, and
replay the program for every later step.

Shape letters: T tokens in the step, B sequences, L rows that need logits, H heads, G KV heads, D head dim, C hidden,
F ffn, V vocab, P page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from martlet.errors import UnsupportedError
from martlet.machine import memory_available
from martlet.quant.table import RawTensor
from martlet.spec import Activation, Attention, Rope

__all__ = [
    "Abilities",
    "Ability",
    "Array",
    "Backend",
    "Program",
    "RecentPages",
    "Rows",
    "StepInputs",
    "StepLimits",
    "Weight",
]

Array = Any  # opaque outside its backend
Weight = Any  # a packed matrix, opaque outside its backend
F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


class Rows(Enum):
    """A domain of rows, the first dimension of an activation. `StepLimits.most` and `StepInputs.n_rows` say its sizes."""

    TOKENS = "T"
    LOGITS = "L"


class Ability(StrEnum):
    """What a backend may lack. The value names it in the error of who needs it."""

    SECTIONS = "programs that run in sections"  # prompts between layers
    LORA = "low-rank adapters"
    HEADS = "draft heads"  # `feed`, `argmax`, `advance`


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a backend can do and what its memory holds, known before it is made."""

    name: str
    kv_types: frozenset[str]  # names in KV_TYPES
    packed_bytes: Callable[[Sequence[RawTensor]], int]  # that `pack` of these tensors would occupy
    features: frozenset[Ability] = frozenset(Ability)
    value_bytes: float = 4.0  # of an activation's value in a program, other forms of it included
    row_tile: int = 4  # rows that a product computes in little more time than one
    memory_available: Callable[[], int | None] = (
        memory_available  # bytes for weights, pages and programs; None: unknown
    )

    def require(self, feature: Ability) -> None:
        """Raise UnsupportedError, with the ability's name, if the backend lacks it."""
        if feature not in self.features:
            raise UnsupportedError(f"the {self.name} backend lacks {feature}", sorted(self.features))

    def require_kv_type(self, dtype: str) -> None:
        """Raise UnsupportedError, with the types that there are, if the backend cannot keep pages of this one."""
        if dtype not in self.kv_types:
            raise UnsupportedError(f"the {self.name} backend has no KV type {dtype!r}", sorted(self.kv_types))


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that a program must take."""

    max_tokens: int  # T
    max_seqs: int
    max_logits: int  # L
    max_pages_per_seq: int
    layered_rows: int = 0  # of a chunk that goes through the layers in several steps; 0: none does

    def most(self, rows: Rows) -> int:
        """The largest size of a domain."""
        return {Rows.TOKENS: self.max_tokens, Rows.LOGITS: self.max_logits}[rows]


@dataclass(frozen=True, slots=True)
class RecentPages:
    """How many float16 pages a q4 cache has for the newest positions: numbers 0 … kept - 1 last from step to step.

    Numbers from `kept` on pass with the layer: caches of one shape may share them.
    """

    kept: int
    passing: int


def _none() -> I32:
    return np.zeros(0, np.int32)


def _nothing() -> F32:
    return np.zeros((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one step computes, flattened from its spans: row t is token `ids[t]` at `positions[t]`.

    ids, positions: int32 [T]. slots: int32 [T], where row t's key and value go: page * page_size + offset.
    span_starts: int32 [B + 1], rows of sequence b are span_starts[b] : span_starts[b + 1], at consecutive positions.
    page_table: int32 [B, n], page numbers of each sequence in order of position. logit_rows: int32 [L].
    recent_slots [T] and recent_table [B, n] say the same of float16 pages (`RecentPages`), for q4 caches; without one
    they are empty. Of the table only the pages of groups that the step's rows are in count. lora_slots [T] is each row's slot
    in the tables of `lora`, below 0 for none; without one it is empty, and only programs without `lora` take that.
    feed [T, W], float32, is what `feed` hands to programs that have it.
    `least` is the chance of which some guess has to be for `advance` to go on.
    """

    ids: I32
    positions: I32
    slots: I32
    span_starts: I32
    page_table: I32
    logit_rows: I32
    recent_slots: I32 = field(default_factory=_none)
    recent_table: I32 = field(default_factory=_none)
    lora_slots: I32 = field(default_factory=_none)
    feed: F32 = field(default_factory=_nothing)
    least: float = 0.0

    def n_rows(self, rows: Rows) -> int:
        """A domain's size in this step."""
        return {Rows.TOKENS: self.ids.size, Rows.LOGITS: self.logit_rows.size}[rows]


class Program(Protocol):
    """A captured step."""

    def run(self, inputs: StepInputs, first: int = 0, stop: int | None = None) -> Any:
        """Run the step and return what the captured function returned: Arrays that `download` reads.

        Of a step with sections, it runs those from `first` up to `stop`, None: all that follow; the result is whole when
        the last has run. A run from `first` > 0 goes on from the one that stopped there: with the same inputs, and
        none of this program between the two.
        """


class Backend(Protocol):
    """One of the four plug-in points. Every operation writes `out`, its last argument, and returns nothing.

    Activations are float32 [rows, width]. `out` may be the same array as an input where a line says "in place".
    """

    name: str
    abilities: Abilities

    def fingerprint(self) -> str:
        """Text that differs where the bits of results may: the processor, versions of what makes the code, and the like."""

    # -- memory ---------------------------------------------------------------------------------------------------
    def upload(self, values: NDArray[Any]) -> Array:
        """Copy a small constant (a norm's weight, a bias) to the backend, as float32."""

    def download(self, array: Array) -> F32:
        """Copy an activation of the step that ran last to NumPy: float32 [rows, width]."""

    def view(self, array: Array) -> F32:
        """What `download` gives, without a copy where there need be none: it holds until the next run, and is read only."""

    def empty(self, rows: Rows, width: int) -> Array:
        """Scratch for an activation, float32 [rows, width]; call only inside `capture`'s function."""

    def columns(self, array: Array, start: int, stop: int) -> Array:
        """The view array[:, start:stop]."""

    def pack(self, tensors: Sequence[RawTensor]) -> Weight:
        """Pack matrices [n_i, k] stacked by rows into one weight [sum n_i, k] in the kernel's layout.

        The tensors may have different block types. What the packing loses, if anything, stands in the docs.
        """

    def kv_cache(
        self,
        n_pages: int,
        page_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: str,
        recent: RecentPages | None = None,
    ) -> Array:
        """Key and value pages of one layer, zeroed; dtype is a name in KV_TYPES, and q4 needs `recent`."""

    def page_bytes(self, cache: Array) -> int:
        """Bytes of one page of this layer: keys, values, and what else belongs to them."""

    def copy_page(self, cache: Array, source: int, target: int) -> None:
        """Make page `target` equal to page `source`, bit for bit. Between two runs of programs, as the next two."""

    def read_page(self, cache: Array, page: int, out: U8) -> None:
        """Copy a page to `out`, uint8 [page_bytes], in an order of the backend's own."""

    def write_page(self, cache: Array, page: int, data: U8) -> None:
        """Make a page what it was when `read_page` gave `data`, uint8 [page_bytes]."""

    def lora_table(self, n_slots: int, k: int, n: int) -> Array:
        """Room for `n_slots` low-rank updates of a product [rows, k] → [rows, n]; at first none has one."""

    def set_lora(self, table: Array, slot: int, a: F32 | None, b: F32 | None) -> None:
        """The update of a slot, a [r, k] and b [n, r], None for none. Between two runs of programs."""

    def weight_bytes(self, weight: Weight) -> int:
        """Bytes that a packed weight occupies."""

    def close(self) -> None:
        """Free everything; stop the threads. Idempotent."""

    # -- capture --------------------------------------------------------------------------------------------------
    def capture(self, step: Callable[[], Any], limits: StepLimits) -> Program:
        """Turn `step`, which calls the operations below, into a program; it returns the Arrays to hand out."""

    def section(self) -> None:
        """Inside `capture`'s function: here one section ends and the next begins. They are numbered from 0."""

    # -- operations -----------------------------------------------------------------------------------------------
    def embed(self, table: Weight, scale: float, out: Array) -> None:
        """out[t] = table[ids[t]] * scale, with the step's ids; out [T, C]."""

    def feed(self, out: Array) -> None:
        """out[t] = feed[t], the step's, before anything else writes out, [T, W]. At most one of a program."""

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """out = x / sqrt(mean(x²) + eps) * weight over groups of len(weight) columns; in place allowed.

        x, out [rows, n * len(weight)]: n = 1 for a layer's norm, the number of heads for a norm per head.
        """

    def linear(
        self, x: Array, weight: Weight, out: Array, bias: Array | None = None, residual: Array | None = None
    ) -> None:
        """out = x @ weightᵀ (+ bias) (+ residual); x [rows, k], out and residual [rows, n], out may be residual."""

    def lora(self, x: Array, table: Array, out: Array) -> None:
        """out += (x @ aᵀ) @ bᵀ, with a and b of each row's own slot; a row without one stays as it is, bit for bit."""

    def rope(self, x: Array, head_dim: int, rope: Rope, out: Array) -> None:
        """Rotate each head of x [T, n * head_dim] by its row's position, half-split pairs; in place allowed."""

    def kv_write(self, k: Array, v: Array, cache: Array) -> None:
        """Write row t of k and v, [T, G * D], to the step's slot t of the cache.

        A q4 cache takes them to recent_slots, and the step's full pages from there to page_table's.
        """

    def attention(self, q: Array, cache: Array, spec: Attention, out: Array) -> None:
        """Causal attention of q [T, H * D] over each row's own sequence through the page table; out [T, H * D].

        Row t at position p sees positions max(0, p - window + 1) … p, whose keys are all in the cache. Of a q4 cache it
        sees positions from p // RECENT_TOKENS * RECENT_TOKENS on in float16, and all before in 4 bits.
        """

    def act_mul(self, gate_up: Array, activation: Activation, out: Array) -> None:
        """out = act(gate) * up, with gate the first half of the columns of gate_up [rows, 2F]; out [rows, F]."""

    def add(self, x: Array, y: Array, scale: float, out: Array) -> None:
        """out = x + scale * y; in place allowed."""

    def take_logit_rows(self, x: Array, out: Array) -> None:
        """out[l] = x[logit_rows[l]]; x [T, C], out [L, C]."""

    def choose(self, logits: Array, out: Array) -> None:
        """out[l, 0] = the lowest column with the largest of logits[l], -1 where that is infinite or one is NaN.

        logits [L, V], out [L, 1]. It lets greedy sampling stay on a device: ids come back in place of rows of logits. On a CPU
        the sampler reads the logits where they are, so no program of ours calls it there.
        """

    def argmax(self, logits: Array, ids: Array, before: Array | None, out: Array) -> None:
        """out[l] = the likeliest token of row l, its probability p, and p times out[l, 2] of `before`, if any; out [L, 3].

        logits [L, D]; ids [D] is an uploaded constant, each column's token. Of equals the first counts.
        """

    def advance(self, guesses: Array, x: Array, page_size: int) -> Array:
        """Go on with the next step: of each sequence the token guesses[l, 0], at the position after its last.

        Every operation from here on is of that step, a row a sequence, and takes arrays that are made from here on: and the
        result, which is x [L, C], as [T, C] of the new step. The old one must have had a logit row of each sequence. Where no
        guesses[l, 2] is at least `least`, nothing more need be computed. Arrays that are handed out must be [L, width].
        Not for q4 caches.
        """

    def scale_cap(self, x: Array, scale: float, cap: float | None, out: Array) -> None:
        """out = x * scale, then cap * tanh(out / cap) where there is a cap; in place allowed."""
