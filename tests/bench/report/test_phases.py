"""How a request's time is cut into parts."""

from __future__ import annotations

import dataclasses
from array import array

import pytest

from headway.bench.report.phases import (
    CANCELLED,
    CLIENT,
    FAILED,
    NETWORK,
    PARTS,
    SERVER_REST,
    STREAM,
    WAIT,
    Slice,
    growth_in_words,
    in_words,
    lengths,
    median_and_slowest,
    part_of,
)
from headway.load.record import Failure, FailureKind, RequestRecord
from headway.policy.step.ledger import Phase
from tests.bench.report.simulated import simulated_run


@pytest.mark.parametrize("ledger", [True, False])
def test_the_parts_of_a_request_sum_to_its_time_from_when_it_was_due(ledger: bool) -> None:
    for record in simulated_run(50, failures=5, ledger=ledger).records:
        assert sum(lengths(record).values()) == record.end_ns - record.scheduled_ns


def test_every_phase_of_the_ledger_has_a_part() -> None:
    known = {phase for part in PARTS for phase in part.phases}
    assert known == {str(phase) for phase in Phase}


def test_a_phase_that_is_not_known_is_counted_as_the_rest_of_the_server() -> None:
    record = simulated_run(1).records[0]
    record.timings = {"e2e_ns": 1000, "ttft_ns": 500, "phases_ns": {"warp": 700, "decode_compute": 300}}
    parts = lengths(record)
    assert parts[SERVER_REST] == 700
    assert sum(parts.values()) == record.end_ns - record.scheduled_ns


def test_without_a_ledger_only_what_is_seen_from_outside_is_told_apart() -> None:
    record = simulated_run(1, ledger=False).records[0]
    parts = lengths(record)
    assert parts[STREAM] == record.last_token_ns - record.first_token_ns
    assert parts[WAIT] == record.first_token_ns - max(record.connected_ns, record.sent_ns)


def test_a_failed_request_is_one_part_and_one_never_sent_none() -> None:
    failed = RequestRecord(0, scheduled_ns=10, sent_ns=30, end_ns=130, failure=Failure(FailureKind.CUT, "cut"))
    assert lengths(failed) == {CLIENT: 20, FAILED: 100}
    given_up = dataclasses.replace(failed, failure=Failure(FailureKind.CANCELLED, "as planned"))
    assert lengths(given_up) == {CLIENT: 20, CANCELLED: 100}
    never = RequestRecord(1, scheduled_ns=10, end_ns=130, failure=Failure(FailureKind.ABANDONED, "not sent"))
    assert lengths(never) == {}


@pytest.mark.parametrize("timings", [{}, {"phases_ns": "no"}, {"phases_ns": {"queue": -1}, "e2e_ns": 5}, {"e2e_ns": 5}])
def test_nonsense_for_timings_is_no_ledger(timings: dict) -> None:
    record = simulated_run(1).records[0]
    record.timings = timings
    assert WAIT in lengths(record)


def test_a_slice_sums_to_the_mean_latency_of_its_requests() -> None:
    run = simulated_run(400, rate=24)
    median, slowest = median_and_slowest(run.records, "e2el")
    latencies = sorted((record.end_ns - record.scheduled_ns) / 1e6 for record in run.records)
    assert median.total_ms == pytest.approx(sum(latencies[180:220]) / 40)
    assert slowest.total_ms == pytest.approx(sum(latencies[-4:]) / 4)
    assert 0 < slowest.share("stall") < 1 and NETWORK in slowest.parts_ms
    first = median_and_slowest(run.records, "ttft")
    ttfts = sorted((record.first_token_ns - record.scheduled_ns) / 1e6 for record in run.records)
    assert first[1].total_ms == pytest.approx(sum(ttfts[-4:]) / 4)


def test_words_name_the_largest_group() -> None:
    _, slowest = median_and_slowest(simulated_run(400, rate=34).records, "ttft")
    assert "waiting in the queue" in in_words(slowest)
    _, unknown = median_and_slowest(simulated_run(100, ledger=False).records, "e2el")
    assert in_words(unknown) == ""
    schedule, sampling = (part_of(each) for each in ("schedule", "sampling"))
    words = in_words(Slice("slowest", {NETWORK: 10.0, schedule: 30.0, sampling: 50.0, part_of("decode_compute"): 10.0}))
    assert words == "90 % of it in other work, most of it “sampling”"


def test_words_name_the_part_that_grew_most() -> None:
    median, slowest = Slice("median", {WAIT: 10.0, STREAM: 90.0}), Slice("slowest", {WAIT: 90.0, STREAM: 110.0})
    assert growth_in_words(median, slowest) == "80 % of the difference is “until the first token”"
    shrunk = Slice("slowest", {WAIT: 90.0, STREAM: 50.0})
    assert growth_in_words(median, shrunk).startswith("100 %")
    assert growth_in_words(median, median) == ""


def test_too_few_requests_have_no_tail() -> None:
    assert median_and_slowest(simulated_run(1).records, "e2el") == []
    assert median_and_slowest([RequestRecord(0, chunk_ns=array("q"))], "ttft") == []
