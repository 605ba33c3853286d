"""Packing: a file's blocks into the kernels' layout, at the speed of memory (layouts: `layout.py`).

A file stores a matrix row by row; a group needs 16 rows side by side. Everything here therefore
gathers the same four bytes of each row into one vector and rearranges bits in all rows at once.
`PACKERS` has a function for each block type, which packs block b (32 columns) of a panel (256), and
those that share bytes with it, for the rows from `lane` on. Where a file's bits lie is llama.cpp's
ggml-common.h, told one type at a time in `quant/ggml.py`.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.fields import COUNTER, PACK
from martlet.ops.cpu.kernels.layout import BLOCK, GROUP, LINE, PANEL_BLOCKS, FloatLayout, QuantLayout
from martlet.ops.cpu.kernels.linear import OPTIONS, sharer
from martlet.ops.cpu.simd.verbs import Verbs

SRC, SRC_ROW_BYTES, DST, GROUP_BYTES, N_GROUPS, N_COLUMNS = PACK
LOW = 0x0F0F0F0F

# (src, stride, dst, where block b goes, b, lane), all offsets in bytes.
BlockPacker = Callable[..., Any]


def code_writer(v: Verbs) -> Callable[..., Any]:
    """(dst, block, lane, j, low, high): line j from two words of codes, one code a byte."""

    @njit(forceinline=True, **OPTIONS)
    def write(dst, block, lane, j, low, high):  # type: ignore[no-untyped-def]
        v.store(dst, (block + LINE * j) // 4 + lane, v.or_ints(low, v.shift_left(high, 4)))

    return write


def simple_packer(v: Verbs, layout: QuantLayout) -> BlockPacker:
    """Q4_0 … Q5_1, IQ4_NL, MXFP4: scale, minimum, high bits, then nibbles already in our order."""
    has_minimum, five, exponent = layout.minimum is not None, layout.bits == 5, layout.scale == "e8m0"
    high_at = 4 if has_minimum else 2
    codes_at = 1 if exponent else high_at + (4 if five else 0)
    file_bytes = codes_at + 16
    high, scales = layout.code_bytes, layout.code_bytes + layout.high_bytes

    @njit(forceinline=True, **OPTIONS)
    def pack(src, stride, dst, block, b, lane):  # type: ignore[no-untyped-def]
        source = b * file_bytes
        for j in range(4):
            v.store(dst, (block + LINE * j) // 4 + lane, v.gather_dwords(src, source + codes_at + 4 * j, stride))
        if five:  # bit 4i + u → bit i of byte u: 0x204081 moves bit u of a nibble to bit 8u
            bits, word = v.gather_dwords(src, source + high_at, stride), v.splat_int(0)
            for i in range(8):
                nibble = v.times(v.and_mask(v.shift_right(bits, 4 * i), 0xF), 0x00204081)
                word = v.or_ints(word, v.shift_left(v.and_mask(nibble, 0x01010101), i))
            v.store(dst, (block + high) // 4 + lane, word)
        head = v.gather_dwords(src, source, stride)
        if exponent:
            v.store_i8(dst, block + scales + lane, head)
        else:
            v.store_i16(dst, (block + scales) // 2 + lane, head)
        if has_minimum:
            v.store_i16(dst, (block + scales) // 2 + GROUP + lane, v.shift_right(head, 16))

    return pack


def q8_0_packer(v: Verbs, layout: QuantLayout) -> BlockPacker:
    """An f16 scale, then 32 signed bytes, stored 128 too high."""
    scales = layout.code_bytes

    @njit(forceinline=True, **OPTIONS)
    def pack(src, stride, dst, block, b, lane):  # type: ignore[no-untyped-def]
        source = b * 34
        for line in range(8):
            word = v.xor_mask(v.gather_dwords(src, source + 2 + 4 * line, stride), 0x80808080)
            v.store(dst, (block + LINE * line) // 4 + lane, word)
        v.store_i16(dst, (block + scales) // 2 + lane, v.gather_dwords(src, source, stride))

    return pack


def q45_k_packer(v: Verbs, layout: QuantLayout) -> BlockPacker:
    """Q4_K and Q5_K: two f16, 12 bytes of 6-bit scales and minima, (32 bytes of fifth bits,) 4 × 32
    bytes of nibbles.

    A panel a call. Blocks b and b + 1 (b even) are the low and the high nibbles of the same 32
    bytes; the fifth bits of block b are bit b of their 32 bytes.
    """
    five, size = layout.bits == 5, layout.block_bytes
    codes_at = 48 if five else 16
    high, scales = layout.code_bytes, layout.code_bytes + layout.high_bytes
    write = code_writer(v)

    @njit(forceinline=True, **OPTIONS)
    def pack_scales(src, stride, dst, block, lane):  # type: ignore[no-untyped-def]
        s0, s1, s2 = v.gather_dwords(src, 4, stride), v.gather_dwords(src, 8, stride), v.gather_dwords(src, 12, stride)
        for i in range(4):  # blocks i and 4 + i; four bits of the latter, two of them high
            place, later = block + scales + i * size + lane, block + scales + (4 + i) * size + lane
            v.store_i8(dst, place, v.and_mask(s0, 63))
            v.store_i8(dst, place + GROUP, v.and_mask(s1, 63))
            v.store_i8(dst, later, v.or_ints(v.and_mask(s2, 15), v.and_mask(v.shift_right(s0, 2), 48)))
            upper = v.and_mask(v.shift_right(s1, 2), 48)
            v.store_i8(dst, later + GROUP, v.or_ints(v.and_mask(v.shift_right(s2, 4), 15), upper))
            s0, s1, s2 = v.shift_right(s0, 8), v.shift_right(s1, 8), v.shift_right(s2, 8)

    @njit(forceinline=True, **OPTIONS)
    def pack(src, stride, dst, block, b, lane):  # type: ignore[no-untyped-def]
        pack_scales(src, stride, dst, block, lane)
        for b in range(0, 8, 2):
            first, second, source = block + b * size, block + (b + 1) * size, codes_at + 16 * b
            for j in range(4):
                low = v.gather_dwords(src, source + 4 * j, stride)
                upper = v.gather_dwords(src, source + 16 + 4 * j, stride)
                write(dst, first, lane, j, v.and_mask(low, LOW), v.and_mask(upper, LOW))
                low, upper = v.shift_right(low, 4), v.shift_right(upper, 4)
                write(dst, second, lane, j, v.and_mask(low, LOW), v.and_mask(upper, LOW))
            if five:
                even, odd = v.splat_int(0), v.splat_int(0)
                for i in range(8):
                    bits = v.shift_right(v.gather_dwords(src, 16 + 4 * i, stride), b)
                    even = v.or_ints(even, v.shift_left(v.and_mask(bits, 0x01010101), i))
                    bits = v.shift_right(bits, 1)
                    odd = v.or_ints(odd, v.shift_left(v.and_mask(bits, 0x01010101), i))
                v.store(dst, (first + high) // 4 + lane, even)
                v.store(dst, (second + high) // 4 + lane, odd)

    return pack


def q6_k_packer(v: Verbs, layout: QuantLayout) -> BlockPacker:
    """128 bytes of nibbles, 64 of bit pairs, 16 signed scales, an f16.

    Half a panel a call. Its blocks c and c + 2 (c = 0, 1) are the low and the high nibbles of the
    same 32 bytes; bits 2c and 2c + 1 of the half's 32 bytes of pairs are block c's.
    """
    size = layout.block_bytes
    high, scales = layout.code_bytes, layout.code_bytes + layout.high_bytes
    write = code_writer(v)

    @njit(forceinline=True, **OPTIONS)
    def pack(src, stride, dst, block, b, lane):  # type: ignore[no-untyped-def]
        for c in range(2):
            first, second, source, pairs = block + c * size, block + (c + 2) * size, 16 * b + 32 * c, 128 + 8 * b
            for j in range(4):
                low = v.gather_dwords(src, source + 4 * j, stride)
                upper = v.gather_dwords(src, source + 16 + 4 * j, stride)
                write(dst, first, lane, j, v.and_mask(low, LOW), v.and_mask(upper, LOW))
                low, upper = v.shift_right(low, 4), v.shift_right(upper, 4)
                write(dst, second, lane, j, v.and_mask(low, LOW), v.and_mask(upper, LOW))
            for side in range(2):
                mine, later = v.splat_int(0), v.splat_int(0)
                for j in range(4):
                    bits = v.shift_right(v.gather_dwords(src, pairs + 16 * side + 4 * j, stride), 2 * c)
                    mine = v.or_ints(mine, v.shift_left(v.and_mask(bits, 0x03030303), 2 * j))
                    bits = v.shift_right(bits, 4)
                    later = v.or_ints(later, v.shift_left(v.and_mask(bits, 0x03030303), 2 * j))
                v.store(dst, (first + high + LINE * side) // 4 + lane, mine)
                v.store(dst, (second + high + LINE * side) // 4 + lane, later)
        for c in range(0, 4, 2):
            four, place = v.gather_dwords(src, 192 + 2 * (b + c), stride), block + scales + c * size + lane
            v.store_i8(dst, place, four)
            v.store_i8(dst, place + GROUP, v.shift_right(four, 8))
            v.store_i8(dst, place + size, v.shift_right(four, 16))
            v.store_i8(dst, place + size + GROUP, v.shift_right(four, 24))

    return pack


def q2_k_packer(v: Verbs, layout: QuantLayout) -> BlockPacker:
    """16 bytes of scale and minimum nibbles, 64 of bit pairs, two f16.

    Kept as nibbles, which loses nothing.
    """
    scales, write = layout.code_bytes, code_writer(v)

    @njit(forceinline=True, **OPTIONS)
    def pack(src, stride, dst, block, b, lane):  # type: ignore[no-untyped-def]
        source, shift = 16 + 32 * (b >> 2), 2 * (b & 3)
        for j in range(4):
            low = v.and_mask(v.shift_right(v.gather_dwords(src, source + 4 * j, stride), shift), 0x03030303)
            upper = v.and_mask(v.shift_right(v.gather_dwords(src, source + 16 + 4 * j, stride), shift), 0x03030303)
            write(dst, block, lane, j, low, upper)
        pair = v.shift_right(v.gather_dwords(src, 4 * (b >> 1), stride), 16 * (b & 1))
        for run in range(2):
            byte = v.shift_right(pair, 8 * run)
            v.store_i8(dst, block + scales + run * GROUP + lane, v.and_mask(byte, 15))
            v.store_i8(dst, block + scales + (2 + run) * GROUP + lane, v.and_mask(v.shift_right(byte, 4), 15))

    return pack


def q3_k_packer(v: Verbs, layout: QuantLayout) -> BlockPacker:
    """32 bytes of third bits, 64 of bit pairs, 12 of 6-bit scales, an f16.

    Kept as nibbles, which loses nothing.
    """
    scales, write = layout.code_bytes, code_writer(v)

    @njit(forceinline=True, **OPTIONS)
    def codes(src, stride, source, third, shift, b):  # type: ignore[no-untyped-def]
        pairs = v.and_mask(v.shift_right(v.gather_dwords(src, source, stride), shift), 0x03030303)
        bit = v.and_mask(v.shift_right(v.gather_dwords(src, third, stride), b), 0x01010101)
        return v.or_ints(pairs, v.shift_left(bit, 2))

    @njit(forceinline=True, **OPTIONS)
    def pack(src, stride, dst, block, b, lane):  # type: ignore[no-untyped-def]
        source, shift = 32 + 32 * (b >> 2), 2 * (b & 3)
        for j in range(4):
            low = codes(src, stride, source + 4 * j, 4 * j, shift, b)
            upper = codes(src, stride, source + 16 + 4 * j, 16 + 4 * j, shift, b)
            write(dst, block, lane, j, low, upper)
        for run in range(2):
            # scale i: nibble i of the first 8 bytes (low ones first), bits 2 (i // 4) of byte 8 + i
            # % 4
            i = 2 * b + run
            nibble = v.shift_right(v.gather_dwords(src, 96 + 4 * ((i & 7) >> 2), stride), 8 * (i & 3) + 4 * (i >> 3))
            top = v.shift_right(v.gather_dwords(src, 104, stride), 8 * (i & 3) + 2 * (i >> 2))
            scale = v.or_ints(v.and_mask(nibble, 15), v.shift_left(v.and_mask(top, 3), 4))
            v.store_i8(dst, block + scales + run * GROUP + lane, v.add_ints(scale, v.splat_int(-32)))

    return pack


def iq4_xs_packer(v: Verbs, layout: QuantLayout) -> BlockPacker:
    """An f16, 2 bytes of upper and 4 of lower scale bits, 8 × 16 bytes of nibbles in our order."""
    scales = layout.code_bytes

    @njit(forceinline=True, **OPTIONS)
    def pack(src, stride, dst, block, b, lane):  # type: ignore[no-untyped-def]
        for j in range(4):
            v.store(dst, (block + LINE * j) // 4 + lane, v.gather_dwords(src, 8 + 16 * b + 4 * j, stride))
        low = v.and_mask(v.shift_right(v.gather_dwords(src, 4, stride), 4 * b), 15)
        top = v.and_mask(v.shift_right(v.gather_dwords(src, 0, stride), 16 + 2 * b), 3)
        scale = v.add_ints(v.or_ints(low, v.shift_left(top, 4)), v.splat_int(-32))
        v.store_i8(dst, block + scales + lane, scale)

    return pack


# Layout → what packs its blocks, how many a call, a panel's bytes in the file, the dword of it with
# the supers and how far up they are.
PACKERS: dict[str, tuple[Callable[..., BlockPacker], int, int, int, int]] = {
    "q4_0": (simple_packer, 1, 8 * 18, 0, 0),
    "q4_1": (simple_packer, 1, 8 * 20, 0, 0),
    "q5_0": (simple_packer, 1, 8 * 22, 0, 0),
    "q5_1": (simple_packer, 1, 8 * 24, 0, 0),
    "iq4_nl": (simple_packer, 1, 8 * 18, 0, 0),
    "mxfp4": (simple_packer, 1, 8 * 17, 0, 0),
    "q8_0": (q8_0_packer, 1, 8 * 34, 0, 0),
    "q2_k": (q2_k_packer, 1, 84, 80, 0),
    "q3_k": (q3_k_packer, 1, 110, 106, 16),
    "q4_k": (q45_k_packer, 8, 144, 0, 0),
    "q5_k": (q45_k_packer, 8, 176, 0, 0),
    "q6_k": (q6_k_packer, 4, 210, 206, 16),
    "iq4_xs": (iq4_xs_packer, 1, 136, 0, 0),
}


def pack_quant(v: Verbs, layout: QuantLayout) -> Callable[..., None]:
    """The kernel that packs whole groups of one quantised type."""
    make, at_once, file_bytes, supers_at, supers_shift = PACKERS[layout.name]
    pack, lanes = make(v, layout), v.lanes
    block_bytes, super_bytes = layout.block_bytes, layout.super_bytes
    two_supers = layout.minimum == "u8"

    @njit(forceinline=True, **OPTIONS)
    def pack_group(record, g):  # type: ignore[no-untyped-def]
        stride, n_blocks = record[SRC_ROW_BYTES], record[N_COLUMNS] // BLOCK
        for lane in range(0, GROUP, lanes):
            src, dst = record[SRC] + (g * GROUP + lane) * stride, v.i8p(record[DST] + g * record[GROUP_BYTES])
            panel = 0
            for first in range(0, n_blocks, PANEL_BLOCKS):
                rows = v.i8p(src + first // PANEL_BLOCKS * file_bytes)
                if super_bytes != 0:
                    both = v.shift_right(v.gather_dwords(rows, supers_at, stride), supers_shift)
                    v.store_i16(dst, panel // 2 + lane, both)
                    if two_supers:
                        v.store_i16(dst, panel // 2 + GROUP + lane, v.shift_right(both, 16))
                n = min(n_blocks - first, PANEL_BLOCKS)
                for b in range(0, n, at_once):  # panels are whole where a call takes several blocks
                    pack(rows, stride, dst, panel + super_bytes + b * block_bytes, b, lane)
                panel += super_bytes + n * block_bytes

    return group_kernel(v, pack_group)


def pack_float(v: Verbs, layout: FloatLayout) -> Callable[..., None]:
    """The kernel that packs whole groups of floats: 16 rows a column."""
    wide, lanes = layout.item_bytes == 4, v.lanes

    @njit(forceinline=True, **OPTIONS)
    def pack_group(record, g):  # type: ignore[no-untyped-def]
        stride, n_columns = record[SRC_ROW_BYTES], record[N_COLUMNS]
        for lane in range(0, GROUP, lanes):
            src = v.i8p(record[SRC] + (g * GROUP + lane) * stride)
            dst = v.i8p(record[DST] + g * record[GROUP_BYTES])
            for k in range(n_columns):
                if wide:
                    v.store(dst, k * GROUP + lane, v.gather_dwords(src, 4 * k, stride))
                else:
                    v.store_i16(dst, k * GROUP + lane, v.gather_words(src, 2 * k, stride))

    return group_kernel(v, pack_group)


def group_kernel(v: Verbs, pack_group: Callable[..., Any]) -> Callable[..., None]:
    """The kernel that calls pack_group(record, g) for every group.

    Threads take long runs of groups, as in a product of one row: neighbouring groups lie on the
    same huge page, which two threads that touch it first at once would both clear.
    """
    share = sharer()

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        n_groups, counter, ticket = record[N_GROUPS], v.i64p(record[COUNTER]), thread
        while True:
            first, stop = share(record[GROUP_BYTES], 1, n_groups, n_threads, ticket)
            if first >= n_groups:
                break
            ticket = n_threads + v.atomic_add(counter, 0, 1)
            for g in range(first, stop):
                pack_group(record, g)

    return kernel
