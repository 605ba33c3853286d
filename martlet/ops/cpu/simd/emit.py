"""How a SIMD verb becomes LLVM: vector types for Numba and the helpers that emit code.

Read `verbs.py` next.

`b` is always llvmlite's IR builder, `t` the Numba types of a verb's arguments.
"""

import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

X86 = platform.machine() in ("x86_64", "AMD64")
LLVM_VERSION = llvm.llvm_version_info[0]
I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
ELEMENTS = {"i8": I8, "i16": I16, "i32": I32, "f16": ir.HalfType(), "f32": F32}
F32P, F64P, I64P = types.CPointer(types.float32), types.CPointer(types.float64), types.CPointer(types.int64)
I8P, I16P, I32P = types.CPointer(types.int8), types.CPointer(types.int16), types.CPointer(types.int32)


class Vec(types.Type):
    """One register of `n` elements."""

    def __init__(self, element: str, n: int) -> None:
        self.element, self.n = element, n
        self.ir = ir.VectorType(ELEMENTS[element], n)
        super().__init__(name=f"Vec({element}, {n})")


class Tile(types.Type):
    """`rows` registers, one an activation row."""

    def __init__(self, vec: Vec, rows: int) -> None:
        self.vec, self.rows = vec, rows
        self.ir = ir.ArrayType(vec.ir, rows)
        super().__init__(name=f"Tile({vec.name}, {rows})")


@register_model(Vec)
@register_model(Tile)
class RegisterModel(models.PrimitiveModel):
    """Both are plain LLVM values, which LLVM keeps in registers."""

    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, fe_type.ir)


def verb(n_args: int, result: Callable[..., types.Type | None], emit: Callable[..., Any]) -> Any:
    """An intrinsic of type `result(*types)` (None: no value) and code `emit(b, t, *values)`."""

    def typer(typing_context: Any, *args: types.Type) -> Any:
        numba_type = result(*args)

        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            out = emit(builder, sig.args, *values)
            return context.get_dummy_value() if numba_type is None else out

        return (types.none if numba_type is None else numba_type)(*args), codegen

    # Numba reads the number of arguments from the signature, so each count needs a function of its
    # own.
    names = "".join(f", a{i}" for i in range(n_args))
    scope: dict[str, Any] = {"typer": typer}
    exec(f"def fixed(typing_context{names}): return typer(typing_context{names})", scope)
    return intrinsic(scope["fixed"])


def call(b: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """Call the LLVM intrinsic or C function `name`."""
    llvm_type = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, llvm_type, name), args)


def constant(llvm_type: ir.Type, value: float) -> ir.Constant:
    """A constant of `llvm_type`, the same in every lane of a vector."""
    return ir.Constant(llvm_type, [value] * llvm_type.count if isinstance(llvm_type, ir.VectorType) else value)


def splat(b: Any, value: Any, n: int) -> Any:
    """`value` in each of n lanes."""
    llvm_type = ir.VectorType(value.type, n)
    first = b.insert_element(ir.Constant(llvm_type, ir.Undefined), value, constant(I32, 0))
    return b.shuffle_vector(first, ir.Constant(llvm_type, ir.Undefined), ir.Constant(ir.VectorType(I32, n), [0] * n))


def split(b: Any, x: Any, n: int) -> list[Any]:
    """The vector x as vectors of n elements."""
    if x.type.count == n:
        return [x]
    starts = range(0, x.type.count, n)
    return [b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, n), list(range(i, i + n)))) for i in starts]


def joined(b: Any, vectors: list[Any]) -> Any:
    """One vector of all elements: the opposite of `split`."""
    while len(vectors) > 1:
        order = ir.Constant(ir.VectorType(I32, 2 * vectors[0].type.count), list(range(2 * vectors[0].type.count)))
        vectors = [b.shuffle_vector(*vectors[i : i + 2], order) for i in range(0, len(vectors), 2)]
    return vectors[0]


def in_order(b: Any, x: Any) -> Any:
    """x, computed before the next value that is passed through here: LLVM may not reorder these.

    Its scheduler otherwise finishes a sum at a time, and spills what the sums share.
    """
    constraint = "=x,0" if X86 else "=w,0"
    return b.call(ir.InlineAsm(ir.FunctionType(x.type, [x.type]), "", constraint, side_effect=True), [x])


def at(b: Any, pointer: Any, index: Any, element: ir.Type) -> Any:
    """The address of element `index`."""
    return b.gep(b.bitcast(pointer, element.as_pointer()), [index], source_etype=element)


def load(b: Any, pointer: Any, index: Any, llvm_type: ir.Type, element: ir.Type | None = None) -> Any:
    """Load a `llvm_type` that starts at `index`, counted in its own elements or in `element`s."""
    if element is None:
        element = llvm_type.element if isinstance(llvm_type, ir.VectorType) else llvm_type
    return b.load(b.bitcast(at(b, pointer, index, element), llvm_type.as_pointer()), align=1, typ=llvm_type)


def store(b: Any, value: Any, pointer: Any, index: Any) -> None:
    """Store a vector at element `index` of `pointer`."""
    b.store(value, b.bitcast(at(b, pointer, index, value.type.element), value.type.as_pointer()), align=1)


def each_row(b: Any, tile: Tile, row: Callable[[int], Any]) -> Any:
    """A tile whose vector m is `row(m)`."""
    out = ir.Constant(tile.ir, ir.Undefined)
    for m in range(tile.rows):
        out = b.insert_value(out, row(m), m)
    return out


def first_lanes(b: Any, count: Any, n: int) -> Any:
    """The mask of the first `count` (int64, any value) of n lanes."""
    lane = ir.Constant(ir.VectorType(I32, n), list(range(n)))
    most = b.select(b.icmp_signed("<", count, constant(I64, n)), count, constant(I64, n))
    least = b.select(b.icmp_signed(">", most, constant(I64, 0)), most, constant(I64, 0))
    return b.icmp_signed("<", lane, splat(b, b.trunc(least, I32), n))
