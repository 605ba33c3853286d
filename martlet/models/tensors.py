"""Every tensor of a model as a row of one table (read `families.py` next).

A row says the tensor's names, its shape, how ranks split it, and whether RoPE and LoRA concern it.

Names are GGUF's (`blk.3.attn_q.weight`); Hugging Face's are translated into them. A row belongs to
the component of the spec (`spec.py`) that needs the tensor, and names the field of the packed
weights (`weights.py`) that takes it. Rows of one field are stacked there, and a file may store them
stacked too (`FUSED`). A tensor that no row describes belongs to no model that this engine runs.

Sizes in shapes, besides the letters of `spec.py`:

    X    columns that q, k and v read: C, or 2C in a draft head
    Q    rows of q, H * D                    Nq    width of q's norm: D per head, Q over all heads
    K    rows of k and of v, G * D           Nk    width of k's norm: D per head, K over all heads

    E    experts                             Fe   channels of an expert
                                             Fs   channels of the shared network

Shapes end in the rows and columns of a matrix [n, k]. GGUF stacks the matrices of E experts as
[E, n, k]. Hugging Face has a matrix for each: `canonical_name` puts the expert's number behind the
row's name (`blk.3.ffn_up_exps.7.weight`).
"""

import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Literal

from martlet.errors import FormatError
from martlet.quant.table import RawTensor
from martlet.spec import Attention, DenseFfn, Layer, ModelSpec, MoeFfn

Dim = Literal["V", "C", "X", "Q", "K", "Nq", "Nk", "H", "F", "E", "Fe", "Fs", "1"]
Shape = tuple[int, ...]


class Split(Enum):
    """How tensor-parallel ranks divide a tensor (arXiv:1909.08053)."""

    WHOLE = "every rank has all of it"
    ROWS = "a rank has the rows of its KV groups' heads, of its FFN channels or of its token ids"
    COLUMNS = "a rank has the columns that read its heads or channels; ranks add up their products"


@dataclass(frozen=True, slots=True)
class TensorRow:
    """The tensor `name`.weight and, where the spec says so, `name`.bias."""

    name: str  # GGUF's, without "blk.N."
    hugging_face: tuple[str, ...]  # without "model.layers.N."
    shape: tuple[Dim, ...]
    field: str  # of the packed weights
    split: Split = Split.WHOLE
    when: str | None = None  # the component has the tensor if this attribute is set; None: always
    bias: str | None = None  # and has a bias if this one is set; None: never
    rotates: bool = False  # RoPE pairs its rows, in an order that depends on the file
    lora: bool = False  # adapters may update it


