"""Processors and memory from files of Linux, as they stand on machines of several kinds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.engine.host import Core, available_memory, physical_cores, shared_out, total_memory, usable_threads

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def two_way(count: int) -> dict[str, str]:
    """`count` cores of two logical processors each, numbered as Linux does: the second ones after all the first."""
    file = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {file.format(number): f"{number % count},{number % count + count}" for number in range(2 * count)}


def test_one_thread_for_each_physical_core(tmp_path: Path) -> None:
    write(tmp_path, two_way(8))
    assert usable_threads(tmp_path, range(16)) == 8
    assert usable_threads(tmp_path, range(8)) == 8
    assert usable_threads(tmp_path, [2, 10]) == 1, "both of one core"
    assert usable_threads(tmp_path, [2, 3, 11]) == 2


def cores(node: str, numbers: range) -> list[Core]:
    return [Core(number, str(number), node) for number in numbers]


def test_ranks_are_spread_over_memory_nodes(tmp_path: Path) -> None:
    """Each has cores of one node as long as one has enough of them, and the first logical processor of each core."""
    nodes = {f"sys/devices/system/cpu/cpu{n}/node{n % 8 // 4}/cpulist": "" for n in range(16)}
    found = physical_cores(write(tmp_path, two_way(8) | nodes), range(16))
    assert found[3:5] == [Core(3, "3,11", "node0"), Core(4, "4,12", "node1")] and len(found) == 8
    ranks = shared_out(found, 2, 3)
    assert [[core.processor for core in rank] for rank in ranks] == [[0, 1, 2], [4, 5, 6]]
    assert [len({core.node for core in rank}) for rank in shared_out(found, 4, 2)] == [1] * 4
    everything = [core for rank in shared_out(found, 2, 4) for core in rank]
    assert sorted(everything) == sorted(found)


def test_ranks_that_fit_no_node_have_cores_of_several_and_too_many_have_none() -> None:
    uneven = [*cores("a", range(3)), *cores("b", range(3, 8))]
    assert [[core.processor for core in rank] for rank in shared_out(uneven, 2, 4)] == [[3, 4, 5, 6], [0, 1, 2, 7]]
    assert shared_out(uneven, 3, 3) == []


def test_without_a_topology_every_processor_is_a_core(tmp_path: Path) -> None:
    assert usable_threads(tmp_path, range(6)) == 6
    assert 1 <= usable_threads() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "350000 100000"}, 3),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 64),
        ({"proc/self/cgroup": "0::/"}, 64),
        # A service within a slice: the narrowest of those around it counts.
        (
            {
                "proc/self/cgroup": "0::/a.slice/b.service",
                "sys/fs/cgroup/a.slice/cpu.max": "400000 100000",
                "sys/fs/cgroup/a.slice/b.service/cpu.max": "max 100000",
            },
            4,
        ),
        # Version 1 in a container: the path is the host's.
        (
            {
                "proc/self/cgroup": "4:memory:/docker/f00\n3:cpu,cpuacct:/docker/f00\n0::/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "500000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            64,
        ),
    ],
)
def test_no_more_threads_than_the_quota_lets_run(tmp_path: Path, files: dict[str, str], threads: int) -> None:
    write(tmp_path, two_way(64) | files)
    assert usable_threads(tmp_path, range(128)) == threads


def test_available_memory_of_the_machine(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": f"MemTotal: {9 << 20} kB\nMemAvailable: {7 << 20} kB", "proc/self/cgroup": "0::/"})
    assert available_memory(tmp_path) == 7 * GIB


V2, V1 = "sys/fs/cgroup/a", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/a/b",
            f"{V2}/memory.max": str(4 * GIB),
            f"{V2}/memory.current": str(3 * GIB),
            f"{V2}/memory.stat": f"anon 1\nactive_file {GIB}\ninactive_file {GIB}",
            f"{V2}/b/memory.max": "max",
            f"{V2}/b/memory.current": str(GIB),
        },
        {
            "proc/self/cgroup": "5:memory:/docker/f00",
            f"{V1}/memory.limit_in_bytes": str(4 * GIB),
            f"{V1}/memory.usage_in_bytes": str(3 * GIB),
            f"{V1}/memory.stat": f"active_file 7\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}",
        },
    ],
)
def test_memory_of_a_control_group(tmp_path: Path, files: dict[str, str]) -> None:
    """A limit of 4 GiB with 3 in use, 2 of them files that can be given up."""
    write(tmp_path, files | {"proc/meminfo": f"MemAvailable: {64 << 20} kB"})
    assert available_memory(tmp_path) == 3 * GIB
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert total_memory(tmp_path) == min(installed, 4 * GIB)


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/a", f"{V2}/memory.max": "4096", f"{V2}/memory.current": "8192"})
    assert available_memory(tmp_path) == 0


def test_without_limits_memory_is_the_machine_s(tmp_path: Path) -> None:
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    unlimited = {"proc/self/cgroup": "5:memory:/", f"{V1}/memory.limit_in_bytes": "9223372036854771712"}
    assert total_memory(write(tmp_path, unlimited)) == installed
    assert 0 < available_memory() <= total_memory() <= installed
