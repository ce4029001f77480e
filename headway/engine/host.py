"""The processors and the memory that this process may use, as Linux and its control groups say.

`root` is the folder of the system's files: "/", except in tests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")


def usable_threads(root: Path = _ROOT, processors: Collection[int] | None = None) -> int:
    """How many threads are worth having: one for each physical core, but no more than the CPU quota lets run.

    Two threads of one core share its caches and vector units, and one that spins slows the other. Threads beyond the
    quota use up a period's share early, and then all of them stand still until the period ends.

    Args:
        processors: numbers of the logical processors that this process may run on; None asks the system.
    """
    return max(1, math.floor(min(len(physical_cores(root, processors)), _quota(root))))


class Core(NamedTuple):
    """A physical core: the first of its logical processors that may be used, all of them, and its memory node."""

    processor: int
    siblings: str
    node: str


def physical_cores(root: Path = _ROOT, processors: Collection[int] | None = None) -> list[Core]:
    """The physical cores that this process may use. See usable_threads()."""
    found = dict[str, Core]()
    for number in sorted(os.sched_getaffinity(0) if processors is None else processors):
        folder = root / f"sys/devices/system/cpu/cpu{number}"
        siblings = _text(folder / "topology/thread_siblings_list") or str(number)
        found.setdefault(siblings, Core(number, siblings, next((p.name for p in folder.glob("node[0-9]*")), "")))
    return list(found.values())


def shared_out(cores: Collection[Core], ranks: int, threads: int) -> list[list[Core]]:
    """The cores of each of some ranks with so many threads, of one memory node if one has as many; empty if too few.

    Ranks are spread over the nodes, so that each has the most memory to itself.
    """
    if len(cores) < ranks * threads:
        return []
    nodes = [[core for core in cores if core.node == node] for node in {core.node: None for core in cores}]
    shares = []
    for _ in range(ranks):
        nodes.sort(key=len, reverse=True)
        own = [core for node in nodes for core in node][:threads]
        nodes = [[core for core in node if core not in own] for node in nodes]
        shares.append(own)
    return shares


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that can be allocated without swapping, within the limits of the machine and of the control groups.

    Memory that holds cached files counts as available, for a group as for the whole machine.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = _entries(root / "proc/meminfo").get("MemAvailable:", available // 1024) * 1024
    for folder in _groups(root, "memory"):
        limit, used = _memory_files(folder)
        if limit is None or used is None:
            continue
        held = _entries(folder / "memory.stat")
        prefix = "total_" if "total_inactive_file" in held else ""
        files = held.get(prefix + "active_file", 0) + held.get(prefix + "inactive_file", 0)
        available = min(available, limit - max(0, used - files))
    return max(0, available)


def total_memory(root: Path = _ROOT) -> int:
    """Bytes of memory that the machine has, or the control groups' limit where that is less."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [_memory_files(folder)[0] for folder in _groups(root, "memory")]
    return min([installed, *(limit for limit in limits if limit is not None)])


def _quota(root: Path) -> float:
    """How many processors' time the control groups allow; infinity where they set no limit."""
    least = math.inf
    for folder in _groups(root, "cpu"):
        words = _text(folder / "cpu.max").split()
        if not words:
            words = [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
        if words[0].isdecimal() and words[1].isdecimal():  # neither "max" nor -1
            least = min(least, int(words[0]) / int(words[1]))
    return least


def _memory_files(folder: Path) -> tuple[int | None, int | None]:
    """(limit, in use) in bytes of a control group of version 2 or 1; None where there is no limit or no figure."""
    versions = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for names in versions:
        limit, used = (_text(folder / name) for name in names)
        if limit:
            return int(limit) if limit.isdecimal() else None, int(used) if used.isdecimal() else None
    return None, None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those around it: any of them may set a limit.

    In a container of version 1 the path is the host's. Of its folders only the outermost exists: the container's own.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = mounts / controller if controllers else mounts
        folder = mount / path.strip("/")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(mount) and each.is_dir())


def _entries(file: Path) -> dict[str, int]:
    """The lines of a file that are a name and a number."""
    rows = (line.split() for line in _text(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(file: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