BY_ROWS, BY_COLUMNS = Split.ROWS, Split.COLUMNS
ROWS: Mapping[type, tuple[TensorRow, ...]] = {
    ModelSpec: (
        TensorRow("token_embd", ("embed_tokens",), ("V", "C"), "embedding", BY_ROWS),
        TensorRow("output", ("lm_head",), ("V", "C"), "head", BY_ROWS, when="untied_embeddings"),
        TensorRow("output_norm", ("norm",), ("C",), "final_norm"),
    ),
    Attention: (
        TensorRow("attn_q", ("self_attn.q_proj",), ("Q", "X"), "qkv", BY_ROWS, bias="bias", rotates=True, lora=True),
        TensorRow("attn_k", ("self_attn.k_proj",), ("K", "X"), "qkv", BY_ROWS, bias="bias", rotates=True, lora=True),
        TensorRow("attn_v", ("self_attn.v_proj",), ("K", "X"), "qkv", BY_ROWS, bias="bias", lora=True),
        TensorRow("attn_output", ("self_attn.o_proj",), ("C", "Q"), "out", BY_COLUMNS, bias="out_bias", lora=True),
        TensorRow("attn_sinks", ("self_attn.sinks",), ("H",), "sinks", when="sinks"),
        TensorRow("attn_q_norm", ("self_attn.q_norm",), ("Nq",), "q_norm", when="qk_norm"),
        TensorRow("attn_k_norm", ("self_attn.k_norm",), ("Nk",), "k_norm", when="qk_norm"),
    ),
    DenseFfn: (
        TensorRow("ffn_gate", ("mlp.gate_proj",), ("F", "C"), "gate_up", BY_ROWS, lora=True),
        TensorRow("ffn_up", ("mlp.up_proj",), ("F", "C"), "gate_up", BY_ROWS, lora=True),
        TensorRow("ffn_down", ("mlp.down_proj",), ("C", "F"), "down", BY_COLUMNS, lora=True),
    ),
    MoeFfn: (
        TensorRow(
            "ffn_gate_inp",
            ("mlp.gate", "block_sparse_moe.gate", "block_sparse_moe.router.layer", "mlp.router"),
            ("E", "C"),
            "router",
            bias="router_bias",
        ),
        TensorRow(
            "exp_probs_b",
            ("mlp.gate.e_score_correction_bias", "mlp.moe_statics.e_score_correction_bias"),
            ("E",),
            "correction",
            when="correction",
        ),
        TensorRow(
            "ffn_gate_exps",
            ("mlp.experts.*.gate_proj", "block_sparse_moe.experts.*.w1"),
            ("E", "Fe", "C"),
            "gate_up",
            BY_ROWS,
            bias="bias",
        ),
        TensorRow(
            "ffn_up_exps",
            ("mlp.experts.*.up_proj", "block_sparse_moe.experts.*.w3"),
            ("E", "Fe", "C"),
            "gate_up",
            BY_ROWS,
            bias="bias",
        ),
        TensorRow(
            "ffn_down_exps",
            (
                "mlp.experts.*.down_proj",
                "block_sparse_moe.experts.*.w2",
                "block_sparse_moe.output_linear",
                "mlp.experts.down_proj",
            ),
            ("E", "C", "Fe"),
            "down",
            BY_COLUMNS,
            bias="bias",
        ),
        TensorRow(
            "ffn_gate_shexp",
            ("mlp.shared_expert.gate_proj", "mlp.shared_experts.gate_proj"),
            ("Fs", "C"),
            "shared_gate_up",
            BY_ROWS,
            when="shared",
        ),
        TensorRow(
            "ffn_up_shexp",
            ("mlp.shared_expert.up_proj", "mlp.shared_experts.up_proj"),
            ("Fs", "C"),
            "shared_gate_up",
            BY_ROWS,
            when="shared",
        ),
        TensorRow(
            "ffn_down_shexp",
            ("mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj", "shared_mlp.output_linear"),
            ("C", "Fs"),
            "shared_down",
            BY_COLUMNS,
            when="shared",
        ),
        TensorRow("ffn_gate_inp_shexp", ("mlp.shared_expert_gate",), ("1", "C"), "shared_gate", when="has_shared_gate"),
    ),
    Layer: (
        TensorRow("attn_norm", ("input_layernorm",), ("C",), "mixer_norm", when="mixer_norm"),
        TensorRow(
            "ffn_norm", ("post_attention_layernorm", "pre_feedforward_layernorm"), ("C",), "ffn_norm", when="ffn_norm"
        ),
        # Hugging Face's name is that of ffn_norm in other families: see `Family.renamed`.
        TensorRow(
            "post_attention_norm", ("post_self_attn_layernorm",), ("C",), "post_mixer_norm", when="post_mixer_norm"
        ),
        TensorRow(
            "post_ffw_norm",
            ("post_feedforward_layernorm", "post_mlp_layernorm"),
            ("C",),
            "post_ffn_norm",
            when="post_ffn_norm",
        ),
    ),
}
# Names of a tensor that holds all rows of a field, stacked in the table's order: GGUF's, then
# Hugging Face's.
FUSED: Mapping[tuple[type, str], tuple[str, ...]] = {
    (Attention, "qkv"): ("attn_qkv", "self_attn.qkv_proj"),
    (DenseFfn, "gate_up"): ("ffn_up", "mlp.gate_up_proj"),
    (MoeFfn, "gate_up"): ("ffn_gate_up_exps", "block_sparse_moe.input_linear", "mlp.experts.gate_up_proj"),
    (MoeFfn, "shared_gate_up"): ("ffn_gate_up_shexp", "shared_mlp.input_linear"),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file has it: one of `ROWS`, or all rows of a field in one (`FUSED`)."""

    name: str  # with "blk.N.", without ".weight"
    shape: Shape
    rows: tuple[tuple[TensorRow, int], ...]  # what is stacked in it, with the height of each
    has_bias: bool
    expert: int | None = None  # whose matrix it is; of a stack, None for all

    def rows_of(self, name: str) -> slice:
        """Where the matrix has the table's row `name`; an empty slice if nowhere."""
        start = 0
        for row, n_rows in self.rows:
            if row.name == name:
                return slice(start, start + n_rows)
            start += n_rows
        return slice(0, 0)


# -- sizes and shapes ------------------------------------------------------------------------------
def sizes_of(spec: ModelSpec, layer: Layer | None = None, mixer_width: int | None = None) -> dict[Dim, int]:
    """Sizes for the rows of a model, or of one layer; `mixer_width` is X, and C if None."""
    sizes: dict[Dim, int] = {"V": spec.vocab, "C": spec.hidden, "X": mixer_width or spec.hidden}
    if layer is None:
        return sizes
    match layer.mixer:
        case Attention(n_heads, n_kv_heads, head_dim) as attention:
            q, k = n_heads * head_dim, n_kv_heads * head_dim
            per_head = attention.qk_norm_per_head
            sizes |= {
                "H": n_heads,
                "Q": q,
                "K": k,
                "Nq": head_dim if per_head else q,
                "Nk": head_dim if per_head else k,
            }
    match layer.ffn:
        case DenseFfn(ffn_hidden):
            sizes["F"] = ffn_hidden
        case MoeFfn(routing, expert_hidden) as ffn:
            shared = 0 if ffn.shared is None else ffn.shared.ffn_hidden
            sizes |= {"E": routing.n_experts, "Fe": expert_hidden, "Fs": shared, "1": 1}
    return sizes


def fields_of(
    component: ModelSpec | Attention | DenseFfn | MoeFfn | Layer,
    sizes: Mapping[Dim, int],
    prefix: str,
    names: Container[str],
) -> dict[str, tuple[StoredTensor, ...]]:
    """The tensors that fill each field of a component's weights, fused if they are in `names`."""
    present = [row for row in ROWS[type(component)] if row.when is None or getattr(component, row.when)]
    return {
        field: tuple(_stored(component, field, tuple(rows), sizes, prefix, names))
        for field, rows in groupby(present, lambda row: row.field)
    }


def _stored(
    component: object,
    field: str,
    rows: tuple[TensorRow, ...],
    sizes: Mapping[Dim, int],
    prefix: str,
    names: Container[str],
) -> Iterator[StoredTensor]:
    shapes = [tuple(sizes[dim] for dim in row.shape) for row in rows]
    has_bias = rows[0].bias is not None and bool(getattr(component, rows[0].bias))
    ours, *_ = FUSED.get((type(component), field), ("",))
    if ours and f"{prefix}{ours}.weight" in names and f"{prefix}{rows[0].name}.weight" not in names:
        heights = [shape[-2] for shape in shapes]
        shape = (*shapes[0][:-2], sum(heights), shapes[0][-1])
        yield StoredTensor(prefix + ours, shape, tuple(zip(rows, heights, strict=True)), has_bias)
        return
    for row, shape in zip(rows, shapes, strict=True):
        whole = StoredTensor(prefix + row.name, shape, ((row, shape[-2] if len(shape) > 1 else shape[0]),), has_bias)
        if len(shape) == 3 and f"{whole.name}.0.weight" in names:
            yield from (replace(part, name=f"{whole.name}.{part.expert}") for (part,) in by_expert((whole,)))
        else:
            yield whole


def by_expert(stored: Sequence[StoredTensor]) -> list[tuple[StoredTensor, ...]]:
    """The tensors of a field, expert by expert: parts of stacks, or an expert's own.

    An empty list if the field belongs to no expert.
    """
    if len(stored[0].shape) == 3:
        n_experts = stored[0].shape[0]
        return [tuple(replace(t, shape=t.shape[1:], expert=e) for t in stored) for e in range(n_experts)]
    experts = sorted({t.expert for t in stored if t.expert is not None})
    return [tuple(t for t in stored if t.expert == e) for e in experts]


def layer_fields(
    spec: ModelSpec, layer: Layer, prefix: str, names: Container[str], mixer_width: int | None = None
) -> tuple[dict[str, tuple[StoredTensor, ...]], ...]:
    """`fields_of` a layer's mixer, of its ffn, and of the layer itself (its norms)."""
    sizes = sizes_of(spec, layer, mixer_width)
    return tuple(fields_of(component, sizes, prefix, names) for component in (layer.mixer, layer.ffn, layer))


def layer_shapes(
    spec: ModelSpec, layer: Layer, prefix: str, names: Container[str], mixer_width: int | None = None
) -> dict[str, Shape]:
    """Names and shapes of a layer's tensors, as a file with the tensors `names` stores them."""
    return _shapes(layer_fields(spec, layer, prefix, names, mixer_width))


def tensor_shapes(spec: ModelSpec, names: Container[str]) -> dict[str, Shape]:
    """Names and shapes of a model's tensors, as a file with the tensors `names` stores them."""
    shapes = _shapes([fields_of(spec, sizes_of(spec), "", names)])
    for i, layer in enumerate(spec.layers):
        shapes |= layer_shapes(spec, layer, f"blk.{i}.", names)
    return shapes


def _shapes(components: Collection[Mapping[str, tuple[StoredTensor, ...]]]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for stored in (stored for fields in components for field in fields.values() for stored in field):
        shapes[f"{stored.name}.weight"] = stored.shape
        if stored.has_bias:
            shapes[f"{stored.name}.bias"] = stored.shape[:-1]
    return shapes


def lora_shapes(spec: ModelSpec, layer: Layer) -> dict[str, tuple[int, int]]:
    """(rows, columns) of each product of a layer that an adapter may update, by row name."""
    sizes = sizes_of(spec, layer)
    rows = (row for component in (layer.mixer, layer.ffn) for row in ROWS[type(component)] if row.lora)
    return {row.name: (sizes[row.shape[-2]], sizes[row.shape[-1]]) for row in rows}


def check_tensors(
    path: Path,
    tensors: Mapping[str, RawTensor],
    expected: Mapping[str, Shape],
    owner: str,
    published: Mapping[str, str] | None = None,
) -> None:
    """Raise FormatError for an expected tensor that is missing or has another shape.

    Messages name the tensors by `published`, where the names of `expected` are not the file's, and
    say that `owner` needs them.
    """
    for name, shape in expected.items():
        shown = name if published is None else published.get(name, name)
        if name not in tensors:
            raise FormatError(path, f"the tensor {shown} is missing; {owner} needs it")
        if tensors[name].shape != shape:
            stored, wanted = ("x".join(map(str, sizes)) for sizes in (tensors[name].shape, shape))
            raise FormatError(path, f"{shown} has the shape {stored}, expected {wanted}")


# -- names -----------------------------------------------------------------------------------------
_MODEL_NAMES = {theirs: row.name for row in ROWS[ModelSpec] for theirs in row.hugging_face}
_LAYER_NAMES = {
    theirs: row.name
    for component, rows in ROWS.items()
    if component is not ModelSpec
    for row in rows
    for theirs in row.hugging_face
} | {theirs: ours for ours, *published in FUSED.values() for theirs in published}
_PREFIX = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?")


def canonical_name(name: str, renamed: Mapping[str, str]) -> str | None:
    """GGUF's name for a Hugging Face tensor, None if no row has it; `renamed`: see `Family`."""
    module, _, ending = _PREFIX.sub("", name).rpartition(".")
    if ending not in ("weight", "bias"):  # the row says what it is
        module, ending = f"{module}.{ending}", "weight"
        if module.endswith("_proj_bias"):  # of experts
            module, ending = module.removesuffix("_bias"), "bias"
    if module in _MODEL_NAMES:
        return f"{_MODEL_NAMES[module]}.{ending}"
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    if match is None:
        return None
    expert = re.search(r"(?<=\.experts)\.\d+(?=\.)", match[2])
    theirs = match[2] if expert is None else match[2].replace(expert[0], ".*", 1)
    ours = renamed.get(theirs, _LAYER_NAMES.get(theirs))
    return None if ours is None else f"blk.{match[1]}.{ours}{expert[0] if expert is not None else ''}.{ending}"


def gguf_name(name: str, renamed: Mapping[str, str]) -> str:
    """The table's name for a GGUF tensor; `renamed`: see `Family.gguf_renamed`."""
    name = name.replace(".exp_probs_b.bias", ".exp_probs_b.weight")  # a matrix of its own, not a bias
    block, dot, rest = name.rpartition(".")[0].rpartition(".")
    return f"{block}{dot}{renamed[rest]}.{name.rpartition('.')[2]}" if rest in renamed else name


def published_names(prefix: str) -> dict[str, str]:
    """The names in a draft head's file of blk.0.* (after `prefix`), output and output_norm."""
    names = {f"blk.0.{ours}": f"{prefix}{theirs}" for theirs, ours in reversed(_LAYER_NAMES.items())}
    names |= {ours: theirs for theirs, ours in _MODEL_NAMES.items()}
    return {f"{ours}.{end}": f"{theirs}.{end}" for ours, theirs in names.items() for end in ("weight", "bias")}
