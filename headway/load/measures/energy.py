"""The energy that this machine uses, where it says so: processors and memory by RAPL, NVIDIA GPUs by NVML.

It is of the whole machine, whoever uses it: a number about the server only where the server runs here, alone.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"
_NAME_LENGTH = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter of energy."""

    name: str  # the name of what it measures
    joules: Callable[[], float]  # reads it; raises OSError when it cannot
    range_joules: float | None = None  # where it starts again from 0; None when it does not


class EnergyMeter:
    """Joules since it was made, over some counters.

    A processor's counter starts again after some minutes at full power: read at least once a minute.
    """

    def __init__(self, counters: Iterable[Counter]) -> None:
        """Counters that cannot be read are left out."""
        self._last: list[tuple[Counter, float]] = []
        self._total = 0.0
        self._lost = False
        for counter in counters:
            with contextlib.suppress(OSError):
                self._last.append((counter, counter.joules()))

    @property
    def sources(self) -> tuple[str, ...]:
        """What is measured; empty where nothing can be."""
        return tuple(counter.name for counter, _ in self._last)

    def read(self) -> float | None:
        """Joules so far; None where there is no counter, or one of them can no longer be read."""
        try:
            now = [(counter, counter.joules()) for counter, _ in self._last]
        except OSError:
            self._lost = True
        if self._lost or not self._last:
            return None
        for (counter, joules), (_, before) in zip(now, self._last, strict=True):
            again = counter.range_joules if joules < before else 0.0
            if again is None:  # it went back: its driver was started anew
                self._lost = True
                return None
            self._total += joules - before + again
        self._last = now
        return self._total


def energy_meter() -> EnergyMeter:
    """A meter of all that this machine can read. Reading a processor's energy mostly takes root's rights."""
    return EnergyMeter([*rapl_counters(POWERCAP), *nvml_counters(_nvml())])


def rapl_counters(powercap: Path) -> list[Counter]:
    """Packages, and memory where it has a counter of its own. Cores and the like are inside of their package."""
    counters = []
    for zone in sorted(powercap.glob("intel-rapl:*")):
        with contextlib.suppress(OSError, ValueError):
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                wraps = int((zone / "max_energy_range_uj").read_text()) * 1e-6
                counters.append(Counter(f"{zone.name} {name}", _microjoules(zone / "energy_uj"), wraps))
    return counters


def nvml_counters(nvml: Any) -> list[Counter]:
    """Each GPU that counts its energy (Volta and newer). `nvml` is the loaded library, or None."""
    if nvml is None or nvml.nvmlInit_v2() != 0:
        return []
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    counters = []
    for index in range(count.value):
        device, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_LENGTH)
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == 0:
            nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(_NAME_LENGTH))
            counters.append(Counter(f"GPU {index} {name.value.decode(errors='replace')}", _millijoules(nvml, device)))
    return counters


def _nvml() -> Any:
    try:
        return ctypes.CDLL(NVML)
    except OSError:
        return None


def _microjoules(file: Path) -> Callable[[], float]:
    return lambda: int(file.read_text()) * 1e-6


def _millijoules(nvml: Any, device: ctypes.c_void_p) -> Callable[[], float]:
    def joules() -> float:
        energy = ctypes.c_ulonglong()
        if (status := nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(energy))) != 0:
            raise OSError(f"NVML status {status}")
        return energy.value * 1e-3

    return joules
