"""Ask 1: the built wheel, installed into an empty environment, answers a prompt."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.model
def test_wheel_in_an_empty_environment_answers(tmp_path: Path, smollm2_path: Path) -> None:
    wheels, home = tmp_path / "wheels", tmp_path / "env"
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT)]
    subprocess.run(pip, check=True, cwd=tmp_path)
    [wheel] = wheels.glob("martlet-*-py3-none-any.whl")  # pure Python: no processor in its name
    venv.create(home, with_pip=True)
    subprocess.run([str(home / "bin/python"), "-m", "pip", "install", "-q", str(wheel)], check=True, cwd=tmp_path)
    command = [str(home / "bin/martlet"), "run", str(smollm2_path), "The capital of France is", "--raw", "--temp", "0"]
    done = subprocess.run(
        [*command, "-n", "5", "--draft", "eagle=smollm2-135m"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
