"""Metrics of the machine: what a made-up /proc, /sys and NVML tell, and that nothing is made up where one is silent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from headway.engine.allocators import held
from headway.server.metrics import telemetry
from headway.server.metrics.families import Families
from headway.server.metrics.perf import PerfCounters
from headway.server.metrics.telemetry import METRICS, SOURCES, Telemetry
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import LiveServer

STAT = "cpu  3915486 1621463 312963 917180 4867 0 6888 15102 0 0\ncpu0 1 2 3\n"
FILES = {
    "proc/stat": STAT,
    "proc/pressure/cpu": "some avg10=2.33 avg60=4.78 avg300=13.40 total=18786672\nfull avg10=0.00 total=0\n",
    "proc/7/cgroup": "0::/serving\n",
    "proc/7/task/7/status": "Name:\tx\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t2\n",
    "proc/7/task/8/status": "voluntary_ctxt_switches:\t10\nnonvoluntary_ctxt_switches:\t1\n",
    "proc/7/task/7/schedstat": "100 2000000000 3\n",
    "proc/7/task/8/schedstat": "100 500000000 3\n",
    "proc/7/task/7/sched": "x (7, #threads: 2)\nse.nr_migrations          :     4\n",
    "sys/fs/cgroup/serving/cpu.stat": "usage_usec 9\nnr_throttled 3\nthrottled_usec 1500000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "3000000\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "1000000\n",
    "sys/class/powercap/intel-rapl:0/name": "package-0\n",
    "sys/class/powercap/intel-rapl:0/energy_uj": "2500000\n",
    "sys/class/powercap/intel-rapl:0:0/name": "core\n",
    "sys/class/powercap/intel-rapl:0:1/name": "dram\n",
    "sys/class/powercap/intel-rapl:0:1/energy_uj": "500000\n",
}


def scraped(root: Path, pid: int | None = 7, device: str = "cpu", **held: int) -> dict[str, float]:
    """Samples by name and further labels."""
    registry = CollectorRegistry()
    engine = SimpleNamespace(pid=pid, ready=SimpleNamespace(device=device))
    Telemetry(registry, Families("", {"engine": "0"}), engine, lambda: held, root)
    return {
        " ".join([each.name, *(value for name, value in each.labels.items() if name != "engine")]): each.value
        for family in registry.collect()
        for each in family.samples
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def test_each_source_is_read_with_its_unit(root: Path) -> None:
    found = scraped(root, **{"malloc used": 30, "malloc free": 10})
    hertz = os.sysconf("SC_CLK_TCK")
    told = {name: value for name, value in found.items() if not name.startswith("telemetry")}
    assert told == pytest.approx(
        {
            "machine_cpu_frequency_hertz lowest": 1e9,
            "machine_cpu_frequency_hertz mean": 2e9,
            "machine_cpu_frequency_hertz highest": 3e9,
            "machine_cpu_steal_seconds_total": 15102 / hertz,
            "machine_cpu_pressure_seconds_total": 18.786672,
            "machine_energy_joules_total package-0": 2.5,
            "machine_energy_joules_total dram 0:1": 0.5,
            "engine_throttled_seconds_total": 1.5,
            "engine_context_switches_total voluntary": 15,
            "engine_context_switches_total involuntary": 3,
            "engine_run_delay_seconds_total": 2.5,
            "engine_migrations_total": 4,
            "engine_allocator_bytes malloc used": 30,
            "engine_allocator_bytes malloc free": 10,
        }
    )
    silent = {name.split(" ")[1] for name, value in found.items() if name.startswith("telemetry") and not value}
    assert silent == {"perf", "nvml"}


def test_the_quota_of_the_first_version_of_cgroups(root: Path) -> None:
    (root / "proc/7/cgroup").write_text("4:memory:/m\n1:cpu,cpuacct:/serving\n0::/\n")
    (root / "sys/fs/cgroup/cpu/serving").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu/serving/cpu.stat").write_text("nr_throttled 1\nthrottled_time 250000000\n")
    assert scraped(root)["engine_throttled_seconds_total"] == 0.25


@pytest.mark.parametrize("path", FILES)
def test_what_cannot_be_read_has_no_metric_and_is_said(path: str, root: Path) -> None:
    """A file is gone, or has something else in it: its source is missing, or a part of it; no other value changes."""
    whole = scraped(root)
    for content in (None, "what is this?\n"):
        (root / path).unlink() if content is None else (root / path).write_text(content)
        found = scraped(root)
        assert {name for name, value in found.items() if value == 0} <= {f"telemetry_available {s}" for s in SOURCES}
        names, lost = {name.split(" ")[0] for name in found}, {name.split(" ")[0] for name in whole}
        for name in lost - names:
            source = METRICS[name.removesuffix("_total")].source
            assert found[f"telemetry_available {source}"] == 0 or source == "status", name
        (root / path).write_text(FILES[path])


def test_a_machine_that_tells_nothing_says_so(tmp_path: Path) -> None:
    assert scraped(tmp_path, pid=None) == {f"telemetry_available {source}": 0 for source in SOURCES}


@pytest.fixture
def busy() -> Iterator[int]:
    """A process that computes, with a second thread."""
    code = "import threading\ndef spin():\n while True: x = [1] * 100000\nthreading.Thread(target=spin).start()\nspin()"
    process = subprocess.Popen([sys.executable, "-c", code])
    yield process.pid
    process.kill()
    process.wait()


def test_events_of_a_process_are_counted_from_the_first_read_on(busy: int) -> None:
    """By the kernel's own events, which a virtual machine has too: its clock and page faults."""
    counters = PerfCounters({"clock": (1, 1), "no such event": (1, 99)})
    try:
        first = counters.read(busy)
    except OSError as error:
        pytest.skip(f"no counters here: {error}")
    assert first.keys() == {"clock"}
    while (now := counters.read(busy))["clock"] < first["clock"] + 20e6:
        assert now["clock"] >= first["clock"]
    with pytest.raises(OSError, match=r"."):
        counters.read(2**22 - 1)
    assert counters.read(busy)["clock"] < now["clock"], "counted anew"
    counters.close()


