"""Metrics of the engine process, read from /proc when they are scraped. The API process has `process_*`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headway.server.metrics.families import Families


class EngineProcessMetrics:
    """Processor time, memory and page faults of the engine process; nothing while there is none, or without /proc.

    Args:
        pid: gives the id of the engine process, or None while there is none.
    """

    def __init__(self, registry: CollectorRegistry, families: Families, pid: Callable[[], int | None]) -> None:
        self._families, self._pid = families, pid
        registry.register(self)

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Metrics from /proc/PID/stat. Fields are numbered as in proc(5); the third follows the name in parentheses."""
        try:
            fields = Path(f"/proc/{self._pid()}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return
        minor, major, user, system, pages = (int(fields[number - 3]) for number in (10, 12, 14, 15, 24))
        seconds, resident = (user + system) / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")
        gauge, counter, faults = self._families.gauge, self._families.counter, {("minor",): minor, ("major",): major}
        yield counter("engine_cpu_seconds", "Processor time of the engine process.", seconds)
        yield gauge("engine_resident_memory_bytes", "Resident memory of the engine process.", resident)
        yield counter("engine_page_faults", "Page faults of the engine process.", faults, "kind")
