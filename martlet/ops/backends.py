"""The backends by their names in the settings.

What each can do, asked before it is made, and how to make it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from martlet.config import EngineConfig, cache_dir
from martlet.ops.interface import Abilities, Backend


@dataclass(frozen=True, slots=True)
class _Entry:
    """Modules are imported when they are asked for: each takes a moment."""

    abilities: Callable[[], Abilities]
    make: Callable[[EngineConfig], Backend]


def _cpu_abilities() -> Abilities:
    from martlet.ops.cpu.abilities import CPU_ABILITIES

    return CPU_ABILITIES


def _cpu(config: EngineConfig) -> Backend:
    from martlet.ops.cpu.backend import CpuBackend

    return CpuBackend(threads=config.threads, kernels=cache_dir() / "kernels")


def _reference_abilities() -> Abilities:
    from martlet.ops.reference import ReferenceBackend

    return ReferenceBackend.abilities


def _reference(config: EngineConfig) -> Backend:
    from martlet.ops.reference import ReferenceBackend

    return ReferenceBackend()


def _null_abilities() -> Abilities:
    from martlet.ops.null import NullBackend

    return NullBackend.abilities


def _null(config: EngineConfig) -> Backend:
    from martlet.ops.null import NullBackend

    return NullBackend()


BACKENDS = {
    "cpu": _Entry(_cpu_abilities, _cpu),
    "reference": _Entry(_reference_abilities, _reference),
    "null": _Entry(_null_abilities, _null),
}


def abilities_of(config: EngineConfig) -> Abilities:
    """What the backend that the settings name can do; with `oracle`, and the reference as well."""
    abilities = BACKENDS[config.backend].abilities()
    if config.oracle:
        from martlet.ops.oracle import oracle_abilities

        return oracle_abilities(abilities, _reference_abilities())
    return abilities


def make_backend(config: EngineConfig) -> Backend:
    """The backend that the settings name.

    With `oracle`, checked against the reference at every operation.
    """
    ops = BACKENDS[config.backend].make(config)
    if config.oracle:
        from martlet.ops.oracle import OracleBackend

        return OracleBackend(ops, _reference(config))
    return ops
