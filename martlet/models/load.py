"""From a checkpoint to a `Model`: the spec, and every weight packed by a backend (read `decoder.py` next).

Whatever differs between file formats is normalised here, once, so that the decoder sees one kind of model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from martlet.ops.interface import Array, Backend, Weight
from martlet.spec import ModelSpec

__all__ = ["AttentionWeights", "FfnWeights", "LayerWeights", "Model", "load_model"]


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


@dataclass(frozen=True, slots=True)
class Model:
    """A spec with its packed weights, ready for `decoder.forward`. `head` is `embedding` where the two are tied."""

    spec: ModelSpec
    embedding: Weight  # [V, C]
    layers: tuple[LayerWeights, ...]
    final_norm: Array
    head: Weight  # [V, C]
    weight_bytes: int  # as packed


def load_model(
    checkpoint: Any,
    ops: Backend,
    *,
    context: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Check every tensor of the checkpoint against its spec, then pack them all.

    `context` is the longest context the engine will use; it selects between a file's RoPE factor sets (longrope).
    `progress` is called with (bytes done, bytes in all). Raises FormatError and UnsupportedError before packing starts.
    """
    raise NotImplementedError
