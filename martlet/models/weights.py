"""From a checkpoint to a `Model`: its spec and its packed weights (read `tensors.py` next).

File formats differ in names, in the order of rows for RoPE, in norms stored minus 1, in fused or
split projections and in tied embeddings. All of that is normalised here, once, so that the decoder
sees one kind of model. Every tensor is checked against the spec before the first is packed.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from martlet.errors import FormatError
from martlet.formats.checkpoint import Checkpoint
from martlet.formats.expert_stacks import join_mxfp4, transposed
from martlet.models.families import FAMILIES, spec_of
from martlet.models.tensors import (
    StoredTensor,
    by_expert,
    canonical_name,
    check_tensors,
    fields_of,
    gguf_name,
    layer_fields,
    sizes_of,
    tensor_shapes,
)
from martlet.ops.interface import Array, Backend, Weight
from martlet.quant.ggml import decode
from martlet.quant.table import BLOCKS, RawTensor
from martlet.spec import DenseFfn, Layer, ModelSpec, MoeFfn

# Computed, not learned: some files store them.
IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
IGNORED_ENDINGS = ("rotary_emb.inv_freq", ".attn_rot_embd")


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights of an attention sublayer."""

    qkv: Weight  # [(H + 2G) * D, C]: q, k and v stacked
    out: Weight  # [C, H * D]
    qkv_bias: Array | None = None  # [(H + 2G) * D]
    out_bias: Array | None = None  # [C]
    q_norm: Array | None = None  # [D], or [H * D] over all heads
    k_norm: Array | None = None  # [D], or [G * D]
    sinks: Array | None = None  # [H]


@dataclass(frozen=True, slots=True)
class FfnWeights:
    """Weights of a gated feed-forward sublayer."""

    gate_up: Weight  # [2F, C]: gate and up stacked
    down: Weight  # [C, F]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Weights of a mixture of experts; `gate_up` and `down` have one for each expert."""

    router: Weight  # [E, C]
    gate_up: tuple[Weight, ...]  # [2F, C]: gate and up stacked
    down: tuple[Weight, ...]  # [C, F]
    router_bias: Array | None = None  # [E]
    gate_up_bias: Array | None = None  # [E, 2F]
    down_bias: Array | None = None  # [E, C]
    correction: Array | None = None  # [E]
    shared_gate_up: Weight | None = None  # [2F, C], F of the shared network
    shared_down: Weight | None = None  # [C, F]
    shared_gate: Weight | None = None  # [1, C]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; a norm, [C], is None where the spec has none."""

    mixer: AttentionWeights
    ffn: Any  # FfnWeights or MoeWeights, as the spec's ffn is
    mixer_norm: Array | None = None
    ffn_norm: Array | None = None
    post_mixer_norm: Array | None = None
    post_ffn_norm: Array | None = None
    adapters: Mapping[str, Array] = field(default_factory=dict)  # by product: `lora.py`


FFN_WEIGHTS = {DenseFfn: FfnWeights, MoeFfn: MoeWeights}


@dataclass(frozen=True, slots=True)
class Model:
    """A spec with its packed weights, ready for `decoder.forward`."""

    spec: ModelSpec
    embedding: Weight  # [V, C]
    layers: tuple[LayerWeights, ...]
    final_norm: Array  # [C]
    head: Weight  # [V, C]; `embedding` itself where the two are tied
    weight_bytes: int  # as packed
    token_bytes: int  # of these, what a token by itself reads: its experts, no embedding
    features: tuple[int, ...] = ()  # layers whose inputs a draft head reads (`eagle_head.py`)


def load_model(
    checkpoint: Checkpoint,
    ops: Backend,
    *,
    context: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    advise: bool = True,
) -> Model:
    """Check every tensor of the checkpoint against its spec, then pack them all.

    `context` is the longest context in tokens that the engine will use; it selects between a file's
    RoPE factor sets (longrope). `progress` is called with (bytes done, bytes in all). `advise`
    tells the system to read ahead, which is of no use to a backend that reads no weights. Raises
    FormatError and UnsupportedError before packing starts.
    """
    spec = spec_of(checkpoint, context)
    tensors = _checked(checkpoint, spec)
    source = _ModelSource(checkpoint, spec, tensors, ops, progress, advise)
    # The largest matrices are the first: less memory at the peak.
    whole = _packed(source, fields_of(spec, sizes_of(spec), "", tensors))
    layers = tuple(read_layer(source, spec, layer, f"blk.{i}.", tensors) for i, layer in enumerate(spec.layers))
    head = whole.get("head", whole["embedding"])
    sizes = source.packed_bytes, source.token_bytes
    return Model(spec, whole["embedding"], layers, whole["final_norm"], head, *sizes)


class TensorSource(Protocol):
    """Hands out a file's tensors, normalised and packed."""

    def matrix(self, stored: Sequence[StoredTensor]) -> Weight:
        """The matrices stacked by rows: [sum n_i, k]."""

    def bias(self, stored: Sequence[StoredTensor]) -> Array:
        """Their biases end to end: float32 [sum n_i]."""

    def norm(self, stored: StoredTensor) -> Array:
        """A norm's weight, float32 [width]."""


