"""What this machine lets the process use: cores, CPU quota, memory. Read `config.py` next.

Every number is read from files under `root`, so a test can describe any machine with a folder of
small files. Control groups: version 2 has one tree (cpu.max, memory.max), version 1 a tree a
controller (cpu.cfs_quota_us, memory.limit_in_bytes). A limit of any ancestor holds for the group,
so all of them are read. Source: the Linux kernel's Documentation/admin-guide/cgroup-v2.rst and
cgroup-v1/.
"""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What the process may use; None where the machine does not say or sets no limit."""

    affinity_cpus: int
    physical_cores: int  # distinct cores among the CPUs of the affinity mask
    cpu_quota: float | None  # CPUs' worth of time that the control group may use
    quota_source: str | None
    memory_available: int | None  # bytes: the least that the system and the control group have left
    memory_source: str | None


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """A thread count and the rule that set it."""

    count: int
    rule: str


def read_machine(root: Path = Path("/"), affinity: frozenset[int] | None = None) -> MachineLimits:
    """Read the limits; `affinity` is the set of CPUs that may be used, None: this process's own."""
    cpus = affinity if affinity is not None else _affinity()
    quota, quota_source = _least(_quotas(root))
    memory, memory_source = _least(_memory(root))
    return MachineLimits(
        affinity_cpus=len(cpus),
        physical_cores=_physical_cores(root, cpus),
        cpu_quota=quota,
        quota_source=quota_source,
        memory_available=None if memory is None else int(memory),
        memory_source=memory_source,
    )


def memory_available() -> int | None:
    """Bytes that this process may still take; None where the machine does not say."""
    return read_machine().memory_available


def choose_threads(limits: MachineLimits) -> ThreadChoice:
    """The least of affinity, whole CPUs of the quota, and physical cores; at least 1.

    A quota rounds down: with more threads than quota the kernel suspends the whole team for the
    rest of the period, in the middle of a barrier, which costs far more than the fraction of a CPU
    that is left unused.
    """
    rules = [
        (limits.physical_cores, f"{limits.physical_cores} physical cores"),
        (limits.affinity_cpus, f"{limits.affinity_cpus} CPUs in the affinity mask"),
    ]
    if limits.cpu_quota is not None:
        rules.append((int(limits.cpu_quota), f"a quota of {limits.cpu_quota:g} CPUs ({limits.quota_source})"))
    count, rule = min(rules, key=lambda entry: entry[0])
    return ThreadChoice(count, rule) if count >= 1 else ThreadChoice(1, f"{rule}; at least one thread")


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _physical_cores(root: Path, cpus: frozenset[int]) -> int:
    """Count distinct (package, core) pairs; a CPU without a topology entry counts as one core."""
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
        cores.add((package, core) if core is not None else cpu)
    return max(1, len(cores))


def _quotas(root: Path) -> Iterator[tuple[float, str]]:
    for folder in _group_folders(root, ""):
        fields = (_read(folder / "cpu.max") or "").split()
        if len(fields) == 2 and fields[0].isdigit() and int(fields[1]) > 0:
            yield int(fields[0]) / int(fields[1]), "cgroup v2 cpu.max"
    for folder in _group_folders(root, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota and period:
            yield quota / period, "cgroup v1 cpu.cfs_quota_us"


def _memory(root: Path) -> Iterator[tuple[float, str]]:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024, "MemAvailable"
    versions = (
        ("", "memory.max", "memory.current", "inactive_file", "cgroup v2 memory.max"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "cgroup v1 memory limit"),
    )
    for controller, limit_name, usage_name, cache_name, source in versions:
        for folder in _group_folders(root, controller):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None:
                # File pages that nobody uses are charged to the group, but the kernel drops them
                # when it needs room.
                yield max(0, limit - usage + _statistic(folder / "memory.stat", cache_name)), source


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's control group and its ancestors; `controller` is "" in version 2."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller not in names.split(","):
            continue
        for mount in _mounts(root, names, controller):
            # Inside a container the path may be the host's, which is not there: the mount itself is
            # then the group.
            relative = Path(path.strip("/"))
            for parent in (relative, *relative.parents):
                if ".." not in parent.parts and (mount / parent).is_dir():
                    yield mount / parent
        return


def _mounts(root: Path, names: str, controller: str) -> list[Path]:
    base = root / "sys/fs/cgroup"
    candidates = [base, base / "unified"] if not controller else [base / names, base / controller]
    return [folder for folder in dict.fromkeys(candidates) if folder.is_dir()]


def _least(limits: Iterator[tuple[float, str]]) -> tuple[float | None, str | None]:
    return min(limits, key=lambda entry: entry[0], default=(None, None))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """A non-negative integer, or None for "max", -1, and a file that is not there."""
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def processor_name() -> str:
    """The processor's model, as the system calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
