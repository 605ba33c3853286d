"""From a checkpoint to a `Model`: the spec, and every weight packed by a backend (read `decoder.py` next).

Whatever differs between file formats is normalised here, once, so that the decoder sees one kind of model: names, the
order of rows for RoPE, norms stored minus 1, fused or split projections, tied embeddings. Every tensor is checked
against the spec before the first is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from martlet.errors import FormatError, UnsupportedError
from martlet.formats.checkpoint import Checkpoint
from martlet.models.families import GGUF_PERMUTED, OFFSET_NORMS, spec_of
from martlet.models.names import canonical_names
from martlet.ops.interface import Array, Backend, Weight
from martlet.quant.ggml import decode
from martlet.quant.table import RawTensor
from martlet.spec import Layer, ModelSpec

__all__ = ["AttentionWeights", "FfnWeights", "LayerWeights", "Model", "load_model", "output_rows", "steep_layers"]

IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
IGNORED_FIRST = {"mimo": "model.mtp_layers."}  # of a family: a drafter's (`mtp_layers.py`)
IGNORED_ENDINGS = ("rotary_emb.inv_freq", ".attn_rot_embd")  # computed, not learned


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights of one attention part; q, k and v are one matrix [(H + 2G) * D, C], stacked in that order."""

    qkv: Weight
    out: Weight  # [C, H * D]
    qkv_bias: Array | None = None
    out_bias: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None


@dataclass(frozen=True, slots=True)
class FfnWeights:
    """Weights of a gated feed-forward part; gate and up are one matrix [2F, C], gate first."""

    gate_up: Weight
    down: Weight  # [C, F]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer; a norm is None where the spec has none."""

    mixer: AttentionWeights
    ffn: FfnWeights
    mixer_norm: Array | None
    ffn_norm: Array | None
    post_mixer_norm: Array | None
    post_ffn_norm: Array | None
    adapters: Mapping[str, Array] = field(default_factory=dict)  # tables of low-rank updates, by tensor (`lora.py`)


@dataclass(frozen=True, slots=True)
class Model:
    """A spec with its packed weights, ready for `decoder.forward`. `head` is `embedding` where the two are tied."""

    spec: ModelSpec
    embedding: Weight  # [V, C]
    layers: tuple[LayerWeights, ...]
    final_norm: Array
    head: Weight  # [V, C]
    weight_bytes: int  # as packed
    features: tuple[int, ...] = ()  # layers whose inputs a draft head reads (`eagle_head.py`)


