"""`martlet doctor`, `version` and `warmup`: the machine, the kernels (read `machine.py` next)."""

import json
import platform
import time
from argparse import ArgumentParser, Namespace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from martlet.commands.arguments import add_engine_options, open_llm
from martlet.config import cache_dir, environment_isa, resolve_config
from martlet.machine import processor_name, read_machine
from martlet.saved_measurements import load_notes


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: Namespace) -> int:
    """Print a line for each fact, or one JSON object."""
    facts = _facts()
    if args.json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            print(f"{name:<16} {value}")
    return 0


def add_version_arguments(parser: ArgumentParser) -> None:
    """The command has no options."""


def execute_version(args: Namespace) -> int:
    """Print the version that is installed."""
    installed = _version("martlet")
    print("martlet (not installed: run from its source)" if installed == "not installed" else f"martlet {installed}")
    return 0


def add_warmup_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="the model whose kernels are compiled")
    add_engine_options(parser)


def execute_warmup(args: Namespace) -> int:
    """Load a model, which compiles its kernels, and print how long each phase took."""
    start = time.perf_counter()
    with open_llm(args) as llm:
        for phase in llm.start_timeline:
            print(f"{phase.name:<8} {phase.seconds:8.3f} s")
    print(f"ready: {time.perf_counter() - start:.1f} s")
    return 0


def _facts() -> dict[str, str]:
    from martlet.ops.cpu.simd.isa import best_isa, chosen_isa, host_features

    limits = read_machine()
    config = resolve_config({"model": "none"})
    threads = next(setting for setting in config.settings() if setting.name == "threads")
    features = sorted(name for name, on in host_features().items() if on)
    quota = f"{limits.cpu_quota:g} CPUs ({limits.quota_source})" if limits.cpu_quota else "none"
    available = limits.memory_available
    memory = "unknown" if available is None else f"{available / (1 << 30):.1f} GiB available ({limits.memory_source})"
    measured = {key: value for key, value in load_notes("bandwidth").items() if isinstance(value, float)}
    return {
        "martlet": _version("martlet"),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "libraries": ", ".join(f"{name} {_version(name)}" for name in ("numpy", "numba", "llvmlite")),
        "device": "cpu (no other is looked for)",
        "processor": processor_name(),
        "kernels for": chosen_isa().name + (f" (MARTLET_ISA; best: {best_isa().name})" if environment_isa() else ""),
        "SIMD features": ", ".join(f for f in features if f.startswith(("avx", "f16c", "fma", "sse4", "neon", "dot"))),
        "cores": f"{limits.physical_cores} physical, {limits.affinity_cpus} CPUs in the affinity mask",
        "CPU quota": quota,
        "threads": f"{threads.value} ({threads.origin}: {threads.note})",
        "memory": memory,
        "memory speed": ", ".join(f"{v / 1e9:.1f} GB/s ({k} threads)" for k, v in measured.items())
        or "not measured yet",
        "cache folder": f"{cache_dir()} ({_state(cache_dir())})",
        "kernel cache": _size(cache_dir() / "kernels"),
        "models": ", ".join(sorted(p.name for p in (cache_dir() / "models").glob("[!.]*"))) or "none",
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _state(folder: Path) -> str:
    import os

    if not folder.exists():
        return "will be made"
    return "writable" if os.access(folder, os.W_OK) else "not writable: kernels compile at every start"


def _size(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    return (
        f"{len(files)} files, {total / (1 << 20):.1f} MiB"
        if files
        else "empty: the first run compiles, or `martlet warmup`"
    )
