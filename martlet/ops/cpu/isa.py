"""Which processor the kernels are compiled for (read `simd.py` next: the verbs that depend on it).

An `Isa` says how wide a register is and which instruction multiplies bytes. The generic one uses plain LLVM vectors
and runs everywhere; tests force it. The AVX-512 and Arm forms of the byte product follow Intel's and Arm's manuals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from martlet.errors import UnsupportedError

__all__ = ["ISAS", "Isa", "best_isa", "host_features", "isa_named"]


@dataclass(frozen=True, slots=True)
class Isa:
    """Register width and byte product of one kind of processor."""

    name: str
    lanes: int  # float32 values in a vector
    rows: int  # activation rows that a tile holds in registers
    byte_product: str  # "vnni", "maddubs", "sdot" or "generic"
    needs: frozenset[str]  # features, in LLVM's names


ISAS: tuple[Isa, ...] = (
    Isa("avx512vnni", 16, 8, "vnni", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni", "f16c", "fma"})),
    Isa("avx2", 8, 4, "maddubs", frozenset({"avx2", "f16c", "fma"})),
    Isa("neon", 4, 4, "sdot", frozenset({"dotprod"})),  # written, not yet run on hardware
    Isa("generic", 8, 4, "generic", frozenset()),
)


def host_features() -> Mapping[str, bool]:
    """The features of this processor as LLVM names them."""
    import llvmlite.binding as llvm

    return dict(llvm.get_host_cpu_features())


def best_isa(features: Mapping[str, bool] | None = None) -> Isa:
    """The first of `ISAS` whose needs this processor (or `features`) meets."""
    have = {name for name, on in (host_features() if features is None else features).items() if on}
    return next(isa for isa in ISAS if isa.needs <= have)


def isa_named(name: str) -> Isa:
    """The `Isa` called `name`; raises UnsupportedError for an unknown name or one that this processor cannot run."""
    for isa in ISAS:
        if isa.name == name:
            missing = isa.needs - {n for n, on in host_features().items() if on}
            if missing:
                raise UnsupportedError(f"this processor cannot run {name!r}: it lacks {', '.join(sorted(missing))}")
            return isa
    raise UnsupportedError(f"unknown instruction set {name!r}", (isa.name for isa in ISAS))
