"""What the machine does beside and below the engine, read when it is scraped: processors, energy, counters, GPUs.

A source that this machine does not have, or does not let this user read, has no metric at all; `telemetry_available`
says which these are.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headway.server.metrics.families import Families, Values
from headway.server.metrics.perf import PerfCounters

NS = 1e-9
Family = CounterMetricFamily | GaugeMetricFamily


@dataclass(frozen=True, slots=True)
class Told:
    """A metric."""

    source: str  # where it comes from
    kind: str
    text: str
    labels: tuple[str, ...] = ()  # further ones than all metrics have


_GPU = ("gpu",)
METRICS = {
    "machine_cpu_frequency_hertz": Told("cpufreq", "gauge", "Frequency of this machine's cores.", ("of",)),
    "machine_cpu_steal_seconds": Told("steal", "counter", "Time that the host gave this machine's cores to others."),
    "machine_cpu_pressure_seconds": Told("pressure", "counter", "Time in which something waited for a core."),
    "machine_energy_joules": Told("rapl", "counter", "Energy of processors and memory.", ("domain",)),
    "engine_throttled_seconds": Told("cgroup", "counter", "Time that the quota of its cgroup kept the engine waiting."),
    "engine_run_delay_seconds": Told(
        "schedstat", "counter", "Time that the engine's threads could have run and had no core."
    ),
    "engine_context_switches": Told("status", "counter", "Context switches of the engine's threads.", ("kind",)),
    "engine_migrations": Told("sched", "counter", "Times that a thread of the engine went to another core."),
    "engine_cycles": Told("perf", "counter", "Cycles of the engine in user code, since the first scrape."),
    "engine_instructions": Told("perf", "counter", "Instructions of the engine in user code, since the first scrape."),
    "engine_cache_misses": Told(
        "perf", "counter", "Misses of the last cache by the engine in user code, since the first scrape."
    ),
    "engine_allocator_bytes": Told(
        "allocator", "gauge", "Memory that the engine's allocators hold, in use or free.", ("allocator", "state")
    ),
    "gpu_utilization_ratio": Told("nvml", "gauge", "Share of the time in which a kernel ran on the GPU.", _GPU),
    "gpu_memory_used_bytes": Told("nvml", "gauge", "Memory of the GPU in use, by whomever.", _GPU),
    "gpu_power_watts": Told("nvml", "gauge", "Power of the GPU.", _GPU),
    "gpu_energy_joules": Told("nvml", "counter", "Energy of the GPU since its driver was loaded.", _GPU),
    "gpu_temperature_celsius": Told("nvml", "gauge", "Temperature of the GPU.", _GPU),
    "gpu_clock_hertz": Told("nvml", "gauge", "Clocks of the GPU.", ("gpu", "clock")),
    "gpu_clocks_limited": Told("nvml", "gauge", "1 where something holds the GPU's clocks down.", ("gpu", "reason")),
}
SOURCES = tuple(dict.fromkeys(each.source for each in METRICS.values()))


class Telemetry:
    """The collector.

    Args:
        engine: gives `pid`, and `ready` for its device.
        allocators: bytes that the engine's allocators hold, as it last said.
        root: where /proc and /sys are.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        families: Families,
        engine: Any,
        allocators: Callable[[], Mapping[str, int]],
        root: Path = Path("/"),
    ) -> None:
        self._families, self._engine, self._allocators = families, engine, allocators
        self._proc, self._sys = root / "proc", root / "sys"
        self._perf = PerfCounters()
        self._gpus: Any = None  # pynvml once it is there; False where it is not
        registry.register(self)

    def collect(self) -> Iterable[Family]:
        """A family of each metric whose source can be read, and what can be."""
        found: dict[str, float | Values] = {}
        for read in (
            self._frequency,
            self._steal,
            self._pressure,
            self._energy,
            self._cgroup,
            self._threads,
            self._of_gpus,
        ):
            found |= _readable(read)
        if (pid := self._engine.pid) is not None:
            found |= _readable(lambda: self._perf.read(pid).items())
        if held := self._allocators():
            found["engine_allocator_bytes"] = {tuple(name.split(" ")): size for name, size in held.items()}
        for name, values in found.items():
            told = METRICS[name]
            make = self._families.counter if told.kind == "counter" else self._families.gauge
            yield make(name, told.text, values, *told.labels)
        there = {METRICS[name].source for name in found}
        text = "Whether this machine tells, and this user may read, what the metrics of a source need."
        yield self._families.gauge(
            "telemetry_available", text, {(each,): float(each in there) for each in SOURCES}, "source"
        )

    # --- the machine ----------------------------------------------------------------------------------

    def _frequency(self) -> Iterator[tuple[str, float | Values]]:
        files = self._sys.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")
        if hertz := [1e3 * int(file.read_text()) for file in files]:
            told = {"lowest": min(hertz), "mean": sum(hertz) / len(hertz), "highest": max(hertz)}
            yield "machine_cpu_frequency_hertz", {(of,): value for of, value in told.items()}

    def _steal(self) -> Iterator[tuple[str, float | Values]]:
        columns = (self._proc / "stat").read_text().partition("\n")[0].split()
        yield "machine_cpu_steal_seconds", int(columns[8]) / os.sysconf("SC_CLK_TCK")  # proc(5)

    def _pressure(self) -> Iterator[tuple[str, float | Values]]:
        some = (self._proc / "pressure/cpu").read_text().partition("\n")[0]
        yield "machine_cpu_pressure_seconds", int(some.rpartition("total=")[2]) * 1e-6

    def _energy(self) -> Iterator[tuple[str, float | Values]]:
        joules: dict[tuple[str, ...], float] = {}
        for zone in sorted(self._sys.glob("class/powercap/intel-rapl:*")):
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":  # cores and the like are inside of their package
                number = zone.name.partition(":")[2]
                joules[(f"{name} {number}" if name == "dram" else name,)] = int((zone / "energy_uj").read_text()) * 1e-6
        if joules:
            yield "machine_energy_joules", joules

    # --- the engine process ---------------------------------------------------------------------------

    def _cgroup(self) -> Iterator[tuple[str, float | Values]]:
        for line in (self._proc / f"{self._engine.pid}/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            is_second = number == "0" and not controllers
            if is_second or "cpu" in controllers.split(","):
                folder = self._sys / "fs/cgroup" / ("" if is_second else "cpu") / path.strip("/")
                lines = (folder / "cpu.stat").read_text().splitlines() if (folder / "cpu.stat").exists() else []
                told = dict(each.split() for each in lines)
                for key, unit in (("throttled_usec", 1e-6), ("throttled_time", NS)):
                    if key in told:
                        yield "engine_throttled_seconds", int(told[key]) * unit
                        return

    def _threads(self) -> Iterator[tuple[str, float | Values]]:
        """Sums over the threads that live; those of the engine live as long as it does."""
        tasks = list((self._proc / f"{self._engine.pid}/task").glob("*"))
        if not tasks:
            return
        switches = {("voluntary",): 0, ("involuntary",): 0}
        delay_ns = migrations = 0
        has_delay = has_migrations = False
        for task in tasks:
            for line in _lines(task / "status"):
                kind, _, count = line.partition("_ctxt_switches:")
                if count:
                    switches[("voluntary" if kind == "voluntary" else "involuntary",)] += int(count)
            for line in _lines(task / "schedstat"):
                has_delay, delay_ns = True, delay_ns + int(line.split()[1])
            for line in _lines(task / "sched"):
                if line.startswith("se.nr_migrations"):
                    has_migrations, migrations = True, migrations + int(line.rpartition(":")[2])
        yield "engine_context_switches", switches
        if has_delay:
            yield "engine_run_delay_seconds", delay_ns * NS
        if has_migrations:
            yield "engine_migrations", migrations

    # --- GPUs -----------------------------------------------------------------------------------------

    def _of_gpus(self) -> Iterator[tuple[str, float | Values]]:
        """What NVML tells, where the engine runs on a GPU and nvidia-ml-py is installed."""
        ready = self._engine.ready
        if ready is None or not ready.device.startswith("cuda") or self._gpus is False:
            return
        if self._gpus is None:
            self._gpus = _nvml()
        if self._gpus:
            yield from gpu_metrics(self._gpus).items()


def _readable(read: Callable[[], Iterable[tuple[str, float | Values]]]) -> dict[str, float | Values]:
    """What a source tells; nothing where it cannot be read or understood."""
    try:
        return dict(read())
    except (OSError, ValueError, IndexError):
        return {}


def _lines(path: Path) -> list[str]:
    """The lines of a file of /proc; none where there is no such file, or its thread has just ended."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _nvml() -> Any:
    """The module of nvidia-ml-py, ready for use; False where it, or the driver, is not there."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # of the package's own, beside ImportError
        return False
    return nvml


# What nvmlDeviceGetCurrentClocksThrottleReasons sets, and what it means; reasons that are no trouble are left out.
_LIMITS = {"power_cap": 0x4, "hardware": 0x8, "thermal_software": 0x20, "thermal_hardware": 0x40, "power_brake": 0x80}
# What is read of a GPU: the metric and its label beside the GPU's number, and how, of NVML and its handle.
_READ: tuple[tuple[str, tuple[str, ...], Callable[[Any, Any], float]], ...] = (
    ("gpu_utilization_ratio", (), lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
    ("gpu_memory_used_bytes", (), lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    ("gpu_power_watts", (), lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
    ("gpu_energy_joules", (), lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3),
    ("gpu_temperature_celsius", (), lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, 0)),
    ("gpu_clock_hertz", ("sm",), lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, 1) * 1e6),
    ("gpu_clock_hertz", ("memory",), lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, 2) * 1e6),
)


def gpu_metrics(nvml: Any) -> dict[str, Values]:
    """The metrics of all GPUs; without those that a GPU does not tell."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for number in range(nvml.nvmlDeviceGetCount()):
        gpu, label = nvml.nvmlDeviceGetHandleByIndex(number), str(number)
        for name, further, read in _READ:
            with contextlib.suppress(nvml.NVMLError):
                value = read(nvml, gpu)
                found.setdefault(name, {})[label, *further] = value
        with contextlib.suppress(nvml.NVMLError):
            limits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
            for reason, bit in _LIMITS.items():
                found.setdefault("gpu_clocks_limited", {})[label, reason] = float(limits & bit > 0)
    return dict(found)
