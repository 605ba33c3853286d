"""Medusa heads (arXiv:2401.10774): a hidden state, several guesses (read `eagle_head.py` first).

    head i     x       = the output of the model's final norm at position p                 [C]
               x      += silu(block(x)), a few times
               logits  = output(x): of token p + 2 + i

Layouts: config.json with medusa_num_heads and medusa_num_layers, and tensors `0.0.linear.weight`
(head, block) and `0.1.weight` (head, output); or vLLM's, with num_heads and num_hidden_layers,
`blocks.0.layers.0.weight` and `lm_heads.0.weight`, and token_map where the outputs have fewer rows
than the vocabulary. A head without output rows uses the model's. The files are untrusted.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from martlet.errors import FormatError, UnsupportedError
from martlet.formats.checkpoint import Checkpoint
from martlet.models.eagle_head import CODES, OUTPUT_CODES, coded, finite, open_head_folder
from martlet.models.weights import Model
from martlet.ops.interface import Array, Backend, Rows, Weight
from martlet.quant.table import BLOCKS, BlockType, RawTensor
from martlet.spec import Activation, ModelSpec

I64 = NDArray[np.int64]
MOST_HEADS, MOST_BLOCKS = 16, 8
_BLOCK = re.compile(r"(?:blocks\.)?(\d+)\.(?:layers\.(\d+)|(\d+)\.linear)\.(weight|bias)")
_OUTPUT = re.compile(r"(?:lm_heads\.(\d+)|(\d+)\.(\d+))\.weight")


@dataclass(frozen=True, slots=True)
class MedusaFile:
    """The heads' files, checked except for their values.

    `tensors` is keyed by (head, block, "weight" or "bias"); output rows have None as block.
    """

    checkpoint: Checkpoint
    n_heads: int
    n_blocks: int
    features: tuple[int, ...]  # the final norm's output; see `decoder.Features`
    ids: I64 | None  # the model's id for each row of the outputs; None: all of them
    tensors: Mapping[tuple[int, int | None, str], RawTensor]

    @property
    def weight_bytes(self) -> int:
        """About what the matrices occupy as packed."""
        n_values = sum(raw.shape[0] * raw.shape[-1] for raw in self.tensors.values() if len(raw.shape) == 2)
        return n_values * BLOCKS[CODES].nbytes // BLOCKS[CODES].size


@dataclass(frozen=True, slots=True)
class Medusa:
    """Packed heads: for each, its blocks with their biases, and its output rows."""

    heads: tuple[tuple[tuple[tuple[Weight, Array | None], ...], Weight], ...]
    ids: I64 | None
    width: int  # rows of an output


def open_medusa(path: str | Path, spec: ModelSpec) -> MedusaFile:
    """Open a folder of heads; FormatError or UnsupportedError if it does not fit the model."""
    path = Path(path)
    checkpoint = open_head_folder(path)
    config = checkpoint.metadata
    n_heads, n_blocks = (
        config.get(f"medusa_num_{old}", config.get(new))
        for old, new in (("heads", "num_heads"), ("layers", "num_hidden_layers"))
    )
    for noun, count, most in (("heads", n_heads, MOST_HEADS), ("blocks a head", n_blocks, MOST_BLOCKS)):
        if type(count) is not int or not 1 <= count <= most:
            raise FormatError(path, f"config.json has {count!r:.40} Medusa {noun}; expected 1 to {most}")
    assert isinstance(n_heads, int)
    assert isinstance(n_blocks, int)
    ids = _ids(path, checkpoint.tensors.get("token_map"), spec.vocab)
    tensors = _named(path, checkpoint.tensors, n_blocks)
    _check(path, tensors, (n_heads, n_blocks), (spec.hidden, spec.vocab if ids is None else len(ids)))
    if ids is not None and (0, None, "weight") not in tensors:
        raise FormatError(path, "has a token_map, but no output rows of its own")
    return MedusaFile(checkpoint, n_heads, n_blocks, (len(spec.layers),), ids, tensors)


def _ids(path: Path, raw: RawTensor | None, vocab: int) -> I64 | None:
    if raw is None:
        return None
    if raw.type is not BlockType.I64 or len(raw.shape) != 1:
        raise FormatError(path, f"token_map is {raw.type.name} of {len(raw.shape)} dimensions; expected a list of I64")
    ids: I64 = raw.data.view(np.int64)
    if ids.min() < 0 or ids.max() >= vocab or len(set(ids.tolist())) != len(ids):
        raise FormatError(path, f"token_map names ids outside 0 to {vocab - 1:,}, or one twice")
    return ids.copy()


def _named(path: Path, tensors: Mapping[str, RawTensor], n_blocks: int) -> dict[tuple[int, int | None, str], RawTensor]:
    """The tensors of either layout under the keys of `MedusaFile`."""
    named: dict[tuple[int, int | None, str], RawTensor] = {}
    for name, raw in tensors.items():
        short = re.sub(r"^medusa_heads?\.", "", name)
        if short == "token_map":
            continue
        block, output = _BLOCK.fullmatch(short), _OUTPUT.fullmatch(short)
        if block is not None:
            key: tuple[int, int | None, str] = int(block[1]), int(block[2] or block[3]), block[4]
        elif output is not None and (output[1] is not None or int(output[3]) == n_blocks):
            key = int(output[1] or output[2]), None, "weight"
        else:
            raise UnsupportedError(f"{path} holds {name!r:.120}, which Medusa heads here have no use for")
        if key in named:
            raise FormatError(path, f"holds {name!r:.120} under two names")
        named[key] = raw
    return named


def _check(
    path: Path,
    tensors: Mapping[tuple[int, int | None, str], RawTensor],
    counts: tuple[int, int],
    sizes: tuple[int, int],
) -> None:
    """Raise FormatError unless all heads have all matrices, of the right shapes, and no others.

    Biases may be missing, and so may the output rows of all heads together.
    """
    (n_heads, n_blocks), (c, width) = counts, sizes
    for (head, block, ending), raw in tensors.items():
        if head >= n_heads or (block is not None and block >= n_blocks):
            raise FormatError(
                path, f"holds block {block} of head {head}; config.json has {n_blocks} of {n_heads} heads"
            )
        expected = (width, c) if block is None else (c, c) if ending == "weight" else (c,)
        if raw.shape != expected:
            shown = f"the output of head {head}" if block is None else f"the {ending} of head {head}, block {block}"
            stored, wanted = ("x".join(map(str, shape)) for shape in (raw.shape, expected))
            raise FormatError(path, f"{shown} has the shape {stored}, expected {wanted}")
    for head in range(n_heads):
        for block in range(n_blocks):
            if (head, block, "weight") not in tensors:
                raise FormatError(path, f"the weight of head {head}, block {block} is missing")
    n_outputs = sum(block is None for _, block, _ in tensors)
    if n_outputs not in (0, n_heads):
        raise FormatError(path, f"has outputs of {n_outputs} heads out of {n_heads}")


def load_medusa(file: MedusaFile, ops: Backend, model: Model) -> Medusa:
    """Pack the heads; FormatError for values that are not finite."""
    path, tensors = file.checkpoint.path, file.tensors

    def block(head: int, number: int) -> tuple[Weight, Array | None]:
        bias = tensors.get((head, number, "bias"))
        weight = coded("block", finite(path, tensors[head, number, "weight"]), CODES)
        return ops.pack([weight]), None if bias is None else ops.upload(finite(path, bias))

    def output(head: int) -> Weight:
        own = tensors.get((head, None, "weight"))
        return model.head if own is None else ops.pack([coded("output", finite(path, own), OUTPUT_CODES)])

    heads = tuple(
        (tuple(block(head, number) for number in range(file.n_blocks)), output(head)) for head in range(file.n_heads)
    )
    return Medusa(heads, file.ids, model.spec.vocab if file.ids is None else len(file.ids))


def guess_all(ops: Backend, medusa: Medusa, hidden: int) -> tuple[Array, ...]:
    """The logits [T, D] of each head, from given rows [x, 0, 1], each [C]. Call inside a capture.

    The columns of ones are the `up` of `act_mul`, whose gate a block writes: silu(block(x)) * 1.
    """
    given, made = ops.empty(Rows.TOKENS, 3 * hidden), []
    ops.feed(given)
    gate, gate_up = ops.columns(given, hidden, 2 * hidden), ops.columns(given, hidden, 3 * hidden)
    x, gated = ops.empty(Rows.TOKENS, hidden), ops.empty(Rows.TOKENS, hidden)
    for blocks, output in medusa.heads:
        source = ops.columns(given, 0, hidden)
        for weight, bias in blocks:
            ops.linear(source, weight, gate, bias)
            ops.act_mul(gate_up, Activation.SILU, gated)
            ops.add(source, gated, 1.0, x)
            source = x
        logits = ops.empty(Rows.TOKENS, medusa.width)
        ops.linear(source, output, logits)
        made.append(logits)
    return tuple(made)