def load_model(
    checkpoint: Checkpoint,
    ops: Backend,
    *,
    context: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Check every tensor of the checkpoint against its spec, then pack them all.

    `context` is the longest context the engine will use; it selects between a file's RoPE factor sets (longrope).
    `progress` is called with (bytes done, bytes in all). Raises FormatError and UnsupportedError before packing starts.
    """
    spec = spec_of(checkpoint, context)
    tensors = _checked(checkpoint, spec)
    source = _Source(checkpoint, spec, tensors, ops, progress)
    embedding = source.matrix("token_embd.weight")
    head = embedding if spec.tied_embeddings else source.matrix("output.weight")  # large ones first: less at the peak
    layers = tuple(_layer(source, i, layer) for i, layer in enumerate(spec.layers))
    final_norm = source.norm("output_norm.weight")
    return Model(spec, embedding, layers, final_norm, head, source.packed_bytes)


def output_rows(checkpoint: Checkpoint, spec: ModelSpec, ids: NDArray[np.intp]) -> RawTensor:
    """The rows `ids` of the matrix that makes logits, as they are stored."""
    name = "token_embd.weight" if spec.tied_embeddings else "output.weight"
    return _checked(checkpoint, spec)[name].take_rows(ids)


def steep_layers(checkpoint: Checkpoint, spec: ModelSpec, most: float) -> tuple[int, ...]:
    """Layers with a key's bias beyond `most`: such channels have keys of that size at every position (Qwen2.5 has one)."""
    tensors = checkpoint.tensors
    if checkpoint.kind != "gguf":
        tensors = canonical_names(tensors, spec.family)[0]
    found = []
    for i, layer in enumerate(spec.layers):
        raw = tensors.get(f"blk.{i}.attn_k.bias")
        first, width = 0, layer.mixer.n_kv_heads * layer.mixer.head_dim
        if raw is None:
            raw, first = tensors.get(f"blk.{i}.attn_qkv.bias"), layer.mixer.n_heads * layer.mixer.head_dim
        if raw is not None and np.abs(decode(raw)[first : first + width]).max() > most:
            found.append(i)
    return tuple(found)


def _expected(spec: ModelSpec, names: Mapping[str, RawTensor]) -> dict[str, tuple[int, ...]]:
    """Every tensor that the spec needs with its shape, for the fused or split form that the file has."""
    c = spec.hidden
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (spec.vocab, c), "output_norm.weight": (c,)}
    if not spec.tied_embeddings:
        shapes["output.weight"] = (spec.vocab, c)
    for i, layer in enumerate(spec.layers):
        a, f, p = layer.mixer, layer.ffn.ffn_hidden, f"blk.{i}."
        q, kv = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
        fused = p + "attn_qkv.weight" in names
        parts = {"attn_qkv": q + 2 * kv} if fused else {"attn_q": q, "attn_k": kv, "attn_v": kv}
        for name, n in parts.items():
            shapes[f"{p}{name}.weight"] = (n, c)
            if a.bias:
                shapes[f"{p}{name}.bias"] = (n,)
        shapes[p + "attn_output.weight"] = (c, q)
        if a.out_bias:
            shapes[p + "attn_output.bias"] = (c,)
        if a.qk_norm is not None:
            per_head = a.qk_norm_per_head
            shapes[p + "attn_q_norm.weight"] = (a.head_dim if per_head else q,)
            shapes[p + "attn_k_norm.weight"] = (a.head_dim if per_head else kv,)
        if p + "ffn_gate.weight" in names:
            shapes[p + "ffn_gate.weight"] = shapes[p + "ffn_up.weight"] = (f, c)
        else:
            shapes[p + "ffn_up.weight"] = (2 * f, c)
        shapes[p + "ffn_down.weight"] = (c, f)
        shapes.update({p + name: (c,) for name, norm in _norms(layer).items() if norm is not None})
    return shapes


def _norms(layer: Layer) -> dict[str, object]:
    return {
        "attn_norm.weight": layer.mixer_norm,
        "ffn_norm.weight": layer.ffn_norm,
        "post_attention_norm.weight": layer.post_mixer_norm,
        "post_ffw_norm.weight": layer.post_ffn_norm,
    }


def _checked(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, RawTensor]:
    """The tensors under canonical names: all that the spec needs, of the right shapes, and no others."""
    if checkpoint.kind == "gguf":
        tensors, unknown = dict(checkpoint.tensors), list[str]()
    else:
        tensors, unknown = canonical_names(checkpoint.tensors, spec.family)
    if spec.tied_embeddings:
        tensors.pop("output.weight", None)  # some files store the tied head again
    expected = _expected(spec, tensors)
    for name, shape in expected.items():
        if name not in tensors:
            raise FormatError(checkpoint.path, f"the tensor {name} is missing; a {spec.family} model needs it")
        if tensors[name].shape != shape:
            found = "x".join(map(str, tensors[name].shape))
            raise FormatError(checkpoint.path, f"{name} has the shape {found}, expected {'x'.join(map(str, shape))}")
    extra = [n for n in [*tensors, *unknown] if n not in expected and n not in IGNORED]
    extra = [n for n in extra if not n.endswith(IGNORED_ENDINGS)]
    if spec.family in IGNORED_FIRST:
        extra = [n for n in extra if not n.startswith(IGNORED_FIRST[spec.family])]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise FormatError(
            checkpoint.path,
            f"holds the tensor {extra[0]}{more}, which a {spec.family} model here has no use for:"
            " the model has a part that this engine would leave out",
        )
    return tensors


