"""Who watches an engine, by its settings: the trace and the capsule (read `trace.py` and `capsule.py` next)."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from martlet.config import EngineConfig
from martlet.engine.capsule import FORMAT, CapsuleWriter
from martlet.engine.plan import MemoryPlan
from martlet.engine.trace import TraceWriter
from martlet.formats.checkpoint import Checkpoint
from martlet.machine import processor_name
from martlet.metrics import Observer
from martlet.ops.interface import Backend

__all__ = ["capsule_header", "engine_version", "observers"]

_NOT_KEPT = (
    "model",
    "trace",
    "capsule",
    "offline",
    "kv_memory",
    "max_context",
)  # of no effect on a replay, or said below


def observers(
    config: EngineConfig, plan: MemoryPlan, checkpoint: Checkpoint, ops: Backend, resources: ExitStack
) -> list[Observer]:
    """Make those that the settings ask for; `resources` closes them."""
    found: list[Observer] = []
    if config.trace is not None:
        found.append(TraceWriter(config.trace, f"martlet: {Path(config.model).name}"))
    if config.capsule is not None:
        found.append(CapsuleWriter(config.capsule, capsule_header(config, plan, checkpoint, ops)))
    for observer in found:
        resources.callback(observer.close)
    return found


def capsule_header(config: EngineConfig, plan: MemoryPlan, checkpoint: Checkpoint, ops: Backend) -> dict[str, Any]:
    """What the outcome of a run depends on, beside its requests and their schedule."""
    settings = {setting.name: setting.value for setting in config.settings() if setting.name not in _NOT_KEPT}
    path = Path(config.model)
    return {
        "martlet_capsule": FORMAT,
        "version": engine_version(),
        "model": {"file": path.name, "path": str(path.absolute()), "fingerprint": checkpoint.fingerprint()},
        "machine": {"processor": processor_name(), "kernels": ops.fingerprint()},
        "settings": {**settings, "max_context": plan.context, "kv_memory": plan.kv},
    }


def engine_version() -> str:
    """The version that is installed."""
    try:
        return version("martlet")
    except PackageNotFoundError:
        return "not installed"
