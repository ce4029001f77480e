"""The short answer: about ten lines that fit any terminal, with what to do next."""

from __future__ import annotations

import dataclasses

import pytest

from headway.bench.report.brief import brief
from headway.bench.report.console import print_brief, print_summary
from headway.bench.report.run_page import report_page
from headway.load.measures.numbers import Attainment
from headway.load.measures.steady import OVERLOAD
from headway.load.measures.summary import summarise_all
from headway.load.record import Failure, FailureKind, RunResult
from tests.bench.command_line import skip_layout
from tests.bench.report.runs import failed_only
from tests.bench.report.simulated import simulated_run
from tests.bench.report.test_console import printed

OBJECTIVES = {"ttft": 200.0, "tpot": 30.0}


@pytest.fixture(autouse=True)
def _without_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_layout(monkeypatch)


def lines_of(run: RunResult) -> dict[str, str]:
    return {line.label: line.text for line in brief(run, summarise_all(run, goals={"": OBJECTIVES}))}


def test_a_good_run_is_ten_lines() -> None:
    run = simulated_run(300)
    found = lines_of(run)
    assert list(found)[:2] == ["Asked", "Answered"] and list(found)[-1] == "Next"
    assert found["Answered"].startswith("300 of 300 requests in ")
    assert found["TTFT"].startswith("P50 ") and "Objectives" in found and "Valid" in found
    text = printed(print_brief, run, summarise_all(run, goals={"": OBJECTIVES}))
    assert 8 <= len(text.strip().splitlines()) <= 14


def test_a_refused_percentile_says_how_many_samples_there_are() -> None:
    assert "(P90 needs 36 requests; this run had 30)" in lines_of(simulated_run(30))["TTFT"]


def test_what_was_asked_is_in_words() -> None:
    run = simulated_run(30)
    run.settings |= {"num_prompts": 1, "arrivals": "closed loop", "max_concurrency": 4}
    assert lines_of(run)["Asked"].startswith("1 request, closed loop of 4;")
    assert ". More than 1 % failed: the run is not valid." in lines_of(simulated_run(30, failures=1))["Not valid"]


def test_refused_requests_are_named_and_leave_the_run_valid() -> None:
    run = simulated_run(300, failures=60)
    for record in run.records:
        if record.failure is not None:
            record.failure = Failure(FailureKind.REFUSED, "HTTP 429: over the limit (Retry-After: 2)", 429)
    found = lines_of(run)
    assert "; refused by a limit: 60" in found["Answered"] and "failed" not in found["Answered"]
    assert "Valid" in found and "Not valid" not in found and found["Next"].startswith("refused requests count as")
    text = " ".join(printed(print_summary, run, summarise_all(run, goals={"": OBJECTIVES})).split())
    assert "60 requests refused (20 %): The server kept a limit, for example: HTTP 429: over the limit" in text
    assert "240 of 300 requests answered, 60 refused, in " in text and "requests refused by a limit 60" in text
    without = {line.label: line.text for line in brief(run, summarise_all(run))}
    assert without["Next"].startswith("raise the limit that refused requests, or send fewer")
    run.client.reasons.append("the load was not offered")
    assert "Not valid" in lines_of(run)


def test_a_client_that_adds_a_little_is_said_beside_the_figure() -> None:
    run = simulated_run(300)
    run.client.loop_lag_ms = [3.0] * 1000
    found = lines_of(run)
    assert "client: up to" in found["TTFT"]
    run.client.loop_lag_ms = [400.0] * 1000
    assert "not valid" in lines_of(run)["ITL"]
    said = lines_of(run)["Valid"]
    assert said.startswith("but for TTFT P50, ") and "upper bounds" in said and "another machine" in said


def test_a_page_opens_in_green_only_where_every_figure_may_be_quoted() -> None:
    run = simulated_run(300)
    tones = []
    for lag_ms in (0.0, 400.0):
        run.client.loop_lag_ms = [lag_ms] * 1000
        tones.append(report_page([(run, summarise_all(run))]).verdict[0].tone)
    assert tones == ["good", "warn"]


def test_what_is_wrong_is_said_with_what_helps() -> None:
    run = simulated_run(30)
    run.client.reasons.append("the load was not offered")
    found = lines_of(run)
    assert "The load was not offered." in found["Not valid"] and "another machine" in found["Next"]
    assert "server's log" in lines_of(failed_only())["Next"]
    given_up = failed_only()
    for record in given_up.records:
        record.failure = Failure(FailureKind.CANCELLED, "as planned")
    found = lines_of(given_up)
    assert "cancelled by its client" in found["Not valid"] and "--cancel-after-s" in found["Next"]
    assert lines_of(simulated_run(300, failures=60))["Next"] == "--verbose shows what failed and how"


def test_an_interrupted_run_says_how_far_it_came() -> None:
    run = simulated_run(300)
    run.interrupted, run.settings["num_prompts"] = True, 1000
    run.client.loop_lag_ms = [400.0] * 1000
    found = lines_of(run)
    assert found["Not valid"].startswith("Interrupted after ") and ": 300 of 1,000 sent" in found["Not valid"]
    assert "300 of 1,000 requests" in found["Answered"] and "failed" not in found["Next"]


def test_an_overloaded_server_is_no_good_run() -> None:
    run = simulated_run(300)
    views = summarise_all(run)[:1]
    views[0].notes.append(f"no steady state: TTFT grows by 85 ms per second: {OVERLOAD}")
    found = {line.label: line.text for line in brief(run, views)}
    assert "Valid" not in found and OVERLOAD in found["Overloaded"] and "a lower load" in found["Next"]


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (0.992, 1.0, "--find-max-rate finds the highest rate"),
        (0.9, 0.97, "why the slowest requests took longer"),
        (
            0.97,
            0.995,
            "99 % of the requests meet the objectives, raise --num-prompts to at least 368; more",
        ),
    ],
)
def test_what_to_do_next_follows_the_objectives(low: float, high: float, says: str) -> None:
    run = simulated_run(100)
    found = Attainment(OBJECTIVES, 98, 100, low, high, 1.0, 1.0, {"ttft": 2})
    views = [dataclasses.replace(view, attainment=found) for view in summarise_all(run)]
    assert says in {line.label: line.text for line in brief(run, views)}["Next"]


def test_hits_of_the_prefix_cache_are_the_runs_own_where_it_had_a_salt() -> None:
    run = simulated_run(100)
    assert "perhaps from earlier runs" in lines_of(run)["Cached"]
    run.settings["cache_salt"] = "a1b2"
    assert "from this run's own prompts" in lines_of(run)["Cached"]
    del run.settings["cache_salt"]
    run.settings["backend"] = "simulate"
    assert "from this run's own prompts" in lines_of(run)["Cached"]
