"""Random but valid blocks of every type, for the tests of packing and products."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from martlet.quant.table import BLOCKS, BlockType, RawTensor

# Where the float16 fields of a block stand; everything else may be any bits.
F16_FIELDS = {
    BlockType.Q4_0: (0,),
    BlockType.Q4_1: (0, 2),
    BlockType.Q5_0: (0,),
    BlockType.Q5_1: (0, 2),
    BlockType.Q8_0: (0,),
    BlockType.Q2_K: (80, 82),
    BlockType.Q3_K: (108,),
    BlockType.Q4_K: (0, 2),
    BlockType.Q5_K: (0, 2),
    BlockType.Q6_K: (208,),
    BlockType.IQ4_NL: (0,),
    BlockType.IQ4_XS: (0,),
}


def random_tensor(kind: BlockType, n: int, k: int, seed: int = 0) -> RawTensor:
    """A matrix [n, k] whose scales are moderate numbers and whose other bits are random."""
    rng = np.random.default_rng(seed)
    block = BLOCKS[kind]
    if kind in (BlockType.F32, BlockType.F16, BlockType.BF16):
        values = rng.standard_normal((n, k)).astype(np.float32)
        if kind is BlockType.F16:
            data: NDArray[np.uint8] = values.astype(np.float16).view(np.uint8)
        elif kind is BlockType.BF16:
            data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            data = values.view(np.uint8)
        return RawTensor("w", (n, k), kind, data.reshape(-1))
    blocks = rng.integers(0, 256, (n * k // block.size, block.nbytes), dtype=np.uint8)
    for at in F16_FIELDS.get(kind, ()):
        blocks[:, at : at + 2] = rng.standard_normal(len(blocks)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind is BlockType.MXFP4:
        blocks[:, 0] = rng.integers(120, 132, len(blocks))
    return RawTensor("w", (n, k), kind, blocks.reshape(-1))
