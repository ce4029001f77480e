"""Measurements in a virtual machine whose processors its host now and then gives to somebody else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

MOST = 0.01  # largest share of the processors' time that may be stolen during a measurement
TRIES = 5
_STAT = Path("/proc/stat")
_STEAL = 8  # the column of /proc/stat's first line; see proc(5)

Measured = TypeVar("Measured")


def stolen_seconds(stat: Path = _STAT) -> float:
    """Stolen seconds of all processors together since the machine started; 0 if the system does not say."""
    try:
        columns = stat.read_text().split("\n", 1)[0].split()
        return int(columns[_STEAL]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def undisturbed(
    measure: Callable[[], Measured],
    stolen: Callable[[], float] = stolen_seconds,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[Measured, float]:
    """What `measure` gives while at most MOST of the processors' time is stolen, and the share that was.

    It is called up to TRIES times; if there is none such, the least disturbed counts.
    """
    best: tuple[Measured, float] | None = None
    for _ in range(TRIES):
        before, began = stolen(), now()
        found = measure()
        share = (stolen() - before) / ((now() - began) * (os.cpu_count() or 1))
        if best is None or share < best[1]:
            best = found, share
        if share <= MOST:
            break
    assert best is not None
    return best
