"""The exhaustive form of the matrix takes minutes, and runs only where it is asked for by its
marker.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "exhaustive" in (config.option.markexpr or ""):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
