"""How a weight matrix lies in memory for the kernels.

Read `pack.py` for how it gets there, `linear.py` for its use.

Rows stand side by side in groups of 16, so that one register holds the same position of 16 rows and
a product needs no horizontal sum. Within a group the bytes lie in the order in which a product
reads them, front to back, because that is what memory is fast at. A quantised group is a run of
panels of 256 columns (the last may be shorter):

    panel   supers (an f16 for each row that multiplies byte scales, then one for byte minima;
            only such types), blocks
    block   32 columns: codes, high, scales

    codes   4 lines of 64 bytes: line j holds, for each row, columns 4j … 4j+3 in the low nibbles
            and 16+4j … 16+4j+3
            in the high ones (8-bit codes: 8 lines, the first four for columns 0 … 15)
    high    the bits above the nibble: no line, 1 for 5-bit codes, 2 for 6-bit ones
    scales  one scale for each row and run of `run` columns, then the minima if there are any

A weight is `scale * (code - zero_point)`, or `scale * code - minimum` (f16 minima are added, as
Q4_1 stores them). Float matrices are one region: for each column, 16 rows.
"""

from dataclasses import dataclass

from martlet.quant.table import BlockType

GROUP = 16  # rows side by side: the float32 lanes of the widest register
BLOCK = 32  # columns that share an activation scale
LINE = 64
PANEL_BLOCKS = 8
# Weights of a chunk that many rows come back to: half of a small second-level cache.
CHUNK_BYTES = 256 * 1024

# ggml's kvalues_iq4nl, and twice the E2M1 values (OCP MX 1.0).
IQ4_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_CODEBOOK = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class QuantLayout:
    """What distinguishes the kernels of the quantised types."""

    name: str
    bits: int  # of a stored code: 4, 5, 6 or 8
    run: int  # columns that share a scale: 16 or 32
    scale: str  # "f16", "f32"; "u8" or "i8" (times a super); "e8m0" (a power of two, halved)
    minimum: str | None = None  # None, "f16", "f32" or "u8" (times a super)
    zero_point: int = 0
    codebook: tuple[int, ...] | None = None  # codes select these values
    used_bits: int | None = None  # of a stored code, if not all

    @property
    def product_bits(self) -> int:
        """Bits of the unsigned bytes that a product multiplies."""
        return 8 if self.codebook is not None else self.used_bits or self.bits

    @property
    def unpacked(self) -> "QuantLayout":
        """The same weights as bytes with float32 scales, for products of many rows."""
        minimum = None if self.minimum is None else "f32"
        return QuantLayout(self.name, 8, self.run, "f32", minimum, self.zero_point, None, self.product_bits)

    @property
    def has_supers(self) -> bool:
        """Whether scales are bytes that an f16 a row and 256 columns multiplies."""
        return self.scale in ("u8", "i8")

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return LINE * (8 if self.bits == 8 else 4)

    @property
    def high_bytes(self) -> int:
        """Bytes of a block's bits above the nibble."""
        return LINE * {4: 0, 5: 1, 6: 2, 8: 0}[self.bits]

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scales and minima."""
        sizes = {"f32": 4, "f16": 2, "u8": 1, "i8": 1, "e8m0": 1, None: 0}
        per_row = sizes[self.scale] + sizes[self.minimum]
        return GROUP * (BLOCK // self.run) * per_row

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 16 rows."""
        return self.code_bytes + self.high_bytes + self.scale_bytes

    @property
    def super_bytes(self) -> int:
        """Bytes of a panel's supers."""
        return GROUP * 2 * (2 if self.minimum == "u8" else 1) if self.has_supers else 0


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


def group_bytes(layout: Layout, k: int) -> int:
    """Bytes of one group of 16 rows of k columns."""
    if isinstance(layout, FloatLayout):
        return _lines(GROUP * k * layout.item_bytes)
    n_blocks = k // BLOCK
    return _lines(n_blocks * layout.block_bytes + -(-n_blocks // PANEL_BLOCKS) * layout.super_bytes)


def unpacked_bytes(layout: QuantLayout, k: int) -> int:
    """Bytes that a thread needs for unpacked groups of k columns."""
    return max(CHUNK_BYTES, k // BLOCK * layout.unpacked.block_bytes)


def packed_bytes(block_type: BlockType, n: int, k: int) -> int:
    """Bytes of a packed matrix [n, k]; what has no kernel of its own is packed as float32."""
    layout = LAYOUTS.get(block_type)
    if layout is None or (isinstance(layout, QuantLayout) and k % BLOCK):
        layout = LAYOUTS[BlockType.F32]
    return -(-n // GROUP) * group_bytes(layout, k)
