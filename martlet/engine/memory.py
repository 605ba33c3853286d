"""How much memory an engine needs, and the context that fits: planned before anything is allocated.

`measure` runs the model's loading and one step on the null backend, which only writes down what is
done, so that the plan and the allocator are the same code: `engine/build.py` refuses with this sum,
and `martlet plan` prints it (read `build.py` next).

    total = weights + adapters + n_pages * page_size * kv_per_token + recent
            + activations + logits + overhead
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from martlet.config import EngineConfig
from martlet.errors import CapacityError, RequestError
from martlet.kv_types import KV_TYPES, LARGEST_KEY_BIAS, parse_kv_types
from martlet.models.decoder import forward
from martlet.models.eagle_head import HeadFile
from martlet.models.medusa_heads import MedusaFile
from martlet.models.weights import load_model, outlier_key_layers
from martlet.ops.interface import Abilities, Rows, StepLimits
from martlet.ops.null import NullBackend
from martlet.runtime.kv import kv_bytes_per_token, recent_bytes
from martlet.spec import ModelSpec

OVERHEAD_BYTES = 200 << 20  # the interpreter, NumPy, Numba with its compiled code, the tokenizer
USABLE_SHARE = 0.9  # of what is available; the rest is for other programs and unplanned needs
LOGIT_BYTES = 32 << 20  # of a step's logits, at most, unless the running sequences need more
MAX_LOGIT_ROWS = 64
LAYERED_ROWS = 16  # of a chunk that pauses between layers: more rows cost no less each
KV_SHARE = 0.25  # of what is available, for KV pages beyond the one context that there must be


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model needs apart from its KV pages, in bytes."""

    spec: ModelSpec
    weights: int
    token_bytes: int  # of the weights, what a token by itself reads
    activations: int
    logits: int
    head_kv: int = 0  # of a draft head, a position
    outliers: tuple[int, ...] = ()  # layers that q8 would be too coarse for
    adapters: int = 0  # their numbers, and the activations of the step that uses them


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sum. `available` is None on a machine that does not say."""

    weights: int
    token_bytes: int  # of the weights, what a token by itself reads
    activations: int
    logits: int
    overhead: int
    kv_dtype: str
    kv_per_token: int
    recent: int  # float16 pages of the newest positions, beside pages of 4 bits
    page_size: int
    n_pages: int
    context: int
    context_note: str  # why this context
    available: int | None
    sequences: int = 1  # of a full context each, that the pages hold
    adapters: int = 0

    @property
    def kv(self) -> int:
        """Bytes of all KV pages."""
        return self.n_pages * self.page_size * self.kv_per_token

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the context."""
        return self.weights + self.adapters + self.recent + self.activations + self.logits + self.overhead

    @property
    def total(self) -> int:
        return self.fixed + self.kv

    @property
    def usable(self) -> int | None:
        """The part of the available memory that an engine may take."""
        return None if self.available is None else int(self.available * USABLE_SHARE)

    @property
    def fits(self) -> bool:
        """Whether the sum is within what may be used."""
        return self.usable is None or self.total <= self.usable

    def explain(self) -> str:
        parts = (
            f"weights {_mib(self.weights)}",
            *([f"adapters {_mib(self.adapters)}"] if self.adapters else []),
            f"KV {_mib(self.kv)} ({self.n_pages * self.page_size:,} tokens × {self.kv_per_token:,} B, {self.kv_dtype})",
            *([f"recent KV {_mib(self.recent)}"] if self.recent else []),
            f"activations {_mib(self.activations)}",
            f"logits {_mib(self.logits)}",
            f"overhead {_mib(self.overhead)}",
        )
        return f"{' + '.join(parts)} = {_mib(self.total)}"


