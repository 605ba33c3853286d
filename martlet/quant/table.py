"""The block types of weights: names and sizes (read `blocks.py` next for their layouts).

Source: the GGUF specification (ggml/docs/gguf.md) and ggml-common.h of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class BlockType(IntEnum):
    """Block types by their numbers in a GGUF file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    MXFP4 = 39


@dataclass(frozen=True, slots=True)
class Block:
    """`size` values are stored together in `nbytes` bytes."""

    size: int
    nbytes: int


BLOCKS: dict[BlockType, Block] = {
    BlockType.F32: Block(1, 4),
    BlockType.F16: Block(1, 2),
    BlockType.BF16: Block(1, 2),
    BlockType.F64: Block(1, 8),
    BlockType.I8: Block(1, 1),
    BlockType.I16: Block(1, 2),
    BlockType.I32: Block(1, 4),
    BlockType.I64: Block(1, 8),
    BlockType.Q4_0: Block(32, 18),
    BlockType.Q4_1: Block(32, 20),
    BlockType.Q5_0: Block(32, 22),
    BlockType.Q5_1: Block(32, 24),
    BlockType.Q8_0: Block(32, 34),
    BlockType.Q8_1: Block(32, 36),
    BlockType.Q2_K: Block(256, 84),
    BlockType.Q3_K: Block(256, 110),
    BlockType.Q4_K: Block(256, 144),
    BlockType.Q5_K: Block(256, 176),
    BlockType.Q6_K: Block(256, 210),
    BlockType.Q8_K: Block(256, 292),
    BlockType.IQ4_NL: Block(32, 18),
    BlockType.IQ4_XS: Block(256, 136),
    BlockType.MXFP4: Block(32, 17),
    BlockType.IQ2_XXS: Block(256, 66),
    BlockType.IQ2_XS: Block(256, 74),
    BlockType.IQ3_XXS: Block(256, 98),
    BlockType.IQ1_S: Block(256, 50),
    BlockType.IQ3_S: Block(256, 110),
    BlockType.IQ2_S: Block(256, 82),
    BlockType.IQ1_M: Block(256, 56),
}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as its file stores it: a view, not a copy.

    `shape` is in NumPy order, rows first: a matrix is [n, k], and each row is a whole number of
    blocks. `data` is uint8 [nbytes] on the file's mapping (read-only).
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    data: NDArray[np.uint8]

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row (the last dimension)."""
        block = BLOCKS[self.type]
        return (self.shape[-1] if self.shape else 1) // block.size * block.nbytes

    def rows(self) -> NDArray[np.uint8]:
        """The bytes, uint8 [rows, row_nbytes], all dimensions but the last flattened."""
        return self.data.reshape(-1, self.row_nbytes)

    def take_rows(self, index: NDArray[np.intp] | slice) -> RawTensor:
        """The rows `index` of a matrix: a view for a slice, a copy for an index array."""
        picked = self.rows()[index]
        return RawTensor(self.name, (picked.shape[0], self.shape[-1]), self.type, picked.reshape(-1))

    def part(self, index: int) -> RawTensor:
        """Matrix `index` of a stack [E, n, k]: a view."""
        n_bytes = self.data.size // self.shape[0]
        data = self.data[index * n_bytes : (index + 1) * n_bytes]
        return RawTensor(f"{self.name}[{index}]", self.shape[1:], self.type, data)
