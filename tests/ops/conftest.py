"""Compiled kernels, kept where the engine keeps its own: they are keyed by their source, and
compiling all takes minutes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_calls import Kernels

from martlet.config import cache_dir
from martlet.ops.cpu.simd.isa import chosen_isa, runnable_isas

NAMES = [isa.name for isa in runnable_isas()]


@pytest.fixture(scope="session")
def kernel_folder() -> Path:
    """Where the object code lies."""
    return cache_dir() / "kernels"


@pytest.fixture(scope="session", params=NAMES)
def kernels(request: pytest.FixtureRequest, kernel_folder: Path) -> Kernels:
    """The kernels of each instruction set that this processor can run."""
    return Kernels(request.param, kernel_folder)


@pytest.fixture(scope="session")
def best_kernels(kernel_folder: Path) -> Kernels:
    """The kernels of this processor's best instruction set."""
    return Kernels(chosen_isa().name, kernel_folder)
