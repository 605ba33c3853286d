"""Layouts of block types as NumPy record types (read `ggml.py` next for the bits' meaning).

Source: ggml-common.h of llama.cpp. Everything is little-endian and packed without gaps. A record is
exactly one block, so `data.view(LAYOUTS[block_type])` splits a tensor into blocks without copying.
"""

from typing import Any

import numpy as np

from martlet.quant.table import BLOCKS, BlockType

# Types whose block is one number: no layout but a dtype. BF16 is the upper half of a float32.
PLAIN: dict[BlockType, np.dtype[Any]] = {
    BlockType.F32: np.dtype("<f4"),
    BlockType.F16: np.dtype("<f2"),
    BlockType.F64: np.dtype("<f8"),
    BlockType.I8: np.dtype("<i1"),
    BlockType.I16: np.dtype("<i2"),
    BlockType.I32: np.dtype("<i4"),
    BlockType.I64: np.dtype("<i8"),
}

# d is the scale, m the minimum, dmin the minima's scale; qs holds the low bits of the values, qh
# and hmask their high bits; scales holds the scales (and minima) of sub-blocks.
_FIELDS: dict[BlockType, list[tuple[Any, ...]]] = {
    BlockType.Q4_0: [("d", "<f2"), ("qs", "u1", 16)],
    BlockType.Q4_1: [("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)],
    BlockType.Q5_0: [("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)],
    BlockType.Q5_1: [("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)],
    BlockType.Q8_0: [("d", "<f2"), ("qs", "i1", 32)],
    BlockType.Q8_1: [("d", "<f2"), ("s", "<f2"), ("qs", "i1", 32)],
    BlockType.Q2_K: [("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")],
    BlockType.Q3_K: [("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")],
    BlockType.Q4_K: [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)],
    BlockType.Q5_K: [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)],
    BlockType.Q6_K: [("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")],
    BlockType.Q8_K: [("d", "<f4"), ("qs", "i1", 256), ("sums", "<i2", 16)],
    BlockType.IQ4_NL: [("d", "<f2"), ("qs", "u1", 16)],
    BlockType.IQ4_XS: [("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)],
    BlockType.MXFP4: [("e", "u1"), ("qs", "u1", 16)],
    BlockType.IQ2_XXS: [("d", "<f2"), ("qs", "<u4", (8, 2))],
    BlockType.IQ2_XS: [("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)],
    BlockType.IQ2_S: [("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)],
    BlockType.IQ3_XXS: [("d", "<f2"), ("qs", "u1", 64), ("signs", "<u4", 8)],
    BlockType.IQ3_S: [("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)],
    BlockType.IQ1_S: [("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)],
    BlockType.IQ1_M: [("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)],
}

LAYOUTS: dict[BlockType, np.dtype[Any]] = {name: np.dtype(fields) for name, fields in _FIELDS.items()}
assert all(layout.itemsize == BLOCKS[name].nbytes for name, layout in LAYOUTS.items())

# The values of the sixteen 4-bit codes, before scaling. MXFP4's are twice the values of the OCP
# Microscaling specification 1.0 (E2M1), so that they are integers; its scale is halved to match.
CODEBOOK_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
CODEBOOK_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
