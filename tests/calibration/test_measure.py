"""Measuring: rates from a scripted stopwatch, and the real device with little effort."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from headway.calibration import __main__ as command
from headway.calibration import machine
from headway.calibration.describe import hardware_of
from headway.calibration.measure import EFFORTS, MIB, CalibrationError, Effort, measure
from headway.calibration.peaks import MachinePeaks
from headway.calibration.stopwatch import MIN_REPEATS, MOST_CAPTURED, MOST_REPEATS, GraphStopwatch, measure_rate
from tests.calibration.little import LITTLE_MEMORY


class ScriptedStopwatch:
    """Says what it is told, and counts the calls."""

    def __init__(self, per_call: list[float]) -> None:
        self.per_call = per_call
        self.calls: list[int] = []

    def seconds(self, call, calls):
        self.calls.append(calls)
        call()
        return calls * self.per_call[min(len(self.calls), len(self.per_call)) - 1]


def nothing() -> None:
    pass


def test_best_and_median_leave_the_first_calls_out():
    watch = ScriptedStopwatch([9.0, 0.5, 0.5, 1.0, 0.25, 1.0, 2.0])
    rate = measure_rate(8.0, nothing, watch, 0.0, "me", 7)
    assert rate.repeats == MIN_REPEATS
    assert (rate.best, rate.median, rate.by, rate.size) == (32.0, 8.0, "me", 7)
    assert rate.scatter == 0.75


def test_short_calls_are_timed_many_at_a_time():
    watch = ScriptedStopwatch([2.0**-20])
    rate = measure_rate(1.0, nothing, watch, 1.0, "me", 1)
    assert rate.best == 2.0**20
    assert rate.repeats == MOST_REPEATS
    assert set(watch.calls[2:]) == {2098}


def test_the_budget_bounds_the_repeats():
    assert measure_rate(1.0, nothing, ScriptedStopwatch([0.01]), 0.105, "me", 1).repeats == 10


@pytest.mark.gpu
def test_a_gpu_is_timed_without_its_host():
    numbers, more = torch.zeros(16, device="cuda"), torch.zeros(2**28, device="cuda")
    watch = GraphStopwatch()
    one = min(watch.seconds(lambda: numbers.add_(1), 10 * MOST_CAPTURED) for _ in range(3)) / (10 * MOST_CAPTURED)
    assert 0 < one < 5e-6  # a launch takes the host longer
    assert numbers[0] == 3 * (1 + MOST_CAPTURED + 10 * MOST_CAPTURED)
    few, many = (min(watch.seconds(lambda: more.add_(1), calls) for _ in range(3)) for calls in (2, 20))
    assert 5 * few < many < 20 * few  # others may use the device meanwhile


@pytest.fixture
def little_effort(monkeypatch):
    """Sizes that take no time."""
    for key in EFFORTS:
        monkeypatch.setitem(EFFORTS, key, Effort(0.0, (MIB,), (64, 128)))
    monkeypatch.setattr("headway.calibration.measure.total_memory", lambda: LITTLE_MEMORY)


def check(peaks: MachinePeaks) -> None:
    sizes = [rate.size for rate in peaks.read_bytes_per_s]
    assert (
        sizes == sorted(sizes) and sizes[0] == MIB and sizes[-1] >= min(8 * peaks.cache_bytes, peaks.memory_bytes // 9)
    )
    for rate in (*peaks.read_bytes_per_s, *peaks.gemm_flops_per_s.values()):
        assert 1e8 < rate.median <= rate.best < 1e16
        assert rate.by in ("torch", "headway")
    assert 1e-8 < peaks.small_op_s < 1e-2 and 1e-8 < peaks.kernel_call_s < 1e-2
    assert peaks.memory_bytes > 2**28 and peaks.name


def test_a_cpu_is_measured(little_effort):
    stages = []
    peaks = measure("cpu", threads=1, dtypes=["bfloat16", "float32", "int8"], on_stage=stages.append)
    check(peaks)
    assert (peaks.device, peaks.threads, list(peaks.gemm_flops_per_s)) == ("cpu", 1, ["bfloat16", "float32", "int8"])
    assert hardware_of(None, peaks).flops_per_s["int8"] == peaks.gemm_flops_per_s["int8"].best
    assert stages[0] == "reads of 1 MiB" and "products in float32" in stages


@pytest.mark.gpu
def test_a_gpu_is_measured(little_effort):
    peaks = measure("cuda", dtypes=["bfloat16", "float16"])
    check(peaks)
    assert (peaks.device, peaks.threads) == ("cuda", 0)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"device": "tpu"}, "device is 'tpu'; it must be auto, cpu or cuda"),
        ({"device": "cpu", "dtypes": ["int3"]}, "dtype is int3; choose of float32, bfloat16, float16"),
        ({"device": "cpu", "dtypes": []}, "dtype is missing"),
        ({"device": "cpu", "threads": 0}, "threads is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(asked, said):
    with pytest.raises(CalibrationError, match=said):
        measure(**asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named():
    with pytest.raises(CalibrationError, match="torch finds no CUDA device"):
        measure("cuda")


def test_products_in_int8_need_no_torch(little_effort, monkeypatch):
    def unknown(*_):
        raise RuntimeError("not implemented")

    monkeypatch.setattr(torch, "_int_mm", unknown)
    assert measure("cpu", threads=1, dtypes=["int8"]).gemm_flops_per_s["int8"].by == "headway"


def test_the_command_prints_json_and_progress(little_effort, monkeypatch, capfdbinary):
    monkeypatch.setattr("sys.argv", ["calibration", "--device", "cpu", "--dtype", "float32", "--threads", "1"])
    command.main()
    out, err = capfdbinary.readouterr()
    peaks = MachinePeaks.from_json(out)
    assert list(peaks.gemm_flops_per_s) == ["float32"]
    assert b"products in float32\n" in err


def test_the_command_refuses_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["calibration", "--device", "cpu", "--dtype", "int3"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "headway: dtype is int3; choose of float32, bfloat16, float16, int8\n"


def test_the_machine_is_described():
    assert machine.processor_name()


def test_processor_time_of_others_is_told_from_our_own(tmp_path: Path):
    stat, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    own = os.times()
    stat.write_text(f"cpu  {500 * ticks} {ticks} {ticks} 99999 99999 {ticks} {ticks} {ticks} 0 0\ncpu0 1 1\n")
    others = machine.others_cpu_seconds(stat)
    assert others is not None
    assert 0 <= 505 - own.user - own.system - others < 5
    stat.write_text("nonsense")
    assert machine.others_cpu_seconds(stat) is None
    assert machine.others_cpu_seconds(tmp_path / "none") is None


def test_the_largest_cache_is_found(tmp_path: Path):
    assert machine.largest_cache_bytes(tmp_path) == 0
    for index, size in enumerate(("32K\n", "1024K\n", "32M", "nonsense")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size)
    assert machine.largest_cache_bytes(tmp_path) == 32 * 2**20
