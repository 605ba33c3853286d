"""The measuring scripts of the engine run: they reach into it, and nothing else tells when what
they reach has gone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def output_of(script: str, *args: str) -> str:
    command = [sys.executable, str(BENCH / script), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.model
def test_overhead(smollm2_path: Path) -> None:
    found = output_of("overhead.py", str(smollm2_path), "--sequences", "3", "--steps", "5", "--kv-memory", "64")
    assert "3 sequences decode: " in found


@pytest.mark.model
def test_stall(smollm2_path: Path) -> None:
    found = output_of("stall.py", str(smollm2_path), "--prompt", "200", "--streams", "2", "-r", "1", "-t", "1")
    assert "of the streams' own at that length: median " in found
