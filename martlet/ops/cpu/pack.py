"""Packing: a file's blocks into the kernels' layout, at the speed of memory (layouts: `layout.py`).

A file stores a matrix row by row; a group needs 16 rows side by side. Everything here therefore gathers the same four
bytes of each row into one vector and rearranges bits in all rows at once. `PACKERS` has a function for each block type,
which packs block b (32 columns) of a panel (256) for the rows from `lane` on. Where a file's bits lie is llama.cpp's
ggml-common.h, told one type at a time in `quant/ggml.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.layout import BLOCK, GROUP, LINE, PANEL_BLOCKS, FloatLayout, QuantLayout
from martlet.ops.cpu.linear import OPTIONS
from martlet.ops.cpu.record import ARGS, COUNTER
from martlet.ops.cpu.simd import Verbs

__all__ = ["pack_float", "pack_quant"]

SRC, SRC_ROW_BYTES, DST, GROUP_BYTES, N_GROUPS, N_COLUMNS = range(ARGS, ARGS + 6)
LOW = 0x0F0F0F0F

BlockPacker = Callable[..., Any]  # (src, stride, dst, block, b, lane), all offsets in bytes


def code_writer(v: Verbs) -> Callable[..., Any]:
    """(dst, block, lane, j, low, high): line j from two words of codes, one code a byte."""

    @njit(forceinline=True, **OPTIONS)
    def write(dst, block, lane, j, low, high):  # type: ignore[no-untyped-def]
        v.store(dst, (block + LINE * j) // 4 + lane, v.or_ints(low, v.shift_left(high, 4)))

    return write


def simple_packer(v: Verbs, layout: QuantLayout) -> BlockPacker:
    """Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, MXFP4: scale, minimum, high bits, then nibbles already in our order."""
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
        if five:  # bit 4i + u of 32 → bit i of byte u: times 0x204081 moves bit u of a nibble to bit 8u
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
    """Q4_K and Q5_K: two f16, 12 bytes of 6-bit scales and minima, (32 bytes of fifth bits,) 4 × 32 bytes of nibbles.

    Block b's nibbles are the low (b even) or high ones of 32 bytes; its fifth bits are bit b of the 32 bytes.
    """
    five = layout.bits == 5
    codes_at = 48 if five else 16
    high, scales = layout.code_bytes, layout.code_bytes + layout.high_bytes
    write = code_writer(v)

    @njit(forceinline=True, **OPTIONS)
    def pack(src, stride, dst, block, b, lane):  # type: ignore[no-untyped-def]
        source, shift = codes_at + 32 * (b >> 1), 4 * (b & 1)
        for j in range(4):
            low = v.and_mask(v.shift_right(v.gather_dwords(src, source + 4 * j, stride), shift), LOW)
            upper = v.and_mask(v.shift_right(v.gather_dwords(src, source + 16 + 4 * j, stride), shift), LOW)
            write(dst, block, lane, j, low, upper)
        if five:
            word = v.splat_int(0)
            for i in range(8):
                bits = v.and_mask(v.shift_right(v.gather_dwords(src, 16 + 4 * i, stride), b), 0x01010101)
                word = v.or_ints(word, v.shift_left(bits, i))
            v.store(dst, (block + high) // 4 + lane, word)
        place, byte = block + scales + lane, 8 * (b & 3)
        s0 = v.shift_right(v.gather_dwords(src, 4, stride), byte)
        s1 = v.shift_right(v.gather_dwords(src, 8, stride), byte)
        if b < 4:
            v.store_i8(dst, place, v.and_mask(s0, 63))
            v.store_i8(dst, place + GROUP, v.and_mask(s1, 63))
        else:  # four bits of each in the third dword, the upper two above the first four's six
            s2 = v.shift_right(v.gather_dwords(src, 12, stride), byte)
            v.store_i8(dst, place, v.or_ints(v.and_mask(s2, 15), v.and_mask(v.shift_right(s0, 2), 48)))
            upper = v.and_mask(v.shift_right(s1, 2), 48)
            v.store_i8(dst, place + GROUP, v.or_ints(v.and_mask(v.shift_right(s2, 4), 15), upper))

    return pack


def q6_k_packer(v: Verbs, layout: QuantLayout) -> BlockPacker:
    """128 bytes of nibbles, 64 of bit pairs, 16 signed scales, an f16.

    Of each half of 128 columns, block c = 0 … 3 has the low (c < 2) or high nibbles of 32 bytes and bits 2c, 2c + 1
    of the half's 32 bytes of pairs.
    """
    high, scales = layout.code_bytes, layout.code_bytes + layout.high_bytes
    write = code_writer(v)

    @njit(forceinline=True, **OPTIONS)
    def pack(src, stride, dst, block, b, lane):  # type: ignore[no-untyped-def]
        half, c = b >> 2, b & 3
        source, pairs, shift = 64 * half + 32 * (c & 1), 128 + 32 * half, 4 * (c >> 1)
        for j in range(4):
            low = v.and_mask(v.shift_right(v.gather_dwords(src, source + 4 * j, stride), shift), LOW)
            upper = v.and_mask(v.shift_right(v.gather_dwords(src, source + 16 + 4 * j, stride), shift), LOW)
            write(dst, block, lane, j, low, upper)
        for side in range(2):
            word = v.splat_int(0)
            for j in range(4):
                bits = v.shift_right(v.gather_dwords(src, pairs + 16 * side + 4 * j, stride), 2 * c)
                word = v.or_ints(word, v.shift_left(v.and_mask(bits, 0x03030303), 2 * j))
            v.store(dst, (block + high + LINE * side) // 4 + lane, word)
        pair = v.shift_right(v.gather_dwords(src, 192 + 4 * (b >> 1), stride), 16 * (b & 1))
        v.store_i8(dst, block + scales + lane, pair)
        v.store_i8(dst, block + scales + GROUP + lane, v.shift_right(pair, 8))

    return pack


def q2_k_packer(v: Verbs, layout: QuantLayout) -> BlockPacker:
    """16 bytes of scale and minimum nibbles, 64 of bit pairs, two f16; kept as nibbles, which loses nothing."""
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
    """32 bytes of third bits, 64 of bit pairs, 12 of 6-bit scales, an f16; kept as nibbles, which loses nothing."""
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
            # scale i: nibble i of the first 8 bytes (low ones first), bits 2 (i // 4) of byte 8 + i % 4
            i = 2 * b + run
            nibble = v.shift_right(v.gather_dwords(src, 96 + 4 * ((i & 7) >> 2), stride), 8 * (i & 3) + 4 * (i >> 3))
            top = v.shift_right(v.gather_dwords(src, 104, stride), 8 * (i & 3) + 2 * (i >> 2))
            scale = v.or_ints(v.and_mask(nibble, 15), v.shift_left(v.and_mask(top, 3), 4))
            v.store_i8(dst, block + scales + run * GROUP + lane, v.add_ints(scale, v.splat_int(-32)))

    return pack


def iq4_xs_packer(v: Verbs, layout: QuantLayout) -> BlockPacker:
    """An f16, 2 bytes of upper and 4 of lower scale bits, 8 × 16 bytes of nibbles already in our order."""
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


# Layout → what packs its blocks, a panel's bytes in the file, the dword of it with the supers and how far up they are.
PACKERS: dict[str, tuple[Callable[..., BlockPacker], int, int, int]] = {
    "q4_0": (simple_packer, 8 * 18, 0, 0),
    "q4_1": (simple_packer, 8 * 20, 0, 0),
    "q5_0": (simple_packer, 8 * 22, 0, 0),
    "q5_1": (simple_packer, 8 * 24, 0, 0),
    "iq4_nl": (simple_packer, 8 * 18, 0, 0),
    "mxfp4": (simple_packer, 8 * 17, 0, 0),
    "q8_0": (q8_0_packer, 8 * 34, 0, 0),
    "q2_k": (q2_k_packer, 84, 80, 0),
    "q3_k": (q3_k_packer, 110, 106, 16),
    "q4_k": (q45_k_packer, 144, 0, 0),
    "q5_k": (q45_k_packer, 176, 0, 0),
    "q6_k": (q6_k_packer, 210, 206, 16),
    "iq4_xs": (iq4_xs_packer, 136, 0, 0),
}


def pack_quant(v: Verbs, layout: QuantLayout) -> Callable[..., None]:
    """The kernel that packs whole groups of one quantised type; a unit of work is a group."""
    make, file_bytes, supers_at, supers_shift = PACKERS[layout.name]
    pack, lanes = make(v, layout), v.lanes
    block_bytes, super_bytes = layout.block_bytes, layout.super_bytes
    two_supers = layout.minimum == "u8"

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        stride, n_blocks, counter = record[SRC_ROW_BYTES], record[N_COLUMNS] // BLOCK, v.i64p(record[COUNTER])
        while True:
            g = v.atomic_add(counter, 0, 1)
            if g >= record[N_GROUPS]:
                break
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
                    for b in range(n):
                        pack(rows, stride, dst, panel + super_bytes + b * block_bytes, b, lane)
                    panel += super_bytes + n * block_bytes

    return kernel


def pack_float(v: Verbs, layout: FloatLayout) -> Callable[..., None]:
    """The kernel that packs whole groups of floats: 16 rows a column."""
    wide, lanes = layout.item_bytes == 4, v.lanes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        stride, n_columns, counter = record[SRC_ROW_BYTES], record[N_COLUMNS], v.i64p(record[COUNTER])
        while True:
            g = v.atomic_add(counter, 0, 1)
            if g >= record[N_GROUPS]:
                break
            for lane in range(0, GROUP, lanes):
                src = v.i8p(record[SRC] + (g * GROUP + lane) * stride)
                dst = v.i8p(record[DST] + g * record[GROUP_BYTES])
                for k in range(n_columns):
                    if wide:
                        v.store(dst, k * GROUP + lane, v.gather_dwords(src, 4 * k, stride))
                    else:
                        v.store_i16(dst, k * GROUP + lane, v.gather_words(src, 2 * k, stride))

    return kernel