class NoSuchThing(Exception):
    pass


class Nvml:
    """What nvidia-ml-py has, of two GPUs; the second one does not tell its energy."""

    NVMLError = NoSuchThing

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return SimpleNamespace(gpu=37 + gpu)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(used=5_000_000_000)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return 412_500

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:
        if gpu:
            raise NoSuchThing
        return 7_000

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetClockInfo(self, gpu: int, clock: int) -> int:
        return {1: 1980, 2: 2619}[clock]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
        return 0x4 | 0x1


def test_gpus_tell_by_nvml_where_the_engine_runs_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(telemetry, "_nvml", lambda: asked.append(True) or Nvml())
    assert not [name for name in scraped(tmp_path, device="cpu") if name.startswith("gpu")] and not asked
    found = scraped(tmp_path, device="cuda")
    assert found["telemetry_available nvml"] == 1
    assert found["gpu_utilization_ratio 0"] == 0.37 and found["gpu_utilization_ratio 1"] == 0.38
    assert found["gpu_power_watts 1"] == 412.5 and found["gpu_memory_used_bytes 0"] == 5e9
    assert found["gpu_energy_joules_total 0"] == 7.0 and "gpu_energy_joules_total 1" not in found
    assert found["gpu_clock_hertz 0 sm"] == 1.98e9 and found["gpu_clock_hertz 0 memory"] == 2.619e9
    assert found["gpu_clocks_limited 0 power_cap"] == 1 and found["gpu_clocks_limited 0 thermal_hardware"] == 0


def test_the_package_has_what_is_asked_of_it() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert all(hasattr(pynvml, name) for name in dir(Nvml) if name.lower().startswith("nvml"))


def test_without_the_package_or_a_driver_gpus_are_not_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = scraped(tmp_path, device="cuda")
    assert found["telemetry_available nvml"] == 0 and not [name for name in found if name.startswith("gpu")]


def test_allocators_say_what_they_hold() -> None:
    before = held()
    assert {"malloc used", "malloc free"} <= before.keys()
    kept = [bytearray(1000) for _ in range(50_000)]
    assert held()["malloc used"] > before["malloc used"] + 40_000_000
    del kept


def test_a_scrape_asks_the_engine_and_does_not_wait_for_it(server: LiveServer, engine: FakeEngine) -> None:
    engine.allocators = {"malloc used": 77}
    wanted = 'engine_allocator_bytes{allocator="malloc",engine="0",model_name="tiny",state="used"} 77.0'
    assert wanted in server.client.get("/metrics").text
    engine.explains_s, engine.allocators = 5.0, {"malloc used": 88}
    assert wanted in server.client.get("/metrics").text, "its last word"
    engine.die()
    assert server.client.get("/metrics").status_code == 200
