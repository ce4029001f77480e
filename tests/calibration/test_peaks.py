"""What a calibration says, and how it is read."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import msgspec
import pytest

from headway.calibration.peaks import MachinePeaks, Rate


def rate(best: float, size: int = 1024, scatter: float = 0.05) -> Rate:
    return Rate(best, best * (1 - scatter), 10, "torch", size)


PEAKS = MachinePeaks(
    device="cpu",
    name="a processor",
    threads=2,
    memory_bytes=8 * 10**9,
    cache_bytes=32 * 10**6,
    read_bytes_per_s=(rate(100e9, 10**6), rate(60e9, 10**7), rate(20e9, 10**9)),
    gemm_flops_per_s={"float32": rate(200e9), "bfloat16": rate(400e9)},
    small_op_s=1e-6,
    kernel_call_s=4e-6,
    seconds=5.0,
)


@pytest.mark.parametrize(
    ("working_set", "expected"),
    [(1, 100e9), (10**6, 100e9), (10**7, 60e9), (10**8, 40e9), (10**9, 20e9), (10**12, 20e9)],
)
def test_bandwidth_is_interpolated_between_sizes(working_set, expected):
    """10**8 lies in the middle of 10**7 and 10**9 on a logarithmic scale."""
    assert PEAKS.bandwidth(working_set) == pytest.approx(expected)


def test_roofline_takes_the_dtype_s_products_and_the_working_set_s_bandwidth():
    assert PEAKS.roofline("float32").ridge == 10
    assert PEAKS.roofline("bfloat16", working_set=10).ridge == 4


def test_repeats_that_scatter_make_the_machine_busy():
    assert PEAKS.busy is None
    gemm = {"float32": rate(200e9), "bfloat16": rate(400e9, scatter=0.35)}
    said = dataclasses.replace(PEAKS, gemm_flops_per_s=gemm).busy
    assert said is not None and said.startswith("half of the repeats of bfloat16 products were 35% or more below")
    reads = (*PEAKS.read_bytes_per_s[:-1], rate(20e9, 10**9, scatter=0.5))
    said = dataclasses.replace(PEAKS, read_bytes_per_s=reads).busy
    assert said is not None and "memory reads were 50%" in said


def test_the_better_of_two_measurements_counts_rate_by_rate():
    other = dataclasses.replace(
        PEAKS,
        read_bytes_per_s=(rate(90e9, 10**6), rate(70e9, 10**7), rate(10e9, 10**9)),
        gemm_flops_per_s={"float32": rate(300e9), "bfloat16": rate(100e9)},
        small_op_s=5e-7,
        others_cores=1.5,
    )
    best = dataclasses.replace(PEAKS, others_cores=0.5).or_better(other)
    assert [each.best for each in best.read_bytes_per_s] == [100e9, 70e9, 20e9]
    assert {dtype: each.best for dtype, each in best.gemm_flops_per_s.items()} == {"float32": 300e9, "bfloat16": 400e9}
    assert (best.small_op_s, best.kernel_call_s, best.seconds, best.others_cores) == (5e-7, 4e-6, 10.0, 0.5)
    assert PEAKS.or_better(other).others_cores is None


def test_others_on_the_machine_make_it_busy():
    said = dataclasses.replace(PEAKS, others_cores=0.7).busy
    assert said is not None and said.startswith("other processes used 0.7 cores")
    assert dataclasses.replace(PEAKS, others_cores=0.05).busy is None


def test_json_comes_back_as_it_went():
    assert MachinePeaks.from_json(PEAKS.to_json()) == PEAKS


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"device": 3}'])
def test_what_is_no_calibration_is_refused(text):
    with pytest.raises(msgspec.DecodeError):
        MachinePeaks.from_json(text)
    with pytest.raises(msgspec.DecodeError):
        MachinePeaks.from_json(dataclasses.replace(PEAKS, read_bytes_per_s=()).to_json())


def test_reading_a_calibration_needs_no_torch():
    program = "import sys, headway.calibration.peaks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
