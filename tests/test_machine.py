"""Thread count and memory from fake machines: folders of the files that Linux shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from martlet.machine import choose_threads, read_machine

GIB = 1 << 30


def machine(root: Path, files: dict[str, str], cores: dict[int, tuple[int, int]] | None = None) -> Path:
    """Write the files; `cores` gives (package, core) of each CPU."""
    for cpu, (package, core) in (cores or {}).items():
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = f"{package}\n"
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/core_id"] = f"{core}\n"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


FOUR_CORES_EIGHT_CPUS = {cpu: (0, cpu % 4) for cpu in range(8)}


def test_physical_cores_win_over_hardware_threads(tmp_path: Path) -> None:
    limits = read_machine(machine(tmp_path, {}, FOUR_CORES_EIGHT_CPUS), frozenset(range(8)))
    choice = choose_threads(limits)
    assert (limits.affinity_cpus, limits.physical_cores, choice.count) == (8, 4, 4)
    assert choice.rule == "4 physical cores"


def test_two_packages_have_the_same_core_numbers(tmp_path: Path) -> None:
    cores = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    assert read_machine(machine(tmp_path, {}, cores), frozenset(range(4))).physical_cores == 4


def test_affinity_counts_only_its_own_cores(tmp_path: Path) -> None:
    # 1 and 5 share a core
    limits = read_machine(machine(tmp_path, {}, FOUR_CORES_EIGHT_CPUS), frozenset({1, 5, 2}))
    assert (limits.affinity_cpus, limits.physical_cores) == (3, 2)


@pytest.mark.parametrize(
    ("quota", "expected"), [("150000 100000", 1), ("399000 100000", 3), ("50000 100000", 1), ("800000 100000", 4)]
)
def test_cgroup_v2_quota_rounds_down(tmp_path: Path, quota: str, expected: int) -> None:
    files = {"proc/self/cgroup": "0::/app/worker\n", "sys/fs/cgroup/app/worker/cpu.max": quota}
    choice = choose_threads(read_machine(machine(tmp_path, files, FOUR_CORES_EIGHT_CPUS), frozenset(range(8))))
    assert choice.count == expected
    assert ("cgroup v2 cpu.max" in choice.rule) == (expected < 4)


def test_cgroup_v2_limit_of_an_ancestor_holds(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/app/worker\n",
        "sys/fs/cgroup/app/worker/cpu.max": "max 100000",
        "sys/fs/cgroup/app/cpu.max": "200000 100000",
    }
    limits = read_machine(machine(tmp_path, files, FOUR_CORES_EIGHT_CPUS), frozenset(range(8)))
    assert limits.cpu_quota == 2.0


def test_cgroup_v2_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/kubepods/pod7/abc\n", "sys/fs/cgroup/cpu.max": "250000 100000"}
    assert read_machine(machine(tmp_path, files), frozenset({0})).cpu_quota == 2.5


def test_cgroup_v1_quota(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/docker/abc\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
    }
    choice = choose_threads(read_machine(machine(tmp_path, files, FOUR_CORES_EIGHT_CPUS), frozenset(range(8))))
    assert (choice.count, choice.rule) == (3, "a quota of 3 CPUs (cgroup v1 cpu.cfs_quota_us)")


def test_cgroup_v1_without_quota_is_minus_one(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "1:cpu:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert read_machine(machine(tmp_path, files), frozenset({0})).cpu_quota is None


def test_quota_below_one_cpu_still_gives_a_thread_and_says_so(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000"}
    choice = choose_threads(read_machine(machine(tmp_path, files), frozenset(range(8))))
    assert choice.count == 1
    assert choice.rule.endswith("at least one thread")


@pytest.mark.parametrize("text", ["garbage", "", "max", "100000 0", "-5 100000"])
def test_a_malformed_quota_is_no_quota(tmp_path: Path, text: str) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": text}
    assert read_machine(machine(tmp_path, files), frozenset({0})).cpu_quota is None


def test_memory_is_the_least_of_system_and_group(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n",
        "proc/self/cgroup": "0::/app\n",
        "sys/fs/cgroup/app/memory.max": str(4 * GIB),
        "sys/fs/cgroup/app/memory.current": str(3 * GIB),
        "sys/fs/cgroup/app/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    limits = read_machine(machine(tmp_path, files), frozenset({0}))
    assert (limits.memory_available, limits.memory_source) == (2 * GIB, "cgroup v2 memory.max")


def test_memory_of_a_group_without_a_limit_is_the_systems(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable:   1024 kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "max",
        "sys/fs/cgroup/memory.current": "5",
    }
    limits = read_machine(machine(tmp_path, files), frozenset({0}))
    assert (limits.memory_available, limits.memory_source) == (1024 * 1024, "MemAvailable")


def test_memory_of_cgroup_v1(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable:   33554432 kB\n",
        "proc/self/cgroup": "2:memory:/box\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(GIB // 2),
    }
    assert read_machine(machine(tmp_path, files), frozenset({0})).memory_available == 3 * GIB // 2


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    limits = read_machine(tmp_path, frozenset({0, 1, 2}))
    assert (limits.physical_cores, limits.cpu_quota, limits.memory_available) == (3, None, None)


def test_this_machine_can_be_read() -> None:
    limits = read_machine()
    assert 1 <= choose_threads(limits).count <= limits.affinity_cpus
