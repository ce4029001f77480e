"""Comparisons of simulated runs: what is the same, what differs by 10 %, and what cannot be told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats

from headway.load.errors import BenchError
from headway.load.measures.bootstrap import block_weights, estimate, quantile, ratio_of_sums, run_test
from headway.load.measures.compare import Comparison, Verdict, compare, holm
from headway.load.record import ClientHealth, Failure, FailureKind, RequestRecord, RunResult
from tests.load.measures.queues import BEGAN_NS, ended_ns, record, served


def result(records: list[RequestRecord], seed: int = 0, **settings: Any) -> RunResult:
    return RunResult({"seed": seed, **settings}, records, BEGAN_NS, ended_ns(records), ClientHealth())


def twins(seed: int, count: int = 250, slower: float = 1.0, same_workload: bool = True) -> tuple[RunResult, RunResult]:
    """Two runs of M/G/4 at a load of 0.6, with 5 % noise of their own on each request."""
    rng = np.random.default_rng(seed)

    def workload() -> tuple[np.ndarray, np.ndarray]:
        return np.cumsum(rng.exponential(1 / 2.4, count)), rng.gamma(4.0, 0.25, count)

    def run(work: tuple[np.ndarray, np.ndarray], factor: float, number: int) -> RunResult:
        return result(served(work[0], work[1] * factor * rng.lognormal(0.0, 0.05, count), 4), number)

    first = workload()
    second = first if same_workload else workload()
    return run(first, 1.0, 0), run(second, slower, 0 if same_workload else 1)


def verdict(found: Comparison, metric: str, statistic: str) -> Verdict:
    difference = found.of(metric, statistic)
    assert difference is not None
    return difference.verdict


@pytest.mark.parametrize("same_workload", [True, False])
def test_runs_that_do_not_differ(same_workload: bool) -> None:
    # The family of all metrics together may be wrong once in twenty comparisons.
    wrong = 0
    for seed in range(25):
        found = compare(*twins(seed, same_workload=same_workload), resamples=400)
        assert found.paired == same_workload
        wrong += any(each.verdict is Verdict.REAL for each in found.differences)
    assert wrong <= 4


def test_a_shift_of_ten_percent_is_seen_when_paired() -> None:
    paired = [compare(*twins(seed, slower=1.1), resamples=400) for seed in range(8)]
    assert all(verdict(each, "e2el_ms", "mean") is Verdict.REAL for each in paired)
    assert sum(verdict(each, "tpot_ms", "median") is Verdict.REAL for each in paired) >= 5
    alone = [compare(*twins(seed, slower=1.1, same_workload=False), resamples=400) for seed in range(8)]
    assert sum(verdict(each, "e2el_ms", "mean") is Verdict.REAL for each in alone) <= 4
    widths = [
        [each.of("tpot_ms", "mean").high - each.of("tpot_ms", "mean").low for each in side] for side in (paired, alone)
    ]  # type: ignore[union-attr, operator]
    assert np.median(widths[0]) < 0.5 * np.median(widths[1])


def test_the_numbers_of_a_difference() -> None:
    a, b = twins(3, slower=1.1)
    a.settings["goodput"] = b.settings["goodput"] = {"e2el": 1500.0}
    found = compare(a, b)
    difference = found.of("tpot_ms", "mean")
    assert difference is not None and difference.a is not None and difference.b is not None
    assert difference.difference == pytest.approx(difference.b - difference.a)
    assert difference.ratio == pytest.approx(difference.b / difference.a)
    assert difference.ratio == pytest.approx(1.1, abs=0.02)
    assert difference.low < difference.difference < difference.high  # type: ignore[operator]
    assert difference.ratio_low < difference.ratio < difference.ratio_high  # type: ignore[operator]
    assert difference.p_value < difference.adjusted_p_value < 0.05  # type: ignore[operator]
    met = found.of("attainment", "share")
    assert met is not None and met.a is not None
    e2el = [(each.last_token_ns - each.scheduled_ns) / 1e6 for each in a.records]
    assert met.a == pytest.approx(np.mean(np.array(e2el) <= 1500.0))
    assert found.of("request_throughput", "rate").a == pytest.approx(250 / a.duration_s)  # type: ignore[union-attr]
    assert found == compare(a, b)
    assert "paired by request index" in found.method


def test_percentiles_that_cannot_be_claimed_are_not_compared() -> None:
    found = compare(*twins(4, slower=3.0), resamples=200)
    difference = found.of("ttft_ms", "p99")
    assert difference is not None and difference.verdict is Verdict.TOO_FEW
    assert (difference.a, difference.difference, difference.p_value) == (None, None, None)
    assert difference.needs is not None and difference.needs >= 368
    tiny = [result(each.records[:5], each.settings["seed"]) for each in twins(5)]
    assert {each.verdict for each in compare(*tiny).differences} == {Verdict.TOO_FEW}


def test_a_difference_beyond_all_resamples_is_real_in_a_short_run() -> None:
    due = np.arange(40.0)
    runs = [result([record(i, t, t + first, t + 1.0) for i, t in enumerate(due)]) for first in (0.1, 0.5)]
    assert verdict(compare(*runs, resamples=100), "ttft_ms", "median") is Verdict.REAL


def test_objectives_come_from_the_settings() -> None:
    a, b = twins(6)
    for goodput in ({"e2el": 1500.0}, ["e2el:1500"]):
        a.settings["goodput"] = b.settings["goodput"] = goodput
        assert compare(a, b, resamples=100).of("attainment", "share") is not None
    b.settings["goodput"] = ["e2el:900"]
    assert compare(a, b, resamples=100).of("attainment", "share") is None


def test_doubts_are_said() -> None:
    a, b = twins(7)
    b.client.reasons.append("its event loop was late by 40 ms")
    b.interrupted = True
    b.settings["request_rate"] = 4.0
    b.server = {"name": "other", "metrics": {"x": 1.0}}
    for each in b.records[:3]:
        each.failure = Failure(FailureKind.TIMEOUT, "took too long")
    found = compare(a, b, resamples=100)
    said = "\n".join(found.warnings)
    assert "b was client-bound" in said and "40 ms" in said
    assert "b was interrupted" in said
    assert "b has 3 failed of 250 requests" in said
    assert "one run of each side does not show" in said
    assert found.settings == {"request_rate": (None, 4.0), "server.name": (None, "other")}
    assert found.paired
    assert not any("failed" in each for each in compare(a, a, resamples=100).warnings)


def test_other_workloads_are_not_paired() -> None:
    a, b = twins(8)
    b.records[5] = replace(b.records[5], planned_prompt_tokens=99)
    found = compare(a, b, resamples=100)
    assert not found.paired
    assert any("the workloads differ" in each for each in found.warnings)


def test_a_run_against_itself() -> None:
    a, _ = twins(9)
    found = compare(a, a, resamples=100)
    assert {each.verdict for each in found.differences} <= {Verdict.NOISE, Verdict.TOO_FEW}
    assert all(each.difference in (0.0, None) for each in found.differences)


def several(factor: float, drift: float, seeds: range, rng: np.random.Generator, shift: int = 0) -> list[RunResult]:
    """Runs of one side. Each has a pace of its own: the machine drifts between runs."""
    runs = []
    for seed in seeds:
        work = np.random.default_rng(seed)
        due, takes = np.cumsum(work.exponential(1 / 2.4, 150)), work.gamma(4.0, 0.25, 150)
        runs.append(result(served(due, takes * factor * rng.lognormal(0.0, drift), 4), seed + shift))
    return runs


def test_several_runs_see_what_one_cannot() -> None:
    # The runs of both sides drift by 10 %: two single runs call the drift real, five against five do not.
    alone = many = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        a, b = several(1.0, 0.1, range(5), rng), several(1.0, 0.1, range(5), rng)
        alone += verdict(compare(a[0], b[0], resamples=300), "tpot_ms", "mean") is Verdict.REAL
        found = compare(a, b)
        assert found.paired and found.runs == (5, 5)
        many += any(each.verdict is Verdict.REAL for each in found.differences)
    assert alone >= 6
    assert many <= 2


def test_several_runs_show_a_shift() -> None:
    rng = np.random.default_rng(1)
    found = compare(several(1.0, 0.01, range(4), rng), several(1.15, 0.01, range(4), rng))
    difference = found.of("tpot_ms", "mean")
    assert difference is not None and difference.verdict is Verdict.REAL
    assert difference.ratio_low < 1.15 < difference.ratio_high  # type: ignore[operator]
    assert "paired t-test" in found.method
    welch = compare(several(1.0, 0.01, range(4), rng), several(1.15, 0.01, range(4), rng, shift=100))
    assert not welch.paired and "Welch" in welch.method


def test_runs_are_paired_by_seed_in_any_order() -> None:
    rng = np.random.default_rng(2)
    a, b = several(1.0, 0.0, range(4), rng), several(1.1, 0.02, range(4), rng)
    assert compare(a, b).differences == compare(a, b[::-1]).differences


def test_tests_over_runs_agree_with_scipy() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(10, 1, 4), rng.normal(11, 2, 6)
    theirs = scipy.stats.ttest_ind(b, a, equal_var=False)
    ours = run_test(a, b, False, 0.95)
    bounds = theirs.confidence_interval(0.95)
    assert (ours.p_value, ours.low, ours.high) == pytest.approx((theirs.pvalue, bounds.low, bounds.high))
    theirs = scipy.stats.ttest_rel(b[:4], a)
    assert run_test(a, b[:4], True, 0.95).p_value == pytest.approx(theirs.pvalue)
    equal = run_test(np.ones(3), np.ones(3), False, 0.95)
    assert (equal.p_value, equal.low, equal.high) == (1.0, 0.0, 0.0)


def test_holm_against_the_textbook() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_weights_are_blocks_of_neighbours() -> None:
    rows = np.concatenate(list(block_weights(np.random.default_rng(4), 10, 5, 2000)))
    assert rows.shape == (2000, 10)
    assert (rows.sum(axis=1) == 10).all()
    assert rows.mean(axis=0) == pytest.approx(np.ones(10), abs=0.08)
    one = next(block_weights(np.random.default_rng(5), 10, 10, 1))
    assert (one == 1).all()
    neighbours = np.mean([np.corrcoef(rows[:, i], rows[:, (i + 1) % 10])[0, 1] for i in range(10)])
    far = np.mean([np.corrcoef(rows[:, i], rows[:, (i + 5) % 10])[0, 1] for i in range(10)])
    assert neighbours > 0.5 > far


@pytest.mark.parametrize("count", [300, 20_000])
def test_replicates_have_the_right_spread(count: int) -> None:
    # Standard errors of the mean and of the median of exponential values: 1 / sqrt(n), of both.
    values = np.random.default_rng(6).exponential(size=count)
    units = count if count == 300 else 1000
    unit_of = np.arange(count) * units // count
    weights = np.concatenate(list(block_weights(np.random.default_rng(7), units, 1, 1000)))
    sums, sizes = np.bincount(unit_of, weights=values), np.bincount(unit_of).astype(float)
    for replicate, point in (
        (ratio_of_sums(sums, sizes), np.mean(values)),
        (quantile(values, unit_of, units, 0.5), np.median(values)),
    ):
        found = replicate(weights)
        assert np.std(found) == pytest.approx(1 / np.sqrt(count), rel=0.2)
        assert np.mean(found) == pytest.approx(point, abs=0.3 / np.sqrt(count))


def test_a_metric_that_few_requests_have() -> None:
    # Seven of 300 answers are longer than a token: some resamples have none of them, and no TPOT.
    a, b = (
        result([record(i, i, i + 0.1, i + 1 + slower * (i % 50) / 50, 5 if i % 43 == 0 else 1) for i in range(300)])
        for slower in (0.5, 0.6)
    )
    weights = np.concatenate(list(block_weights(np.random.default_rng(0), 300, 1, 2000)))
    assert (weights[:, ::43].sum(axis=1) == 0).any()
    for each in compare(a, b).differences:
        if each.metric == "tpot_ms" and each.statistic in ("mean", "median"):
            assert np.isfinite([each.low, each.high, each.p_value]).all()  # type: ignore[list-item]
            assert each.low <= each.difference <= each.high  # type: ignore[operator]


def test_the_estimates_p_value_is_near_nominal() -> None:
    rng = np.random.default_rng(8)
    rejected = 0
    for _ in range(200):
        a, b = rng.lognormal(size=(2, 150))
        replicates = [ratio_of_sums(each, np.ones(150))(next(block_weights(rng, 150, 1, 400))) for each in (a, b)]
        found = estimate(replicates[0], replicates[1], float(b.mean() - a.mean()), 149.0, 0.95)
        rejected += found.p_value < 0.05
        assert (found.low <= 0 <= found.high) == (found.p_value >= 0.05) or 0.02 < found.p_value < 0.1
    assert 0.015 <= rejected / 200 <= 0.1


def test_bad_input() -> None:
    a, b = twins(10, count=40)
    with pytest.raises(BenchError, match="1 and 2 runs cannot be compared"):
        compare(a, [a, b])
    with pytest.raises(BenchError, match="2 and 3 runs"):
        compare([a, b], [a, b, a])
    with pytest.raises(BenchError, match="0 and 0 runs"):
        compare([], [])
    for each in b.records:
        each.failure = Failure(FailureKind.CONNECT, "refused")
    with pytest.raises(BenchError, match="side b has no completed request"):
        compare(a, b)
