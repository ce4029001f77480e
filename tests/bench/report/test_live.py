"""The live view: what it counts, what it shows, and what it costs."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from headway.bench.client.dispatch import LoadMode, LoadStage
from headway.bench.client.load import Pace, run_load
from headway.bench.report import live
from headway.bench.report.live import LiveView, Reservoir
from headway.load.record import Failure, FailureKind, RequestRecord
from headway.load.request import PlannedRequest, Prompt
from tests.bench.report.simulated import simulated_run


def view_of(terminal: bool, total: int = 100, **options: object) -> tuple[LiveView, io.StringIO]:
    file = io.StringIO()
    return LiveView(Console(file=file, force_terminal=terminal, width=100), total, **options), file


def feed(view: LiveView, records: list[RequestRecord]) -> None:
    for record in records:
        view.started(record)
        view.ended(record)


def test_it_counts_and_shows_requests_failures_and_percentiles() -> None:
    view, _ = view_of(True, 150, label="12 requests/s")
    run = simulated_run(130, failures=4)
    view.stage(LoadStage.LOAD)
    feed(view, run.records)
    view.started(RequestRecord(500))
    view.waiting(7)
    text = view.frame().plain
    for words in ("12 requests/s", "measuring", "sent 131", "done 130 of 150", "in flight 1", "waiting for a place 7"):
        assert words in text
    assert "not answered: " in text and "server_error" in text
    ttfts = sorted((r.first_token_ns - r.scheduled_ns) / 1e6 for r in run.records if r.chunk_ns)
    assert view.ttft_ms.quantiles(0.5)[0] == ttfts[len(ttfts) // 2]
    line = view.line()
    assert "130/150 done, not answered: " in line and "1 in flight" in line and "\n" not in line


def test_a_first_token_counts_before_its_request_has_ended() -> None:
    view, _ = view_of(True)
    record = simulated_run(1).records[0]
    view.started(record)
    view.refresh()
    view.refresh()
    assert view.ttft_ms.count == 1 and view.e2el_ms.count == 0
    view.ended(record)
    assert view.ttft_ms.count == 1 and view.e2el_ms.count == 1 and view.tpot_ms.count == 1


def test_a_request_that_was_never_sent_is_done_and_has_no_lag() -> None:
    view, _ = view_of(True)
    view.ended(RequestRecord(0, scheduled_ns=5, end_ns=9, failure=Failure(FailureKind.ABANDONED, "never sent")))
    assert (view.done, view.start_lag_ms.count, view.failures["abandoned"]) == (1, 0, 1)


def test_a_p99_of_few_is_not_shown() -> None:
    sample = Reservoir()
    assert sample.quantiles(0.5, 0.99) == [None, None]
    for value in range(live.ENOUGH_FOR_P99 - 1):
        sample.add(value)
    assert sample.quantiles(0.5, 0.99) == [49, None]
    sample.add(99)
    assert sample.quantiles(0.99) == [99]


def test_a_reservoir_is_bounded_and_fair() -> None:
    sample = Reservoir(500)
    for value in range(50_000):
        sample.add(value)
    assert len(sample.values) == 500 and sample.count == 50_000
    median = sample.quantiles(0.5)[0]
    assert median is not None and 20_000 < median < 30_000


def test_rates_are_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    view, _ = view_of(True)
    now = time.monotonic_ns()
    monkeypatch.setattr(live.time, "monotonic_ns", lambda: now)
    records = simulated_run(60).records
    view.refresh()
    feed(view, records[:20])
    now += 20_000_000_000
    view.refresh()
    feed(view, records[20:60])
    now += 4_000_000_000
    view.refresh()
    requests_per_s, tokens_per_s = view.rates()
    assert requests_per_s == pytest.approx(10)
    assert tokens_per_s == pytest.approx(sum(record.tokens for record in records[20:60]) / 4)


def test_without_a_terminal_there_is_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic_ns()
    monkeypatch.setattr(live.time, "monotonic_ns", lambda: now)
    view, file = view_of(False)
    with view:
        for _ in range(50):
            now += 500_000_000
            view.refresh()
        assert len(file.getvalue().splitlines()) == 2
    assert len(file.getvalue().splitlines()) == 3 and "\x1b" not in file.getvalue()
    view.stage(LoadStage.DONE)
    assert "done, " in view.line() and "requests/s" not in view.line()  # not those of the last seconds


def test_it_leaves_nothing_behind_in_a_terminal() -> None:
    view, file = view_of(True)
    with view:
        feed(view, simulated_run(20).records)
        view.refresh()
    text = file.getvalue()
    assert "done 20 of 100" in text
    assert text.rstrip().endswith("\x1b[2K") or "\x1b[?25h" in text  # erased, and the cursor is back


def test_time_left_comes_from_the_schedule_where_it_is_known() -> None:
    def shown(view: LiveView, after_s: int) -> str:
        view.began(1)
        return view.frame(1 + after_s * 1_000_000_000).plain

    view, _ = view_of(True, 100, expected_s=60.0)
    assert "about 0:40 left" in shown(view, 20)
    feed(view, simulated_run(50).records)
    assert "about 1:40 left" in shown(view, 100)
    plain, _ = view_of(True, 100)
    assert "left" not in shown(plain, 20)


class Answers:
    """Stands in for the client: everything is answered at once."""

    async def send(self, planned: PlannedRequest, record: RequestRecord, prompt: Prompt | None = None) -> None:
        record.sent_ns = record.connected_ns = time.monotonic_ns()
        record.chunk_ns.append(time.monotonic_ns())
        record.chunk_tokens.append(1)
        record.output_tokens = 1
        record.end_ns = time.monotonic_ns()


async def test_the_load_generator_feeds_it() -> None:
    requests = [PlannedRequest(i, Prompt(text="a"), 1, 1, arrival_s=i * 0.02) for i in range(40)]
    view, file = view_of(True, len(requests))
    with view:
        outcome = await run_load(Answers(), requests, Pace(LoadMode.OPEN), listener=view)
    assert len(outcome.records) == view.sent == view.done == view.ttft_ms.count == 40
    assert "40/40 done" in view.line() and "measuring" in file.getvalue()


def test_a_frame_costs_little() -> None:
    view, _ = view_of(True, 4000)
    records = simulated_run(3000, ledger=False).records
    feed(view, records[:1000])
    for record in records[1000:]:
        view.started(record)
    with view:
        view.refresh()
        began = time.process_time()
        for _ in range(20):
            view.refresh()
        per_frame = (time.process_time() - began) / 20
    assert per_frame < 0.02  # with 2,000 requests in flight; two of them a second
