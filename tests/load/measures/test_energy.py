"""Energy of a machine made of files and of a library that is not there."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from headway.load.measures.energy import Counter, EnergyMeter, energy_meter, nvml_counters, rapl_counters


def zone(powercap: Path, folder: str, name: str, energy_uj: int) -> Path:
    path = powercap / folder
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text("1000000000\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    return path / "energy_uj"


def test_packages_and_memory_count_and_what_is_inside_them_does_not(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 900_000_000)
    cores = zone(tmp_path, "intel-rapl:0:0", "core", 1_000_000)
    meter = EnergyMeter(rapl_counters(tmp_path))
    assert meter.sources == ("intel-rapl:0 package-0", "intel-rapl:0:1 dram")
    assert meter.read() == 0
    package.write_text("25000000\n")
    cores.write_text("9000000\n")
    assert meter.read() == pytest.approx(20)
    memory.write_text("100000000\n")  # began again at 1000 J
    assert meter.read() == pytest.approx(220)


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    meter = EnergyMeter([*rapl_counters(tmp_path / "none"), *nvml_counters(None)])
    assert meter.sources == () and meter.read() is None


def test_a_counter_that_may_not_be_read_is_left_out(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 5).unlink()
    assert EnergyMeter(rapl_counters(tmp_path)).sources == ()


def test_a_counter_lost_on_the_way_leaves_no_half_sum(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 5)
    gone = zone(tmp_path, "intel-rapl:1", "package-1", 5)
    meter = EnergyMeter(rapl_counters(tmp_path))
    gone.unlink()
    assert meter.read() is None
    gone.write_text("6000000\n")
    assert meter.read() is None


def test_a_counter_without_a_range_that_goes_back_is_lost() -> None:
    values = iter([50.0, 70.0, 3.0, 90.0])
    meter = EnergyMeter([Counter("GPU", lambda: next(values))])
    assert meter.read() == 20
    assert meter.read() is None
    assert meter.read() is None


class FakeNvml:
    """Two GPUs, of which the second is too old to count."""

    def __init__(self) -> None:
        self.millijoules = 7000

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:
        device._obj.value = 100 + index.value
        return 0

    def nvmlDeviceGetName(self, device: ctypes.c_void_p, name: Any, length: ctypes.c_uint) -> int:
        name.value = b"H200"
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: ctypes.c_void_p, energy: Any) -> int:
        energy._obj.value = self.millijoules
        return 0 if device.value == 100 else 3


def test_gpus() -> None:
    nvml = FakeNvml()
    meter = EnergyMeter(nvml_counters(nvml))
    assert meter.sources == ("GPU 0 H200",)
    nvml.millijoules += 1500
    assert meter.read() == pytest.approx(1.5)


def test_this_machine_can_be_asked_whatever_it_is() -> None:
    meter = energy_meter()
    assert (meter.read() is None) == (meter.sources == ())
