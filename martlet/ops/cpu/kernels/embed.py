"""Rows of a packed matrix as floats.

The embedding of tokens, and the inverse of packing (layouts: `layout.py`).

One row of a packed matrix is every sixteenth lane of a group, so this reads scattered bytes, one
value at a time: some microseconds a token, a thousandth of a step. With the ids 0 … n - 1 it
unpacks a whole matrix (tests do).
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from martlet.ops.cpu.kernels.fields import COUNTER, EMBED, ROWS, STEP_IDS
from martlet.ops.cpu.kernels.layout import BLOCK, GROUP, LINE, PANEL_BLOCKS, FloatLayout, QuantLayout
from martlet.ops.cpu.kernels.linear import OPTIONS
from martlet.ops.cpu.simd.verbs import Verbs

TABLE, N_COLUMNS, GROUP_BYTES, CODEBOOK, SCALE, OUT, OUT_STRIDE = EMBED


def value_reader(v: Verbs, layout: QuantLayout) -> Callable[..., Any]:
    """(group, panel, block, row, k, codebook) → column k of a block, float32; offsets in bytes."""
    bits, coded, scale_type, minimum = layout.bits, layout.codebook is not None, layout.scale, layout.minimum
    code_bytes, run_columns, runs = layout.code_bytes, layout.run, BLOCK // layout.run
    scales_at = layout.code_bytes + layout.high_bytes
    zero_point = 0 if coded else layout.zero_point

    @njit(forceinline=True, **OPTIONS)
    def code_at(group, block, row, k, codebook):  # type: ignore[no-untyped-def]
        upper, j, u = k >> 4, (k >> 2) & 3, k & 3
        place = 4 * row + u
        if bits == 8:
            return group[block + LINE * (4 * upper + j) + place] & 0xFF
        code = (group[block + LINE * j + place] >> (4 * upper)) & 15
        if coded:
            return codebook[code] + 0
        if bits == 5:
            code += ((group[block + code_bytes + place] >> (4 * upper + j)) & 1) << 4
        if bits == 6:
            code += ((group[block + code_bytes + LINE * upper + place] >> (2 * j)) & 3) << 4
        return code

    @njit(forceinline=True, **OPTIONS)
    def value(group, panel, block, row, k, codebook):  # type: ignore[no-untyped-def]
        scales, run = block + scales_at, k // run_columns
        code = v.int_to_f32(code_at(group, block, row, k, codebook) - zero_point)
        if scale_type == "f16":
            scaled = v.f16_at(group, scales // 2 + row) * code
            if minimum == "f16":
                return scaled + v.f16_at(group, scales // 2 + GROUP + row)
            return scaled
        if scale_type == "e8m0":
            return v.exponent_at(group, scales + row) * v.int_to_f32(1) / v.int_to_f32(2) * code
        place = scales + run * GROUP + row
        scale = group[place] & 0xFF if scale_type == "u8" else group[place] + 0
        scaled = v.f16_at(group, panel // 2 + row) * v.int_to_f32(scale) * code
        if minimum == "u8":
            least = v.int_to_f32(group[scales + (runs + run) * GROUP + row] & 0xFF)
            return scaled - v.f16_at(group, panel // 2 + GROUP + row) * least
        return scaled

    return value


def embed_quant(v: Verbs, layout: QuantLayout) -> Callable[..., None]:
    """The kernel for one quantised layout; a unit of work is a row."""
    value = value_reader(v, layout)
    block_bytes, super_bytes = layout.block_bytes, layout.super_bytes

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        ids, counter, codebook = v.i32p(step[STEP_IDS]), v.i64p(record[COUNTER]), v.i8p(record[CODEBOOK])
        scale = v.float_bits(record[SCALE])
        while True:
            t = v.atomic_add(counter, 0, 1)
            if t >= step[record[ROWS]]:
                break
            group, row = v.i8p(record[TABLE] + ids[t] // GROUP * record[GROUP_BYTES]), ids[t] % GROUP
            out = v.f32p(record[OUT] + t * record[OUT_STRIDE] * 4)
            for b in range(record[N_COLUMNS] // BLOCK):
                panel = b // PANEL_BLOCKS * (super_bytes + PANEL_BLOCKS * block_bytes)
                block = panel + super_bytes + b % PANEL_BLOCKS * block_bytes
                for k in range(BLOCK):
                    out[b * BLOCK + k] = value(group, panel, block, row, k, codebook) * scale

    return kernel


def embed_float(v: Verbs, layout: FloatLayout) -> Callable[..., None]:
    """The kernel for float weights; a unit of work is a row."""
    at = {"f32": v.f32_at, "f16": v.f16_at, "bf16": v.bf16_at}[layout.name]

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        ids, counter, scale = v.i32p(step[STEP_IDS]), v.i64p(record[COUNTER]), v.float_bits(record[SCALE])
        while True:
            t = v.atomic_add(counter, 0, 1)
            if t >= step[record[ROWS]]:
                break
            group, row = v.i8p(record[TABLE] + ids[t] // GROUP * record[GROUP_BYTES]), ids[t] % GROUP
            out = v.f32p(record[OUT] + t * record[OUT_STRIDE] * 4)
            for k in range(record[N_COLUMNS]):
                out[k] = at(group, k * GROUP + row) * scale

    return kernel
