"""Compiled kernels, shared by all tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_calls import Kernels

from martlet.ops.cpu.isa import ISAS, best_isa, host_features

HOST = {name for name, on in host_features().items() if on}
NAMES = [isa.name for isa in ISAS if isa.needs <= HOST]


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session's object code lies."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session", params=NAMES)
def kernels(request: pytest.FixtureRequest, kernel_folder: Path) -> Kernels:
    """The kernels of each instruction set that this processor can run."""
    return Kernels(request.param, kernel_folder)


@pytest.fixture(scope="session")
def best_kernels(kernel_folder: Path) -> Kernels:
    """The kernels of this processor's best instruction set."""
    return Kernels(best_isa().name, kernel_folder)
