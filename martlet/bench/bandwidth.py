"""How fast this machine reads memory: what a decode on the CPU cannot exceed (read `probe.py` next).

Each thread takes the maximum of its own part of a buffer that no cache holds, in pieces, as NumPy does it: with SIMD and
without the GIL. The best of several rounds counts, since other programs can only slow a round down.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

__all__ = ["read_bandwidth"]

BUFFER_BYTES = 256 << 20  # far beyond the caches of one socket's share
PIECE = 1 << 20  # elements a call: long enough that the interpreter does not count


def read_bandwidth(threads: int, seconds: float = 0.5) -> float:
    """Bytes per second that `threads` threads read together, measured for about `seconds`."""
    parts = np.array_split(np.ones(BUFFER_BYTES // 4, np.float32), threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        stop = time.perf_counter() + seconds
        while True:
            start = time.perf_counter()
            list(pool.map(_read, parts))
            end = time.perf_counter()
            best = max(best, BUFFER_BYTES / (end - start))
            if end >= stop:
                return best


def _read(part: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> float:
    return max(float(part[at : at + PIECE].max()) for at in range(0, len(part), PIECE))
