"""Compiled code on disk: found again, never trusted when damaged, and not needed."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from martlet.ops.cpu import store as store_module
from martlet.ops.cpu.simd.isa import Isa, chosen_isa, isa_named
from martlet.ops.cpu.store import KernelStore

KERNEL = "take_rows"  # the quickest to compile


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.o"))


def test_second_store_loads_without_compiling(tmp_path: Path) -> None:
    first = KernelStore(chosen_isa(), tmp_path)
    assert first.address(KERNEL) != 0
    assert list(first.compiled) == [KERNEL]
    second = KernelStore(chosen_isa(), tmp_path)
    assert second.address(KERNEL) != 0
    assert second.compiled == {}


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 5000])
def test_damaged_file_is_compiled_again(tmp_path: Path, damage: bytes) -> None:
    KernelStore(chosen_isa(), tmp_path).address(KERNEL)
    (path,) = files(tmp_path)
    path.write_bytes(damage)
    again = KernelStore(chosen_isa(), tmp_path)
    again.address(KERNEL)
    assert list(again.compiled) == [KERNEL]
    assert path.stat().st_size > 1000


def test_one_flipped_bit_is_noticed(tmp_path: Path) -> None:
    KernelStore(chosen_isa(), tmp_path).address(KERNEL)
    (path,) = files(tmp_path)
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    again = KernelStore(chosen_isa(), tmp_path)
    again.address(KERNEL)
    assert list(again.compiled) == [KERNEL]


def test_changed_source_goes_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = KernelStore(chosen_isa(), tmp_path).folder
    monkeypatch.setattr(store_module, "source_digest", lambda *folders: "another text")
    assert KernelStore(chosen_isa(), tmp_path).folder != before


def test_instruction_sets_do_not_share_a_folder(tmp_path: Path) -> None:
    generic: Isa = isa_named("generic")
    if generic != chosen_isa():
        assert KernelStore(generic, tmp_path).folder != KernelStore(chosen_isa(), tmp_path).folder


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    store = KernelStore(chosen_isa(), blocked / "below")
    assert store.address(KERNEL) != 0
    assert blocked.read_text() == "in the way"


def test_a_full_disk_is_done_without_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # as much as a disk would take; a kernel is larger
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        store = KernelStore(chosen_isa(), tmp_path)
        assert store.address(KERNEL) != 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.folder is not None
    assert [path.name for path in store.folder.iterdir()] == ["lock"]


def test_no_folder_keeps_nothing() -> None:
    store = KernelStore(chosen_isa(), None)
    assert store.address(KERNEL) != 0


LOAD = """
import sys
from pathlib import Path
from martlet.ops.cpu.simd.isa import chosen_isa
from martlet.ops.cpu.store import KernelStore
store = KernelStore(chosen_isa(), Path(sys.argv[1]))
store.address("take_rows")
print(len(store.compiled), "numba" in sys.modules)
"""


def test_two_processes_compile_once_and_a_third_needs_no_numba(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate(timeout=120)[0].split()[0] for process in pair)
    assert said == ["0", "1"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["0", "False"]
