"""The verbs of tiles: the same for each of several activation rows.

Read `linear.py` next to see them used.

A tile's rows are independent: no verb mixes them, but some reduce each row to one lane of a vector.
"""

from collections.abc import Callable
from itertools import product
from types import ModuleType
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from martlet.ops.cpu.simd.byte_product import BYTE_PRODUCTS, Sums
from martlet.ops.cpu.simd.emit import (
    F32,
    I8,
    I32,
    I64,
    Tile,
    Vec,
    call,
    constant,
    each_row,
    joined,
    load,
    splat,
    split,
    store,
    verb,
)
from martlet.ops.cpu.simd.isa import Isa


class TileVerbs(ModuleType):
    """The part of `simd.Verbs` that works on tiles."""

    isa: Isa
    lanes: int
    f32: Vec
    i32: Vec

    def _tiles(self) -> None:
        n, f32 = self.lanes, self.f32

        def tile_fma(b: Any, t: Any, acc: Any, x: Any, p: Any, i: Any, stride: Any) -> Any:
            """acc[m] += x * p[i + m * stride]"""

            def row(m: int) -> Any:
                factor = splat(b, load(b, p, b.add(i, b.mul(stride, constant(I64, m))), F32), n)
                return call(b, f"llvm.fma.v{n}f32", f32.ir, x, factor, b.extract_value(acc, m))

            return each_row(b, t[0], row)

        def tile_fma_int(b: Any, t: Any, acc: Any, dots: Any, x: Any, p: Any, i: Any) -> Any:
            """acc[m] += float(dots[m]) * (x * p[i + m])"""

            def row(m: int) -> Any:
                scale = b.fmul(x, splat(b, load(b, p, b.add(i, constant(I64, m)), F32), n))
                whole = b.sitofp(b.extract_value(dots, m), f32.ir)
                return call(b, f"llvm.fma.v{n}f32", f32.ir, whole, scale, b.extract_value(acc, m))

            return each_row(b, t[0], row)

        def tile_get(b: Any, t: Any, tile: Any, m: Any) -> Any:
            """Vector m of a tile."""
            slot = cgutils.alloca_once(b, tile.type)
            b.store(tile, slot)
            return b.load(b.gep(slot, [constant(I32, 0), m], source_etype=tile.type), typ=t[0].vec.ir)

        def tile_scale(b: Any, t: Any, tile: Any, p: Any, i: Any) -> Any:
            """tile[m] * p[i + m]"""
            where = [b.add(i, constant(I64, m)) for m in range(t[0].rows)]
            return each_row(b, t[0], lambda m: b.fmul(b.extract_value(tile, m), splat(b, load(b, p, where[m], F32), n)))

        def tile_add(b: Any, t: Any, x: Any, y: Any) -> Any:
            """x[m] + y[m]; y may be one vector, the same for all rows"""
            other = (lambda m: b.extract_value(y, m)) if isinstance(t[1], Tile) else (lambda m: y)
            return each_row(b, t[0], lambda m: b.fadd(b.extract_value(x, m), other(m)))

        def tile_fma_each(b: Any, t: Any, acc: Any, tile: Any, x: Any) -> Any:
            """acc[m] += tile[m] * x, a vector for all rows"""
            get = b.extract_value
            return each_row(b, t[0], lambda m: call(b, f"llvm.fma.v{n}f32", f32.ir, get(tile, m), x, get(acc, m)))

        def tile_store(b: Any, t: Any, tile: Any, p: Any, i: Any, stride: Any) -> None:
            """p[i + m * stride : ] = tile[m]"""
            for m in range(t[0].rows):
                store(b, b.extract_value(tile, m), p, b.add(i, b.mul(stride, constant(I64, m))))

        self.tile_add = verb(2, lambda tile, *a: tile, tile_add)
        self.tile_scale = verb(3, lambda tile, *a: tile, tile_scale)
        self.tile_store = verb(4, lambda *a: None, tile_store)
        self.tile_fma = verb(5, lambda acc, *a: acc, tile_fma)
        self.tile_fma_each = verb(3, lambda acc, *a: acc, tile_fma_each)
        self.tile_fma_int = verb(5, lambda acc, *a: acc, tile_fma_int)
        self.tile_get = verb(2, lambda tile, m: tile.vec, tile_get)
        self._tile_bytes()

    def _tile_bytes(self) -> None:
        """What turns a tile into bytes."""
        n, f32, i32, get = self.lanes, self.f32, self.i32, lambda b, tile, m: b.extract_value(tile, m)

        def tile_abs(b: Any, t: Any, tile: Any) -> Any:
            return each_row(b, t[0], lambda m: call(b, f"llvm.fabs.v{n}f32", f32.ir, get(b, tile, m)))

        def tile_max(b: Any, t: Any, x: Any, y: Any) -> Any:
            return each_row(b, t[0], lambda m: call(b, f"llvm.maxnum.v{n}f32", f32.ir, get(b, x, m), get(b, y, m)))

        def tile_codes(b: Any, t: Any, tile: Any, factors: Any) -> Any:
            """int32 tile: `nearest_int` of tile[m] times lane m of `factors`."""

            def row(m: int) -> Any:
                factor = b.shuffle_vector(factors, factors, ir.Constant(ir.VectorType(I32, n), [m] * n))
                return nearest_int(b, b.fmul(get(b, tile, m), factor))

            return each_row(b, Tile(i32, t[0].rows), row)

        def tile_add_ints(b: Any, t: Any, x: Any, y: Any) -> Any:
            return each_row(b, t[0], lambda m: b.add(get(b, x, m), get(b, y, m)))

        def tile_store_i8(b: Any, t: Any, tile: Any, p: Any, i: Any, stride: Any) -> None:
            for m in range(t[0].rows):
                where = b.add(i, b.mul(stride, constant(I64, m)))
                store(b, b.trunc(get(b, tile, m), ir.VectorType(I8, n)), p, where)

        self.tile_abs, self.tile_max = verb(1, lambda x: x, tile_abs), verb(2, lambda x, y: x, tile_max)
        self.tile_codes = verb(2, lambda tile, f: Tile(i32, tile.rows), tile_codes)
        self.tile_add_ints, self.tile_store_i8 = (
            verb(2, lambda x, y: x, tile_add_ints),
            verb(4, lambda *a: None, tile_store_i8),
        )
        self.row_maxima = verb(
            1,
            lambda tile: f32,
            lambda b, t, x: reduce_rows(
                b, t[0], x, lambda p, q: call(b, f"llvm.maxnum.v{p.type.count}f32", p.type, p, q)
            ),
        )
        self.row_sums = verb(1, lambda tile: i32, lambda b, t, x: reduce_rows(b, t[0], x, b.add))

    def tile_zero(self, rows: int) -> Any:
        """The verb () → float tile of zeros."""
        tile = Tile(self.f32, rows)
        return verb(0, lambda: tile, lambda b, t: each_row(b, tile, lambda m: constant(self.f32.ir, 0.0)))

    def tile_load(self, rows: int) -> Any:
        """The verb (p, i, stride) → float tile whose vector m starts at p[i + m * stride]."""
        tile = Tile(self.f32, rows)

        def emit(b: Any, t: Any, p: Any, i: Any, stride: Any) -> Any:
            return each_row(b, tile, lambda m: load(b, p, b.add(i, b.mul(stride, constant(I64, m))), self.f32.ir))

        return verb(3, lambda p, i, s: tile, emit)

    def tile_bias(self, rows: int, zero_point: int) -> Any:
        """The verb (p, i) → int tile: every lane of row m is zero_point * p[i + m].

        A byte product takes unsigned weights, stored zero_point too high: with p the negative sum
        of the row's activations, starting from this value takes the excess out again, exactly.
        """
        tile = Tile(self.i32, rows)

        def emit(b: Any, t: Any, p: Any, i: Any) -> Any:
            if zero_point == 0:
                return each_row(b, tile, lambda m: constant(self.i32.ir, 0))

            def row(m: int) -> Any:
                sums = splat(b, load(b, p, b.add(i, constant(I64, m)), I32), self.lanes)
                return b.mul(sums, constant(self.i32.ir, zero_point))

            return each_row(b, tile, row)

        return verb(2, lambda p, i: tile, emit)

    def dots(self, bits: int, product_bits: int, runs: tuple[int, ...], row_stride: int) -> Any:
        """The verb (sums, p, line, high, codebook, x, i) → int tile: sums plus the products of a
        block's columns.

        `runs` names the halves of the block: 0 for columns 0 … 15, 1 for 16 … 31. Codes of `bits`
        bits lie at bytes `line` and `high` of p as `layout.py` says and become bytes of
        `product_bits`; row m's activations are at x[i + m * row_stride :]. Weights are unpacked
        once for all rows, four columns at a time, and sums stay narrow for as long as they are
        exact.
        """
        form, lanes = BYTE_PRODUCTS[self.isa.byte_product], self.isa.lanes
        raw = ir.VectorType(I8, 4 * lanes)
        together = 2 if form.most_narrow(product_bits) == 2 else 1

        def emit(b: Any, t: Any, sums: Any, p: Any, line: Any, high: Any, codebook: Any, x: Any, i: Any) -> Any:
            rows = range(t[0].rows)
            made = Sums(b, form, product_bits, [split(b, b.extract_value(sums, m), lanes) for m in rows])
            steps = [(run, j) for j in range(4) for run in runs] if together == 1 else [*product(runs, range(4))]
            for first in range(0, len(steps), together):
                words = [
                    (step, self._codes(b, bits, product_bits, p, line, high, codebook, *step))
                    for step in steps[first : first + together]
                ]
                for m in rows:
                    for (run, j), codes in words:
                        place = b.add(i, constant(I64, row_stride * m + 16 * run + 4 * j))
                        activations = b.bitcast(splat(b, load(b, x, place, I32, I8), lanes), raw)
                        for register, w in enumerate(split(b, codes, 4 * lanes)):
                            made.add(m, register, w, activations)
                made.pin()
            totals = made.finish()
            return each_row(b, t[0], lambda m: joined(b, totals[m]))

        return verb(7, lambda sums, *a: sums, emit)

    def unpack(self, bits: int, product_bits: int) -> Any:
        """The verb (p, line, high, codebook, q, i): a block's codes as bytes to q[i :]."""

        def emit(b: Any, t: Any, p: Any, line: Any, high: Any, codebook: Any, q: Any, i: Any) -> None:
            for run, j in product((0, 1), range(4)):
                codes = self._codes(b, bits, product_bits, p, line, high, codebook, run, j)
                store(b, codes, q, b.add(i, constant(I64, 64 * (4 * run + j))))

        return verb(6, lambda *a: None, emit)

    def _codes(
        self, b: Any, bits: int, product_bits: int, p: Any, line: Any, high: Any, codebook: Any, run: int, j: int
    ) -> Any:
        """Unsigned bytes: columns 16 * run + 4j … + 3 of each lane."""
        raw, words = ir.VectorType(I8, 4 * self.lanes), self.i32.ir

        def words_at(start: Any, offset: int) -> Any:
            return b.bitcast(load(b, p, b.add(start, constant(I64, offset)), raw), words)

        def shifted(x: Any, left: int, mask: int) -> Any:
            x = b.shl(x, constant(words, left)) if left > 0 else b.lshr(x, constant(words, -left)) if left else x
            return b.and_(x, constant(words, mask))

        if bits == 8:
            return b.bitcast(words_at(line, 64 * (4 * run + j)), raw)
        code = shifted(words_at(line, 64 * j), -4 * run, 0x0F0F0F0F)
        if bits == 5:  # bit i of byte u of the high word: column 4i + u, i = 4 * run + j
            code = b.or_(code, shifted(words_at(high, 0), 4 - j - 4 * run, 0x10101010))
        if bits == 6:  # bits 2j and 2j + 1 of byte u of word `run`
            code = b.or_(code, shifted(words_at(high, 64 * run), 4 - 2 * j, 0x30303030))
        code = b.bitcast(code, raw)
        return code if product_bits == bits else self._lookup(b, code, codebook)

    def store_rows(self, rows: int) -> Any:
        """The verb (p, i, x): the first `rows` lanes of x to p[i :]."""

        def emit(b: Any, t: Any, p: Any, i: Any, x: Any) -> None:
            first = ir.Constant(ir.VectorType(I32, rows), list(range(rows)))
            store(b, b.shuffle_vector(x, x, first), p, i)

        return verb(3, lambda p, i, x: None, emit)


