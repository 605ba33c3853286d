"""Draft heads that guess from a model's hidden states: EAGLE-3 (read `speculate/eagle.py` next).

EAGLE-3 (arXiv:2503.01840):

    features   the residual stream of position p as it enters three of the model's layers    [3C]
    x        = fuse(features)                                                                [C]
    both     = [norm(embedding of token p + 1), norm(x)]                                     [2C]
    x       += attention(both), over the head's own keys and values; x += ffn(norm(x))
    logits   = output(norm(x)): of token p + 2, over a smaller vocabulary

x then stands for the features that p + 1 will have, without fusing, and so on. A head's files are
laid out as published: config.json and model.safetensors with fc, midlayer.*, norm, lm_head, d2t
(for each of the head's ids, the model's id minus the head's) and t2d (for each of the model's ids,
whether the head knows it). A head without lm_head shares the model's output rows. The files are
untrusted.

A model's own layer for multi-token prediction is run here too (`mtp_layers.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.errors import FormatError, UnsupportedError
from martlet.formats.checkpoint import Checkpoint, open_checkpoint
from martlet.models.families import spec_of
from martlet.models.layer import Stream, run_layer
from martlet.models.tensors import StoredTensor, canonical_name, check_tensors, layer_shapes, published_names
from martlet.models.weights import LayerWeights, Model, read_layer
from martlet.ops.interface import Array, Backend, Rows, Weight
from martlet.quant.encode import encode
from martlet.quant.ggml import decode
from martlet.quant.table import BLOCKS, BlockType, RawTensor
from martlet.spec import DenseFfn, Layer, ModelSpec

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
CODES = BlockType.Q8_0  # of the head's matrices, where their rows are whole blocks
OUTPUT_CODES = BlockType.Q4_1  # of the output rows: every guess waits until all of them are read
LEAST_LAYERS = 4


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A head's files, checked except for their values.

    `tensors` has the layer under canonical names (`blk.0.attn_q.weight`), `output_norm.weight` and
    `output.weight`; tensors that only heads have keep EAGLE-3's published names (`fc.weight`).
    """

    checkpoint: Checkpoint
    spec: ModelSpec  # of the head: one layer, and the head's own vocabulary
    features: tuple[int, ...]  # layers whose inputs the head reads: `decoder.Features`
    ids: I64  # [D], the model's id of each of the head's
    tensors: Mapping[str, RawTensor]

    @property
    def is_mtp(self) -> bool:
        """Whether it is a model's own layer for multi-token prediction."""
        return "token_norm.weight" in self.tensors

    @property
    def weight_bytes(self) -> int:
        """About what its matrices occupy as packed, the model's output rows included."""
        n_values = sum(tensor.shape[0] * tensor.shape[-1] for tensor in self.tensors.values() if len(tensor.shape) == 2)
        if "output.weight" not in self.tensors and "d2t" in self.tensors:
            n_values += self.spec.vocab * self.spec.hidden
        return n_values * BLOCKS[CODES].nbytes // BLOCKS[CODES].size

    @property
    def width(self) -> int:
        """Floats of a row of its activations."""
        layer = self.spec.layers[0]
        mixer = layer.mixer
        assert isinstance(layer.ffn, DenseFfn)
        heads = 2 * mixer.n_heads + 2 * mixer.n_kv_heads
        return (2 * len(self.features) + 6) * self.spec.hidden + heads * mixer.head_dim + 3 * layer.ffn.ffn_hidden


@dataclass(frozen=True, slots=True)
class Head:
    """A head with its packed weights. EAGLE-3's mixer_norm is that of the embedding."""

    layer: Layer
    weights: LayerWeights
    fuse: Weight  # [C, 3C], of multi-token prediction [C, 2C]
    hidden_norm: Array  # [C]
    final_norm: Array  # [C]
    output: Weight  # [D, C]
    ids: I64  # [D], the model's
    n_features: int
    token_norm: Array | None = None  # [C], of multi-token prediction

    @property
    def is_mtp(self) -> bool:
        """Whether it is a model's own layer for multi-token prediction."""
        return self.token_norm is not None


