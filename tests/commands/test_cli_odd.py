"""The command line in odd surroundings: closed or full streams, files that are no templates, texts
that are no text.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def shell(words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell line in which $M is `python -m martlet`."""
    root = Path(__file__).parents[2]
    values = {**os.environ, "PYTHONPATH": str(root), "M": f"{sys.executable} -m martlet", **environment}
    return subprocess.run(["bash", "-c", words], capture_output=True, env=values, cwd=root, timeout=60, check=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["$M --help", "$M version"])
def test_a_full_disk_is_one_line(words: str) -> None:
    done = shell(f"{words} >/dev/full")
    assert done.returncode == 1
    assert done.stderr == b"martlet: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("words", ["$M version >&-", "$M version 2>&-", "$M version <&-", "$M version >&- 2>&- <&-"])
def test_streams_that_are_closed(words: str) -> None:
    done = shell(words)
    assert done.returncode == 0
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--chat-template /dev/zero", b"more than 4,194,304 bytes"),
        ("--chat-template /dev/null", b"/dev/null holds nothing"),
        ("--chat-template <(printf 'a\\xff')", b"is not UTF-8: byte 1 is 0xff"),
        ("--logit-bias '{\"5\":null}'", b"ID=BIAS"),
    ],
)
def test_what_is_no_value_of_an_option(options: str, words: bytes) -> None:
    done = shell(f"$M run model.gguf Hello --offline {options}")
    assert words in done.stderr
    assert b"Traceback" not in done.stderr
    assert done.returncode == 2


def test_a_prompt_that_is_no_utf8_says_so() -> None:
    done = shell("$M run model.gguf $'a\\xff'")
    assert b"The prompt is not UTF-8: byte 1 is 0xff" in done.stderr
    assert done.returncode == 2
