"""Measures the memory bandwidth, which bounds the decode speed on a CPU (read `probe.py` next).

The cpu backend's thread team reads a buffer larger than any cache, in order and on huge pages, as
weights are stored. The best of several rounds counts: other programs can only slow a round down.
"""

from __future__ import annotations

from martlet.config import cache_dir
from martlet.ops.cpu.backend import CpuBackend

__all__ = ["read_bandwidth"]


def read_bandwidth(threads: int, seconds: float = 0.5) -> float:
    """The total read bandwidth of `threads` threads in bytes/s, measured for about `seconds`."""
    ops = CpuBackend(threads, cache_dir() / "kernels")
    try:
        return ops.read_bandwidth(seconds)
    finally:
        ops.close()
