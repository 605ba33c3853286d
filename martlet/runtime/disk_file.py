"""The second tier's file: KV pages on disk that outlive the process (layout: `disk_format.py`; read
`page_moves.py` next).

A folder has a file for each fingerprint (model, precision, kernels), and all of them together stay
within a number of bytes. A page is written first, its header after it, by plain writes: what a
killed process leaves behind is whole, or its checksum says that it is not. Nothing that a disk does
reaches the caller: a failed save or load is an answer, and the page is computed again.

It reads and writes, where a mapping would be no faster (a page of 0.7 MB: 41 µs against 45),
because what a disk cannot give or take is an error for the one and a signal that ends the process
for the other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

from martlet.runtime.disk_format import FILE_HEADER_BYTES, Layout, Owner, Record, read_owner, read_table
from martlet.types import Load, Save, SlotId

SUFFIX = ".kv"
# what may be removed: a folder can hold others' files, also *.kv
NAME = re.compile(r"[0-9a-f]{16,}(-[2-9])?\.kv")
COPIES = 8  # files of one fingerprint: each process needs its own
MAX_FAILURES = 3  # of the disk in a row, after which it is left alone
FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def open_tier(folder: Path, most_bytes: int, owner: Owner) -> DiskFile | None:
    """The file for `owner` in `folder`, which is made if need be; None, with a warning, where there
    can be none.

    A file that another process uses is left to it: the next of that fingerprint is taken.
    """
    try:
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True)
        for copy in range(COPIES):
            name = owner.fingerprint + (f"-{copy + 1}" if copy else "") + SUFFIX
            descriptor = _open_locked(folder / name)
            if descriptor is None:
                continue
            try:
                return DiskFile(folder / name, descriptor, most_bytes, owner)
            except BaseException:
                os.close(descriptor)
                raise
    except (OSError, AttributeError, ImportError) as error:  # the last two: a system without such calls
        _warn(f"KV pages are not kept on disk: {error}")
        return None
    _warn(f"KV pages are not kept on disk: {COPIES} processes use {folder} for this model already.")
    return None


class DiskFile:
    """An open file with slots 0 … n_slots - 1. `save` and `load` return whether it worked and never
    raise OSError.
    """

    def __init__(self, path: Path, descriptor: int, most_bytes: int, owner: Owner) -> None:
        self.path = path
        self.layout = Layout(owner.page_size, owner.page_bytes)
        self.n_slots = self.layout.slots_within(most_bytes)
        self._file: int | None = descriptor
        self._most_bytes = most_bytes
        if read_owner(os.pread(descriptor, FILE_HEADER_BYTES, 0)) != owner:
            os.ftruncate(descriptor, 0)  # it is new, or damaged
            _write(descriptor, owner.pack(), 0)
        size = os.fstat(descriptor).st_size
        if size > self.layout.page_at(self.n_slots):  # the budget was larger
            size = self.layout.page_at(self.n_slots)
            os.ftruncate(descriptor, size)
        os.utime(descriptor)
        self._n_used = self.layout.slots_in(size)  # slots that the file has room for
        self._failures = 0
        self._warned = False
        self._records = {record.slot: record for record in self._read_records()}
        self._use = max((record.use for record in self._records.values()), default=0)

    @property
    def n_kept(self) -> int:
        """Slots that hold a page, as far as their headers say."""
        return len(self._records)

    def records(self) -> list[Record]:
        """What the slots hold, in the order in which they were written. The pages themselves are
        checked by `load`.
        """
        return sorted(self._records.values(), key=lambda record: record.use)

    def save(self, save: Save, page: memoryview) -> bool:
        """Write a page and what identifies it; the slot's old content is gone in any case."""
        self._records.pop(save.slot, None)
        if self._file is None or not 0 <= save.slot < self.n_slots:
            return False
        if save.slot >= self._n_used and not self._make_room(save.slot):
            return False
        record = Record(save.slot, save.key, save.parent, save.ids, self._use + 1, zlib.crc32(page))
        try:
            _write(self._file, page, self.layout.page_at(save.slot))
            if save.slot >= self._n_used:
                # to the end of the slot
                os.ftruncate(self._file, self.layout.page_at(save.slot + 1))
                self._n_used = save.slot + 1
            _write(self._file, record.pack(self.layout), self.layout.header_at(save.slot))
        except OSError as error:
            self._failed(error, "writing")
            return False
        self._failures = 0
        self._use += 1
        self._records[save.slot] = record
        return True

    def load(self, load: Load, out: memoryview) -> bool:
        """Read a slot's page into `out`; False if it is cut, not `load.key`'s, or unreadable."""
        record = self._records.get(load.slot)
        if self._file is None or record is None or record.key != load.key:
            return False
        try:
            done = os.preadv(self._file, [out], self.layout.page_at(load.slot)) if out.nbytes else 0
        except OSError as error:
            self._failed(error, "reading")
            return False
        self._failures = 0
        if done != out.nbytes or zlib.crc32(out) != record.checksum:
            del self._records[load.slot]
            self._warn_once(f"{self.path} has a damaged page; what it held is computed again.")
            return False
        return True

    def forget(self, slot: SlotId) -> None:
        """Make a slot hold nothing."""
        if self._file is not None and self._records.pop(slot, None) is not None:
            with contextlib.suppress(OSError):
                _write(self._file, bytes(self.layout.header_bytes), self.layout.header_at(slot))

    def close(self) -> None:
        """Let go of the file and its lock. Idempotent."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file)
                os.close(self._file)
            self._file = None

    def _read_records(self) -> list[Record]:
        assert self._file is not None
        return read_table(os.pread(self._file, self._n_used * self.layout.header_bytes, FILE_HEADER_BYTES), self.layout)

    def _make_room(self, slot: SlotId) -> bool:
        """Whether the file may grow by this slot: files not used for longer make room."""
        assert self._file is not None
        try:
            growth = self.layout.page_at(slot + 1) - self.layout.page_at(self._n_used)
            need = os.fstat(self._file).st_blocks * 512 + growth
            others = [file for file in stored_files(self.path.parent) if file.path != self.path]
            total = need + sum(file.disk_bytes for file in others)
            for file in sorted(others, key=lambda file: file.last_use_s):
                if total <= self._most_bytes:
                    break
                if remove_file(file.path):
                    total -= file.disk_bytes
        except OSError as error:
            self._failed(error, "listing the folder of")
            return False
        return total <= self._most_bytes

    def _failed(self, error: OSError, doing: str) -> None:
        """A disk that is full keeps what it has; one that fails again and again is left alone."""
        if error.errno in FULL:
            self._warn_once(f"The disk has no room for more KV pages ({error.strerror}): {self.path} does not grow.")
            self.n_slots = min(self.n_slots, self._n_used)
            return
        self._failures += 1
        self._warn_once(f"{doing.capitalize()} {self.path} failed ({error.strerror}): KV pages are computed again.")
        if self._failures >= MAX_FAILURES:
            self.close()

    def _warn_once(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            _warn(message)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a folder, as it can be seen from outside."""

    path: Path
    disk_bytes: int
    last_use_s: float  # of the epoch

    def read(self) -> tuple[Owner | None, list[Record]]:
        """Whose pages it says it holds; no owner: damaged, or of another version."""
        with open(self.path, "rb") as file:
            owner = read_owner(file.read(FILE_HEADER_BYTES))
            if owner is None:
                return None, []
            layout = Layout(owner.page_size, owner.page_bytes)
            n_slots = layout.slots_in(os.fstat(file.fileno()).st_size)
            file.seek(FILE_HEADER_BYTES)
            return owner, read_table(file.read(n_slots * layout.header_bytes), layout)

    @property
    def in_use(self) -> bool:
        """Whether a process has it open."""
        try:
            descriptor = _open_locked(self.path, create=False)
        except FileNotFoundError:
            return False
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None


def stored_files(folder: Path) -> list[StoredFile]:
    """The files of KV pages in a folder, if it exists. Raises OSError if it is unreadable."""
    files: list[StoredFile] = []
    if not folder.exists():
        return files
    with os.scandir(folder) as entries:
        for entry in entries:
            if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    status = entry.stat(follow_symlinks=False)
                    files.append(StoredFile(Path(entry.path), status.st_blocks * 512, status.st_mtime))
    return sorted(files, key=lambda file: file.path)


def remove_file(path: Path) -> bool:
    """Remove a file unless a process uses it; return whether it is gone."""
    try:
        descriptor = _open_locked(path, create=False)
    except FileNotFoundError:
        return True
    if descriptor is None:
        return False
    try:
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
    return True


def _open_locked(path: Path, *, create: bool = True) -> int | None:
    """Open a file that nobody else may read, and lock it; None if another process has it."""
    import fcntl

    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(descriptor, 0o600)
            if _is_at(status, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was removed before we had the lock


def _is_at(status: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(status, os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of it; a disk that takes a part only says why at the next attempt."""
    rest = memoryview(data).cast("B")
    while rest:
        done = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[done:], offset + done


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
