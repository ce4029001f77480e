"""What the operating system says of the processor and its memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def processor_name() -> str:
    """The model name of the processor, or its architecture if the system does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def largest_cache_bytes(folder: Path = _CACHES) -> int:
    """The size of the largest cache of the first core, shared ones included; 0 where it is not known."""
    sizes = [0]
    for file in folder.glob("index*/size"):
        try:
            text = file.read_text().strip()
            unit = _UNITS.get(text[-1:], 1)
            sizes.append(int(text.rstrip("KMG")) * unit)
        except (OSError, ValueError):
            continue
    return max(sizes)


def others_cpu_seconds(stat: Path = Path("/proc/stat")) -> float | None:
    """Processor seconds since the machine started that went to anybody but this process; None where nobody counts them.

    Time stolen by other virtual machines counts too.
    """
    try:
        fields = stat.read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, irq, softirq, stolen = map(int, fields)
    except (OSError, ValueError):
        return None
    own = os.times()
    everybody = (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")
    return everybody - own.user - own.system
