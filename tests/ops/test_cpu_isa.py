"""The instruction set: the best, or the one that MARTLET_ISA names."""

from __future__ import annotations

from pathlib import Path

import pytest

from martlet.errors import UnsupportedError
from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.cpu.simd.isa import (
    ISAS,
    best_isa,
    chosen_isa,
    host_features,
    isa_named,
    runnable_isas,
    target_features,
)


def test_the_best_is_the_first_that_the_features_allow() -> None:
    assert best_isa({"avx2": True, "f16c": True, "fma": True, "avx512f": True}).name == "avx2"
    assert best_isa({"dotprod": True}).name == "neon"
    assert best_isa({"avx2": False}).name == "generic"
    assert [isa.name for isa in runnable_isas({"dotprod": True})] == ["neon", "generic"]


def test_the_environment_names_another(monkeypatch: pytest.MonkeyPatch, kernel_folder: Path) -> None:
    monkeypatch.delenv("MARTLET_ISA", raising=False)
    assert chosen_isa() == best_isa()
    monkeypatch.setenv("MARTLET_ISA", " Generic ")
    assert chosen_isa().name == "generic"
    ops = CpuBackend(1, kernel_folder)
    assert (ops.isa.name, ops.store.isa.name) == ("generic", "generic")
    ops.close()


def test_an_instruction_set_that_cannot_be_is_refused_with_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = ", ".join(isa.name for isa in runnable_isas())
    monkeypatch.setenv("MARTLET_ISA", "sse9")
    with pytest.raises(UnsupportedError, match=rf"MARTLET_ISA is 'sse9'.*Supported: {choices}\."):
        chosen_isa()
    other = next(isa.name for isa in ISAS if isa not in runnable_isas())
    with pytest.raises(UnsupportedError, match=rf"isa is '{other}'.*lacks .*Supported: {choices}\."):
        isa_named(other)


@pytest.mark.skipif(not host_features().get("avx512f"), reason="this processor has no AVX-512")
def test_code_for_avx2_has_32_byte_registers_only(kernel_folder: Path) -> None:
    """Else a forced AVX2 would be measured with instructions that its processors lack."""
    features = target_features(isa_named("avx2")).split(",")
    assert {"-avx512f", "-avx512vl", "+avx2"} <= set(features)
    assert "+avx512f" in target_features(isa_named("avx512vnni")).split(",")
