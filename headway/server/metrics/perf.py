"""Counters of the processor for the threads of a process, by perf_event_open(2), where the system permits it."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Mapping
from pathlib import Path

# Type and config of an event, by the name of its metric.
EVENTS = {"engine_cycles": (0, 0), "engine_instructions": (0, 1), "engine_cache_misses": (0, 3)}
_SYSCALLS = {"x86_64": 298, "aarch64": 241}
# perf_event_attr as it was first, of 64 bytes. Threads that are begun later are counted too; the kernel is not.
_ATTRIBUTES = struct.Struct("=IIQQQQQIIQ")
_INHERIT, _NO_KERNEL, _NO_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_TIMES = 1 | 2  # beside the count, how long it was enabled, and how long it ran: events may take turns


class PerfCounters:
    """Counts events of all threads of a process from the first read on."""

    def __init__(self, events: Mapping[str, tuple[int, int]] = EVENTS) -> None:
        self._events = events
        self._pid: int | None = None
        self._files: dict[str, list[int]] = {}

    def read(self, pid: int) -> dict[str, float]:
        """The counts so far, by the names of events; those that there are not on this processor are left out.

        Raises:
            OSError: the process is gone, or nothing may be counted.
        """
        if pid != self._pid:
            self.close()
            self._open(pid)
        return {name: sum(map(_count, files)) for name, files in self._files.items()}

    def close(self) -> None:
        """Count nothing any more."""
        for files in self._files.values():
            for file in files:
                os.close(file)
        self._pid, self._files = None, {}

    def _open(self, pid: int) -> None:
        refused: OSError | None = None
        threads = [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()]
        for name, (kind, config) in self._events.items():
            files: list[int] = []
            try:
                for thread in threads:
                    files.append(_event(kind, config, thread))
            except OSError as error:
                refused = error
                for file in files:
                    os.close(file)
                continue
            self._files[name] = files
        if refused is not None and not self._files:
            raise refused
        self._pid = pid


def _event(kind: int, config: int, thread: int) -> int:
    """A file that counts an event of a thread. Raises OSError."""
    flags = _INHERIT | _NO_KERNEL | _NO_HYPERVISOR
    attributes = _ATTRIBUTES.pack(kind, _ATTRIBUTES.size, config, 0, 0, _TIMES, flags, 0, 0, 0)
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        raise OSError(f"no number of perf_event_open is known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    file: int = libc.syscall(number, attributes, thread, -1, -1, 8)  # 8: closed in programs that are started
    if file < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return file


def _count(file: int) -> float:
    """The count, scaled to all of the time where the event ran for a part of it. Raises OSError where it never ran."""
    count, enabled, running = struct.unpack("=QQQ", os.read(file, 24))
    if enabled and not running:
        raise OSError("the processor had no counter free")
    return count * enabled / running if running else float(count)
