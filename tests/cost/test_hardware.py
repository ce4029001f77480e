"""What a device falls back on, what it reads at, and its roofline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.machines import MACHINE


@pytest.mark.parametrize(
    ("has", "asked", "used"),
    [
        ("fp32", "fp32", "fp32"),
        ("fp32", "bf16", "fp32"),
        ("fp32", "int4", "fp32"),
        ("fp32 fp16", "bf16", "fp16"),
        ("fp32 bf16", "fp16", "bf16"),
        ("fp32 fp16 bf16", "fp8", "bf16"),
        ("fp32 fp16 bf16", "int8", "bf16"),
        ("fp32 fp16", "fp8", "fp16"),
        ("fp32 bf16 fp8", "fp8", "fp8"),
        ("fp32 bf16 fp8", "fp4", "fp8"),
        ("fp32 bf16 fp8", "int8", "bf16"),
        ("fp32 bf16 int8", "int4", "int8"),
        ("fp32 bf16 int8", "fp8", "bf16"),
        ("fp32 bf16 fp8 fp4", "fp4", "fp4"),
    ],
)
def test_arithmetic_falls_back_on_the_next_wider_format(has, asked, used):
    rates = {name: 1e12 * rank for rank, name in enumerate(has.split(), 1)}
    machine = replace(MACHINE, flops_per_s=rates)
    assert machine.arithmetic(asked) == used
    assert machine.rate(asked) == rates[used]
    assert machine.roofline(asked).flops_per_s == rates[used]


@pytest.mark.parametrize(("has", "asked"), [("bf16", "fp32"), ("fp8", "bf16"), ("fp32", "fp64")])
def test_nothing_is_narrowed(has, asked):
    machine = replace(MACHINE, flops_per_s={has: 1e12})
    with pytest.raises(ValueError, match=f"round has no rate for products in {asked}; it has {has}"):
        machine.arithmetic(asked)


READS = ((1000, 8e9), (10_000, 4e9), (100_000, 1e9))


@pytest.mark.parametrize(
    ("size", "rate"),
    [(1, 8e9), (1000, 8e9), (10_000, 4e9), (100_000, 1e9), (10**9, 1e9), (3162.27766, 6e9), (31622.7766, 2.5e9)],
)
def test_bandwidth_is_interpolated_over_the_logarithm_of_the_size(size, rate):
    assert replace(MACHINE, reads=READS).bandwidth(size) == pytest.approx(rate)


@given(st.integers(1, 10**7), st.integers(0, 10**6))
def test_more_bytes_are_never_read_faster(size, more):
    machine = replace(MACHINE, reads=READS)
    assert 1e9 <= machine.bandwidth(size + more) <= machine.bandwidth(size) <= 8e9


def test_bandwidth_without_measured_sizes_is_the_data_sheet_s():
    assert MACHINE.bandwidth(1) == MACHINE.bandwidth(10**12) == MACHINE.bandwidth() == 1e10
    assert replace(MACHINE, reads=READS).bandwidth() == 1e10


def test_the_roofline_is_the_data_sheet_s():
    roofline = replace(MACHINE, reads=READS).roofline("fp8")
    assert (roofline.flops_per_s, roofline.bytes_per_s, roofline.ridge) == (8e11, 1e10, 80)
    assert MACHINE.roofline().flops_per_s == 4e11
