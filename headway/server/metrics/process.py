"""Metrics of the engine process, read from /proc when they are scraped. The API process has `process_*`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric

from headway.server.metrics.families import Families


def of_engine_process(families: Families, pid: int | None) -> Iterator[Metric]:
    """Processor time, memory and page faults of the engine process; nothing while there is none, or without /proc."""
    if (used := used_by(pid)) is None:
        return
    faults = {("minor",): used.minor_faults, ("major",): used.major_faults}
    yield families.counter("engine_cpu_seconds", "Processor time of the engine process.", used.cpu_seconds)
    yield families.gauge("engine_resident_memory_bytes", "Resident memory of the engine process.", used.resident_bytes)
    yield families.counter("engine_page_faults", "Page faults of the engine process.", faults, "kind")


@dataclass(frozen=True, slots=True)
class Used:
    """What a process has used since its start."""

    cpu_seconds: float
    resident_bytes: int
    minor_faults: int
    major_faults: int


def used_by(pid: int | None) -> Used | None:
    """What a process has used; None where there is no such process, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    # Fields are numbered as in proc(5); the third follows the name in parentheses.
    minor, major, user, system, pages = (int(fields[number - 3]) for number in (10, 12, 14, 15, 24))
    return Used((user + system) / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"), minor, major)