def step_limits(config: EngineConfig, vocab: int, context: int) -> StepLimits:
    """The largest step: rows of logits that fit LOGIT_BYTES, and max_seqs + 1 at least."""
    rows = min(MAX_LOGIT_ROWS, LOGIT_BYTES // (4 * vocab))
    return StepLimits(
        max_tokens=config.max_step_tokens,
        max_seqs=config.max_seqs,
        max_logits=max(rows, config.max_seqs + 1),
        max_pages_per_seq=-(-context // config.page_size),
        layered_rows=LAYERED_ROWS if config.max_step_tokens >= LAYERED_ROWS else 0,
    )


def measure(checkpoint: Any, config: EngineConfig, abilities: Abilities) -> Footprint:
    """The memory that a model needs on the backend of these `abilities`, but for its pages.

    Loads it on the null backend and records a step there.

    Raises FormatError and UnsupportedError as `load_model` does.
    """
    ops = NullBackend(abilities.packed_bytes)
    model = load_model(checkpoint, ops, context=config.max_context, advise=False)
    limits = step_limits(config, model.spec.vocab, config.page_size)
    caches = [None for _ in model.spec.layers]
    recording = ops.record(lambda: forward(ops, model, caches))
    activations = int(abilities.value_bytes * limits.max_tokens * recording.width(Rows.TOKENS))
    logits = 4 * limits.max_logits * recording.width(Rows.LOGITS)
    return Footprint(
        model.spec,
        model.weight_bytes,
        model.token_bytes,
        activations,
        logits,
        outliers=outlier_key_layers(checkpoint, model.spec, LARGEST_KEY_BIAS),
    )


def with_head(
    footprint: Footprint, head: HeadFile | MedusaFile, config: EngineConfig, abilities: Abilities
) -> Footprint:
    """The footprint of a model together with a draft head."""
    if isinstance(head, MedusaFile):
        features = int(abilities.value_bytes * config.max_step_tokens * footprint.spec.hidden)
        logits = 4 * config.max_seqs * head.n_heads * (footprint.spec.vocab if head.ids is None else len(head.ids))
        weights = footprint.weights + head.weight_bytes
        return replace(
            footprint, weights=weights, activations=footprint.activations + features, logits=footprint.logits + logits
        )
    activations = int(
        abilities.value_bytes * config.max_step_tokens * (head.width + len(head.features) * head.spec.hidden)
    )
    head_kv = kv_bytes_per_token(head.spec, parse_kv_types("f16"), config.page_size)
    return replace(
        footprint,
        weights=footprint.weights + head.weight_bytes,
        activations=footprint.activations + activations + config.max_seqs * config.page_size * head_kv,
        logits=footprint.logits + 4 * config.max_seqs * head.spec.vocab,
        head_kv=head_kv,
    )


def with_adapters(footprint: Footprint, nbytes: int) -> Footprint:
    """The footprint with adapters of so many bytes in all; their step is a program of its own."""
    return replace(footprint, adapters=nbytes + footprint.activations + footprint.logits) if nbytes else footprint


def plan_memory(footprint: Footprint, config: EngineConfig, available: int | None) -> MemoryPlan:
    """Choose the context and the number of pages, and check that everything fits.

    The context is max_context if given, else the smaller of the model's own and what fits. The
    pages hold as much as kv_memory says; without it a quarter of the available memory, but at least
    one full context and at most one for each sequence that may run. Raises RequestError for a
    context beyond the model's, and CapacityError, with the sum and what to change, where the memory
    is too small.
    """
    spec = footprint.spec
    if config.max_context is not None and config.max_context > spec.context:
        raise RequestError(
            f"max_context is {config.max_context:,}, but {spec.name or 'the model'} was trained for {spec.context:,}"
            " positions: give at most that.",
            param="max_context",
        )
    context, note = config.max_context or spec.context, "max_context" if config.max_context else "the model's own"
    plan = _plan(footprint, config, available, context, note)
    if config.kv_memory is not None:
        n_pages = config.kv_memory // (config.page_size * plan.kv_per_token)
        holds = n_pages * config.page_size
        if n_pages == 0 or (config.max_context is not None and holds < context):
            wanted = config.page_size if config.max_context is None else context
            needed = plan.kv_per_token * -(-wanted // config.page_size) * config.page_size
            raise CapacityError(
                f"kv_memory is {config.kv_memory:,} bytes, which hold {holds:,} tokens; a context of {wanted:,} needs"
                f" {needed:,} bytes: raise kv_memory{'' if config.max_context is None else ' or lower max_context'}."
            )
        plan = replace(plan, n_pages=n_pages, sequences=max(1, holds // context))
        if holds < context:
            plan = replace(plan, context=holds, context_note="what kv_memory holds")
    elif config.max_context is None and not plan.fits and plan.usable is not None:
        fit = (plan.usable - plan.fixed) // plan.kv_per_token // config.page_size * config.page_size
        if fit >= config.page_size:
            plan = _plan(footprint, config, available, fit, "what fits in memory")
    if not plan.fits:
        raise CapacityError(_refusal(plan, config))
    return plan if config.kv_memory is not None else _with_room(plan, config)


def _with_room(plan: MemoryPlan, config: EngineConfig) -> MemoryPlan:
    """The plan with pages for more than one context where memory allows it."""
    if plan.available is None or plan.usable is None:
        return plan
    budget = min(plan.available * KV_SHARE, plan.usable - plan.fixed) // (plan.kv_per_token * plan.page_size)
    n_pages = max(plan.n_pages, min(int(budget), plan.n_pages * config.max_seqs))
    return replace(plan, n_pages=n_pages, sequences=n_pages // plan.n_pages)


def context_table(
    footprint: Footprint,
    config: EngineConfig,
    available: int | None,
    contexts: Sequence[int],
    sequences: Sequence[int] = (1,),
) -> list[MemoryPlan]:
    """The plan of each context, number of sequences and KV type, whether it fits or not.

    A row's `kv` given as kv_memory makes an engine of its pages.
    """
    return [
        _plan(footprint, replace(config, kv_dtype=dtype), available, context, "", count)
        for context in contexts
        for count in sequences
        for dtype in KV_TYPES
    ]


def _plan(
    footprint: Footprint, config: EngineConfig, available: int | None, context: int, note: str, sequences: int = 1
) -> MemoryPlan:
    types = parse_kv_types(config.kv_dtype).guarded(footprint.outliers)
    return MemoryPlan(
        weights=footprint.weights,
        token_bytes=footprint.token_bytes,
        activations=footprint.activations,
        logits=footprint.logits,
        overhead=OVERHEAD_BYTES,
        kv_dtype=str(types),
        kv_per_token=kv_bytes_per_token(footprint.spec, types, config.page_size) + footprint.head_kv,
        recent=recent_bytes(
            footprint.spec, types, step_limits(config, footprint.spec.vocab, context), config.page_size
        ),
        page_size=config.page_size,
        n_pages=sequences * -(-context // config.page_size),
        context=context,
        context_note=note,
        available=available,
        sequences=sequences,
        adapters=footprint.adapters,
    )


def _refusal(plan: MemoryPlan, config: EngineConfig) -> str:
    assert plan.usable is not None
    assert plan.available is not None
    short = plan.total - plan.usable
    room = (plan.usable - plan.fixed) // plan.kv_per_token // plan.page_size * plan.page_size
    if room >= plan.page_size and config.kv_memory is not None:
        fix = f"lower kv_memory to {room * plan.kv_per_token:,} bytes or less"
    elif room >= plan.page_size:
        less = {"f32": ", or use kv_dtype f16, which halves the KV memory", "f16": ", or use kv_dtype q8 or q4"}
        fix = f"set max_context to {room:,} or less{less.get(plan.kv_dtype, '')}"
    else:
        fix = "no context fits: close other programs, use a machine with more memory, or choose a smaller model"
    return (
        f"The model needs {plan.explain()}, and {_mib(plan.usable)} may be used ({USABLE_SHARE:.0%} of the"
        f" {_mib(plan.available)} available): {_mib(short)} too much. To make it fit, {fix}."
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB" if nbytes < 10 << 30 else f"{nbytes / (1 << 30):,.1f} GiB"
