"""What is printed when a run is over, and what it says in words."""

from __future__ import annotations

import dataclasses
import io
import re

import numpy as np
import pytest
from rich.console import Console

from headway.bench.options import Claims
from headway.bench.report import tables, verdict
from headway.bench.report.comparison import comparison_banners, settings_table
from headway.bench.report.console import print_comparison, print_runs, print_search, print_summary
from headway.bench.report.figures_rates import load_points
from headway.bench.report.pictures import load_pictures
from headway.bench.report.search import search_banners
from headway.load.measures.compare import compare
from headway.load.measures.numbers import Attainment, Distribution, Percentile
from headway.load.measures.search import SearchResult, Stop
from headway.load.measures.summary import summarise_all
from headway.load.measures.trials import ProbeOutcome, Trial
from headway.load.measures.trials import Verdict as RateVerdict
from headway.load.record import Failure, FailureKind, RunResult
from tests.bench.report.runs import OBJECTIVES, ODD, failed_only, sweep, usual
from tests.bench.report.simulated import MS, simulated_run


def printed(print_, *args: object, width: int = 100, **options: object) -> str:
    file = io.StringIO()
    print_(Console(file=file, width=width), *args, **options)
    return file.getvalue()


def summary_of(run: RunResult, **options: object) -> str:
    return printed(print_summary, run, summarise_all(run, goals={"": OBJECTIVES}), **options)


