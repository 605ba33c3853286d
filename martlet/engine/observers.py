"""Who watches an engine, by its settings: the trace and the capsule (read `trace.py` and
`capsule.py` next).
"""

from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from martlet.config import EngineConfig
from martlet.engine.memory import MemoryPlan
from martlet.errors import RequestError
from martlet.formats.checkpoint import Checkpoint
from martlet.machine import processor_name
from martlet.metrics import Observer
from martlet.observe.capsule import FORMAT, CapsuleWriter
from martlet.observe.trace import TraceWriter
from martlet.ops.interface import Backend

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
    """Make the observers of the settings; `resources` closes them.

    Raises RequestError for a file that cannot be written.
    """
    made: list[Observer] = []
    for name, path in (("trace", config.trace), ("capsule", config.capsule)):
        if path is None:
            continue
        try:
            _check_target(name, Path(path), config)
            if name == "trace":
                observer: Observer = TraceWriter(path, f"martlet: {Path(config.model).name}")
            else:
                observer = CapsuleWriter(path, capsule_header(config, plan, checkpoint, ops))
        except OSError as error:
            raise RequestError(
                f"{name} is {path}, which cannot be written ({error.strerror}): give a file in a folder that can be.",
                param=name,
            ) from error
        resources.callback(observer.close)
        made.append(observer)
    return made


def _check_target(name: str, path: Path, config: EngineConfig) -> None:
    """A trace is written as it comes, also into a device or a pipe; a capsule replaces the file."""
    if not path.exists():
        return
    if name == "capsule" and not path.is_file():
        raise RequestError(f"capsule is {path}, which is no regular file: give the path of a file.", param=name)
    others = {"the model": config.model, "the trace": config.trace if name == "capsule" else None}
    for what, other in others.items():
        if other is not None and Path(other).exists() and path.samefile(other):
            raise RequestError(f"{name} is {path}, which is {what} as well: give another file.", param=name)


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
