"""Views of runs whose requests were written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from headway.bench.report.tables import part_tables
from headway.load.measures import summary as summary_module
from headway.load.measures.numbers import Window
from headway.load.measures.summary import cost_per_million_tokens, length_bands, summarise, summarise_all
from headway.load.record import ClientHealth, FailureKind, RequestRecord
from tests.bench.records import MS, at, failed, request, run


def steady_stream(count: int = 400, gap: float = 25.0, **fields: str) -> list[RequestRecord]:
    """TTFT uniform over 100 .. 200 ms, ten tokens after it with 10 ms between."""
    generator = np.random.default_rng(3)
    records = []
    for index in range(count):
        due, first = index * gap, generator.uniform(100, 200)
        records.append(request(index, [due + first + 10 * i for i in range(11)], due=due, sent=due + 1, **fields))
    return records


def test_the_whole_run() -> None:
    records = [*steady_stream(), failed(400), failed(401, FailureKind.TIMEOUT), failed(402, FailureKind.TIMEOUT)]
    summary = summarise(run(records), percentiles=[50, 99])
    assert (summary.name, summary.completed, summary.failed) == ("whole run", 400, 3)
    assert summary.failures == {"server_error": 1, "timeout": 2}
    assert summary.tokens == {"prompt": 4000, "output": 4400, "cached": 0, "chunks": 4400}
    assert summary.rates["output_throughput"] == 440
    ttft, sent = summary.from_schedule["ttft_ms"], summary.from_send["ttft_ms"]
    exact = [(r.first_token_ns - r.scheduled_ns) / MS for r in records if r.ok]
    assert ttft.count == 400
    assert ttft.mean == pytest.approx(np.mean(exact))
    assert ttft.percentiles[0].value == pytest.approx(np.percentile(exact, 50))
    assert sent.mean == pytest.approx(ttft.mean - 1)
    assert summary.from_send["itl_ms"].count == 4000
    assert summary.from_send["itl_ms"].maximum == pytest.approx(10)
    assert summary.from_send["tpot_ms"].mean == pytest.approx(10)
    assert set(summary.from_schedule) == {"ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "normalized_latency_ms"}
    assert summary.attainment is None and summary.phases_ms == {}


def test_a_claim_on_too_few_is_refused_with_what_it_needs() -> None:
    summary = summarise(run(steady_stream(50)), percentiles=[50, 99])
    median, p99 = summary.from_schedule["ttft_ms"].percentiles
    assert median.value is not None and median.low is not None and median.low < median.value
    assert p99.value is None and p99.needs is not None and p99.needs > 50


def test_latencies_of_a_window_are_of_the_requests_due_in_it() -> None:
    records = steady_stream(400)
    window = Window(at(2000), at(6000), True, "by hand")
    summary = summarise(run(records), name="steady state", window=window, goals={"": {"ttft": 150.0}})
    due = [r for r in records if at(2000) <= r.scheduled_ns < at(6000)]
    assert summary.completed == len(due) == 160
    assert summary.window is window
    assert summary.attainment is not None and summary.attainment.total == 160
    assert summary.attainment.requests_per_s == summary.attainment.met / 4
    came = sum(at(2000) <= ns < at(6000) for r in records for ns in r.chunk_ns)
    assert summary.rates["output_throughput"] == pytest.approx(came / 4)


def test_a_window_that_was_not_found_is_the_whole_run() -> None:
    result = run(steady_stream(20))
    window = Window(result.began_ns, result.ended_ns, False, "too short")
    found = summarise(result, window=window)
    assert found.rates == summarise(result).rates
    assert found.window is window


def test_every_view_of_a_mix() -> None:
    records = steady_stream(400, class_name="chat")
    for record in records[::4]:
        record.class_name = "batch"
    summaries = summarise_all(run(records), price_per_hour=3.6, goals={"chat": {"ttft": 150.0}})
    by_name = {each.name: each for each in summaries}
    assert next(iter(by_name)) == "whole run"
    assert by_name["class chat"].completed == 300 and by_name["class batch"].completed == 100
    of_classes = sum(by_name[name].rates["output_throughput"] for name in ("class chat", "class batch"))
    assert of_classes == pytest.approx(by_name["whole run"].rates["output_throughput"])
    chat = by_name["class chat"].attainment
    assert chat is not None and chat.objectives == {"ttft": 150.0}
    assert by_name["class batch"].attainment is None
    assert by_name["class chat"].cost_per_million_tokens is None


def test_how_long_answers_were_in_tokens_and_in_steps() -> None:
    """Steps are those that the server tells of; of others, chunks."""
    records = [
        request(0, [10, 20, 30], tokens=9, timings={"steps": 4}, class_name="told"),
        request(1, [10, 20, 30, 40], tokens=12, class_name="untold"),
        request(2, [10, 20], tokens=2, timings={"steps": True}, class_name="untold"),
        failed(3),
    ]
    records[1].finish_reason = "stop"
    whole, *_ = views = summarise_all(run(records))
    assert [whole.answers[key].mean for key in ("output_tokens", "steps")] == pytest.approx([23 / 3, 10 / 3])
    assert whole.ended_by == {"length": 2, "stop": 1} and summarise(run([failed(0)])).answers == {}
    (table,) = part_tables(views)
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["steps of an answer, mean"] == ["4", "3"] and rows["tokens of a step"] == ["2.25", "2.33"]
    assert rows["ended by max_tokens"] == ["100 %", "50 %"]


def test_cancelled_requests_are_counted_apart() -> None:
    records = [*steady_stream(20), *(failed(20 + i, FailureKind.CANCELLED, due=0, end=9) for i in range(3)), failed(23)]
    summary = summarise(run(records), goals={"": {"ttft": 5000.0}})
    assert (summary.completed, summary.failed, summary.cancelled) == (20, 1, 3)
    assert summary.failures == {"server_error": 1}
    assert summary.attainment is not None and (summary.attainment.met, summary.attainment.total) == (20, 21)
    assert any(note.startswith("3 requests cancelled by the client") for note in summary.notes)


def test_probes_are_in_no_number_of_the_load() -> None:
    records = steady_stream(40, class_name="chat")
    probes = [request(i, [i * 500 + 7, i * 500 + 9], due=i * 500) for i in range(20)]
    alone, beside = summarise_all(run(records)), summarise_all(run(records, probes=probes))
    assert beside[:-1] == alone
    stream = beside[-1]
    assert (stream.name, stream.completed, stream.attainment) == ("probe stream", 20, None)
    assert stream.from_schedule["ttft_ms"].maximum == pytest.approx(7)


@pytest.mark.parametrize("found", [True, False])
def test_the_steady_state_is_its_own_view_or_a_note_says_why_not(monkeypatch, found: bool) -> None:
    window = Window(at(1000), at(9000), found, "because")
    monkeypatch.setattr(summary_module, "find_steady_window", lambda records, began, ended: window)
    summaries = summarise_all(run(steady_stream()))
    assert [each.name for each in summaries] == (["whole run", "steady state"] if found else ["whole run"])
    assert summaries[0].notes == ([] if found else ["no steady state: because"])


def test_cost_is_price_over_tokens() -> None:
    # Document 003, section 13: price / 3600 * 10^6 / (tokens/s).
    summary = summarise(run(steady_stream()), price_per_hour=3.6)
    assert summary.cost_per_million_output_tokens == pytest.approx(3.6 / 3600 * 1e6 / 440)
    assert summary.cost_per_million_tokens == pytest.approx(3.6 / 3600 * 1e6 / 840)
    assert cost_per_million_tokens(None, 440) is None
    assert summarise(run([failed(0)]), price_per_hour=3.6).cost_per_million_output_tokens is None


def test_tokens_per_joule_are_of_the_whole_run() -> None:
    result = run(steady_stream(), energy_joules=200.0)
    assert summarise(result).tokens_per_joule == 22
    assert summarise(result, window=Window(at(1000), at(2000), True, "by hand")).tokens_per_joule is None
    assert summarise(run(steady_stream())).tokens_per_joule is None


def test_phases_are_distributions() -> None:
    records = steady_stream(100)
    for index, record in enumerate(records):
        record.timings = {"e2e_ns": 60 * MS, "phases_ns": {"queue_blocks": index * MS, "decode_stall_prefill": 5 * MS}}
    phases = summarise(run(records)).phases_ms
    assert phases["queue"].mean == phases["queue_blocks"].mean == pytest.approx(49.5)
    assert phases["stall"].maximum == 5
    assert phases["network_and_client"].count == 100


def test_a_run_in_which_nothing_completed() -> None:
    summary = summarise(run([failed(0), failed(1)]), goals={"": {"ttft": 1.0}})
    assert summary.from_schedule == {} and summary.from_send == {}
    assert (summary.completed, summary.failed) == (0, 2)
    assert summary.attainment is not None and summary.attainment.missed_by["failed"] == 2
    assert summarise(run([])).completed == 0


def test_an_answer_without_tokens_or_failure_is_no_answer() -> None:
    assert summarise(run([request(0)])).failures == {"no_tokens": 1}


def test_notes_say_what_to_know_before_believing_the_numbers() -> None:
    quiet = summarise(run(steady_stream(20)))
    assert quiet.notes == []
    no_usage, at_once = request(500, [10, 20]), request(501, [10], tokens=7)
    no_usage.output_tokens = None
    client = ClientHealth(reasons=["the event loop ran 40 ms late"])
    records = [no_usage, at_once, failed(502), failed(503, FailureKind.ABANDONED), failed(504, FailureKind.ABANDONED)]
    notes = summarise(run(records, client=client, interrupted=True)).notes
    assert notes == [
        "client-bound: the event loop ran 40 ms late",
        "interrupted: 2 requests abandoned; not in any latency",
        "1 request failed; not in any latency, and counted as missed",
        "1 request without `usage`: their output tokens are counted by chunks",
        "1 request with several tokens answered in one chunk: no TPOT, no ITL",
    ]
    assert summarise(run([failed(0, FailureKind.ABANDONED)])).notes == [
        "1 request abandoned by this client; not in any latency"
    ]
    assert summarise(run([request(0, [1, 2]), request(1, [1, 2], resent=1), failed(2)])).resent == 1
    (note,) = summarise(run([request(0, [1, 2], resent=1)])).notes
    assert note.startswith("1 request sent again, because the server had closed the kept-open connection")
    assert summarise(run([request(0, [1, 2], tokens=6)])).notes == [
        "3.00 tokens per chunk: ITL is the gap between chunks, not tokens"
    ]


def test_requests_by_the_length_of_their_prompts() -> None:
    """Document 004: are the slow ones those with long prompts?"""
    records = [
        request(i, [i * 100 + 1 + i % 8, i * 100 + 21 + i % 8], due=i * 100, prompt=1 + i % 8) for i in range(80)
    ]
    assert length_bands(records) == [(1, 3), (4, 5), (6, 7), (8, 8)]
    bands = [each for each in summarise_all(run(records)) if each.name.startswith("prompts of ")]
    assert (bands[0].name, bands[0].completed) == ("prompts of 1 to 3", 30)
    assert sum(each.completed for each in bands) == 80
    means = [each.from_schedule["ttft_ms"].mean for each in bands]
    assert means == pytest.approx([2.0, 4.5, 6.5, 8.0])
    assert length_bands(records[:39]) == length_bands([request(i, [1.0]) for i in range(80)]) == []
    skewed = [request(i, [1.0], prompt=10 if i else 99) for i in range(80)]
    assert length_bands(skewed) == [(10, 10), (99, 99)]


def test_tokens_per_second_of_a_request_are_the_inverse_of_its_tpot() -> None:
    """Document 001, chapter 4: TPS = 1 / TBT."""
    records = [request(i, [10, 10 + gap, 10 + 2 * gap], due=0) for i, gap in enumerate([5, 10, 20, 40, 50, 80, 100])]
    tps = summarise(run(records)).tps
    assert tps is not None and (tps.maximum, tps.minimum) == pytest.approx((200, 10))
    median = tps.percentile(50.0)
    assert median is not None and median.value == pytest.approx(25)
    assert summarise(run([request(0, [5.0])])).tps is None


def test_a_server_that_speculates_is_named() -> None:
    records = [request(at, [10, 20], timings={"drafts": 8, "accepted_drafts": 2}) for at in range(2)]
    (note,) = [note for note in summarise(run(records)).notes if "speculated" in note]
    assert note == "the server speculated: 25 % of 16 drafts were accepted"
    (note,) = [
        note for note in summarise(run(records, settings={"dataset_name": "random"})).notes if "16 drafts" in note
    ]
    assert note.endswith("measure with --prompts prose or texts")
    assert not any("speculated" in note for note in summarise(run([request(0, [10, 20])])).notes)
