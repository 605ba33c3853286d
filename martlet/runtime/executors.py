"""Who runs a plan: one of the four plug-in points (read `rank.py` next).

A plan is integers only, a few hundred bytes, so that it can be sent to another process as it is. `LocalExecutor` runs
it in this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from martlet.models.lora import Adapter
from martlet.types import PageId, StepPlan, StepResult

if TYPE_CHECKING:
    from martlet.runtime.rank import Rank

__all__ = ["Executor", "LocalExecutor"]


class Executor(Protocol):
    """Computes what a plan says and samples."""

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step."""

    def embed(self, ids: Sequence[int], pages: tuple[PageId, ...]) -> NDArray[np.float32]:
        """Return the mean over the prompt of what the final norm gives, [C]; `pages` are lent for the call."""

    def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter, between two steps."""

    def remove_adapter(self, digest: str) -> None:
        """Let go of an adapter that no sequence uses."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class LocalExecutor:
    """Runs every plan in the calling thread."""

    def __init__(self, runner: Rank) -> None:
        self._runner = runner

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        return self._runner.run(plan)

    def embed(self, ids: Sequence[int], pages: tuple[PageId, ...]) -> NDArray[np.float32]:
        """Return the mean over the prompt of what the final norm gives, [C]."""
        return self._runner.embed(ids, pages)

    def add_adapter(self, adapter: Adapter) -> None:
        """Load an adapter."""
        self._runner.add_adapter(adapter)

    def remove_adapter(self, digest: str) -> None:
        """Let go of an adapter."""
        self._runner.remove_adapter(digest)

    def close(self) -> None:
        """Free everything."""
        self._runner.close()
