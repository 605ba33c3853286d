"""How a weight matrix lies in memory for the kernels (read `pack.py` for how it gets there, `linear.py` for its use).

Rows stand side by side in groups of 16, so that one register holds the same position of 16 rows and a product needs no
horizontal sum. A group of a quantised matrix is four regions, each starting on a 64-byte line; a block is 32 columns:

    codes   per block  4 lines of 64 bytes: line j holds, for each row, columns 4j … 4j+3 in the low nibbles and
                       16+4j … 16+4j+3 in the high ones (8-bit codes: 8 lines, the first four for columns 0 … 15)
    high    per block  the bits above the nibble: 1 line for 5-bit codes, 2 for 6-bit ones
    scales  per block  one scale for each row and run of `run` columns, then the minima if there are any
    supers  per 256    an f16 for each row that multiplies byte scales, then one for byte minima

A weight is `scale * (code - zero_point)`, or `scale * code - minimum` (f16 minima are added, as Q4_1 stores them).
Float matrices are one region: for each column, 16 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from martlet.quant.table import BlockType

__all__ = ["BLOCK", "GROUP", "LAYOUTS", "FloatLayout", "Layout", "QuantLayout", "group_bytes", "region_offsets"]

GROUP = 16  # rows side by side: the float32 lanes of the widest register
BLOCK = 32  # columns that share an activation scale
LINE = 64

IQ4_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml's kvalues_iq4nl
MXFP4_CODEBOOK = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the E2M1 values (OCP MX 1.0)


@dataclass(frozen=True, slots=True)
class QuantLayout:
    """What distinguishes the kernels of the quantised types."""

    name: str
    bits: int  # of a stored code: 4, 5, 6 or 8
    run: int  # columns that share a scale: 16 or 32
    scale: str  # "f16"; "u8" or "i8" (times a super); "e8m0" (a power of two, halved)
    minimum: str | None = None  # None, "f16" or "u8" (times a super)
    zero_point: int = 0
    codebook: tuple[int, ...] | None = None  # codes select these values

    @property
    def has_supers(self) -> bool:
        """Whether scales are bytes that an f16 a row and 256 columns multiplies."""
        return self.scale in ("u8", "i8")

    @property
    def high_lines(self) -> int:
        """Lines a block of bits above the nibble."""
        return {4: 0, 5: 1, 6: 2, 8: 0}[self.bits]

    @property
    def scale_bytes(self) -> int:
        """Bytes a block and group of scales and minima."""
        runs = BLOCK // self.run
        per_row = {"f16": 2, "u8": 1, "i8": 1, "e8m0": 1}[self.scale] + {None: 0, "f16": 2, "u8": 1}[self.minimum]
        return GROUP * runs * per_row


@dataclass(frozen=True, slots=True)
class FloatLayout:
    """A matrix of floats, 16 rows a column."""

    name: str  # "f32", "f16" or "bf16"
    item_bytes: int


Layout = QuantLayout | FloatLayout

LAYOUTS: dict[BlockType, Layout] = {
    BlockType.Q4_0: QuantLayout("q4_0", 4, 32, "f16", zero_point=8),
    BlockType.Q4_1: QuantLayout("q4_1", 4, 32, "f16", "f16"),
    BlockType.Q5_0: QuantLayout("q5_0", 5, 32, "f16", zero_point=16),
    BlockType.Q5_1: QuantLayout("q5_1", 5, 32, "f16", "f16"),
    BlockType.Q8_0: QuantLayout("q8_0", 8, 32, "f16", zero_point=128),
    BlockType.Q2_K: QuantLayout("q2_k", 4, 16, "u8", "u8"),
    BlockType.Q3_K: QuantLayout("q3_k", 4, 16, "i8", zero_point=4),
    BlockType.Q4_K: QuantLayout("q4_k", 4, 32, "u8", "u8"),
    BlockType.Q5_K: QuantLayout("q5_k", 5, 32, "u8", "u8"),
    BlockType.Q6_K: QuantLayout("q6_k", 6, 16, "i8", zero_point=32),
    BlockType.IQ4_NL: QuantLayout("iq4_nl", 4, 32, "f16", zero_point=128, codebook=IQ4_CODEBOOK),
    BlockType.IQ4_XS: QuantLayout("iq4_xs", 4, 32, "i8", zero_point=128, codebook=IQ4_CODEBOOK),
    BlockType.MXFP4: QuantLayout("mxfp4", 4, 32, "e8m0", zero_point=128, codebook=MXFP4_CODEBOOK),
    BlockType.F16: FloatLayout("f16", 2),
    BlockType.BF16: FloatLayout("bf16", 2),
    BlockType.F32: FloatLayout("f32", 4),
}


def _lines(nbytes: int) -> int:
    return (nbytes + LINE - 1) // LINE * LINE


def region_offsets(layout: QuantLayout, n_blocks: int) -> tuple[int, int, int, int]:
    """Byte offsets in a group of the high bits, scales and supers (codes start at 0), and the group's size."""
    high = n_blocks * (8 if layout.bits == 8 else 4) * LINE
    scales = high + n_blocks * layout.high_lines * LINE
    supers = scales + _lines(n_blocks * layout.scale_bytes)
    per_super = GROUP * 2 * (2 if layout.minimum == "u8" else 1)
    end = supers + (_lines((n_blocks * BLOCK + 255) // 256 * per_super) if layout.has_supers else 0)
    return high, scales, supers, end


def group_bytes(layout: Layout, k: int) -> int:
    """Bytes of one group of 16 rows of k columns."""
    if isinstance(layout, FloatLayout):
        return _lines(GROUP * k * layout.item_bytes)
    return region_offsets(layout, k // BLOCK)[3]
