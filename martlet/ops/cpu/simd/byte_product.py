"""The byte product, which decides how fast a quantised model runs, in each processor's form.

Each form adds to the int32 lanes of `acc` the products of four weight vectors with 16 consecutive
activations of one row: `acc[lane] += sum over j, u < 4 of w_j[4 lane + u] * x_j[u]`. Weights are
unsigned and of `bits` bits; with 8 bits they are stored 128 too high, and a processor that
multiplies signed bytes takes the 128 off first (`ZERO_POINTS` tells a kernel which). All sums are
exact integers, so every form gives the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from martlet.ops.cpu.simd.emit import I8, I16, LLVM_VERSION, call, constant

Weights = Sequence[Any]

# What 8-bit weights are too high by when the product has been taken.
ZERO_POINTS = {"vnni": 128, "maddubs": 0, "sdot": 0, "generic": 128}


def vnni(b: Any, acc: Any, weights: Weights, x: Weights, bits: int) -> Any:
    """AVX-512 VNNI: vpdpbusd, unsigned times signed bytes added to int32 without saturation."""
    lanes = acc.type.count
    llvm_type = ir.VectorType(I8, 4 * lanes) if LLVM_VERSION >= 22 else acc.type
    for w, v in zip(weights, x, strict=True):
        name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
        acc = call(b, name, acc.type, acc, b.bitcast(w, llvm_type), b.bitcast(v, llvm_type))
    return acc


def maddubs(b: Any, acc: Any, weights: Weights, x: Weights, bits: int) -> Any:
    """AVX2: vpmaddubsw sums pairs in 16 bits, vpmaddwd widens them.

    A pair is at most 2 * 127 * (2^bits - 1), so 16 bits hold the pairs of all four vectors for
    5-bit weights (31,496 of 32,767), of two for 6-bit ones, and of one for 8-bit ones, signed.
    """
    i16 = ir.VectorType(I16, 16)
    together = {4: 4, 5: 4, 6: 2, 8: 1}[bits]
    pairs: list[Any] = []
    for w, v in zip(weights, x, strict=True):
        v = b.bitcast(v, w.type)
        if bits == 8:  # |w| times the activation with w's sign
            signed = b.xor(w, constant(w.type, -128))
            v = call(b, "llvm.x86.avx2.psign.b", w.type, v, signed)
            w = call(b, "llvm.abs.v32i8", w.type, signed, ir.Constant(ir.IntType(1), 0))
        pairs.append(call(b, "llvm.x86.avx2.pmadd.ub.sw", i16, w, v))
    for first in range(0, 4, together):
        total = pairs[first]
        for other in pairs[first + 1 : first + together]:
            total = b.add(total, other)
        acc = b.add(acc, call(b, "llvm.x86.avx2.pmadd.wd", acc.type, total, constant(i16, 1)))
    return acc


def sdot(b: Any, acc: Any, weights: Weights, x: Weights, bits: int) -> Any:
    """Arm dotprod: sdot, signed times signed bytes; up to 6 bits are the same signed.

    Not yet run on hardware.
    """
    for w, v in zip(weights, x, strict=True):
        signed = b.xor(w, constant(w.type, -128)) if bits == 8 else w
        acc = call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, acc, signed, b.bitcast(v, w.type))
    return acc


def generic(b: Any, acc: Any, weights: Weights, x: Weights, bits: int) -> Any:
    """Any processor: one byte of each lane at a time, in int32."""
    for w, v in zip(weights, x, strict=True):
        w, v = b.bitcast(w, acc.type), b.bitcast(v, acc.type)
        for u in range(4):
            weight = b.and_(b.lshr(w, constant(acc.type, 8 * u)), constant(acc.type, 255))
            value = b.ashr(b.shl(v, constant(acc.type, 24 - 8 * u)), constant(acc.type, 24))
            acc = b.add(acc, b.mul(weight, value))
    return acc


BYTE_PRODUCTS: dict[str, Callable[..., Any]] = {"vnni": vnni, "maddubs": maddubs, "sdot": sdot, "generic": generic}
assert BYTE_PRODUCTS.keys() == ZERO_POINTS.keys()
