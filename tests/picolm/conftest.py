"""The tiny models, made once a run by the program that made them for the recordings."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).parent))

import make_malformed
import make_models
from recordings import DATA, notes


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sixteen models, the same bytes that the C was recorded with."""
    folder = tmp_path_factory.mktemp("picolm-models")
    make_models.main(str(folder))
    for line in (DATA / "models.sha256").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    return folder


@pytest.fixture(scope="session")
def malformed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 73 broken or unusual files."""
    folder = tmp_path_factory.mktemp("picolm-malformed")
    make_malformed.main(str(folder))
    for case in notes("malformed"):
        assert hashlib.sha256((folder / f"{case['name']}.gguf").read_bytes()).hexdigest() == case["sha256"], case[
            "name"
        ]
    return folder


@pytest.fixture(autouse=True)
def one_blas_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As the command line has it: threads of picolm's own, and BLAS with one."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    with threadpool_limits(1, "blas"):
        yield