def read_layer(
    source: TensorSource,
    spec: ModelSpec,
    layer: Layer,
    prefix: str,
    names: Mapping[str, RawTensor],
    mixer_width: int | None = None,
) -> LayerWeights:
    """Pack a layer whose tensors begin with `prefix`; `mixer_width` as in `layer_fields`."""
    mixer, ffn, norms = (_packed(source, fields) for fields in layer_fields(spec, layer, prefix, names, mixer_width))
    ffn_weights = FFN_WEIGHTS[type(layer.ffn)](**ffn)
    return LayerWeights(AttentionWeights(**mixer), ffn_weights, **norms)


def _packed(source: TensorSource, fields: Mapping[str, tuple[StoredTensor, ...]]) -> dict[str, Any]:
    """The weights of some fields, and their biases as `field`_bias."""
    weights: dict[str, Any] = {}
    for name, stored in fields.items():
        if len(stored[0].shape) == 1:
            weights[name] = source.norm(stored[0])
        elif experts := by_expert(stored):
            weights[name] = tuple(source.matrix(own) for own in experts)
        else:
            weights[name] = source.matrix(stored)
        if stored[0].has_bias:
            weights[f"{name}_bias"] = source.bias(stored)
    return weights


def layer_matrices(checkpoint: Checkpoint, spec: ModelSpec) -> list[tuple[RawTensor, float]]:
    """Every matrix of the layers as stored, [n, k], with the share of tokens that read it."""
    named = _checked(checkpoint, spec)
    matrices = []
    for i, layer in enumerate(spec.layers):
        for fields in layer_fields(spec, layer, f"blk.{i}.", named):
            for stored in (tensor for tensors in fields.values() for tensor in tensors if len(tensor.shape) > 1):
                for (own,) in by_expert((stored,)) or [(stored,)]:
                    matrices.append((_matrix_of(named, own), _token_share(spec, own)))
    return matrices


def _matrix_of(tensors: Mapping[str, RawTensor], stored: StoredTensor) -> RawTensor:
    """The matrix in the file; of a stack, that of the expert."""
    raw = tensors[f"{stored.name}.weight"]
    return raw if len(raw.shape) == 2 or stored.expert is None else raw.part(stored.expert)


def _token_share(spec: ModelSpec, stored: StoredTensor) -> float:
    """The share of tokens for which a matrix is read."""
    if stored.rows[0][0].field == "embedding":
        return float(spec.tied_embeddings)  # as the head
    routings = [layer.ffn.routing for layer in spec.layers if isinstance(layer.ffn, MoeFfn)]
    return 1.0 if stored.expert is None else routings[0].n_chosen / routings[0].n_experts


def output_rows(checkpoint: Checkpoint, spec: ModelSpec, ids: NDArray[np.intp]) -> RawTensor:
    """The rows of the tokens `ids` [n] of the matrix that makes logits, as stored: [n, C]."""
    name = "output.weight" if spec.untied_embeddings else "token_embd.weight"
    return _checked(checkpoint, spec)[name].take_rows(ids)


def outlier_key_layers(checkpoint: Checkpoint, spec: ModelSpec, most: float) -> tuple[int, ...]:
    """Layers with a key's bias beyond ±`most`.

    Such a channel has keys of that size at every position; Qwen2.5 has layers of this kind.
    """
    tensors, _ = _canonical(checkpoint, spec)
    outliers = []
    for i, layer in enumerate(spec.layers):
        mixer_fields, *_ = layer_fields(spec, layer, f"blk.{i}.", tensors)
        for stored in mixer_fields["qkv"]:
            bias = tensors.get(f"{stored.name}.bias")
            rows = stored.rows_of("attn_k")
            if bias is not None and np.abs(decode(bias)[rows]).max(initial=0.0) > most:
                outliers.append(i)
    return tuple(outliers)


def _canonical(checkpoint: Checkpoint, spec: ModelSpec) -> tuple[dict[str, RawTensor], list[str]]:
    """The tensors under canonical names, and the names that have none."""
    family = FAMILIES[spec.family]
    if checkpoint.format == "gguf":
        renamed = family.gguf_renamed
        return {gguf_name(name, renamed): tensor for name, tensor in checkpoint.tensors.items()}, []
    tensors: dict[str, RawTensor] = {}
    unknown = []
    for name, tensor in join_mxfp4(checkpoint.path, checkpoint.tensors).items():
        canonical = canonical_name(name, family.renamed)
        if canonical is None:
            unknown.append(name)
            continue
        if canonical.endswith("exp_probs_b.weight"):
            tensor = replace(tensor, shape=(math.prod(tensor.shape),))  # some files have [1, E]
        floats = len(tensor.shape) == 3 and BLOCKS[tensor.type].size == 1
        tensors[canonical] = transposed(tensor) if floats and family.transposed_experts else tensor
    return tensors, unknown