@pytest.mark.parametrize("width", [80, 120])
def test_everything_fits_the_width(width: int) -> None:
    run, summaries = usual()
    text = printed(print_summary, run, summaries, width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    words = " ".join(text.split())
    for part in (
        "whole run",
        "steady state",
        "TTFT",
        "schedule",
        "send",
        "ITL",
        "chat",
        "batch",
        "decode_stall_prefill",
    ):
        assert part in words
    assert "cost per 1M output tokens" in words and "event loop after its timer" in words


@pytest.mark.parametrize("kind", ODD)
def test_no_run_breaks_it(kind: str) -> None:
    text = summary_of(ODD[kind]())
    assert not re.search(r"\bnan\b", text) and text.strip().splitlines()[-1].startswith(("Valid", "Not valid"))


def test_a_percentile_is_shown_with_its_interval_or_with_what_it_would_need() -> None:
    known = tables.percentile_cell(Percentile(50.0, 12.34, 11.0, 14.5))
    assert (known.text, known.detail) == ("12.3", "11–14.5")
    refused = tables.percentile_cell(Percentile(99.0, None, None, None, 368))
    assert (refused.text, refused.detail) == ("needs 368+", "")
    assert tables.percentile_cell(None, 0).text == "–"


def test_probes_have_a_table_of_their_own_and_cancelled_requests_are_no_failures() -> None:
    run = simulated_run(40)
    run.records[3].failure = Failure(FailureKind.CANCELLED, "its client gave it up 2 s after it was sent")
    assert "Probes" not in summary_of(run) and not verdict.failures_by_kind(run)
    probed = dataclasses.replace(run, probes=simulated_run(20).records)
    text = " ".join(summary_of(probed).split())
    assert "Short requests in addition to the load" in text and "1 request cancelled by the client" in text
    assert "FAILED" not in text and "Valid: 39 of 39 requests answered" in text


def test_failures_are_listed_by_kind_with_an_example() -> None:
    run = simulated_run(30, failures=6)
    rows = verdict.failures_by_kind(run)
    assert sum(number for _, number, _ in rows) == 6
    text = summary_of(run)
    for kind, _, example in rows:
        assert kind in text and example in text
    assert "Not valid" in text and "6 REQUESTS FAILED (20 %)" in text


def test_few_failures_are_allowed_and_said() -> None:
    run = simulated_run(300, failures=2)
    views = summarise_all(run)
    assert verdict.is_valid(run, views) and not verdict.is_valid(run, views, Claims(max_failed_share=0.001))
    assert "2 REQUESTS FAILED (0.667 %)" in summary_of(run)


def test_a_client_that_is_the_limit_is_said_loudly() -> None:
    run = simulated_run(30)
    run.client.reasons.append("the event loop was 40 ms late")
    first = verdict.banners(run, summarise_all(run))[0]
    assert (first.title, first.tone) == ("CLIENT-BOUND", "bad")
    assert "The event loop was 40 ms late." in first.lines
    text = summary_of(run)
    assert "━ CLIENT-BOUND ━" in text and text.rstrip().splitlines()[-1].startswith("Not valid")


def test_an_interrupted_run_and_one_without_answers_are_not_valid() -> None:
    run = simulated_run(30)
    run.interrupted = True
    assert "INTERRUPTED" in summary_of(run) and not verdict.is_valid(run, summarise_all(run))
    failed = failed_only()
    assert "NO ANSWER" in summary_of(failed) and not verdict.is_valid(failed, summarise_all(failed))


def test_what_the_send_hides_is_pointed_out() -> None:
    run = simulated_run(60, rate=5)
    for record in run.records:
        record.scheduled_ns -= 500 * MS
    (found,) = [each for each in verdict.banners(run, summarise_all(run)) if "before they were sent" in each.title]
    assert "values from the send leave this wait out" in found.lines[0]
    calm = simulated_run(60, rate=5)
    assert not [each for each in verdict.banners(calm, summarise_all(calm)) if "before they were sent" in each.title]


@pytest.mark.parametrize(
    ("low", "high", "word"), [(0.992, 1.0, "held"), (0.9, 0.97, "missed"), (0.97, 0.995, "undecided")]
)
def test_objectives_are_held_missed_or_undecided(low: float, high: float, word: str) -> None:
    found = Attainment(OBJECTIVES, 98, 100, low, high, 1.0, 1.0, {"ttft": 2, "failed": 3})
    assert verdict.outcome(found, 0.99) == word
    whole = dataclasses.replace(summarise_all(simulated_run(10))[0], attainment=found)
    (banner,) = [each for each in verdict.banners(simulated_run(10), [whole]) if "bjectives" in each.title]
    assert banner.tone == {"held": "good", "missed": "bad", "undecided": "warn"}[word]
    assert "TTFT ≤ 200 ms, TPOT ≤ 30 ms" in banner.lines[0] and banner.lines[0].endswith(
        "missed: TTFT by 2; not answered: 3."
    )


def test_objectives_of_classes_carry_their_names() -> None:
    assert verdict.objectives_in_words({"chat.ttft": 200.0, "e2el": 5000.0}) == "chat TTFT ≤ 200 ms, E2EL ≤ 5,000 ms"


def test_a_sweep_names_the_load_up_to_which_objectives_held() -> None:
    runs, summaries = sweep()
    text = printed(print_runs, list(zip(runs, summaries, strict=True)))
    lines = [line.split()[0] for line in text.splitlines() if line.strip().endswith("valid")]
    assert lines == ["4", "8", "16", "40"]
    held = [view for view in map(tables.steady_or_whole, summaries) if verdict.outcome(view.attainment, 0.99) == "held"]
    assert ("Objectives held up to" in text) == bool(held)
    runs[3].client.reasons.append("late")
    try:
        assert "At a load of 40 this client was the limit" in printed(
            print_runs, list(zip(runs, summaries, strict=True))
        )
    finally:
        runs[3].client.reasons.clear()


def test_a_load_above_one_that_broke_does_not_count_as_held() -> None:
    runs, summaries = sweep()
    shares = {4.0: 0.999, 8.0: 0.5, 16.0: 0.999, 40.0: 0.5}
    views = []
    for run in runs:
        share = shares[run.settings["request_rate"]]
        found = Attainment(OBJECTIVES, 1, 1, share - 0.001, share, 1.0, 1.0, {})
        views.append([dataclasses.replace(summaries[0][0], attainment=found)])
    (banner,) = verdict.of_runs(list(zip(runs, views, strict=True)), target=0.99)
    assert banner.title == "Objectives held up to 4"
    *_, picture = load_pictures(load_points(list(zip(runs, views, strict=True))), "Request rate (1/s)")
    assert "held" not in picture.caption and "95 %" not in picture.caption  # the banner says it, and better


@pytest.mark.parametrize(
    ("bounds", "client_bound", "title", "says"),
    [
        # 2 and 8 met everything and 20 did not: too few requests to be certain is no failure, and 20 is not the lowest.
        (
            {2.0: (0.95, 1.0), 8.0: (0.97, 1.0), 20.0: (0.5, 0.7)},
            (),
            "Objectives: too few requests",
            "2 (100 %), 8 (100 %)",
        ),
        ({2.0: (0.95, 1.0), 8.0: (0.97, 1.0)}, (2.0, 8.0), "Objectives: too few requests", "at least 368 requests"),
        (
            {2.0: (0.995, 1.0), 8.0: (0.97, 1.0), 20.0: (0.5, 0.7)},
            (),
            "Objectives held up to 2",
            "at every load up to 2",
        ),
        ({2.0: (0.5, 0.7), 8.0: (0.97, 1.0)}, (), "Objectives missed at every load", "At the lowest load, 2, 70 % met"),
        # What a client that was the limit has missed says nothing; what it has met was met.
        ({2.0: (0.995, 1.0), 8.0: (0.5, 0.7)}, (8.0,), "Objectives held up to 2", "up to 2, of those that were run"),
        ({2.0: (0.995, 1.0), 8.0: (0.995, 1.0)}, (8.0,), "Objectives held up to 8", "up to 8"),
    ],
)
def test_the_load_up_to_which_objectives_held_is_one_that_was_run(
    bounds: dict[float, tuple[float, float]], client_bound: tuple[float, ...], title: str, says: str
) -> None:
    runs = []
    for load, (low, high) in bounds.items():
        run = simulated_run(10, rate=load)
        run.settings["request_rate"] = load
        run.client.reasons += ["late"] * (load in client_bound)
        found = Attainment(OBJECTIVES, round(100 * high), 100, low, high, 1.0, 1.0, {})
        runs.append((run, [dataclasses.replace(summarise_all(run)[0], attainment=found)]))
    *bound, banner = verdict.of_runs(runs, target=0.99)
    assert banner.title.startswith(title) and says in banner.lines[0]
    assert [each.title for each in bound] == ["CLIENT-BOUND"] * bool(client_bound)


def test_a_search_says_its_rate_and_what_it_doubts() -> None:
    trials = (
        Trial(4.0, [ProbeOutcome(4.0, np.zeros(500))], RateVerdict.HELD, 0.991, 1.0, block=20),
        Trial(5.0, [ProbeOutcome(5.0, np.repeat([0.5, 2.0], [495, 5]))], RateVerdict.UNDECIDED, 0.97, 0.999),
    )
    trials[1].reason = "misses come together: it takes 9,000 requests"
    curve = ((4.0, 1.0), (5.0, 0.99))
    reason = "the rates cannot be told apart"
    found = SearchResult(4.0, 5.0, None, trials, Stop.NOISE, reason, ("odd",), curve, confidence=0.975)
    words = " ".join(printed(print_search, found).split())
    assert "Highest rate: 4 requests/s: At 4 requests/s at least 99 %" in words
    assert (
        "5 requests/s met them for 99 % of 500 requests, but this is not certain: the true share may be as low as "
        "97 %, because misses come together: it takes 9,000 requests." in words
    )
    assert "97.5 % certain if stalls and bursts affect at most 20 requests in a row (5 s)" in words
    assert "Beware: Odd." in words
    none = dataclasses.replace(found, rate=None, likely=4.0)
    words = " ".join(printed(print_search, none).split())
    assert "4 requests/s looks good, but is not proven: 500 of 500 requests met their objectives" in words
    assert "2 rates tried with 1,000 requests" in words
    assert "10,360 requests at one rate, about 43 min on this machine: raise --max-search-seconds" in words
    simulated = dataclasses.replace(none, trials=(dataclasses.replace(trials[0], seconds=0.5), trials[1]))
    assert "about 10 s on this machine" in " ".join(printed(print_search, simulated).split())
    early = dataclasses.replace(none, likely=None, trials=trials[1:])
    assert "Nothing proven yet: 1 rate tried with 500 requests" in " ".join(printed(print_search, early).split())
    failed = (dataclasses.replace(trials[1], verdict=RateVerdict.FAILED),)
    worst = dataclasses.replace(early, trials=failed, stop=Stop.FLOOR)
    banner = search_banners(worst)[0]
    assert banner.title == "No rate held" and banner.tone == "bad"
    assert banner.lines[0] == "1 rate tried with 500 requests; even 5 requests/s did not meet 99 %."


def test_a_comparison_tells_real_differences_from_noise() -> None:
    a, b = (simulated_run(150, rate=8, seed=1, seats=seats, goodput=OBJECTIVES) for seats in (12, 3))
    found = compare(a, b, resamples=300)
    said = printed(print_comparison, found, "a.json", "b.json")
    words = " ".join(said.split())
    assert said.index("a is a.json") < said.index("Differences")  # the conclusion is first
    assert "TTFT mean" in words and "noise" in words and "a is a.json, b is b.json." in words
    same = compare(a, simulated_run(150, rate=8, seed=1, seats=12), resamples=300)
    assert comparison_banners(same, "a", "b")[0].title == "No difference is real"


def test_settings_that_differ_are_in_words() -> None:
    a, b = simulated_run(60, seed=1, goodput={"ttft": 300.0, "tpot": 50.0}), simulated_run(60, seed=1)
    a.settings |= {"ignore_eos": True, "notes": []}
    b.settings |= {"ignore_eos": False, "goodput": None, "notes": ["two are left out", "one is cut"]}
    table = settings_table(compare(a, b, resamples=100))
    assert table is not None
    rows = {name.text: (of_a.text, of_b.text) for name, of_a, of_b in table.rows}
    assert rows["goodput"] == ("ttft 300, tpot 50", "–")
    assert rows["ignore_eos"] == ("yes", "no")
    assert rows["notes"] == ("–", "two are left out, one is cut")


def test_phases_have_shares_that_sum_to_one() -> None:
    def flat(mean: float) -> Distribution:
        return Distribution(1, 1.0, mean, 0.0, mean, mean, ())

    view = dataclasses.replace(
        usual()[1][0], phases_ms={"receive": flat(1), "decode_compute": flat(3), "queue": flat(0)}
    )
    table = tables.phase_table(view)
    assert table is not None
    assert [(row[0].text, row[1].text) for row in table.rows] == [
        ("receive", "25.0 %"),
        ("decode_compute", "75.0 %"),
    ]
    assert "All queue phases: 0 ms, 0.0 %." in table.note
    pictured = tables.phase_table(view, pictured=True)
    assert pictured is not None and [row[1].text for row in pictured.rows] == ["reading and tokenizing", "decode"]
    assert tables.phase_table(dataclasses.replace(view, phases_ms={})) is None


def test_the_servers_own_metrics_are_shown() -> None:
    metrics = {
        "prefix": "vllm",
        "queue": {"count": 4, "sum_s": 0.2, "mean_ms": 50.0},
        "prefill": {"count": 0, "sum_s": 0.0, "mean_ms": None},
        "preemptions": 3.0,
        "prefix_cache": {"queries": 200.0, "hits": 50.0, "hit_rate": 0.25},
        "gauges": {"running": {"mean": 2.5, "peak": 7.0}, "kv_cache_usage": {"mean": 0.1, "peak": 0.9}},
        "gauges_over_time": {"t_s": [1.0], "running": [7.0]},
    }
    table = tables.metrics_table(metrics)
    assert table is not None
    shown = {row[0].text: (row[1].text, row[2].text) for row in table.rows}
    assert shown == {
        "queue, ms": ("50", "–"),
        "requests running": ("2.5", "7"),
        "KV cache, %": ("10", "90"),
        "preemptions": ("3", "–"),
        "prompt tokens found in its prefix cache, %": ("25", "–"),
    }
    assert tables.metrics_table({}) is None and tables.metrics_table({"error": "not Prometheus text"}) is None
    run = simulated_run(30)
    run.server["metrics"] = metrics
    assert "By the server's own metrics" in summary_of(run)
