"""Stacks of experts' matrices that a checkpoint stores otherwise than GGUF does (read
`models/weights.py` for their use).

gpt-oss on Hugging Face stores a matrix [n, k] as its transpose, or as MXFP4 (OCP Microscaling
Formats 1.0) in two tensors: `…_blocks`, two codes a byte, neighbours together, and `…_scales`, an
exponent for each 32 codes. A `LazyStack` makes one expert's matrix at a time, so that no second
copy of the model is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from martlet.errors import FormatError
from martlet.quant.table import BLOCKS, BlockType, RawTensor

BLOCKS_ENDING, SCALES_ENDING = "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class LazyStack(RawTensor):
    """A stack [E, n, k] whose matrices are made when they are asked for.

    `data` is the stored bytes, for their number only.
    """

    make: Callable[[int], NDArray[np.uint8]]  # an expert's bytes, in the order of the type

    def part(self, index: int) -> RawTensor:
        """Matrix `index`, a copy."""
        data = self.make(index).reshape(-1)
        return RawTensor(f"{self.name}[{index}]", self.shape[1:], self.type, data)


def transposed(stack: RawTensor) -> LazyStack:
    """A stack [E, k, n] of floats as [E, n, k]."""
    n_experts, k, n = stack.shape
    values = stack.data.reshape(n_experts, k, n, BLOCKS[stack.type].nbytes)
    return LazyStack(
        stack.name,
        (n_experts, n, k),
        stack.type,
        stack.data,
        lambda e: np.ascontiguousarray(values[e].swapaxes(0, 1)),
    )


def join_mxfp4(path: Path, tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The tensors, with each pair of blocks and scales as one stack under their common name.

    Raises FormatError for blocks whose scales are missing or have another shape.
    """
    joined: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(BLOCKS_ENDING):
            base = name.removesuffix(BLOCKS_ENDING)
            joined[base] = _mxfp4(path, base, tensor, tensors.get(base + SCALES_ENDING))
        elif not name.endswith(SCALES_ENDING) or name.removesuffix(SCALES_ENDING) + BLOCKS_ENDING not in tensors:
            joined[name] = tensor
    return joined


def _mxfp4(path: Path, name: str, blocks: RawTensor, scales: RawTensor | None) -> LazyStack:
    """Codes [E, n, k / 32, 16] and exponents [E, n, k / 32] as a stack [E, n, k] of MXFP4."""
    if len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales is None or scales.shape != blocks.shape[:3]:
        shape = "none" if scales is None else str(list(scales.shape))
        message = f"{name}: blocks {list(blocks.shape)} and scales {shape}; expected [E, n, b, 16] and [E, n, b]"
        raise FormatError(path, message)
    n_experts, n, n_blocks, _ = blocks.shape
    codes, exponents = blocks.data.reshape(blocks.shape), scales.data.reshape(scales.shape)

    def make(e: int) -> NDArray[np.uint8]:
        """An exponent, then codes i and i + 16 in byte i (ggml-common.h, block_mxfp4)."""
        values = np.stack([codes[e] & 15, codes[e] >> 4], axis=-1).reshape(n, n_blocks, 32)
        out = np.empty((n, n_blocks, BLOCKS[BlockType.MXFP4].nbytes), np.uint8)
        out[:, :, 0] = exponents[e]
        out[:, :, 1:] = values[:, :, :16] | values[:, :, 16:] << 4
        return out

    return LazyStack(name, (n_experts, n, 32 * n_blocks), BlockType.MXFP4, blocks.data, make)