def nearest_int(b: Any, x: Any) -> Any:
    """int32 of float32 below 2^22 in size, half to even.

    At 1.5 · 2^23 a float has no bits of a fraction, so adding that rounds.
    """
    n = x.type.count
    moved = b.bitcast(b.fadd(x, constant(x.type, 1.5 * 2**23)), ir.VectorType(I32, n))
    return b.sub(moved, constant(moved.type, 0x4B400000))


def reduce_rows(b: Any, tile: Tile, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """A vector whose lane m is row m reduced, for `combine` of which no order matters.

    Two vectors of w lanes a row become one of w / 2 lanes a row of twice as many rows, until a row
    has one lane.
    """
    n, vectors = tile.vec.ir.count, [b.extract_value(x, m) for m in range(tile.rows)]
    width = n
    while width > 1:
        width //= 2
        count = vectors[0].type.count
        sources = range(min(len(vectors), 2))
        firsts = [v * count + start for v in sources for start in range(0, count, 2 * width)]
        low, high = (
            ir.Constant(
                ir.VectorType(I32, len(firsts) * width), [i + k for i in firsts for k in range(side, side + width)]
            )
            for side in (0, width)
        )
        pairs = [(vectors[i], vectors[min(i + 1, len(vectors) - 1)]) for i in range(0, len(vectors), 2)]
        vectors = [combine(b.shuffle_vector(p, q, low), b.shuffle_vector(p, q, high)) for p, q in pairs]
    lanes = [min(lane, tile.rows - 1) for lane in range(n)]
    return b.shuffle_vector(vectors[0], vectors[0], ir.Constant(ir.VectorType(I32, n), lanes))
