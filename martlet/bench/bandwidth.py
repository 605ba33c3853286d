"""How fast this machine reads memory: what a decode on the CPU cannot exceed (read `probe.py` next).

The cpu backend's own team reads a buffer that no cache holds, on huge pages and front to back, which is how weights lie.
The best of several rounds counts, since other programs can only slow a round down.
"""

from __future__ import annotations

from martlet.config import cache_dir
from martlet.ops.cpu.backend import CpuBackend

__all__ = ["read_bandwidth"]


def read_bandwidth(threads: int, seconds: float = 0.5) -> float:
    """Bytes per second that `threads` threads read together, measured for about `seconds`."""
    ops = CpuBackend(threads, cache_dir() / "kernels")
    try:
        return ops.read_bandwidth(seconds)
    finally:
        ops.close()
