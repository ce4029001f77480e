"""What a machine says of the processes of a server: threads, cores, steal, swap, huge pages and frequency.

Everything is read from Linux's /proc and /sys. `root` is the folder that they are in: "/", except in tests. Figures
that cannot be read are None.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.engine.host import usable_threads

ROOT = Path("/")
# A thread that ran at least this share of the time of the busiest one takes part in the work.
TAKES_PART = 0.25


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of a machine and of some processes at one time.

    Args:
        at: seconds of the monotonic clock.
        ran, waited: nanoseconds that each thread ran, and that it could have run but had no core.
        names: the name of each thread.
        stolen, total: ticks of all processors: taken by the hypervisor, and all.
        swapped: pages that the machine swapped in or out.
    """

    at: float
    ran: dict[tuple[int, int], int] = field(default_factory=dict)
    waited: dict[tuple[int, int], int] = field(default_factory=dict)
    stolen: int | None = None
    total: int | None = None
    swapped: int | None = None


@dataclass(frozen=True, slots=True)
class MachineLook:
    """What the processes of a server did between two readings, and how their machine is set up."""

    seconds: float  # between the readings
    cores: int  # physical cores that the server may use, within its affinity and quota
    cores_used: float = 0.0  # processor seconds of a second, of all threads of the busiest process
    workers: int = 0  # threads of that process that took part in the work
    waited: float | None = None  # share of the time in which those threads could have run but had no core
    steal: float | None = None  # share of the processors' time that the hypervisor took
    swapped_bytes: int = 0  # memory of the processes that is in the swap space
    swapping: float | None = None  # pages that the machine swapped, in a second
    # resident_bytes, huge_bytes: memory of the processes, and how much of it is in huge pages.
    resident_bytes: int = 0
    huge_bytes: int | None = None
    huge_pages: str = ""  # the machine's setting: always, madvise or never
    frequency: float | None = None  # present frequency of the processors / the highest, on average
    governor: str = ""  # the frequency governor's name
    commands: tuple[str, ...] = ()  # the command lines of the processes


def read(pids: Iterable[int], root: Path = ROOT) -> Reading:
    """Read the counters now."""
    ran: dict[tuple[int, int], int] = {}
    waited: dict[tuple[int, int], int] = {}
    for pid in pids:
        for task in _listed(root / f"proc/{pid}/task"):
            words = _text(task / "schedstat").split()
            if len(words) >= 2:
                ran[pid, int(task.name)], waited[pid, int(task.name)] = int(words[0]), int(words[1])
    ticks = [int(word) for word in _text(root / "proc/stat").partition("\n")[0].split()[1:9]]
    pages = _entries(root / "proc/vmstat")
    stolen, total = (ticks[7], sum(ticks)) if len(ticks) == 8 else (None, None)
    swapped = pages["pswpin"] + pages["pswpout"] if {"pswpin", "pswpout"} <= pages.keys() else None
    return Reading(time.monotonic(), ran, waited, stolen, total, swapped)


def look(before: Reading, after: Reading, clocks: Sequence[tuple[float, str]] = (), root: Path = ROOT) -> MachineLook:
    """What happened between two readings of the same processes.

    Args:
        clocks: `frequency` as it was now and then between them: idle processors are clocked down.
    """
    pids = sorted({pid for pid, _ in after.ran})
    seconds = max(after.at - before.at, 1e-3)
    ran = {thread: ns - before.ran.get(thread, 0) for thread, ns in after.ran.items()}
    of_process = {pid: sum(ns for (of, _), ns in ran.items() if of == pid) for pid in pids}
    busiest = max(of_process, key=of_process.__getitem__, default=0)
    most = max((ns for (pid, _), ns in ran.items() if pid == busiest), default=0)
    workers = [each for each, ns in ran.items() if each[0] == busiest and most and ns >= TAKES_PART * most]
    waiting = sum(after.waited[each] - before.waited.get(each, 0) for each in workers)
    running = sum(ran[each] for each in workers)
    status = [_entries(root / f"proc/{pid}/status") for pid in pids]
    huge = [_entries(root / f"proc/{pid}/smaps_rollup").get("AnonHugePages") for pid in pids]
    known = [each for each in huge if each is not None]
    return MachineLook(
        seconds,
        usable_threads(root, allowed(busiest, root)),
        of_process.get(busiest, 0) / 1e9 / seconds,
        len(workers),
        waiting / (waiting + running) if waiting + running else None,
        _share(before.stolen, after.stolen, before.total, after.total),
        1024 * sum(each.get("VmSwap", 0) for each in status),
        None if before.swapped is None or after.swapped is None else (after.swapped - before.swapped) / seconds,
        1024 * sum(each.get("VmRSS", 0) for each in status),
        1024 * sum(known) if known else None,
        _chosen(_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        statistics.fmean(share for share, _ in clocks) if clocks else None,
        clocks[-1][1] if clocks else "",
        tuple(filter(None, (_text(root / f"proc/{pid}/cmdline").replace("\0", " ").strip() for pid in pids))),
    )


def allowed(pid: int, root: Path = ROOT) -> list[int] | None:
    """Numbers of the logical processors that a process may run on; None where that cannot be read."""
    for line in _text(root / f"proc/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list":
            return list(_numbers(value.strip()))
    return None


def _numbers(text: str) -> Iterator[int]:
    """Numbers of a list such as 0-3,8."""
    for part in text.split(","):
        first, dash, last = part.partition("-")
        yield from range(int(first), int(last if dash else first) + 1)


def _share(part: int | None, now: int | None, whole: int | None, whole_now: int | None) -> float | None:
    if part is None or now is None or whole is None or whole_now is None or whole_now <= whole:
        return None
    return (now - part) / (whole_now - whole)


def _chosen(text: str) -> str:
    """The word in brackets of `always [madvise] never`."""
    return text.partition("[")[2].partition("]")[0]


def frequency(root: Path = ROOT) -> tuple[float, str] | None:
    """The mean share of the highest frequency that processors have now, and their governor; None if unknown."""
    shares, governor = [], ""
    for cpu in sorted(_listed(root / "sys/devices/system/cpu")):
        now, most = (_text(cpu / "cpufreq" / name) for name in ("scaling_cur_freq", "cpuinfo_max_freq"))
        if now.isdecimal() and most.isdecimal() and int(most):
            shares.append(int(now) / int(most))
            governor = _text(cpu / "cpufreq/scaling_governor") or governor
    return (statistics.fmean(shares), governor) if shares else None


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # it has ended, or is another user's
        return []


def _entries(file: Path) -> dict[str, int]:
    """The lines of a file that are a name and a whole number."""
    rows = (line.split() for line in _text(file).splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(file: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace").strip()
    return ""