def open_head_folder(path: Path) -> Checkpoint:
    """Open a head's folder, or its .safetensors file with the config.json beside it.

    Raises FormatError for a folder that is no draft head.
    """
    folder = path.parent if path.name.endswith(".safetensors") else path
    if not (folder / "config.json").exists():
        raise FormatError(path, "is no draft head; expected a folder with config.json and model.safetensors")
    if not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        raise FormatError(path, "holds its weights as a pickle, which is a program: convert them to model.safetensors")
    return open_checkpoint(folder)


def open_head(path: str | Path, spec: ModelSpec) -> HeadFile:
    """Open an EAGLE-3 head; FormatError or UnsupportedError if it does not fit the model."""
    path = Path(path)
    checkpoint = open_head_folder(path)
    config = dict(checkpoint.metadata)
    for key, ours, size in (("hidden_size", spec.hidden, "hidden size"), ("vocab_size", spec.vocab, "vocabulary")):
        if config.get(key) != ours:
            theirs = f"{config.get(key)!r:.40}"
            raise UnsupportedError(
                f"{path} is a draft head for another model: its {size} is {theirs}, this model's {ours:,}"
            )
    if config.get("num_hidden_layers", 1) != 1:
        raise UnsupportedError(f"{path} is a draft head of {config['num_hidden_layers']!r:.40} layers", ["1"])
    n_ids = config.get("draft_vocab_size") or spec.vocab
    if not isinstance(n_ids, int) or not 0 < n_ids <= spec.vocab:
        raise FormatError(path, f"draft_vocab_size is {n_ids!r:.40}, expected 1 to {spec.vocab:,}")
    plain = {**config, "model_type": "llama", "num_hidden_layers": 1, "vocab_size": n_ids, "tie_word_embeddings": False}
    own = spec_of(replace(checkpoint, metadata=plain))
    tensors = _named(path, checkpoint.tensors)
    _check(path, tensors, own, spec.vocab)
    return HeadFile(checkpoint, own, _features(path, config, spec), _ids(path, tensors, n_ids, spec.vocab), tensors)


