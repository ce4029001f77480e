"""Where the time of requests went, by ledgers written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.load.measures.phases import MEDIAN, SLOWEST, phase_composition, phase_lengths
from headway.load.record import RequestRecord
from tests.bench.records import MS, failed, request


def timings(ttft: float, **phases: float) -> dict[str, Any]:
    """Timings as Headway gives them, made of milliseconds."""
    phases_ns = {name: round(ms * MS) for name, ms in phases.items()}
    return {"e2e_ns": sum(phases_ns.values()), "ttft_ns": round(ttft * MS), "phases_ns": phases_ns, "tokens": 2}


def with_ledger(index: int, decode: float = 10.0, due: float = 0.0) -> RequestRecord:
    """2 ms late, 30 ms + decode in the server, and 5 ms outside of it, 4 of them before the first token."""
    ledger = timings(
        29, receive=1, queue_capacity=12, prefill_compute=9, prefill_stall=3, sampling=5, decode_compute=decode
    )
    end = due + 2 + 30 + decode + 5
    return request(index, [due + 2 + 29 + 4, end], due=due, sent=due + 2, end=end, timings=ledger)


def test_lengths_by_phase_with_their_sums() -> None:
    lengths = phase_lengths([with_ledger(0), with_ledger(1, 30), failed(2), request(3, [5, 6])])
    assert lengths["decode_compute"].tolist() == [10, 30]
    assert lengths["queue"].tolist() == [12, 12]
    assert lengths["stall"].tolist() == [3, 3]
    assert lengths["network_and_client"].tolist() == [5, 5]
    assert "decode_stall_prefill" not in lengths
    assert list(lengths)[:3] == ["receive", "queue_capacity", "prefill_compute"]


def test_a_phase_that_only_some_spent_time_in_counts_with_zero_for_the_others() -> None:
    stalled = with_ledger(1)
    assert stalled.timings is not None
    stalled.timings["phases_ns"]["decode_stall_prefill"] = 7 * MS
    stalled.timings["e2e_ns"] += 7 * MS
    lengths = phase_lengths([with_ledger(0), stalled])
    assert lengths["decode_stall_prefill"].tolist() == [0, 7]
    assert lengths["stall"].tolist() == [3, 10]


def test_no_ledgers_no_phases() -> None:
    assert phase_lengths([request(0, [1, 2])]) == {}
    assert phase_composition([request(0, [1, 2])], *MEDIAN) == {}


@pytest.mark.parametrize(
    "nonsense",
    [
        {"phases_ns": 3},
        {"e2e_ns": 5, "phases_ns": {"receive": "1"}},
        {"phases_ns": {}},
        {"e2e_ns": True, "phases_ns": {}},
    ],
)
def test_a_ledger_that_makes_no_sense_is_left_out(nonsense: dict[str, Any]) -> None:
    assert phase_lengths([request(0, [1, 2], timings=nonsense)]) == {}


def test_the_median_and_the_slowest_are_told_apart() -> None:
    records = [with_ledger(i, decode=10 + (90 if i == 137 else 0), due=i) for i in range(200)]
    median, slowest = phase_composition(records, *MEDIAN), phase_composition(records, *SLOWEST)
    assert median["decode_compute"] == 10
    assert slowest["decode_compute"] == (100 + 10) / 2  # two are the slowest 1 % of 200
    assert phase_composition(records[:150], *SLOWEST)["decode_compute"] == 55
    assert phase_composition(records[:3], *SLOWEST)["decode_compute"] == 10


@pytest.mark.parametrize("metric", ["e2el", "ttft"])
def test_the_parts_sum_to_the_latency(metric: Any) -> None:
    records = [with_ledger(i, decode=i, due=i) for i in range(1, 60)]
    parts = phase_composition(records, 0, 100, metric)
    until = [r.end_ns if metric == "e2el" else r.first_token_ns for r in records]
    latency = np.mean([end - r.scheduled_ns for end, r in zip(until, records, strict=True)]) / MS
    assert sum(parts.values()) == pytest.approx(latency)
    assert parts["start_lag"] == 2


def test_ttft_is_made_of_what_lies_before_the_first_token() -> None:
    assert phase_composition([with_ledger(0)], *MEDIAN, metric="ttft") == {
        "start_lag": 2,
        "receive": 1,
        "queue_capacity": 12,
        "prefill_compute": 9,
        "prefill_stall": 3,
        "server_rest": 4,
        "network_and_client": 4,
    }


def test_phases_of_another_server_are_kept_and_what_they_leave_open_is_shown() -> None:
    record = request(0, [50, 90], end=100, timings={"e2e_ns": 80 * MS, "phases_ns": {"dreaming": 60 * MS}})
    assert phase_composition([record], 0, 100) == {
        "start_lag": 0,
        "dreaming": 60,
        "server_rest": 20,
        "network_and_client": 20,
    }
    assert phase_composition([record], 0, 100, metric="ttft") == {}
