"""The second tier's files within their bounds, beside other models' and other processes'."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from martlet.runtime.disk_file import open_tier, remove_file, stored_files
from martlet.runtime.disk_format import MAX_SLOTS
from tests.runtime.test_tier_file import (
    MIB,
    NEW,
    OLD,
    OLDER,
    OWNER,
    USED,
    loaded,
    opened,
    page_of,
    save_of,
)


def test_the_file_stays_within_its_bound(tmp_path: Path) -> None:
    """1 MiB: two blocks for headers, then slots of 12,288 bytes and a header of 256 each: 82 of
    them.
    """
    tier = opened(tmp_path)
    assert tier.n_slots == 82 == (MIB - 2 * 4096) // (12_288 + 256)
    assert all(tier.save(save_of(slot, slot), page_of(slot)) for slot in range(82))
    assert not tier.save(save_of(82, 82), page_of(82))
    assert os.stat(tier.path).st_blocks * 512 <= MIB
    tier.close()
    smaller = opened(tmp_path, MIB // 2)
    assert os.stat(tier.path).st_blocks * 512 <= MIB // 2 + 16_384  # the table's blocks stay
    assert [r.slot for r in smaller.records()] == list(range((MIB // 2 - 8192) // 12_544))
    smaller.close()
    assert opened(tmp_path, 1 << 50).n_slots == MAX_SLOTS
    assert opened(tmp_path, 10_000).n_slots == 0


def test_files_of_other_models_make_room(tmp_path: Path) -> None:
    """The bound is for all files together; the one that was not used for longest goes first, never
    one in use.
    """
    for number, name in enumerate([OLD, OLDER, NEW]):
        tier = opened(tmp_path, MIB, replace(OWNER, fingerprint=name))
        for slot in range(20):
            assert tier.save(save_of(slot, slot), page_of(slot))
        tier.close()
        os.utime(tier.path, (0, [2000, 1000, 3000][number]))
    used = opened(tmp_path, MIB, replace(OWNER, fingerprint=USED))
    os.utime(used.path, (0, 500))
    tier = opened(tmp_path)
    for slot in range(30):
        assert tier.save(save_of(slot, slot), page_of(slot))
    assert [file.path.stem for file in stored_files(tmp_path)] == [OLD, NEW, USED, "f" * 16]
    for slot in range(30, 78):
        assert tier.save(save_of(slot, slot), page_of(slot))
    assert [file.path.stem for file in stored_files(tmp_path)] == [USED, "f" * 16]
    assert used.save(save_of(0, 0), page_of(0))
    assert not tier.save(save_of(81, 81), page_of(81))  # the others' bytes are in use
    assert sum(file.disk_bytes for file in stored_files(tmp_path)) <= MIB + 16_384
    tier.close()
    used.close()


def test_another_fingerprint_has_another_file(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.save(save_of(0, 0), page_of(0))
    tier.close()
    other = opened(tmp_path, MIB, replace(OWNER, fingerprint="e" * 16))
    assert not other.records()
    other.close()
    renamed = opened(tmp_path, MIB, replace(OWNER, model="The same under another name"))
    assert len(renamed.records()) == 1
    renamed.close()
    tier.path.rename(tmp_path / ("d" * 16 + ".kv"))  # a file under a name that is not its own
    wrong = opened(tmp_path, MIB, replace(OWNER, fingerprint="d" * 16))
    assert not wrong.records()
    wrong.close()


# -- other processes -------------------------------------------------------------------------------
def test_two_processes_have_a_file_each(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    assert [first.path.name, second.path.name] == ["f" * 16 + ".kv", "f" * 16 + "-2.kv"]
    assert first.save(save_of(0, 0), page_of(0))
    assert second.save(save_of(0, 1), page_of(1))
    assert loaded(first, 0, 0) == bytes(page_of(0))
    more = [opened(tmp_path) for _ in range(6)]
    with pytest.warns(RuntimeWarning, match="8 processes use"):
        assert open_tier(tmp_path, MIB, OWNER) is None
    assert all(file.in_use for file in stored_files(tmp_path))
    assert not remove_file(first.path)
    first.close()
    assert [file.in_use for file in stored_files(tmp_path)].count(False) == 1
    assert len(opened(tmp_path).records()) == 1
    for tier in (second, *more):
        tier.close()


def test_a_removed_file_goes_on_until_it_is_closed(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.save(save_of(0, 0), page_of(0))
    tier.path.unlink()
    assert loaded(tier, 0, 0) == bytes(page_of(0))
    assert tier.save(save_of(1, 1), page_of(1))
    tier.close()
    tier.close()
    assert remove_file(tier.path)  # it is gone, as asked


def test_kill_9_leaves_whole_pages(tmp_path: Path) -> None:
    """A process that writes pages without end is killed at a random moment; every page that loads
    is right.
    """
    code = f"""
        import itertools, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_tier_file import *
        tier = opened(Path({str(tmp_path)!r}))
        for number in itertools.count():
            assert tier.save(save_of(number % 7, number), page_of(number))
            if number == 7:
                print("going", flush=True)
    """
    rng = random.Random(0)
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"going\n"
        time.sleep(rng.random() / 50)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        tier = opened(tmp_path)
        numbers = {record.slot: record.ids[0] for record in tier.records()}
        assert len(numbers) == 7
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one page may be torn
            found = {slot: loaded(tier, slot, number) for slot, number in numbers.items()}
        assert sum(page is None for page in found.values()) <= 1
        assert all(page in (None, bytes(page_of(numbers[slot]))) for slot, page in found.items())
        tier.close()
