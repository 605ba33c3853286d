"""Where weights, pages and adapters lie, and the packing of a file's tensors by the team (kernels:
`pack.py`).

A weight is a stack of parts, one for each run of tensors with the same block type. A type that has
no kernel of its own is unpacked to float32, which loses nothing and costs memory; `docs/formats.md`
has the table.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from martlet.errors import UnsupportedError
from martlet.kv_types import KV_TYPES
from martlet.ops.cpu.kernels.fields import MAX_HEAD_DIM, PACK, PAGE
from martlet.ops.cpu.kernels.layout import BLOCK, GROUP, LAYOUTS, FloatLayout, Layout, group_bytes
from martlet.ops.cpu.program import Region
from martlet.ops.cpu.threads import aligned
from martlet.ops.kv_pages import by_page
from martlet.quant.table import BlockType, RawTensor

ARENA_BYTES = 64 << 20
SLOT_WORDS = 3  # of a slot in a LoRA table: addresses of a and bᵀ, ranks (`kernels/lora.py`)
F32 = NDArray[np.float32]
PackJob = tuple[str, list[int]]  # a kernel's name and its record's own fields


class Arena:
    """Memory for weights or KV pages, in large mappings that are handed out front to back.

    `huge` puts it on huge pages where the system has them. Not KV pages: a huge page is cleared
    when it is first touched, and the arrays of all layers come to new ones in the same step, which
    would then take a tenth of a second.
    """

    def __init__(self, *, huge: bool) -> None:
        self._advice = mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE
        self._maps: list[mmap.mmap] = []
        self._rest: NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """Zeroed bytes, uint8 [n_bytes], that start on a cache line."""
        if n_bytes > self._rest.size:
            # private memory: what is shared cannot lie on huge pages
            mapping = mmap.mmap(-1, max(n_bytes, ARENA_BYTES), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(AttributeError, OSError):
                mapping.madvise(self._advice)
            self._maps.append(mapping)
            self._rest = np.frombuffer(mapping, np.uint8)
        taken, self._rest = self._rest[:n_bytes], self._rest[(n_bytes + 63) // 64 * 64 :]
        return taken


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one layout: `n` of them, in groups at `data`."""

    layout: Layout
    n: int
    data: NDArray[np.uint8]

    @property
    def address(self) -> int:
        """Where the first group starts."""
        return int(self.data.ctypes.data)


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """A packed matrix [n, k]."""

    n: int
    k: int
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies."""
        return sum(part.data.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class CpuCache:
    """Key and value pages of one layer (`attention.py` draws them)."""

    n_kv_heads: int
    head_dim: int
    dtype: str
    keys: NDArray[np.uint8]
    values: NDArray[np.uint8]
    n_pages: int
    recent: tuple[CpuCache, ...] = ()  # of q4: float16 pages, the kept and the passing ones
    # How many of these are kept, and where both begin (`kv_q4.py`).
    recent_places: NDArray[np.int64] | None = None

    @staticmethod
    def zeros(arena: Arena, n_pages: int, n_kv_heads: int, head_dim: int, dtype: str) -> CpuCache:
        """Zeroed pages, which take memory once written. UnsupportedError for too large heads."""
        kv_type = KV_TYPES[dtype]
        if head_dim > MAX_HEAD_DIM:
            raise UnsupportedError(f"heads of {head_dim} dimensions; the cpu backend takes up to {MAX_HEAD_DIM}")
        count = n_pages * n_kv_heads
        keys, values = (arena.take(count * size(PAGE, head_dim)) for size in (kv_type.key_bytes, kv_type.value_bytes))
        return CpuCache(n_kv_heads, head_dim, dtype, keys, values, n_pages)

    @property
    def addresses(self) -> list[int]:
        """Where keys and values start."""
        return [int(self.keys.ctypes.data), int(self.values.ctypes.data)]

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of one head's keys and of its values in a page."""
        pages = self.n_pages * self.n_kv_heads
        return [self.keys.size // pages, self.values.size // pages]

    @property
    def parts(self) -> tuple[NDArray[np.uint8], ...]:
        """The bytes of each head's keys and values, uint8 [n_pages, bytes]."""
        heads = (array.reshape(self.n_kv_heads, -1) for array in (self.keys, self.values))
        return tuple(by_page(head, self.n_pages) for array in heads for head in array)

    @property
    def region(self) -> Region:
        """What reading or writing its pages touches."""
        return Region(self.addresses[0], 0, 1)

    def with_recent(self, kept: CpuCache, passing: CpuCache) -> CpuCache:
        """The cache with its recent pages."""
        places = np.array([kept.n_pages, *kept.addresses, *passing.addresses], np.int64)
        return replace(self, recent=(kept, passing), recent_places=places)

    @property
    def recent_address(self) -> int:
        """Address of the places of its recent pages; 0 without any."""
        return 0 if self.recent_places is None else int(self.recent_places.ctypes.data)

    @property
    def recent_regions(self) -> list[Region]:
        """What reading or writing its recent pages touches."""
        return [cache.region for cache in self.recent]


@dataclass(slots=True, eq=False)
class LoraTable:
    """Updates of a product [rows, k] → [rows, n], one a slot."""

    k: int
    n: int
    words: NDArray[np.int64] = field(repr=False)
    held: dict[int, tuple[F32, F32]] = field(default_factory=dict, repr=False)

    @classmethod
    def empty(cls, n_slots: int, k: int, n: int) -> LoraTable:
        """A table whose slots have no update."""
        return cls(k, n, aligned(n_slots * SLOT_WORDS * 8, np.int64))

    def put(self, slot: int, a: F32 | None, b: F32 | None) -> None:
        """The update of a slot, a [r, k] and b [n, r]; None for none."""
        entry = self.words[slot * SLOT_WORDS : (slot + 1) * SLOT_WORDS]
        if a is None or b is None:
            entry[:] = 0
            self.held.pop(slot, None)
            return
        kept = _padded(a, self.k), _padded(b.T, self.n)
        entry[:] = kept[0].ctypes.data, kept[1].ctypes.data, len(kept[0])
        self.held[slot] = kept

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)


