"""Whole pages of a KV cache as bytes, for backends whose pages lie in NumPy arrays.

Read `interface.py` next.

A cache is some arrays (keys, values, scales), each seen here as bytes [n_pages, size]: a page is
one row of each.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def by_page(array: NDArray[Any], n_pages: int) -> Bytes:
    """The bytes [n_pages, size] of a contiguous array whose first dimension runs over pages.

    A view.
    """
    view: Bytes = array.reshape(n_pages, -1).view(np.uint8)
    return view


def page_bytes(parts: Sequence[Bytes]) -> int:
    """Bytes of one page."""
    return sum(part.shape[1] for part in parts)


def copy_page(parts: Sequence[Bytes], source: int, target: int) -> None:
    """Make page `target` equal to page `source`."""
    for part in parts:
        part[target] = part[source]


def read_page(parts: Sequence[Bytes], page: int, out: Bytes) -> None:
    """Copy a page to `out`, its parts one behind the other."""
    start = 0
    for part in parts:
        stop = start + part.shape[1]
        out[start:stop] = part[page]
        start = stop
    assert start == out.size


def write_page(parts: Sequence[Bytes], page: int, data: Bytes) -> None:
    """Copy what `read_page` wrote back to a page."""
    start = 0
    for part in parts:
        stop = start + part.shape[1]
        part[page] = data[start:stop]
        start = stop
    assert start == data.size
