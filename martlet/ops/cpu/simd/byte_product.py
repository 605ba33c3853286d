"""The byte product, which decides how fast a quantised model runs, in each processor's form.

A form adds to the int32 lanes of `acc` the products of a weight vector with four activations of a
row: `acc[lane] += sum over u < 4 of w[4 lane + u] * x[u]`. Weights are unsigned and of `bits` bits;
with 8 bits they are stored 128 too high, and a processor that multiplies signed bytes takes the 128
off first (`zero_point` tells a kernel which). All sums are exact integers, so every form gives the
same bits. A form may add narrower sums first and widen them later, as AVX2's does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from martlet.ops.cpu.simd.emit import I8, I16, LLVM_VERSION, call, constant, in_order


@dataclass(frozen=True, slots=True)
class ByteProduct:
    """One processor's form; `b` is LLVM's builder, w and x are vectors of a register's bytes."""

    zero_point: int  # what 8-bit weights are too high by when the product has been taken
    add: Callable[..., Any]  # (b, acc, w, x, bits) → acc + products; acc + widened sums if `narrow`
    narrow: Callable[..., Any] | None = None  # (b, w, x, bits) → sums that `add` takes as w
    most_narrow: Callable[[int], int] = lambda bits: 1  # sums of `bits` bits that may be added


def vnni(b: Any, acc: Any, w: Any, x: Any, bits: int) -> Any:
    """AVX-512 VNNI: vpdpbusd, unsigned times signed bytes added to int32 without saturation."""
    lanes = acc.type.count
    llvm_type = ir.VectorType(I8, 4 * lanes) if LLVM_VERSION >= 22 else acc.type
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    return call(b, name, acc.type, acc, b.bitcast(w, llvm_type), b.bitcast(x, llvm_type))


def maddubs(b: Any, w: Any, x: Any, bits: int) -> Any:
    """AVX2: vpmaddubsw sums pairs of products in 16 bits."""
    if bits == 8:  # |w| times the activation with w's sign
        signed = b.xor(w, constant(w.type, -128))
        x = call(b, "llvm.x86.avx2.psign.b", w.type, x, signed)
        w = call(b, "llvm.abs.v32i8", w.type, signed, ir.Constant(ir.IntType(1), 0))
    return call(b, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), w, x)


def most_pairs(bits: int) -> int:
    """How many of `maddubs`' sums 16 bits hold.

    A pair is at most 2 * 127 * (2^bits - 1): 30,480 of 32,767 for eight pairs of 4-bit weights,
    31,496 for four of 5-bit ones; with 8 bits, signed, 2 * 127 * 128 for one.
    """
    return {4: 8, 5: 4, 6: 2, 8: 1}[bits]


def widened(b: Any, acc: Any, pairs: Any, x: Any, bits: int) -> Any:
    """AVX2: vpmaddwd adds neighbouring 16-bit sums in 32 bits."""
    return b.add(acc, call(b, "llvm.x86.avx2.pmadd.wd", acc.type, pairs, constant(pairs.type, 1)))


def sdot(b: Any, acc: Any, w: Any, x: Any, bits: int) -> Any:
    """Arm dotprod: sdot, signed times signed bytes; up to 6 bits are the same signed.

    Run under emulation (`tools/arm_check.sh`), not yet on hardware.
    """
    signed = b.xor(w, constant(w.type, -128)) if bits == 8 else w
    return call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, acc, signed, x)


def generic(b: Any, acc: Any, w: Any, x: Any, bits: int) -> Any:
    """Any processor: one byte of each lane at a time, in int32."""
    w, x = b.bitcast(w, acc.type), b.bitcast(x, acc.type)
    for u in range(4):
        weight = b.and_(b.lshr(w, constant(acc.type, 8 * u)), constant(acc.type, 255))
        value = b.ashr(b.shl(x, constant(acc.type, 24 - 8 * u)), constant(acc.type, 24))
        acc = b.add(acc, b.mul(weight, value))
    return acc


class Sums:
    """The int32 sums of products in the making: `totals` [rows][registers of a row].

    Where the form adds narrow sums, these are kept beside the totals for as long as they are exact.
    """

    def __init__(self, b: Any, form: ByteProduct, bits: int, totals: list[list[Any]]) -> None:
        self.totals = totals
        self._b, self._form, self._bits = b, form, bits
        self._narrow: dict[tuple[int, int], tuple[Any, int]] = {}  # a sum, and of how many products

    def add(self, row: int, register: int, w: Any, x: Any) -> None:
        """Add w times x to a row's sum."""
        b, form, total = self._b, self._form, self.totals[row][register]
        if form.narrow is None:
            self.totals[row][register] = form.add(b, total, w, x, self._bits)
            return
        new, (old, count) = form.narrow(b, w, x, self._bits), self._narrow.pop((row, register), (None, 0))
        self._narrow[row, register] = new if old is None else b.add(old, new), count + 1
        if count + 1 == form.most_narrow(self._bits):
            self._widen(row, register)

    def pin(self) -> None:
        """Keep LLVM from reordering what was added before and after this."""
        for row, registers in enumerate(self.totals):
            for i, total in enumerate(registers):
                if (row, i) in self._narrow:
                    narrow, count = self._narrow[row, i]
                    self._narrow[row, i] = in_order(self._b, narrow), count
                elif self._form.narrow is not None:
                    registers[i] = in_order(self._b, total)

    def finish(self) -> list[list[Any]]:
        """The totals of everything."""
        for row, register in list(self._narrow):
            self._widen(row, register)
        return self.totals

    def _widen(self, row: int, register: int) -> None:
        narrow, _ = self._narrow.pop((row, register))
        self.totals[row][register] = self._form.add(self._b, self.totals[row][register], narrow, None, self._bits)


BYTE_PRODUCTS = {
    "vnni": ByteProduct(128, vnni),
    "maddubs": ByteProduct(0, widened, maddubs, most_pairs),
    "sdot": ByteProduct(0, sdot),
    "generic": ByteProduct(128, generic),
}
