"""The second tier's file: what comes back is what was kept, or nothing, whatever the disk and other
processes do.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import stat
import struct
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from martlet.runtime import disk_file as tier_file
from martlet.runtime.disk_file import DiskFile, open_tier, stored_files
from martlet.runtime.disk_format import Layout, Owner, read_owner, read_table
from martlet.types import Load, PageId, Save, SlotId

OWNER = Owner("A model", "f" * 16, "f16", 32, 10_000)
LAYOUT = Layout(32, 10_000)
MIB = 1 << 20
SALT = b"\0" * 32
OLD, OLDER, NEW, USED = (digit * 16 for digit in "1234")  # fingerprints of other models


def key(number: int) -> bytes:
    return struct.pack("<32sQ", b"", number)[-32:]


def save_of(slot: int, number: int) -> Save:
    ids = tuple(range(number, number + 32))
    return Save(PageId(0), SlotId(slot), key(number), key(number - 1) if number else SALT, ids)


def page_of(number: int, size: int = 10_000) -> memoryview:
    return memoryview(random.Random(number).randbytes(size))


def loaded(tier: DiskFile, slot: int, number: int) -> bytes | None:
    out = bytearray(OWNER.page_bytes)
    return bytes(out) if tier.load(Load(SlotId(slot), PageId(0), key(number)), memoryview(out)) else None


def opened(folder: Path, most_bytes: int = MIB, owner: Owner = OWNER) -> DiskFile:
    tier = open_tier(folder, most_bytes, owner)
    assert tier is not None
    return tier


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskFile]:
    """An empty file of up to 1 MiB."""
    made = opened(tmp_path / "kv")
    yield made
    made.close()


# -- what is kept ----------------------------------------------------------------------------------
def test_a_page_comes_back_in_the_next_process(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = opened(tmp_path)
        for slot, number in ((3, 0), (0, 1), (1, 2)):
            assert first.save(save_of(slot, number), page_of(number))
        assert loaded(first, 3, 0) == bytes(page_of(0))
        first.close()
        second = opened(tmp_path)
        assert [(r.slot, r.key, r.parent, r.ids) for r in second.records()] == [
            (3, key(0), SALT, tuple(range(32))),
            (0, key(1), key(0), tuple(range(1, 33))),
            (1, key(2), key(1), tuple(range(2, 34))),
        ]
        assert [loaded(second, slot, number) for slot, number in ((3, 0), (0, 1), (1, 2))] == [
            bytes(page_of(number)) for number in range(3)
        ]
        second.close()


def test_a_slot_written_again_holds_the_new_page_only(tier: DiskFile) -> None:
    assert tier.save(save_of(0, 1), page_of(1))
    assert tier.save(save_of(0, 7), page_of(7))
    assert loaded(tier, 0, 1) is None
    assert loaded(tier, 0, 7) == bytes(page_of(7))
    assert tier.n_kept == 1
    tier.forget(SlotId(0))
    assert loaded(tier, 0, 7) is None
    assert not tier.records()


def test_a_slot_is_only_loaded_under_its_own_key(tier: DiskFile) -> None:
    tier.save(save_of(0, 1), page_of(1))
    assert loaded(tier, 0, 2) is None
    assert loaded(tier, 1, 1) is None  # a slot that was never used


def test_the_layout_in_bytes(tier: DiskFile) -> None:
    """As docs/formats.md has it: the numbers are worked out by hand."""
    tier.save(save_of(2, 5), page_of(5))
    data = tier.path.read_bytes()
    assert struct.unpack_from("<8sI", data) == (b"martlet\x01", 1)
    n_json, checksum = struct.unpack_from("<II", data, 12)
    assert zlib.crc32(data[20 : 20 + n_json]) == checksum
    assert json.loads(data[20 : 20 + n_json]) == {
        "model": "A model",
        "fingerprint": "f" * 16,
        "kv_dtype": "f16",
        "page_size": 32,
        "page_bytes": 10_000,
    }
    header = 4096 + 2 * 256  # 88 bytes and 32 ids of 4 are 216, in whole cache lines 256
    assert data[header : header + 4] == b"page"
    own, checksum, n_ids, use = struct.unpack_from("<IIIQ", data, header + 4)
    assert (n_ids, use) == (32, 1)
    assert own == zlib.crc32(data[header + 8 : header + 256])
    assert data[header + 24 : header + 88] == key(5) + key(4)
    assert struct.unpack_from("<32I", data, header + 88) == tuple(range(5, 37))
    page = 4096 + 65536 * 256 + 2 * 12288  # a page of 10,000 bytes takes three blocks
    assert data[page : page + 10_000] == bytes(page_of(5))
    assert checksum == zlib.crc32(page_of(5))
    assert len(data) == page + 12288


def test_files_are_private(tmp_path: Path) -> None:
    tier = opened(tmp_path / "new" / "folder")
    assert stat.S_IMODE(os.stat(tier.path.parent).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(tier.path).st_mode) == 0o600
    tier.close()
    os.chmod(tier.path, 0o644)
    opened(tier.path.parent).close()
    assert stat.S_IMODE(os.stat(tier.path).st_mode) == 0o600


# -- damage ----------------------------------------------------------------------------------------
def test_damage_anywhere_is_seen(tmp_path: Path) -> None:
    """A flipped bit in a page, in its header, or in the file's header: that page is gone, and no
    other bytes appear.
    """
    tier = opened(tmp_path)
    for slot in range(4):
        tier.save(save_of(slot, slot), page_of(slot))
    tier.close()
    whole = tier.path.read_bytes()
    rng = random.Random(1)
    places = [LAYOUT.page_at(1) + rng.randrange(10_000) for _ in range(20)]
    places += [LAYOUT.header_at(1) + n for n in range(88 + 128)]
    for place in places:
        with open(tier.path, "r+b") as file:
            file.seek(place)
            file.write(bytes([whole[place] ^ 1 << rng.randrange(8)]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = opened(tmp_path)
            assert loaded(again, 1, 1) is None, place
            assert [loaded(again, slot, slot) for slot in (0, 2, 3)] == [bytes(page_of(slot)) for slot in (0, 2, 3)]
            again.close()
        with open(tier.path, "r+b") as file:
            file.seek(place)
            file.write(whole[place : place + 1])
    for place in range(100):
        with open(tier.path, "r+b") as file:
            file.write(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 : 4096])
            file.seek(4096)
            file.write(whole[4096 : 4096 + 4 * 256])
        again = opened(tmp_path)
        assert not again.records(), place
        again.close()


@pytest.mark.parametrize("size", [0, 1, 19, 100, 4095, 4096, 5000, 16_781_312, 16_781_312 + 12_288 + 9_999])
def test_a_cut_file_gives_what_is_whole(tmp_path: Path, size: int) -> None:
    tier = opened(tmp_path)
    for slot in range(3):
        tier.save(save_of(slot, slot), page_of(slot))
    tier.close()
    os.truncate(tier.path, size)
    again = opened(tmp_path)
    expected = 1 if size > 16_781_312 else 0
    assert [r.slot for r in again.records()] == list(range(expected))
    for slot in range(3):
        assert loaded(again, slot, slot) == (bytes(page_of(slot)) if slot < expected else None)
    assert all(again.save(save_of(slot, slot + 9), page_of(slot + 9)) for slot in range(3))
    assert all(loaded(again, slot, slot + 9) == bytes(page_of(slot + 9)) for slot in range(3))
    again.close()


def test_a_file_cut_while_it_is_open_is_no_signal(tier: DiskFile) -> None:
    """With a mapping this would be SIGBUS, the end of the process."""
    tier.save(save_of(0, 0), page_of(0))
    os.truncate(tier.path, 4096)
    with pytest.warns(RuntimeWarning, match=r"damaged page.*computed again"):
        assert loaded(tier, 0, 0) is None
    assert tier.save(save_of(0, 1), page_of(1))
    assert loaded(tier, 0, 1) == bytes(page_of(1))


def test_junk_is_no_header() -> None:
    rng = random.Random(3)
    for size in (0, 1, 20, 4096):
        assert read_owner(rng.randbytes(size)) is None
    assert not read_table(rng.randbytes(100 * 256 + 17), LAYOUT)
    good = OWNER.pack()
    assert read_owner(good) == OWNER
    for fields in (
        {"page_size": 0},
        {"page_size": True},
        {"page_size": 1 << 40},
        {"page_bytes": -1},
        {"model": 3},
        {"x": 1},
    ):
        text = json.dumps(json.loads(good[20:].rstrip(b"\0")) | fields).encode()
        assert read_owner(good[:12] + struct.pack("<II", len(text), zlib.crc32(text)) + text) is None, fields
    for text in (b"[" * 4000, b"[]", b"\xff", b"7"):
        assert read_owner(good[:12] + struct.pack("<II", len(text), zlib.crc32(text)) + text) is None
    assert read_owner(good[:12] + struct.pack("<II", 1 << 31, 0) + b"{}") is None


def test_a_header_that_claims_too_many_ids_is_no_record(tier: DiskFile) -> None:
    tier.save(save_of(0, 0), page_of(0))
    with open(tier.path, "r+b") as file:
        file.seek(4096)
        header = bytearray(file.read(256))
        for n_ids in (0, 33, 1 << 31):
            struct.pack_into("<I", header, 12, n_ids)
            struct.pack_into("<I", header, 4, zlib.crc32(header[8:]))
            assert read_table(bytes(header), LAYOUT) == []


# -- disks -----------------------------------------------------------------------------------------
def test_a_full_disk_keeps_what_it_has(tmp_path: Path) -> None:
    """The file may not grow beyond 3 slots: they stay, and can be written again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    tier = opened(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LAYOUT.page_at(3) + 5000, before[1]))
    try:
        with pytest.warns(RuntimeWarning, match="no room for more KV pages") as seen:
            done = [tier.save(save_of(slot, slot), page_of(slot)) for slot in range(10)]
        assert len(seen) == 1
        assert done == [True] * 3 + [False] * 7
        assert tier.n_slots == 3
        assert tier.save(save_of(1, 20), page_of(20))
        assert [loaded(tier, slot, number) for slot, number in ((0, 0), (1, 20), (2, 2))] == [
            bytes(page_of(number)) for number in (0, 20, 2)
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    tier.close()
    assert [r.slot for r in opened(tmp_path).records()] == [0, 2, 1]


@pytest.mark.parametrize("call", ["pwrite", "preadv", "ftruncate", "scandir"])
def test_a_failing_disk_is_left_alone_after_a_while(tier: DiskFile, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    tier.save(save_of(0, 0), page_of(0))
    calls = []

    def fail(*_: object) -> int:
        calls.append(call)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(tier_file.os, call, fail)

    def works(number: int) -> bool:
        return (
            loaded(tier, 0, 0) is not None if call == "preadv" else tier.save(save_of(number, number), page_of(number))
        )

    with pytest.warns(RuntimeWarning, match=r"failed \(Input/output error\)") as seen:
        assert not any(works(number) for number in range(1, 9))
    assert len(seen) == 1
    assert len(calls) == 3


def test_a_folder_that_cannot_be_used_means_no_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.warns(RuntimeWarning, match="KV pages are not kept on disk"):
        assert open_tier(tmp_path / "file", MIB, OWNER) is None
    with pytest.warns(RuntimeWarning, match="not kept on disk"):
        assert open_tier(tmp_path / "file" / "below", MIB, OWNER) is None

    (tmp_path / f"{'f' * 16}.kv").mkdir()
    with pytest.warns(RuntimeWarning, match="not kept on disk.*[Dd]irectory"):
        assert open_tier(tmp_path, MIB, OWNER) is None
    (tmp_path / f"{'f' * 16}.kv").rmdir()
    (tmp_path / f"{'f' * 16}.kv").symlink_to(tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="not kept on disk"):
        assert open_tier(tmp_path, MIB, OWNER) is None
    assert (tmp_path / "file").read_text() == "x"
    (tmp_path / f"{'f' * 16}.kv").unlink()
    os.mkfifo(tmp_path / f"{'f' * 16}.kv")
    with pytest.warns(RuntimeWarning, match="not kept on disk.*not a regular file"):
        assert open_tier(tmp_path, MIB, OWNER) is None
    (tmp_path / f"{'f' * 16}.kv").unlink()

    def read_only(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tier_file.os, "open", read_only)
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        assert open_tier(tmp_path, MIB, OWNER) is None


def test_a_folder_that_is_not_there_has_no_files(tmp_path: Path) -> None:
    assert stored_files(tmp_path / "nowhere") == []
    (tmp_path / "note.txt").write_text("x")
    (tmp_path / "link.kv").symlink_to(tmp_path / "note.txt")
    (tmp_path / f"{'a' * 32}.kv").write_text("junk")
    [file] = stored_files(tmp_path)
    assert (file.path.name, file.read()) == (f"{'a' * 32}.kv", (None, []))


def test_files_of_others_are_never_removed_to_make_room(tmp_path: Path) -> None:
    """Other programs have files that end in .kv as well (Kivy's are written by hand)."""
    names = ["main.kv", "screen-2.kv", f"{'a' * 32}.kv.kv", f"{'A' * 32}.kv", f"{'a' * 32}-x.kv", ".kv"]
    for name in names:
        (tmp_path / name).write_bytes(b"theirs" * 10_000)
        os.utime(tmp_path / name, (1, 1))
    assert stored_files(tmp_path) == []
    tier = opened(tmp_path, 64 << 10)
    for slot in range(4):
        assert tier.save(save_of(slot, slot), page_of(slot))
    tier.close()
    assert all((tmp_path / name).read_bytes() == b"theirs" * 10_000 for name in names)
