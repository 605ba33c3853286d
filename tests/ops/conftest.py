"""Compiled kernels, kept where the engine keeps its own: they are keyed by their source, and compiling all takes minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_calls import Kernels

from martlet.config import cache_dir
from martlet.ops.cpu.isa import ISAS, best_isa, host_features

HOST = {name for name, on in host_features().items() if on}
NAMES = [isa.name for isa in ISAS if isa.needs <= HOST]


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
    return Kernels(best_isa().name, kernel_folder)
