"""The command line in a shell: streams that are closed or full, threads that cannot start, a closed
pipe, an interrupt.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import picolm.model


def shell(line: str, model: Path, n: int = 5) -> subprocess.CompletedProcess[bytes]:
    """A line for bash, in which `picolm` is the program with this model and a prompt."""
    prompt = "" if "<" in line else "-p 'hello the cat'"
    program = f"{sys.executable} -m picolm {model} -n {n} -t 0 --order sse {prompt}"
    environment = {**os.environ, "PYTHONPATH": str(Path(picolm.model.__file__).parents[1])}
    return subprocess.run(["bash", "-c", line.replace("picolm", program, 1)], capture_output=True, env=environment)


@pytest.mark.skipif(sys.platform != "linux", reason="needs bash and /dev/full")
def test_streams_that_are_closed_or_full(tiny: Path) -> None:
    """A message and status 1, no traceback; what is told on stderr never lands in the text."""
    model = tiny / "q8_0.gguf"
    right = shell("picolm", model).stdout
    assert shell("picolm 2>&-", model).stdout == right
    for line, message in (
        ("picolm <&-", b"No prompt provided"),
        ("picolm >&-", b"Bad file descriptor"),
        ("picolm >/dev/full", b"cannot read stdin, or write the text: [Errno 28]"),
        ("ulimit -v 450000; picolm -j 64", b"can't start new thread"),
    ):
        ended = shell(line, model)
        assert (ended.returncode, ended.stdout) == (1, b""), line
        assert message in ended.stderr
        assert b"Traceback" not in ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_closed_pipe_and_an_interrupt_end_it_quietly(tiny: Path) -> None:
    """As they end the C: by the signal, without a word."""
    ended = shell("picolm | head -c 1; exit ${PIPESTATUS[0]}", tiny / "q8_0.gguf", 90)
    assert (ended.returncode, len(ended.stdout)) == (128 + signal.SIGPIPE, 1)
    assert b"Traceback" not in ended.stderr
    command = [sys.executable, "-m", "picolm", str(tiny / "q8_0.gguf"), "-p", "hello", "-n", "90"]
    environment = {**os.environ, "PYTHONPATH": str(Path(picolm.model.__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"Loading model")
        process.send_signal(signal.SIGINT)
        rest = process.communicate()[1]
    assert b"Traceback" not in rest
    assert process.returncode in (-signal.SIGINT, 0)  # 0: it had ended before
