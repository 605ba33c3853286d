"""The verbs that kernels are written in: arithmetic on SIMD registers.

Read `tiles.py` next, then `linear.py` to see them used.

A `Vec` is one register: `lanes` float32 or int32, or 4 * lanes bytes. A `Tile` is a column of
vectors, one for each of several activation rows, so that a kernel reads as arithmetic on whole
tiles and its one-row and many-row forms are the same text; its verbs are in `tiles.py`. Verbs take
a pointer and an index in elements. `Verbs(isa)` makes the set for one processor; what depends on
the processor is the products of bytes (`dots`) and the lookup of nibbles, the rest is plain
LLVM.

No verb reassociates: one lane of one row is computed in the order in which the kernel names it.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from martlet.ops.cpu.simd.byte_product import BYTE_PRODUCTS
from martlet.ops.cpu.simd.emit import (
    F32,
    F32P,
    F64P,
    I8,
    I8P,
    I16,
    I32,
    I32P,
    I64,
    I64P,
    LLVM_VERSION,
    Vec,
    at,
    call,
    constant,
    first_lanes,
    joined,
    load,
    splat,
    split,
    store,
    verb,
)
from martlet.ops.cpu.simd.isa import Isa
from martlet.ops.cpu.simd.tiles import TileVerbs


class Verbs(TileVerbs):
    """The verbs for one processor; `f32`, `i32` and `bytes` are its register types.

    A module, so that compiled code may say `v.add`: Numba follows the attributes of modules.
    """

    def __init__(self, isa: Isa, lanes: int | None = None) -> None:
        """`lanes` above the processor's make each `Vec` several of its registers."""
        super().__init__(f"verbs_{isa.name}")
        self.isa, self.lanes, self.rows = isa, lanes or isa.lanes, isa.rows
        self.f32, self.i32, self.bytes = Vec("f32", self.lanes), Vec("i32", self.lanes), Vec("i8", 4 * self.lanes)
        self.byte_zero_point = BYTE_PRODUCTS[isa.byte_product].zero_point
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

        def cast(numba_type: Any, element: Any) -> Any:
            return verb(1, lambda a: numba_type, lambda b, t, a: b.inttoptr(a, element.as_pointer()))

        self.f32p, self.f64p, self.i64p = cast(F32P, F32), cast(F64P, ir.DoubleType()), cast(I64P, I64)
        self.i32p, self.i8p = cast(I32P, I32), cast(I8P, I8)
        # A float32 pointer, by floats.
        self.advance = verb(2, lambda p, i: F32P, lambda b, t, p, i: at(b, p, i, F32))

    def _loads_and_stores(self) -> None:
        """(pointer, index) → vector; (pointer, index, vector) → nothing."""
        n, f32, i32 = self.lanes, self.f32, self.i32

        def loader(out: Vec, stored: ir.Type, convert: Callable[[Any, Any], Any]) -> Any:
            llvm_type = ir.VectorType(stored, n)
            return verb(2, lambda p, i: out, lambda b, t, p, i: convert(b, load(b, p, i, llvm_type)))

        def storer(convert: Callable[[Any, Any], Any]) -> Any:
            return verb(3, lambda p, i, x: None, lambda b, t, p, i, x: store(b, convert(b, x), p, i))

        byte, word = ir.VectorType(I8, n), ir.VectorType(I16, n)
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
        self.store = storer(lambda b, x: x)
        self.store_i8 = storer(lambda b, x: b.trunc(x, byte))  # the low bytes of int32 lanes
        self.store_i16 = storer(lambda b, x: b.trunc(x, word))
        raw = self.bytes
        self.load_bytes = verb(2, lambda p, i: raw, lambda b, t, p, i: load(b, p, i, raw.ir))

        def prefetch(locality: int) -> Any:
            fetch, how = ("llvm.prefetch.p0", ir.VoidType()), [constant(I32, hint) for hint in (0, locality, 1)]
            return verb(2, lambda p, i: None, lambda b, t, p, i: call(b, *fetch, at(b, p, i, I8), *how) and None)

        # (pointer, byte): to the first cache, to the second.
        self.prefetch, self.prefetch_l2 = prefetch(3), prefetch(2)

        def gather(item: ir.Type) -> Any:
            """(p, i, stride) → int32 lane r = the item at byte i + r * stride, r < `lanes`."""

            def emit(b: Any, t: Any, p: Any, i: Any, stride: Any) -> Any:
                out = ir.Constant(i32.ir, ir.Undefined)
                for r in range(n):
                    x = load(b, p, b.add(i, b.mul(stride, constant(I64, r))), item, I8)
                    out = b.insert_element(out, b.zext(x, I32) if item is I16 else x, constant(I32, r))
                return out

            return verb(3, lambda p, i, s: i32, emit)

        self.gather_dwords, self.gather_words = gather(I32), gather(I16)

    def _partial_loads_and_stores(self) -> None:
        """`count` float32 lanes: (p, i, count) → vector with zeros; (p, i, vector, count)."""
        n, f32 = self.lanes, self.f32
        align = () if LLVM_VERSION >= 22 else (constant(I32, 4),)

        # Most vectors are whole, and a masked store takes AVX2 processors many cycles.
        def load_first(b: Any, t: Any, p: Any, i: Any, count: Any) -> Any:
            with b.if_else(b.icmp_signed(">=", count, constant(I64, n)), likely=True) as (whole, partial):
                with whole:
                    full, after_full = load(b, p, i, f32.ir), b.block
                with partial:
                    address = b.bitcast(at(b, p, i, F32), f32.ir.as_pointer())
                    mask, zero = first_lanes(b, count, n), constant(f32.ir, 0.0)
                    part = call(b, f"llvm.masked.load.v{n}f32.p0", f32.ir, address, *align, mask, zero)
                    after_part = b.block
            x = b.phi(f32.ir)
            x.add_incoming(full, after_full)
            x.add_incoming(part, after_part)
            return x

        def store_first(b: Any, t: Any, p: Any, i: Any, x: Any, count: Any) -> None:
            with b.if_else(b.icmp_signed(">=", count, constant(I64, n)), likely=True) as (whole, partial):
                with whole:
                    store(b, x, p, i)
                with partial:
                    address = b.bitcast(at(b, p, i, F32), f32.ir.as_pointer())
                    mask = first_lanes(b, count, n)
                    call(b, f"llvm.masked.store.v{n}f32.p0", ir.VoidType(), x, address, *align, mask)

        self.load_first = verb(3, lambda p, i, c: f32, load_first)
        self.store_first = verb(4, lambda p, i, x, c: None, store_first)
        self.keep_first = verb(  # (x, count, other): x in the first `count` lanes, then other
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
        n = self.lanes

        def reduce(b: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
            width = n
            while width > 1:
                width //= 2
                low, high = (ir.Constant(ir.VectorType(I32, width), list(range(k, k + width))) for k in (0, width))
                x = combine(b.shuffle_vector(x, x, low), b.shuffle_vector(x, x, high))
            return b.extract_element(x, constant(I32, 0))

        def larger(b: Any) -> Callable[[Any, Any], Any]:
            return lambda x, y: call(b, f"llvm.maxnum.v{x.type.count}f32", x.type, x, y)

        self.sum_lanes = verb(1, lambda x: types.float32, lambda b, t, x: reduce(b, x, b.fadd))
        self.max_lanes = verb(1, lambda x: types.float32, lambda b, t, x: reduce(b, x, larger(b)))
        self.sum_ints = verb(1, lambda x: types.int32, lambda b, t, x: reduce(b, x, b.add))

    def _ints_and_bytes(self) -> None:
        n, i32 = self.lanes, self.i32

        def binary(method: str) -> Any:
            return verb(2, lambda x, y: i32, lambda b, t, x, y: getattr(b, method)(x, y))

        def by_scalar(method: str) -> Any:
            return verb(2, lambda x, k: i32, lambda b, t, x, k: getattr(b, method)(x, splat(b, b.trunc(k, I32), n)))

        self.add_ints, self.or_ints = binary("add"), binary("or_")
        self.times, self.shift_right_signed = by_scalar("mul"), by_scalar("ashr")
        self.shift_left, self.shift_right = by_scalar("shl"), by_scalar("lshr")  # (x, bits)
        self.and_mask, self.xor_mask = by_scalar("and_"), by_scalar("xor")  # (x, 32-bit mask)
        self.as_ints = verb(1, lambda x: i32, lambda b, t, x: b.bitcast(x, i32.ir))
        self.splat_int = verb(1, lambda x: i32, lambda b, t, x: splat(b, b.trunc(x, I32), n))

    def _lookup(self, b: Any, x: Any, p: Any) -> Any:
        """Replace each byte 0 … 15 of x by the byte that it selects in the 16 at pointer p."""
        n = 4 * self.lanes
        table = load(b, p, constant(I64, 0), ir.VectorType(I8, 16))
        shuffles = {"vnni": "llvm.x86.avx512.pshuf.b.512", "maddubs": "llvm.x86.avx2.pshuf.b"}
        if self.isa.byte_product in shuffles:
            width = 4 * self.isa.lanes
            wide = b.shuffle_vector(
                table, table, ir.Constant(ir.VectorType(I32, width), [i % 16 for i in range(width)])
            )
            name = shuffles[self.isa.byte_product]
            return joined(b, [call(b, name, wide.type, wide, part) for part in split(b, x, width)])
        out = constant(x.type, 0)
        for code in range(16):
            entry = splat(b, b.extract_element(table, constant(I32, code)), n)
            out = b.select(b.icmp_unsigned("==", x, constant(x.type, code)), entry, out)
        return out

    def _scalars(self) -> None:
        """A value: (pointer, index) → float32; conversions keep Numba from widening to float64."""

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
        # From float64.
        self.narrow = verb(1, lambda x: types.float32, lambda b, t, x: b.fptrunc(x, F32))
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
