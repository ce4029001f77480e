"""What the client's own delays may have added to each figure, and when that makes a figure or a run not valid."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from headway.bench.report import verdict
from headway.load.measures.client_effect import Delay, is_spoilt, reasons, spoilt
from headway.load.measures.numbers import Percentile
from headway.load.measures.summary import summarise
from headway.load.record import ClientHealth, Failure, FailureKind, RequestRecord, RunResult

MS = 1_000_000


def answered(index: int, ttft_ms: float, gap_ms: float, tokens: int = 11) -> RequestRecord:
    """One request each 10 ms."""
    due = 10**9 + index * 10 * MS
    times = [due + round((ttft_ms + gap_ms * i) * MS) for i in range(tokens)]
    return RequestRecord(
        index, scheduled_ns=due, sent_ns=due, chunk_ns=array("q", times), output_tokens=tokens, end_ns=times[-1]
    )


def run_with(client: ClientHealth, ttft_ms: float = 92.0, gap_ms: float = 8.0, requests: int = 500) -> RunResult:
    records = [answered(index, ttft_ms, gap_ms) for index in range(requests)]
    client.reasons = reasons(client, records)
    return RunResult({}, records, 10**9, max(record.end_ns for record in records), client)


def late(p50_ms: float, p99_ms: float, count: int = 1000) -> list[float]:
    return [p50_ms] * (count * 97 // 100) + [p99_ms] * (count * 3 // 100)


def test_a_loop_a_little_late_adds_little_and_the_run_is_valid() -> None:
    """The case of a bench on the machine that serves: 3.8 ms late at P99, a TTFT of 92 ms."""
    run = run_with(ClientHealth(loop_lag_ms=late(0.1, 3.8)))
    whole = summarise(run)
    ttft = whole.from_schedule["ttft_ms"].percentile(99.0)
    assert ttft is not None and ttft.client_ms == pytest.approx(3.8) and ttft.client_share == pytest.approx(3.8 / 92)
    assert not is_spoilt(ttft) and verdict.is_valid(run, [whole])
    # It adds to a gap between two tokens as much, which is nearly half of it: that figure alone is not valid.
    assert verdict.spoilt_figures([whole]) == ["ITL P99", "ITL P99.9"]
    assert verdict.headline(run, [whole]).startswith("Valid but for ITL P99 and 1 more: ")
    (banner,) = [each for each in verdict.banners(run, [whole]) if each.title == "CLIENT DELAYS"]
    assert banner.tone == "warn" and "ITL P99 by up to 3.8 ms (48 %)" in banner.lines[0]


def test_what_is_added_depends_on_the_figure() -> None:
    client = ClientHealth(loop_lag_ms=[2.0] * 100, start_lag_ms=[5.0] * 100, backlog_bytes=[16_000] * 100)
    delay = Delay.of(client, 99.0)
    assert (delay.send_ms, delay.read_ms) == (5.0, 2.0)
    added = {
        (metric, since): delay.added_ms(metric, since, tokens=11.0)  # type: ignore[arg-type]
        for metric in ("ttft_ms", "e2el_ms", "itl_ms", "tpot_ms")
        for since in ("schedule", "send")
    }
    assert added["ttft_ms", "schedule"] == added["e2el_ms", "schedule"] == 7.0
    assert added["ttft_ms", "send"] == added["e2el_ms", "send"] == 2.0
    assert added["itl_ms", "schedule"] == added["itl_ms", "send"] == 2.0
    assert added["tpot_ms", "schedule"] == pytest.approx(0.2)  # of eleven tokens, over ten gaps
    assert delay.added_ms("normalized_latency_ms", "schedule", 11.0) == pytest.approx(7 / 11)


def test_unread_bytes_are_time_until_they_are_read() -> None:
    assert Delay.of(ClientHealth(backlog_bytes=[160_000] * 10), 50.0).read_ms == 10.0
    assert Delay.of(ClientHealth(), 99.0) == Delay(0.0, 0.0)


@pytest.mark.parametrize(("share", "is_not_valid"), [(0.09, False), (0.11, True)])
def test_a_tenth_of_a_figure_spoils_it(share: float, is_not_valid: bool) -> None:
    run = run_with(ClientHealth(loop_lag_ms=late(0.0, share * 92.0)))
    found = summarise(run).from_schedule["ttft_ms"].percentile(99.0)
    assert found is not None and is_spoilt(found) == is_not_valid
    assert verdict.is_valid(run, [summarise(run)])


def test_the_most_spoilt_figure_comes_first() -> None:
    found = spoilt(summarise(run_with(ClientHealth(loop_lag_ms=late(1.0, 30.0)))).from_schedule)
    shares = [claim.client_share for _, claim in found]
    assert shares == sorted(shares, reverse=True) and found[0][0] == "itl_ms"


def test_a_client_can_have_made_all_of_a_figure_and_no_more() -> None:
    """Tokens that are read together have gaps of 0 between them."""
    for value, client_ms in ((0.0, 8.0), (2.0, 8.0)):
        assert Percentile(50.0, value, None, None, client_ms=client_ms).client_share == 1.0
    assert Percentile(50.0, 0.0, None, None).client_share == 0.0


def test_a_load_that_was_not_offered_makes_the_run_not_valid() -> None:
    # 500 requests in 5 seconds, of which some were sent 0.6 seconds late.
    run = run_with(ClientHealth(start_lag_ms=late(0.1, 600.0)))
    assert run.client.bound and "the load was not offered" in run.client.reasons[0]
    assert not verdict.is_valid(run, [summarise(run)])
    assert verdict.banners(run, [summarise(run)])[0].title == "CLIENT-BOUND"
    assert not run_with(ClientHealth(start_lag_ms=late(0.1, 400.0))).client.bound


def test_a_client_that_spoils_every_median_makes_the_run_not_valid() -> None:
    run = run_with(ClientHealth(loop_lag_ms=[40.0] * 100, cpu_share=0.97), ttft_ms=50.0, gap_ms=1.0)
    assert run.client.bound and "to every median latency" in run.client.reasons[0]
    assert run.client.reasons[1].startswith("the client used 0.97 of a core")
    assert not run_with(ClientHealth(loop_lag_ms=[0.3] * 100, cpu_share=0.97)).client.bound


def test_it_says_who_held_the_client_up() -> None:
    records = [answered(index, 50.0, 1.0) for index in range(100)]
    client = ClientHealth(loop_lag_ms=[40.0] * 100, cpu_share=0.3)
    assert reasons(client, records, waited_share=0.4)[1].startswith("the client had no core 40 % of the time")
    assert len(reasons(client, records, waited_share=0.0)) == 1


def test_failed_requests_are_in_no_figure() -> None:
    failed = answered(0, 0.1, 0.1)
    failed.failure = Failure(FailureKind.CUT, "cut")
    assert reasons(ClientHealth(loop_lag_ms=[6.0] * 100), [failed, RequestRecord(1)]) == []


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 250, 1000])
def test_delays_are_nearest_ranks(count: int) -> None:
    values = list(np.random.default_rng(count).exponential(size=count))
    assert Delay.of(ClientHealth(loop_lag_ms=values), 99.0).read_ms == sorted(values)[-(-99 * count // 100) - 1]