@dataclass(slots=True)
class _Source:
    """Hands out a checkpoint's tensors, normalised and packed."""

    checkpoint: Checkpoint
    spec: ModelSpec
    tensors: Mapping[str, RawTensor]
    ops: Backend
    progress: Callable[[int, int], None] | None
    packed_bytes: int = 0
    done_bytes: int = 0
    total_bytes: int = field(init=False)
    permuted: bool = field(init=False)
    head_dim: int = field(init=False)

    def __post_init__(self) -> None:
        self.permuted = self.checkpoint.kind == "gguf" and self.spec.family in GGUF_PERMUTED
        mixers = [layer.mixer for layer in self.spec.layers]
        self.head_dim = mixers[0].head_dim
        if self.permuted and any(a.rope is not None and a.rope.dims != a.head_dim for a in mixers):
            raise UnsupportedError(f"{self.spec.family} as GGUF with heads that rotate only in part")
        self.total_bytes = sum(tensor.data.nbytes for tensor in self.tensors.values() if len(tensor.shape) == 2)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def matrix(self, *names: str, heads: Sequence[int] = ()) -> Weight:
        """Matrices stacked by rows; `heads` says how many heads the rows of the first ones are, for RoPE's order."""
        raws = stored = [self.tensors[name] for name in names]
        for raw in stored:
            self.checkpoint.advise(raw, "willneed")
        if heads and self.permuted:
            orders = _row_orders([raw.shape[0] for raw in raws], heads, self.head_dim)
            raws = [raw.take_rows(order) for raw, order in zip(stored, orders, strict=True)]
        weight = self.ops.pack(raws)
        self.packed_bytes += self.ops.weight_bytes(weight)
        for raw in stored:
            self.checkpoint.advise(raw, "dontneed")
            self.done_bytes += raw.data.nbytes
        if self.progress is not None:
            self.progress(self.done_bytes, self.total_bytes)
        return weight

    def vector(self, *names: str, heads: Sequence[int] = ()) -> Array:
        """Vectors end to end, float32."""
        parts = [decode(self.tensors[name]) for name in names]
        if heads and self.permuted:
            orders = _row_orders([part.size for part in parts], heads, self.head_dim)
            parts = [part[order] for part, order in zip(parts, orders, strict=True)]
        return self.ops.upload(np.concatenate(parts))

    def norm(self, name: str) -> Array:
        """A norm's weight; some families store it minus 1 in safetensors."""
        values = decode(self.tensors[name])
        if self.checkpoint.kind == "safetensors" and self.spec.family in OFFSET_NORMS:
            values = values + np.float32(1)
        return self.ops.upload(values)


def half_split_rows(heads: int, head_dim: int) -> NDArray[np.intp]:
    """Row order that turns RoPE's neighbouring pairs (2i, 2i + 1) of each head into halves (i, i + D/2)."""
    return np.arange(heads * head_dim).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)


def _row_orders(sizes: Sequence[int], heads: Sequence[int], head_dim: int) -> list[NDArray[np.intp] | slice]:
    """The row order of each of q, k, v, or of the one matrix that holds them; v stays as it is."""
    if len(sizes) == 1:
        turned = half_split_rows(sum(heads), head_dim)
        return [np.concatenate([turned, np.arange(turned.size, sizes[0])])]
    return [*(half_split_rows(n, head_dim) for n in heads), slice(None)]


def _layer(source: _Source, i: int, layer: Layer) -> LayerWeights:
    p, a = f"blk.{i}.", layer.mixer
    qkv = ["attn_qkv"] if source.has(p + "attn_qkv.weight") else ["attn_q", "attn_k", "attn_v"]
    heads = (a.n_heads, a.n_kv_heads)
    split = source.has(p + "ffn_gate.weight")
    gate_up = [p + "ffn_gate.weight", p + "ffn_up.weight"] if split else [p + "ffn_up.weight"]
    norms = {name: source.norm(p + name) for name, norm in _norms(layer).items() if norm is not None}
    return LayerWeights(
        AttentionWeights(
            source.matrix(*(f"{p}{name}.weight" for name in qkv), heads=heads),
            source.matrix(p + "attn_output.weight"),
            source.vector(*(f"{p}{name}.bias" for name in qkv), heads=heads) if a.bias else None,
            source.vector(p + "attn_output.bias") if a.out_bias else None,
            source.norm(p + "attn_q_norm.weight") if a.qk_norm is not None else None,
            source.norm(p + "attn_k_norm.weight") if a.qk_norm is not None else None,
        ),
        FfnWeights(source.matrix(*gate_up), source.matrix(p + "ffn_down.weight")),
        norms.get("attn_norm.weight"),
        norms.get("ffn_norm.weight"),
        norms.get("post_attention_norm.weight"),
        norms.get("post_ffw_norm.weight"),
    )