def pack_weight(tensors: Sequence[RawTensor], arena: Arena, run: Callable[[list[PackJob]], None]) -> CpuWeight:
    """Pack matrices [n_i, k], stacked by rows. `run` runs packing kernels with all threads."""
    k = tensors[0].shape[-1]
    assert all(len(t.shape) == 2 and t.shape[1] == k for t in tensors)
    tensors = [_with_kernel(t) for t in tensors]
    parts: list[Part] = []
    for block_type, same in groupby(tensors, key=lambda t: t.type):
        parts += _pack_run(LAYOUTS[block_type], list(same), arena, run)
    return CpuWeight(sum(p.n for p in parts), k, tuple(parts))


def _with_kernel(tensor: RawTensor) -> RawTensor:
    """The tensor itself, or as float32 where its type has no kernel or its rows no whole blocks."""
    layout = LAYOUTS.get(tensor.type)
    if layout is not None and (isinstance(layout, FloatLayout) or tensor.shape[-1] % BLOCK == 0):
        return tensor
    from martlet.quant.ggml import decode

    values = np.ascontiguousarray(decode(tensor), np.float32)
    return RawTensor(tensor.name, tensor.shape, BlockType.F32, values.reshape(-1).view(np.uint8))


def _pack_run(
    layout: Layout, tensors: list[RawTensor], arena: Arena, run: Callable[[list[PackJob]], None]
) -> list[Part]:
    """Pack tensors of one layout: into one part where all but the last fill whole groups."""
    if any(t.shape[0] % GROUP for t in tensors[:-1]):
        return [part for t in tensors for part in _pack_run(layout, [t], arena, run)]
    k, size = tensors[0].shape[1], group_bytes(layout, tensors[0].shape[1])
    n = sum(t.shape[0] for t in tensors)
    data = arena.take((n + GROUP - 1) // GROUP * size)
    jobs: list[PackJob] = []
    keep: list[NDArray[np.uint8]] = []  # copies that must outlive the jobs
    group = 0
    for tensor in tensors:
        rows = tensor.rows()
        if not rows.flags.c_contiguous:
            raise UnsupportedError(f"{tensor.name}: rows of a tensor must be contiguous")
        full, rest = divmod(tensor.shape[0], GROUP)
        for count, source in ((full, rows), (min(rest, 1), rows[full * GROUP :])):
            if count == 0:
                continue
            if count and source is not rows:
                source = np.concatenate([source, np.zeros((GROUP - rest, rows.shape[1]), np.uint8)])
            keep.append(source)
            target = data.ctypes.data + group * size
            args = PACK(
                SRC=source.ctypes.data,
                SRC_ROW_BYTES=rows.shape[1],
                DST=target,
                GROUP_BYTES=size,
                N_GROUPS=count,
                N_COLUMNS=k,
            )
            jobs.append((f"pack_{layout.name}", args))
            group += count
    run(jobs)
    return [Part(layout, n, data)]


def _padded(values: Any, width: int) -> F32:
    """[r, width] with zeros up to a multiple of 4 rows and of 16 columns."""
    rows, columns = -(-len(values) // 4) * 4, -(-width // 16) * 16
    out: F32 = aligned(rows * columns * 4, np.float32).reshape(rows, columns)
    out[: len(values), :width] = values
    return out