def _checked(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, RawTensor]:
    """The tensors under canonical names; FormatError unless they are exactly those of the spec."""
    tensors, unknown = _canonical(checkpoint, spec)
    if not spec.untied_embeddings:
        tensors.pop("output.weight", None)  # some files store the tied head again
    expected = tensor_shapes(spec, tensors)
    check_tensors(checkpoint.path, tensors, expected, f"a {spec.family} model")
    extra = [n for n in [*tensors, *unknown] if n not in expected and n not in IGNORED]
    extra = [n for n in extra if not n.endswith(IGNORED_ENDINGS)]
    family = FAMILIES[spec.family]
    if family.mtp_prefix is not None:
        extra = [n for n in extra if not n.startswith(family.mtp_prefix)]
    if family.next_layers:
        extra = [n for n in extra if _layer_of(n) < len(spec.layers)]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise FormatError(
            checkpoint.path,
            f"holds the tensor {extra[0]}{more}, which a {spec.family} model here has no use for:"
            " the model has a part that this engine would leave out",
        )
    return tensors


def _layer_of(name: str) -> int:
    """The layer of a tensor, under a name of either format; -1: none."""
    match = re.match(r"(?:blk|(?:model\.)?layers)\.(\d+)\.", name)
    return -1 if match is None else int(match[1])


@dataclass(slots=True)
class _ModelSource:
    """`TensorSource` of a checkpoint."""

    checkpoint: Checkpoint
    spec: ModelSpec
    tensors: Mapping[str, RawTensor]
    ops: Backend
    progress: Callable[[int, int], None] | None
    advise: bool
    packed_bytes: int = 0
    token_bytes: int = 0
    done_bytes: int = 0
    total_bytes: int = field(init=False)
    permuted: bool = field(init=False)
    head_dim: int = field(init=False)
    rope_dims: int = field(init=False)

    def __post_init__(self) -> None:
        family = FAMILIES[self.spec.family]
        self.permuted = family.interleaved or (self.checkpoint.format == "gguf" and family.gguf_permuted)
        mixers = [layer.mixer for layer in self.spec.layers]
        self.head_dim = mixers[0].head_dim
        self.rope_dims = max((mixer.rope.dims for mixer in mixers if mixer.rope is not None), default=self.head_dim)
        self.total_bytes = sum(tensor.data.nbytes for tensor in self.tensors.values() if len(tensor.shape) > 1)

    def matrix(self, stored: Sequence[StoredTensor]) -> Weight:
        raws = [_matrix_of(self.tensors, tensor) for tensor in stored]
        for raw in raws if self.advise else ():
            self.checkpoint.advise(raw, "willneed")
        orders = [self._row_order(tensor) for tensor in stored]
        weight = self.ops.pack(
            [raw if order is None else raw.take_rows(order) for raw, order in zip(raws, orders, strict=True)]
        )
        n_bytes = self.ops.weight_bytes(weight)
        self.packed_bytes += n_bytes
        self.token_bytes += round(n_bytes * _token_share(self.spec, stored[0]))
        for raw in raws:
            if self.advise:
                self.checkpoint.advise(raw, "dontneed")
            self.done_bytes += raw.data.nbytes
        if self.progress is not None:
            self.progress(self.done_bytes, self.total_bytes)
        return weight

    def bias(self, stored: Sequence[StoredTensor]) -> Array:
        pieces = []
        for tensor in stored:
            values, order = decode(self.tensors[f"{tensor.name}.bias"]), self._row_order(tensor)
            pieces.append(values if order is None else values[..., order])
        return self.ops.upload(np.concatenate(pieces, axis=-1))  # of experts: [E, sum n_i]

    def norm(self, stored: StoredTensor) -> Array:
        values = decode(self.tensors[f"{stored.name}.weight"])
        if self.checkpoint.format == "safetensors" and FAMILIES[self.spec.family].offset_norms:
            values = values + np.float32(1)
        return self.ops.upload(values)

    def _row_order(self, stored: StoredTensor) -> NDArray[np.intp] | None:
        """The order of a tensor's rows: half-split for RoPE, gate before up; None: as stored."""
        alternating = FAMILIES[self.spec.family].alternating_gate_up and len(stored.rows) == 2
        if alternating and stored.rows[0][0].field == "gate_up":
            return np.arange(stored.shape[-2]).reshape(-1, 2).T.reshape(-1)
        if not self.permuted or not any(row.rotates for row, _ in stored.rows):
            return None
        start, order = 0, []
        for row, n_rows in stored.rows:
            own = np.arange(n_rows)
            if row.rotates:
                own = half_split_rows(n_rows // self.head_dim, self.head_dim, self.rope_dims)
            order.append(start + own)
            start += n_rows
        return np.concatenate(order)


def half_split_rows(heads: int, head_dim: int, dims: int) -> NDArray[np.intp]:
    """Order of rows [heads * head_dim] that turns pairs (2i, 2i + 1) into (i, i + dims / 2).

    Rows of a head beyond the first `dims` stay.
    """
    order = np.arange(heads * head_dim).reshape(heads, head_dim)
    pairs = order[:, :dims].reshape(heads, -1, 2).transpose(0, 2, 1).reshape(heads, dims)
    return np.concatenate([pairs, order[:, dims:]], axis=1).reshape(-1)
