"""Low-rank updates of products, each row's own.

out += (x aᵀ) bᵀ (LoRA, arXiv:2106.09685; definition: `ops/reference.py`).

A unit of work is a row of the step: its x·a, `rank` float32 numbers, stays in the thread's scratch
and is then spread over the output. Both sums go in the order of the columns and of the ranks, so a
row gets the same bits alone and among others; a row without an adapter is not touched. Bounds: 4
rows of a are multiplied at a time, so the multiply-adds of float32; at rank 16 some 3 % of the
product's own work.

A table has for each slot: the addresses of a [ranks, k] and bᵀ [ranks, n], rows padded to whole
registers of zeros, and the number of ranks, padded to a multiple of 4. Zero ranks are no update.
"""

from collections.abc import Callable

from numba import njit

from martlet.ops.cpu.kernels.fields import COUNTER, LORA, MAX_RANK, ROWS, STEP_LOGIT_ROWS, STEP_LORA_SLOTS
from martlet.ops.cpu.kernels.linear import OPTIONS
from martlet.ops.cpu.simd.verbs import Verbs

IN, IN_STRIDE, OUT, OUT_STRIDE, K, N, TABLE, SCRATCH, BY_LOGIT_ROW = LORA
A, B, RANKS, SLOT_WORDS = 0, 1, 2, 3


def lora_kernel(v: Verbs) -> Callable[..., None]:
    """out += (x aᵀ) bᵀ for every row that has an adapter."""
    lanes = v.lanes

    @njit(forceinline=True, **OPTIONS)
    def shrink(x, a, k_stop, stride, ranks, inner):  # type: ignore[no-untyped-def]
        """inner = a x, four ranks at a time."""
        for i in range(0, ranks, 4):
            sum0, sum1, sum2, sum3 = v.splat(0.0), v.splat(0.0), v.splat(0.0), v.splat(0.0)
            for k in range(0, k_stop, lanes):
                value = v.load_first(x, k, k_stop - k)
                sum0 = v.fma(value, v.load_f32(a, i * stride + k), sum0)
                sum1 = v.fma(value, v.load_f32(a, (i + 1) * stride + k), sum1)
                sum2 = v.fma(value, v.load_f32(a, (i + 2) * stride + k), sum2)
                sum3 = v.fma(value, v.load_f32(a, (i + 3) * stride + k), sum3)
            v.put_f32(inner, i, v.sum_lanes(sum0))
            v.put_f32(inner, i + 1, v.sum_lanes(sum1))
            v.put_f32(inner, i + 2, v.sum_lanes(sum2))
            v.put_f32(inner, i + 3, v.sum_lanes(sum3))

    @njit(forceinline=True, **OPTIONS)
    def spread(inner, b, n_stop, stride, ranks, out):  # type: ignore[no-untyped-def]
        """out += bᵀ inner, rank by rank."""
        for n in range(0, n_stop, lanes):
            total = v.splat(0.0)
            for i in range(ranks):
                total = v.fma(v.splat(v.f32_at(inner, i)), v.load_f32(b, i * stride + n), total)
            v.store_first(out, n, v.add(v.load_first(out, n, n_stop - n), total), n_stop - n)

    def kernel(record, step, thread, n_threads):  # type: ignore[no-untyped-def]
        slots, logit_rows = v.i32p(step[STEP_LORA_SLOTS]), v.i32p(step[STEP_LOGIT_ROWS])
        k_stop, n_stop = record[K], record[N]
        a_stride, b_stride = (k_stop + 15) // 16 * 16, (n_stop + 15) // 16 * 16
        inner = v.f32p(record[SCRATCH] + thread * MAX_RANK * 4)
        counter = v.i64p(record[COUNTER])
        while True:
            row = v.atomic_add(counter, 0, 1)
            if row >= step[record[ROWS]]:
                break
            slot = slots[row]
            if record[BY_LOGIT_ROW] != 0:
                slot = slots[logit_rows[row]]
            if slot < 0:
                continue
            entry = v.i64p(record[TABLE] + slot * SLOT_WORDS * 8)
            if entry[RANKS] == 0:
                continue
            x = v.f32p(record[IN] + row * record[IN_STRIDE] * 4)
            out = v.f32p(record[OUT] + row * record[OUT_STRIDE] * 4)
            shrink(x, v.f32p(entry[A]), k_stop, a_stride, entry[RANKS], inner)
            spread(inner, v.f32p(entry[B]), n_stop, b_stride, entry[RANKS], out)

    return kernel
