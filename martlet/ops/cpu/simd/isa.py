"""Which processor the kernels are compiled for (read `verbs.py` next: the verbs that depend on it).

An `Isa` says how wide a register is and which instruction multiplies bytes. The generic one uses
plain LLVM vectors and runs everywhere. MARTLET_ISA names one to use in place of the processor's
best. The AVX-512 and Arm forms of the byte product follow Intel's and Arm's manuals.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from martlet.config import environment_isa
from martlet.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Isa:
    """Register width and byte product of one kind of processor."""

    name: str
    lanes: int  # float32 values in a vector
    rows: int  # activation rows that a tile holds in registers
    byte_product: str  # "vnni", "maddubs", "sdot" or "generic"
    needs: frozenset[str]  # features, in LLVM's names
    without: tuple[str, ...] = ()  # how features begin that code for it may not use
    unpack_from: int = 0  # rows for which a product unpacks its weights to memory first; 0: never


ISAS: tuple[Isa, ...] = (
    Isa("avx512vnni", 16, 8, "vnni", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vnni", "f16c", "fma"})),
    Isa(
        "avx2",
        8,
        4,
        "maddubs",
        frozenset({"avx2", "f16c", "fma"}),
        ("avx512", "evex512", "avx10", "avxvnni", "gfni"),
        32,
    ),
    Isa("neon", 4, 4, "sdot", frozenset({"dotprod"})),  # run under emulation, not yet on hardware
    Isa("generic", 8, 4, "generic", frozenset()),
)


def host_features() -> Mapping[str, bool]:
    """The features of this processor as LLVM names them."""
    import llvmlite.binding as llvm

    return dict(llvm.get_host_cpu_features())


def target_features(isa: Isa) -> str:
    """This processor's features as LLVM's code generator takes them, less what `isa` is without."""
    features = host_features()
    return ",".join(f"{'+' if on and not name.startswith(isa.without) else '-'}{name}" for name, on in features.items())


def runnable_isas(features: Mapping[str, bool] | None = None) -> list[Isa]:
    """Entries of `ISAS` that this processor (or `features`) can run, best first, `generic` last."""
    have = {name for name, on in (host_features() if features is None else features).items() if on}
    return [isa for isa in ISAS if isa.needs <= have]


def best_isa(features: Mapping[str, bool] | None = None) -> Isa:
    """The first of `runnable_isas`."""
    return runnable_isas(features)[0]


def chosen_isa() -> Isa:
    """The instruction set that MARTLET_ISA names, else the best; raises as `isa_named`."""
    name = environment_isa()
    return best_isa() if name is None else isa_named(name, "MARTLET_ISA")


def isa_named(name: str, source: str = "isa") -> Isa:
    """The entry `name`; UnsupportedError if it is unknown or this processor cannot run it."""
    choices = {isa.name: isa for isa in runnable_isas()}
    if name in choices:
        return choices[name]
    needs = next((isa.needs for isa in ISAS if isa.name == name), None)
    if needs is None:
        raise UnsupportedError(f"{source} is {name!r}, which is no instruction set that kernels exist for", choices)
    missing = ", ".join(sorted(needs - {feature for feature, on in host_features().items() if on}))
    raise UnsupportedError(f"{source} is {name!r}, which this processor cannot run: it lacks {missing}", choices)
