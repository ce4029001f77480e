"""Losses: what their numbers mean one by one, and which numbers are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cost.efficiency import Efficiency

seconds = st.floats(0, 1e3)
sharpness = st.floats(1, 1e3)


@given(compute=seconds, memory=seconds, sharp=sharpness)
def test_overlap_lies_between_the_longer_and_the_sum(compute, memory, sharp):
    taken = Efficiency(sharpness=sharp).overlapped(compute, memory)
    assert max(compute, memory) <= taken <= (compute + memory) * (1 + 1e-9)
    assert taken == pytest.approx(Efficiency(sharpness=sharp).overlapped(memory, compute))


@given(compute=seconds, memory=seconds)
def test_the_limits_of_overlap(compute, memory):
    assert Efficiency(sharpness=1).overlapped(compute, memory) == pytest.approx(compute + memory)
    assert Efficiency(sharpness=math.inf).overlapped(compute, memory) == max(compute, memory)


@given(compute=seconds, memory=seconds, sharp=st.tuples(sharpness, sharpness))
def test_sharper_is_never_slower(compute, memory, sharp):
    blunt, sharp_one = (Efficiency(sharpness=each).overlapped(compute, memory) for each in sorted(sharp))
    assert sharp_one <= blunt * (1 + 1e-9)


def test_overlap_by_hand():
    assert Efficiency(sharpness=2).overlapped(3.0, 4.0) == pytest.approx(5.0)
    assert Efficiency(sharpness=3).overlapped(1.0, 1.0) == pytest.approx(2 ** (1 / 3))
    assert Efficiency(sharpness=2).overlapped(0.0, 4.0) == 4.0
    assert Efficiency(sharpness=1000).overlapped(1e-300, 1e300) == 1e300


@pytest.mark.parametrize(("tokens", "factor"), [(1, 2.0), (4, 2.0), (8, 1.75), (16, 1.5), (64, 1.0), (5000, 1.0)])
def test_the_measured_factor_is_interpolated_over_the_logarithm(tokens, factor):
    assert Efficiency(linear=((4, 2.0), (16, 1.5), (64, 1.0))).linear_factor(tokens) == pytest.approx(factor)
    assert Efficiency().linear_factor(tokens) == 1.0
    only = Efficiency(linear_of={"bf16": ((4, 2.0), (16, 1.5), (64, 1.0))})
    assert only.linear_factor(tokens, "bf16") == pytest.approx(factor)
    assert only.linear_factor(tokens, "fp32") == only.linear_factor(tokens) == 1.0


def test_shares_of_products_are_by_format():
    efficiency = Efficiency(matmul_flops={"bf16": 0.6, "other": 0.4})
    assert (efficiency.matmul("bf16"), efficiency.matmul("fp8")) == (0.6, 0.4)
    assert Efficiency.ideal().matmul("fp8") == 1.0


def test_only_narrower_weights_are_widened():
    efficiency = Efficiency(widen_ops={"8": 3.0, "4": 5.0})
    assert (efficiency.widening(8, 16), efficiency.widening(4, 16), efficiency.widening(4, 8)) == (3.0, 5.0, 5.0)
    assert (efficiency.widening(8, 8), efficiency.widening(16, 16), efficiency.widening(2, 16)) == (0.0, 0.0, 0.0)
    assert Efficiency.ideal().widening(4, 16) == 0.0


@pytest.mark.parametrize(
    "bad",
    [
        {"matmul_flops": {"bf16": 0.0}},
        {"matmul_bytes": 0.0},
        {"matmul_bytes": math.nan},
        {"expert_flops": -1.0},
        {"expert_bytes": 0.0},
        {"attention_flops": 0.0},
        {"kv_bytes": 0.0},
        {"element_bytes": 0.0},
        {"link": 0.0},
        {"sharpness": 0.5},
        {"kernel_s": -1e-9},
        {"step_s": -1.0},
        {"sequence_s": math.nan},
        {"token_s": -1.0},
        {"request_s": -1.0},
        {"widen_ops": {"4": -1.0}},
        {"linear": ((1, 0.0),)},
        {"linear": ((0, 1.0),)},
        {"linear": ((8, 1.0), (4, 1.0))},
        {"linear": ((4, 1.0), (4, 2.0))},
        {"linear_of": {"bf16": ((4, 1.0), (2, 2.0))}},
        {"score_s": -1e-12},
    ],
    ids=str,
)
def test_impossible_numbers_are_refused_in_one_line(bad):
    with pytest.raises(ValueError, match=f"^{next(iter(bad))} is .*;.*(above 0|less)") as error:
        Efficiency(**bad)
    assert "\n" not in str(error.value)


def test_free_things_are_possible():
    assert Efficiency(kernel_s=0.0, step_s=0.0, sequence_s=0.0, token_s=0.0, request_s=0.0, widen_ops={"4": 0.0})
    assert Efficiency(expert_bytes=1.5)