def _named(path: Path, tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The tensors by the names of `HeadFile`."""
    named: dict[str, RawTensor] = {}
    for name, raw in tensors.items():
        short = name.removeprefix("model.")
        ours = canonical_name(short.replace("midlayer.", "layers.0."), {}) or short
        if ours in named:
            raise FormatError(path, f"holds {name!r:.120} under two names")
        named[ours] = raw
    return named


def _features(path: Path, config: Mapping[str, Any], spec: ModelSpec) -> tuple[int, ...]:
    """The layers whose inputs the head reads: 2, n // 2 and n - 3 by default.

    At the top level of config.json a number is that of the layer that reads the input; under
    eagle_config, that of the layer before.
    """
    n = len(spec.layers)
    nested = config.get("eagle_config")
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    if layers is None and isinstance(nested, Mapping):
        layers = nested.get("eagle_aux_hidden_state_layer_ids")
        if isinstance(layers, list):
            layers = [layer + 1 if isinstance(layer, int) else layer for layer in layers]
    if layers is None:
        layers = [2, n // 2, n - 3] if n > LEAST_LAYERS else [min(1, n - 1), n // 2, n - 1]
    fits = isinstance(layers, list) and len(layers) == 3
    if not fits or not all(type(layer) is int and 0 <= layer < n for layer in layers):
        raise UnsupportedError(f"{path} reads the layers {str(layers)[:60]}; 3 numbers from 0 to {n - 1} are supported")
    return tuple(layers)


def _check(path: Path, tensors: dict[str, RawTensor], spec: ModelSpec, vocab: int) -> None:
    """Raise where the tensors are not all that a head needs, of the right shapes, and no others."""
    c, owner = spec.hidden, "an EAGLE-3 head"
    expected = {
        "fc.weight": (c, 3 * c),
        "midlayer.hidden_norm.weight": (c,),
        "output_norm.weight": (c,),
        **layer_shapes(spec, spec.layers[0], "blk.0.", tensors, 2 * c),
    }
    optional = {
        "output.weight": (spec.vocab, c),
        "d2t": (spec.vocab,),
        "t2d": (vocab,),
        "token_embd.weight": (vocab, c),  # a copy of the model's, which is used
    }
    known = {name: shape for name, shape in {**optional, **expected}.items() if name in tensors or name in expected}
    check_tensors(path, tensors, known, owner, published_names("midlayer."))
    for name, raw in tensors.items():
        if name not in known:
            raise UnsupportedError(f"{path} holds {raw.name!r:.120}, which {owner} here has no use for")
    tensors.pop("token_embd.weight", None)


def _ids(path: Path, tensors: Mapping[str, RawTensor], n_ids: int, vocab: int) -> I64:
    """The model's id for each of the head's ids, int64 [n_ids]."""
    ids: I64 = np.arange(n_ids, dtype=np.int64)
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None and n_ids != vocab:
        raise FormatError(path, f"the tensor d2t is missing: it says which {n_ids:,} of {vocab:,} ids are guessed")
    if d2t is not None:
        if d2t.type not in (BlockType.I64, BlockType.I32):
            raise FormatError(path, f"d2t has the type {d2t.type.name}, expected I64")
        ids = ids + d2t.data.view(np.int64 if d2t.type is BlockType.I64 else np.int32)
        if ids.min() < 0 or ids.max() >= vocab or len(set(ids.tolist())) != n_ids:
            raise FormatError(path, f"d2t names ids outside 0 to {vocab - 1:,}, or one twice")
    if t2d is not None:
        known = np.zeros(vocab, bool)
        known[ids] = True
        if not np.array_equal(decode(t2d) != 0, known):
            raise FormatError(path, "d2t and t2d disagree on which ids it guesses")
    return ids


@dataclass(frozen=True, slots=True)
class _HeadSource:
    """`TensorSource` of a head's file: matrices as codes."""

    file: HeadFile
    ops: Backend

    def values(self, name: str) -> F32:
        return finite(self.file.checkpoint.path, self.file.tensors[name])

    def matrix(self, stored: Sequence[StoredTensor]) -> Weight:
        return self.ops.pack([coded(tensor.name, self.values(f"{tensor.name}.weight"), CODES) for tensor in stored])

    def bias(self, stored: Sequence[StoredTensor]) -> Array:
        return self.ops.upload(np.concatenate([self.values(f"{tensor.name}.bias") for tensor in stored]))

    def norm(self, stored: StoredTensor) -> Array:
        return self.vector(f"{stored.name}.weight")

    def vector(self, name: str) -> Array:
        return self.ops.upload(self.values(name))

    def output(self, model: Model, output_rows: Callable[[I64], RawTensor]) -> Weight:
        """The head's own output rows, the model's, or some of the model's."""
        if "output.weight" not in self.file.tensors and "d2t" not in self.file.tensors:
            return model.head
        own = "output.weight" in self.file.tensors
        rows = self.values("output.weight") if own else decode(output_rows(self.file.ids))
        return self.ops.pack([coded("output", rows, OUTPUT_CODES)])


def load_head(file: HeadFile, ops: Backend, model: Model, output_rows: Callable[[I64], RawTensor]) -> Head:
    """Pack a head's weights; `output_rows` gives rows [n, C] of the model's output matrix for
    ids, int64 [n].

    Raises FormatError for values that are not finite.
    """
    source, layer, c = _HeadSource(file, ops), file.spec.layers[0], file.spec.hidden
    return Head(
        layer,
        read_layer(source, file.spec, layer, "blk.0.", file.tensors, c if file.is_mtp else 2 * c),
        ops.pack([coded("fc", source.values("fc.weight"), CODES)]),
        source.vector("midlayer.hidden_norm.weight"),
        source.vector("output_norm.weight"),
        source.output(model, output_rows),
        file.ids,
        len(file.features),
        source.vector("token_norm.weight") if file.is_mtp else None,
    )


def finite(path: Path, tensor: RawTensor) -> F32:
    """A tensor's values, float32 [*shape]; FormatError if they are not all finite."""
    values = decode(tensor)
    if not np.isfinite(values).all():
        raise FormatError(path, f"{tensor.name} has values that are not finite numbers")
    return values


def coded(name: str, values: F32, type_: BlockType) -> RawTensor:
    """A matrix [n, k] in a block type, or in float32 where k is no whole number of blocks."""
    type_ = type_ if values.shape[1] % BLOCKS[type_].size == 0 else BlockType.F32
    return RawTensor(name, values.shape, type_, encode(values, type_).reshape(-1))


def guess_on(ops: Backend, model: Model, head: Head, cache: Array, page_size: int, depth: int) -> tuple[Array, ...]:
    """`guess` from the step's features, then a chain of `depth` guesses, each the next one's input.

    Returns logits, x and the guesses, each [L, 3] as `Backend.argmax` makes them.
    """
    logits, x = first = guess(ops, model, head, cache)
    ids, guesses = ops.upload(head.ids), [ops.empty(Rows.LOGITS, 3)]
    ops.argmax(logits, ids, None, guesses[0])
    while len(guesses) < depth:
        before = ops.advance(guesses[-1], x, page_size)
        logits, x = guess(ops, model, head, cache, before)
        guesses.append(ops.empty(Rows.LOGITS, 3))
        ops.argmax(logits, ids, guesses[-2], guesses[-1])
    return *first, *guesses


def guess(
    ops: Backend, model: Model, head: Head, cache: Array, before: Array | None = None, *, is_first: bool = False
) -> tuple[Array, Array]:
    """The head's logits [L, D] and x [L, C] for the logit rows. Call inside a capture.

    The input is x of the guess before, `before` [T, C], or the step's features, given [T,
    n_features * C]. The id of row t is the one after the position whose features the row has; the
    row's keys and values take that position. `is_first` says that the step computes position 0,
    where multi-token prediction has no embedding.
    """
    layer, weights, c = head.layer, head.weights, model.spec.hidden
    stream, norm, has_features = Stream(ops, c, 1.0), layer.mixer_norm, before is None
    assert norm is not None
    if before is None:
        before = ops.empty(Rows.TOKENS, head.n_features * c)
        ops.feed(before)
    both, embedded = ops.empty(Rows.TOKENS, 2 * c), ops.empty(Rows.TOKENS, c)
    left, right = ops.columns(both, 0, c), ops.columns(both, c, 2 * c)
    if head.is_mtp:
        ops.embed(model.embedding, 0.0 if is_first else model.spec.embedding_scale, embedded)
        ops.rms_norm(before, head.hidden_norm, norm.eps, left)
        ops.rms_norm(embedded, head.token_norm, norm.eps, right)
        ops.linear(both, head.fuse, stream.x)
        run_layer(stream, layer, weights, cache, narrows=True)
    else:
        if has_features:
            ops.linear(before, head.fuse, stream.x)
        else:
            stream.x = before
        ops.embed(model.embedding, 1.0, embedded)
        ops.rms_norm(embedded, weights.mixer_norm, norm.eps, left)
        ops.rms_norm(stream.x, head.hidden_norm, norm.eps, right)
        run_layer(stream, layer, weights, cache, mixer_input=both, narrows=True)
    normed, logits = stream.normed(norm, head.final_norm), ops.empty(Rows.LOGITS, len(head.ids))
    ops.linear(normed, head.output, logits)
    return logits, normed if head.is_mtp else stream.x
