"""What a branch of a tree of guesses has on its page beside its own rows is, to the bit, what the sequence's page has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.interface import Rows, StepInputs, StepLimits
from martlet.ops.reference import ReferenceBackend

G, PAGE = 3, 32
BACKENDS: dict[str, Callable[[Path], Any]] = {
    "reference": lambda folder: ReferenceBackend(),
    "cpu": lambda folder: CpuBackend(2, folder),
}


@pytest.mark.parametrize("head_dim", [16, 40, 64])
@pytest.mark.parametrize("dtype", ["f16", "f32", "q8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mirrored_pages_are_equal(kernel_folder: Path, backend: str, dtype: str, head_dim: int) -> None:
    """Positions 0 … 18 by an earlier step, 19 … 21 by rows that are mirrored while others are written elsewhere."""
    ops = BACKENDS[backend](kernel_folder)
    cache, width = ops.kv_cache(4, PAGE, G, head_dim, dtype), G * head_dim

    def step() -> Any:
        both = ops.empty(Rows.TOKENS, 2 * width)
        ops.given(both)
        ops.kv_write(ops.columns(both, 0, width), ops.columns(both, width, 2 * width), cache)
        return both

    program, rng = ops.capture(step, StepLimits(32, 1, 1, 1, max_branches=1)), np.random.default_rng(head_dim)

    def run(slots: list[int], mirrors: list[tuple[int, int]]) -> None:
        n, table = len(slots), np.zeros((1, 1), np.int32)
        given = (rng.standard_normal((n, 2 * width)) * 10.0 ** rng.integers(-3, 6, (n, 1))).astype(np.float32)
        places, starts, twice = np.zeros(n, np.int32), np.array([0, n], np.int32), np.array(mirrors).reshape(-1, 2)
        to = np.array(slots, np.int32)
        more: dict[str, Any] = {
            "mirror_rows": twice[:, 0].astype(np.int32),
            "mirror_slots": twice[:, 1].astype(np.int32),
        }
        program.run(StepInputs(places, places, to, starts, table, places[:0], given=given, **more))

    run([2 * PAGE + place for place in range(19)], [])
    copies = [(-1 - (2 * PAGE + place), PAGE + place) for place in range(19)]
    run(
        [3 * PAGE + 7, *(2 * PAGE + place for place in (19, 20, 21))],
        [*copies, (1, PAGE + 19), (2, PAGE + 20), (3, PAGE + 21)],
    )
    pages = np.zeros((4, ops.page_bytes(cache)), np.uint8)
    for page, out in enumerate(pages):
        ops.read_page(cache, page, out)
    assert np.array_equal(pages[1], pages[2])
    assert not np.array_equal(pages[1], pages[3])
    assert pages[3].any()
    assert not pages[0].any()
    ops.close()
