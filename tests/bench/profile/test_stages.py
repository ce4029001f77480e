"""Stages have no gap and no overlap."""

from __future__ import annotations

import pytest

from headway.bench.profile.stages import STAGES, median_phase, stage_lengths, typical_stages
from headway.policy.step.ledger import Phase
from tests.bench.profile.made import answered
from tests.bench.records import request


def test_every_phase_of_the_ledger_belongs_to_one_stage():
    named = [str(phase) for stage in STAGES for phase in stage.phases]
    assert len(named) == len(set(named))
    assert {str(phase) for phase in Phase} <= set(named)


def test_stages_sum_to_what_the_client_saw():
    record = answered(0, 64)
    lengths = stage_lengths(record)
    assert lengths == {
        "network": 4.0,
        "input": 3.0,
        "transport": 3.0,
        "schedule": 6.5,
        "prefill": 100.0,
        "decode": 150.0,
        "sampling": 7.0,
        "output": 0.5,
    }
    assert sum(lengths.values()) == (record.end_ns - record.sent_ns) / 1e6


def test_a_phase_that_is_not_known_is_not_lost():
    record = answered(0, 64)
    record.timings["phases_ns"]["meditation"] = 1_000_000
    record.timings["e2e_ns"] += 1_000_000
    record.end_ns += 1_000_000
    lengths = stage_lengths(record)
    assert lengths["schedule"] == 7.5
    assert sum(lengths.values()) == (record.end_ns - record.sent_ns) / 1e6


def test_clocks_that_disagree_give_no_negative_network():
    assert stage_lengths(answered(0, 64, late_ms=-5.0))["network"] == 0.0


def test_without_a_ledger_there_are_no_stages():
    record = request(0, [1.0, 2.0])
    assert stage_lengths(record) is None
    assert typical_stages([record]) == {}
    assert median_phase([record], Phase.PREFILL_COMPUTE) is None


def test_typical_stages_are_those_of_the_middle_half():
    """The fastest and the slowest of four requests are left out, and the parts still sum to the mean whole."""
    records = [answered(n, 64, prefill_ms=ms) for n, ms in enumerate((10.0, 20.0, 40.0, 4000.0))]
    stages = typical_stages(records)
    assert stages["prefill"] == 30.0
    assert sum(stages.values()) == pytest.approx(30.0 + 150.0 + 24.0)
    assert typical_stages(records[:1])["prefill"] == 10.0


def test_median_phase_counts_a_phase_without_time_as_zero():
    records = [answered(n, 64, decode_ms=ms) for n, ms in enumerate((30.0, 60.0))]
    assert median_phase(records, Phase.DECODE_COMPUTE) == 45.0
    assert median_phase(records, Phase.DECODE_STALL_PREFILL) == 0.0
