"""The layout of a file of KV pages: packing and checked unpacking of its headers (read
`disk_file.py` next).

    0                 file header: magic, length and checksum of a JSON object: the owner
    4,096             a table of MAX_SLOTS slot headers; a hole where a slot was never used
    first_slot        slots, each as large as a page of all layers, rounded up to whole disk blocks

All numbers are little-endian. A file is untrusted, and may have been cut off by a crash or by a
full disk at any byte: what is not exactly as expected is no record (fields: `docs/formats.md`).
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.types import SlotId

FILE_HEADER_BYTES = 4096
BLOCK = 4096  # of a disk
MAX_SLOTS = 1 << 16
KEY_BYTES = 32
MAX_NAME = 200
VERSION = 1
MAX_PAGE_SIZE = 1 << 12
MAX_PAGE_BYTES = 1 << 32
MAGIC = b"martlet\x01"  # of the file
FILE = struct.Struct("<8sIII")  # magic, version, length of the JSON object, its crc32
# magic, crc32 of what follows, crc32 of the page, ids, use number, key, parent
SLOT = struct.Struct("<4sIIIQ32s32s")
SLOT_MAGIC = b"page"
CHECKED_FROM = 8  # the header's own checksum covers all bytes after it

U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose pages a file holds; pages are only ever used where all of it is the same."""

    model: str = field(compare=False)  # its name, for people; up to MAX_NAME characters
    fingerprint: str  # of all that a page's bits depend on, but the tokens
    kv_dtype: str
    page_size: int
    page_bytes: int  # of all layers

    def pack(self) -> bytes:
        """The file header."""
        text = json.dumps(asdict(self)).encode()
        header = FILE.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text
        assert len(header) <= FILE_HEADER_BYTES
        return header.ljust(FILE_HEADER_BYTES, b"\0")


@dataclass(frozen=True, slots=True)
class Record:
    """What a slot says it holds: the page of `ids` after the tokens that `parent` stands for."""

    slot: SlotId
    key: bytes
    parent: bytes
    ids: tuple[int, ...]
    use: int  # the larger, the later it was written
    checksum: int  # of the page

    def pack(self, layout: Layout) -> bytes:
        """The slot header."""
        ids = np.array(self.ids, "<u4").tobytes()
        head = SLOT.pack(SLOT_MAGIC, 0, self.checksum, len(self.ids), self.use, self.key, self.parent)
        body = (head + ids).ljust(layout.header_bytes, b"\0")[CHECKED_FROM:]
        return SLOT_MAGIC + struct.pack("<I", zlib.crc32(body)) + body


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie, by the size of a page."""

    page_size: int
    page_bytes: int

    @property
    def header_bytes(self) -> int:
        """Bytes of a slot header."""
        return -(-(SLOT.size + 4 * self.page_size) // 64) * 64

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return max(1, -(-self.page_bytes // BLOCK)) * BLOCK

    @property
    def first_slot(self) -> int:
        """Where slot 0 starts."""
        return FILE_HEADER_BYTES + -(-MAX_SLOTS * self.header_bytes // BLOCK) * BLOCK

    def header_at(self, slot: int) -> int:
        """Where a slot's header starts."""
        return FILE_HEADER_BYTES + slot * self.header_bytes

    def page_at(self, slot: int) -> int:
        """Where a slot's page starts."""
        return self.first_slot + slot * self.slot_bytes

    def slots_in(self, file_bytes: int) -> int:
        """How many slots a file of this size can hold."""
        return max(0, min(MAX_SLOTS, (file_bytes - self.first_slot) // self.slot_bytes))

    @property
    def least_bytes(self) -> int:
        """The smallest budget on disk that a slot fits."""
        return FILE_HEADER_BYTES + BLOCK + self.slot_bytes + self.header_bytes

    def slots_within(self, most_bytes: int) -> int:
        """How many slots fit a budget on disk, where the table takes the blocks in use only."""
        room = most_bytes - FILE_HEADER_BYTES - BLOCK
        return max(0, min(MAX_SLOTS, room // (self.slot_bytes + self.header_bytes)))


def read_owner(header: bytes) -> Owner | None:
    """Whose file it is; None if this is no whole file header of this version."""
    if len(header) < FILE.size:
        return None
    magic, version, length, checksum = FILE.unpack_from(header)
    text = header[FILE.size : FILE.size + length]
    if magic != MAGIC or version != VERSION or len(text) != length or zlib.crc32(text) != checksum:
        return None
    try:
        return _owner(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _owner(fields: Any) -> Owner | None:
    kinds = {"model": str, "fingerprint": str, "kv_dtype": str, "page_size": int, "page_bytes": int}
    if not isinstance(fields, dict) or {name: type(value) for name, value in fields.items()} != kinds:
        return None
    owner = Owner(**fields)
    sane = 1 <= owner.page_size <= MAX_PAGE_SIZE and 0 <= owner.page_bytes <= MAX_PAGE_BYTES
    return owner if sane else None


def read_table(table: bytes, layout: Layout) -> list[Record]:
    """The whole records of a table of slot headers, in the order in which they were written."""
    size = layout.header_bytes
    entries = [
        _record(table[at : at + size], SlotId(at // size), layout) for at in range(0, len(table) - size + 1, size)
    ]
    return sorted((record for record in entries if record is not None), key=lambda record: record.use)


def _record(header: bytes, slot: SlotId, layout: Layout) -> Record | None:
    if not header.startswith(SLOT_MAGIC):  # a hole, mostly
        return None
    _, own_checksum, checksum, n_ids, use, key, parent = SLOT.unpack_from(header)
    if own_checksum != zlib.crc32(header[CHECKED_FROM:]) or not 1 <= n_ids <= layout.page_size:
        return None
    ids = np.frombuffer(header, "<u4", n_ids, SLOT.size)
    return Record(slot, key, parent, tuple(ids.tolist()), use, checksum)
