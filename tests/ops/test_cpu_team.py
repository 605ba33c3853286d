"""The team of threads: every worker is woken, however many there are."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from martlet.errors import CapacityError
from martlet.ops.cpu.simd.isa import chosen_isa
from martlet.ops.cpu.store import KernelStore
from martlet.ops.cpu.threads import Team


@pytest.mark.parametrize("n_threads", [2, 64, 65, 66, 130])
def test_more_sleeping_workers_than_a_word_has_bits(n_threads: int, kernel_folder: Path) -> None:
    store = KernelStore(chosen_isa(), kernel_folder)
    team = Team(store, n_threads)
    try:
        time.sleep(0.5)  # all asleep
        runs = threading.Thread(target=lambda: [team.run(0, 0, 0) for _ in range(2)], daemon=True)
        runs.start()
        runs.join(60)
        assert not runs.is_alive(), "the step never ended: a worker was not woken"
    finally:
        if not runs.is_alive():
            team.close()


def test_a_machine_that_has_no_more_threads(monkeypatch: pytest.MonkeyPatch, kernel_folder: Path) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    store = KernelStore(chosen_isa(), kernel_folder)
    store.ensure(["launch", "serve"])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(CapacityError, match="3 of 8 threads"):
        Team(store, 8)
    assert not any(thread.is_alive() for thread in started)


DROP_THE_STORE = """
import gc, sys, time
from pathlib import Path
from martlet.ops.cpu.simd.isa import chosen_isa
from martlet.ops.cpu.store import KernelStore
from martlet.ops.cpu.threads import Team
team = Team(KernelStore(chosen_isa(), Path(sys.argv[1])), 2)  # nobody else refers to the store
gc.collect()
for _ in range(20):
    team.run(0, 0, 0)
time.sleep(0.2)
team.close()
print("alive")
"""


def test_a_team_keeps_the_code_that_it_runs(kernel_folder: Path) -> None:
    """In a process of its own, which would end with a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", DROP_THE_STORE, str(kernel_folder)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-500:]
