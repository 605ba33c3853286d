"""The verbs that kernels are written in: arithmetic on SIMD registers and tiles (read `linear.py` next to see them used).

A `Vec` is one register: `lanes` float32 or int32, or 4 * lanes bytes. A `Tile` is a column of vectors, one for each of
several activation rows, so that a kernel reads as arithmetic on whole tiles and its one-row and many-row forms are the
same text. Verbs take a pointer and an index in elements. `Verbs(isa)` makes the set for one processor; what depends on
the processor is the byte product (`dot16`) and the lookup of nibbles (`lookup`), the rest is plain LLVM.

No verb reassociates: one lane of one row is computed in the order in which the kernel names it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from martlet.ops.cpu.byte_product import BYTE_PRODUCTS, ZERO_POINTS
from martlet.ops.cpu.emit import (
    F32,
    F32P,
    F64P,
    I8,
    I8P,
    I16,
    I16P,
    I32,
    I32P,
    I64,
    I64P,
    LLVM_VERSION,
    Tile,
    Vec,
    at,
    call,
    constant,
    each_row,
    first_lanes,
    load,
    splat,
    store,
    verb,
)
from martlet.ops.cpu.isa import Isa

__all__ = ["Verbs"]

DWORD = ir.VectorType(I8, 4)


class Verbs(ModuleType):
    """The verbs for one processor; `f32`, `i32` and `bytes` are its register types.

    A module, so that compiled code may say `v.add`: Numba follows the attributes of modules.
    """

    def __init__(self, isa: Isa) -> None:
        super().__init__(f"verbs_{isa.name}")
        self.isa, self.lanes, self.rows = isa, isa.lanes, isa.rows
        self.f32, self.i32, self.bytes = Vec("f32", isa.lanes), Vec("i32", isa.lanes), Vec("i8", 4 * isa.lanes)
        self.byte_zero_point = ZERO_POINTS[isa.byte_product]
        self._pointers()
        self._loads_and_stores()
        self._partial_loads_and_stores()
        self._floats()
        self._reductions()
        self._ints_and_bytes()
        self._tiles()
        self._scalars()
        self._threads()

    def _pointers(self) -> None:
        """Addresses, which a record holds as int64, to typed pointers."""

        def cast(kind: Any, element: Any) -> Any:
            return verb(1, lambda a: kind, lambda b, t, a: b.inttoptr(a, element.as_pointer()))

        self.f32p, self.f64p, self.i64p = cast(F32P, F32), cast(F64P, ir.DoubleType()), cast(I64P, I64)
        self.i32p, self.i16p, self.i8p = cast(I32P, I32), cast(I16P, I16), cast(I8P, I8)
        self.advance = verb(2, lambda p, i: F32P, lambda b, t, p, i: at(b, p, i, F32))  # a float32 pointer, by floats

    def _loads_and_stores(self) -> None:
        """(pointer, index) → vector; (pointer, index, vector) → nothing."""
        n, f32, i32 = self.lanes, self.f32, self.i32

        def loader(out: Vec, stored: ir.Type, convert: Callable[[Any, Any], Any]) -> Any:
            kind = ir.VectorType(stored, n)
            return verb(2, lambda p, i: out, lambda b, t, p, i: convert(b, load(b, p, i, kind)))

        def storer(convert: Callable[[Any, Any], Any]) -> Any:
            return verb(3, lambda p, i, x: None, lambda b, t, p, i, x: store(b, convert(b, x), p, i))

        half, byte, word = ir.VectorType(ir.HalfType(), n), ir.VectorType(I8, n), ir.VectorType(I16, n)
        self.load_f32 = loader(f32, F32, lambda b, x: x)
        self.load_f16 = loader(f32, ir.HalfType(), lambda b, x: b.fpext(x, f32.ir))
        self.load_bf16 = loader(
            f32, I16, lambda b, x: b.bitcast(b.shl(b.zext(x, i32.ir), constant(i32.ir, 16)), f32.ir)
        )
        self.load_u8 = loader(f32, I8, lambda b, x: b.uitofp(x, f32.ir))
        self.load_i8 = loader(f32, I8, lambda b, x: b.sitofp(x, f32.ir))
        self.load_low4 = loader(  # the low, and the high, four bits of bytes
            f32, I8, lambda b, x: b.uitofp(b.and_(b.zext(x, i32.ir), constant(i32.ir, 15)), f32.ir)
        )
        self.load_high4 = loader(f32, I8, lambda b, x: b.uitofp(b.lshr(b.zext(x, i32.ir), constant(i32.ir, 4)), f32.ir))
        self.load_exponent = loader(  # a byte e → 2^(e - 127)
            f32, I8, lambda b, x: b.bitcast(b.shl(b.zext(x, i32.ir), constant(i32.ir, 23)), f32.ir)
        )
        self.load_i32 = loader(i32, I32, lambda b, x: x)
        self.store = storer(lambda b, x: x)
        self.store_f16 = storer(lambda b, x: b.fptrunc(x, half))
        self.store_i8 = storer(lambda b, x: b.trunc(x, byte))  # int32 lanes, of which the low byte is kept
        self.store_i16 = storer(lambda b, x: b.trunc(x, word))
        raw = self.bytes
        self.load_bytes = verb(2, lambda p, i: raw, lambda b, t, p, i: load(b, p, i, raw.ir))

        def prefetch(locality: int) -> Any:
            fetch, how = ("llvm.prefetch.p0", ir.VoidType()), [constant(I32, hint) for hint in (0, locality, 1)]
            return verb(2, lambda p, i: None, lambda b, t, p, i: call(b, *fetch, at(b, p, i, I8), *how) and None)

        self.prefetch, self.prefetch_l2 = prefetch(3), prefetch(2)  # (pointer, byte): to the first cache, to the second

        def gather(item: ir.Type) -> Any:
            """(p, i, stride) → int32 lane r = the item at byte i + r * stride: the same one of each of `lanes` rows."""

            def emit(b: Any, t: Any, p: Any, i: Any, stride: Any) -> Any:
                out = ir.Constant(i32.ir, ir.Undefined)
                for r in range(n):
                    x = load(b, p, b.add(i, b.mul(stride, constant(I64, r))), item, I8)
                    out = b.insert_element(out, b.zext(x, I32) if item is I16 else x, constant(I32, r))
                return out

            return verb(3, lambda p, i, s: i32, emit)

        self.gather_dwords, self.gather_words = gather(I32), gather(I16)

    def _partial_loads_and_stores(self) -> None:
        """The first `count` float32 lanes only: (p, i, count) → vector with zeros; (p, i, vector, count)."""
        n, f32 = self.lanes, self.f32
        align = () if LLVM_VERSION >= 22 else (constant(I32, 4),)

        def load_first(b: Any, t: Any, p: Any, i: Any, count: Any) -> Any:
            address = b.bitcast(at(b, p, i, F32), f32.ir.as_pointer())
            mask, zero = first_lanes(b, count, n), constant(f32.ir, 0.0)
            return call(b, f"llvm.masked.load.v{n}f32.p0", f32.ir, address, *align, mask, zero)

        def store_first(b: Any, t: Any, p: Any, i: Any, x: Any, count: Any) -> None:
            address = b.bitcast(at(b, p, i, F32), f32.ir.as_pointer())
            call(b, f"llvm.masked.store.v{n}f32.p0", ir.VoidType(), x, address, *align, first_lanes(b, count, n))

        self.load_first = verb(3, lambda p, i, c: f32, load_first)
        self.store_first = verb(4, lambda p, i, x, c: None, store_first)
        self.keep_first = verb(  # (x, count, other): x in the first `count` lanes, other in the rest
            3, lambda x, c, y: f32, lambda b, t, x, c, y: b.select(first_lanes(b, c, n), x, y)
        )

    def _floats(self) -> None:
        n, f32, i32 = self.lanes, self.f32, self.i32

        def binary(method: str) -> Any:
            return verb(2, lambda x, y: f32, lambda b, t, x, y: getattr(b, method)(x, y))

        def named(function: str, n_args: int) -> Any:
            name = f"llvm.{function}.v{n}f32"
            return verb(n_args, lambda *a: f32, lambda b, t, *a: call(b, name, f32.ir, *a))

        def inverse_or_zero(b: Any, t: Any, x: Any) -> Any:
            """1 / x where x is not 0, else 0."""
            zero, one = constant(f32.ir, 0.0), constant(f32.ir, 1.0)
            return b.select(b.fcmp_unordered("==", x, zero), zero, b.fdiv(one, x))

        self.add, self.sub, self.mul, self.div = map(binary, ("fadd", "fsub", "fmul", "fdiv"))
        self.fma, self.max, self.min = named("fma", 3), named("maxnum", 2), named("minnum", 2)
        self.abs, self.round_even, self.sqrt = named("fabs", 1), named("roundeven", 1), named("sqrt", 1)
        self.splat = verb(
            1, lambda x: f32, lambda b, t, x: splat(b, b.fptrunc(x, F32) if t[0] == types.float64 else x, n)
        )
        self.where_below = verb(  # (x, bound, below, otherwise): choose by x < bound
            4, lambda *a: f32, lambda b, t, x, bound, y, z: b.select(b.fcmp_ordered("<", x, bound), y, z)
        )
        self.first_lane = verb(1, lambda x: types.float32, lambda b, t, x: b.extract_element(x, constant(I32, 0)))
        self.inverse_or_zero = verb(1, lambda x: f32, inverse_or_zero)
        self.to_int = verb(1, lambda x: i32, lambda b, t, x: b.fptosi(x, i32.ir))
        self.to_float = verb(1, lambda x: f32, lambda b, t, x: b.sitofp(x, f32.ir))
        self.as_float = verb(1, lambda x: f32, lambda b, t, x: b.bitcast(x, f32.ir))

    def _reductions(self) -> None:
        """Vector → scalar, halves onto halves, so that the order never depends on the data."""
        n, f32 = self.lanes, self.f32

        def reduce(b: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
            width = n
            while width > 1:
                width //= 2
                order = ir.Constant(ir.VectorType(I32, n), [(lane + width) % n for lane in range(n)])
                x = combine(x, b.shuffle_vector(x, x, order))
            return b.extract_element(x, constant(I32, 0))

        def larger(b: Any) -> Callable[[Any, Any], Any]:
            return lambda x, y: call(b, f"llvm.maxnum.v{n}f32", f32.ir, x, y)

        self.sum_lanes = verb(1, lambda x: types.float32, lambda b, t, x: reduce(b, x, b.fadd))
        self.max_lanes = verb(1, lambda x: types.float32, lambda b, t, x: reduce(b, x, larger(b)))
        self.sum_ints = verb(1, lambda x: types.int32, lambda b, t, x: reduce(b, x, b.add))

    def _ints_and_bytes(self) -> None:
        n, i32, raw = self.lanes, self.i32, self.bytes

        def binary(method: str) -> Any:
            return verb(2, lambda x, y: i32, lambda b, t, x, y: getattr(b, method)(x, y))

        def by_scalar(method: str) -> Any:
            return verb(2, lambda x, k: i32, lambda b, t, x, k: getattr(b, method)(x, splat(b, b.trunc(k, I32), n)))

        self.add_ints, self.or_ints = binary("add"), binary("or_")
        self.times, self.shift_right_signed = by_scalar("mul"), by_scalar("ashr")
        self.shift_left, self.shift_right = by_scalar("shl"), by_scalar("lshr")  # (x, bits)
        self.and_mask, self.xor_mask = by_scalar("and_"), by_scalar("xor")  # (x, 32-bit mask)
        self.as_ints = verb(1, lambda x: i32, lambda b, t, x: b.bitcast(x, i32.ir))
        self.as_bytes = verb(1, lambda x: raw, lambda b, t, x: b.bitcast(x, raw.ir))
        self.splat_int = verb(1, lambda x: i32, lambda b, t, x: splat(b, b.trunc(x, I32), n))
        self.lookup = verb(2, lambda x, p: raw, self._emit_lookup)  # (bytes 0 … 15, pointer to 16 bytes) → bytes

    def _emit_lookup(self, b: Any, t: Any, x: Any, p: Any) -> Any:
        """Replace each byte 0 … 15 of x by the byte that it selects in the 16 at pointer p."""
        n = 4 * self.lanes
        table = load(b, p, constant(I64, 0), ir.VectorType(I8, 16))
        wide = b.shuffle_vector(table, table, ir.Constant(ir.VectorType(I32, n), [i % 16 for i in range(n)]))
        shuffles = {"vnni": "llvm.x86.avx512.pshuf.b.512", "maddubs": "llvm.x86.avx2.pshuf.b"}
        if self.isa.byte_product in shuffles:
            return call(b, shuffles[self.isa.byte_product], x.type, wide, x)
        out = constant(x.type, 0)
        for code in range(16):
            entry = splat(b, b.extract_element(table, constant(I32, code)), n)
            out = b.select(b.icmp_unsigned("==", x, constant(x.type, code)), entry, out)
        return out

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

        A byte product takes unsigned weights, stored zero_point too high: with p the negative sum of the row's
        activations, starting from this value takes the excess out again, exactly.
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

    def dot16(self, bits: int, row_stride: int) -> Any:
        """The verb (acc, w0, w1, w2, w3, p, i) → acc plus 16 products a lane (`byte_product.py`).

        Row m's 16 activations are the bytes p[i + m * row_stride :].
        """
        product, lanes = BYTE_PRODUCTS[self.isa.byte_product], self.lanes

        def emit(b: Any, t: Any, acc: Any, w0: Any, w1: Any, w2: Any, w3: Any, p: Any, i: Any) -> Any:
            def row(m: int) -> Any:
                where = [b.add(i, constant(I64, row_stride * m + 4 * j)) for j in range(4)]
                x = [splat(b, load(b, p, at_, I32, I8), lanes) for at_ in where]
                return product(b, b.extract_value(acc, m), (w0, w1, w2, w3), x, bits)

            return each_row(b, t[0], row)

        return verb(7, lambda acc, *a: acc, emit)

    def _scalars(self) -> None:
        """One value: (pointer, index) → float32, and conversions that keep Numba from widening to float64."""

        def reader(stored: ir.Type, convert: Callable[[Any, Any], Any]) -> Any:
            return verb(2, lambda p, i: types.float32, lambda b, t, p, i: convert(b, load(b, p, i, stored)))

        def shifted(bits: int) -> Callable[[Any, Any], Any]:
            return lambda b, x: b.bitcast(b.shl(b.zext(x, I32), constant(I32, bits)), F32)

        self.f32_at = reader(F32, lambda b, x: x)
        self.f16_at = reader(ir.HalfType(), lambda b, x: b.fpext(x, F32))
        self.bf16_at, self.exponent_at = reader(I16, shifted(16)), reader(I8, shifted(23))

        def bound(b: Any, t: Any, x: Any, most: Any) -> Any:
            """x, at most `most` in size."""
            limit = b.fptrunc(most, F32) if t[1] == types.float64 else most
            low = call(b, "llvm.maxnum.f32", F32, x, b.fneg(limit))
            return call(b, "llvm.minnum.f32", F32, low, limit)

        def putter(stored: ir.Type) -> Any:
            def emit(b: Any, t: Any, p: Any, i: Any, x: Any) -> None:
                b.store(x if stored is F32 else b.fptrunc(x, stored), at(b, p, i, stored), align=1)

            return verb(3, lambda p, i, x: None, emit)

        self.bound = verb(2, lambda x, most: types.float32, bound)
        self.put_f32, self.put_f16 = putter(F32), putter(ir.HalfType())
        self.int_to_f32 = verb(1, lambda x: types.float32, lambda b, t, x: b.sitofp(x, F32))
        self.narrow = verb(1, lambda x: types.float32, lambda b, t, x: b.fptrunc(x, F32))  # from float64
        self.float_bits = verb(1, lambda x: types.float32, lambda b, t, x: b.bitcast(b.trunc(x, I32), F32))

    def _threads(self) -> None:
        """What a team of threads meets with: (pointer to int64, index, …)."""

        def atomic_add(b: Any, t: Any, p: Any, i: Any, value: Any) -> Any:
            return b.atomic_rmw("add", at(b, p, i, I64), value, "seq_cst")

        def exchange(b: Any, t: Any, p: Any, i: Any, value: Any) -> Any:
            return b.atomic_rmw("xchg", at(b, p, i, I64), value, "seq_cst")

        def atomic_load(b: Any, t: Any, p: Any, i: Any) -> Any:
            return b.load_atomic(at(b, p, i, I64), "seq_cst", 8, typ=I64)

        def pause(b: Any, t: Any) -> None:
            if self.isa.name in ("avx512vnni", "avx2"):
                call(b, "llvm.x86.sse2.pause", ir.VoidType())

        self.atomic_add = verb(3, lambda p, i, v: types.int64, atomic_add)
        self.atomic_exchange = verb(3, lambda p, i, v: types.int64, exchange)
        self.atomic_load = verb(2, lambda p, i: types.int64, atomic_load)
        self.pause = verb(0, lambda: None, pause)
        self.yield_processor = verb(0, lambda: None, lambda b, t: call(b, "sched_yield", I32) and None)
