"""Readings of /proc and /sys, as Linux writes them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from headway.advisor.machine import allowed, frequency, look, read

CPU = "cpu  {} 0 0 {} 0 0 0 {} 0 0\ncpu0 1 1\n"


def machine(root: Path, ran_ms: dict[int, tuple[int, int]], user: int, idle: int, steal: int, pages: int) -> None:
    """A machine with process 7, whose threads ran and waited so long."""
    files = {
        "proc/stat": CPU.format(user, idle, steal),
        "proc/vmstat": f"nr_free_pages 9\npswpin {pages}\npswpout 1\n",
        "proc/7/status": "Name:\tx\nCpus_allowed_list:\t0-1\nVmRSS:\t  2097152 kB\nVmSwap:\t   1024 kB\n",
        "proc/7/cmdline": "vllm\0serve\0--tensor-parallel-size\0008\0",
        "proc/7/smaps_rollup": "00-ff ---p 0 00:00 0 [rollup]\nRss: 2097152 kB\nAnonHugePages:  4096 kB\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1500000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3000000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        **{f"proc/7/task/{tid}/schedstat": f"{a}000000 {b}000000 5\n" for tid, (a, b) in ran_ms.items()},
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_what_happened_between_two_readings(tmp_path: Path) -> None:
    machine(tmp_path, {7: (100, 0), 8: (100, 0), 9: (5, 0)}, 100, 100, 10, 3)
    before = read([7], tmp_path)
    machine(tmp_path, {7: (400, 100), 8: (300, 100), 9: (6, 0)}, 150, 130, 30, 13)
    clock = frequency(tmp_path)
    assert clock is not None
    found = look(before, read([7], tmp_path), [clock, (0.7, "powersave")], tmp_path)
    assert found.workers == 2  # the third thread did next to nothing
    assert found.waited == pytest.approx(200 / 700) and found.steal == pytest.approx(20 / 100)
    assert found.swapped_bytes == 2**20 and found.swapping is not None and found.swapping > 0
    assert (found.resident_bytes, found.huge_bytes, found.huge_pages) == (2**31, 2**22, "never")
    assert (found.frequency, found.governor) == (pytest.approx(0.6), "powersave")
    assert found.commands == ("vllm serve --tensor-parallel-size 8",)
    assert allowed(7, tmp_path) == [0, 1] and found.cores == 2


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    before = read([7], tmp_path)
    assert frequency(tmp_path) is None
    found = look(before, read([7], tmp_path), root=tmp_path)
    assert (found.workers, found.waited, found.steal, found.swapping, found.frequency) == (0, None, None, None, None)
    assert found.huge_bytes is None and found.governor == "" and found.commands == ()


def test_threads_of_this_process_that_work_are_counted() -> None:
    """They are still there when they are looked at: what has ended cannot be read."""
    looked = threading.Event()
    before = read([os.getpid()])

    def burn() -> None:
        while not looked.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=burn) for _ in range(2)]
    for each in threads:
        each.start()
    time.sleep(0.3)
    found = look(before, read([os.getpid()]))
    looked.set()
    for each in threads:
        each.join()
    assert found.workers >= 2 and found.cores_used > 0.2 and found.cores >= 1
