"""Tells which differences between two runs are real, and which are noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from headway.load.errors import BenchError
from headway.load.measures.bootstrap import Estimate, block_weights, estimate, run_test
from headway.load.measures.dependence import block_length
from headway.load.measures.run_statistics import FAMILIES, STATISTICS, RunStatistics, Statistic
from headway.load.measures.slo import NO_GOALS, Goals
from headway.load.option_values import check_objectives, parse_goodput
from headway.load.record import RunResult

_ENOUGH_RUNS = 3  # runs of each side that show how runs differ among themselves
_WORKLOAD = ("seed", "dataset_name", "dataset_path")  # settings that make two workloads the same


class Verdict(StrEnum):
    REAL = "real"
    NOISE = "noise"
    TOO_FEW = "too few samples"


@dataclass(frozen=True, slots=True)
class Difference:
    """One statistic of one metric in both runs; a is what b is compared with."""

    # Ttft_ms, tpot_ms, itl_ms, e2el_ms (from the schedule), request_throughput, output_throughput (per second) or
    # attainment (share of requests that met their objectives).
    metric: str
    statistic: str  # mean, median, p90 or p99 of a latency; rate; share
    # a, b: None where the sample is too small for the claim (or, of several runs, that of one of them).
    a: float | None
    b: float | None
    verdict: Verdict = Verdict.TOO_FEW
    # difference, low, high: b - a with its interval; None where there is no claim.
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    # ratio, ratio_low, ratio_high: b / a; None as well where a can be 0.
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    p_value: float | None = None  # chance of a difference at least as large between runs that do not differ, by itself
    # The same with all the comparisons in mind that were made (Holm); the verdict goes by it.
    adjusted_p_value: float | None = None
    needs: int | None = None  # samples (requests, or gaps for itl_ms) that the claim would take, where they are too few


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of side a with side b, each of one or several runs.

    Args:
        differences: in a fixed order, metric by metric.
        runs: the number of runs on side a, and on side b.
        paired: request by request (one run each), or run by run with the same seeds.
        method: how the intervals came about, in words.
        settings: those in which the sides differ: {"request_rate": (4.0, 8.0)}; a tuple of values for several runs.
        warnings: what stands against taking the verdicts at their word, a sentence each.
    """

    differences: tuple[Difference, ...]
    runs: tuple[int, int]
    paired: bool
    method: str
    confidence: float
    settings: dict[str, tuple[Any, Any]]
    warnings: tuple[str, ...]

    def of(self, metric: str, statistic: str) -> Difference | None:
        found = (each for each in self.differences if (each.metric, each.statistic) == (metric, statistic))
        return next(found, None)


def compare(
    a: RunResult | Sequence[RunResult],
    b: RunResult | Sequence[RunResult],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Compare two runs, or at least three runs of each side.

    One run each: block bootstrap over requests, paired by index where both had the same workload. It cannot see what
    differs from one run to the next. Several runs: Welch's t-test on the runs' own statistics, paired by seed where
    each seed occurs once on either side. docs/statistics.md explains both. There is an attainment where all runs had
    the same objectives.

    Args:
        confidence: that of each interval. The chance that any verdict "real" is wrong is at most 1 - confidence.
        resamples, seed: the number of resamples, and the seed of the bootstrap. The same seed gives the same verdicts.

    Raises:
        BenchError: a number of runs that cannot be compared, or runs without completed requests.
    """
    a_runs, b_runs = ([each] if isinstance(each, RunResult) else list(each) for each in (a, b))
    _check(a_runs, b_runs)
    one_each = len(a_runs) == len(b_runs) == 1
    same = one_each and _same_workload(a_runs[0], b_runs[0])
    keep = _completed_in_both(a_runs[0], b_runs[0]) if same else None
    goals = _shared_goals(a_runs + b_runs)

    def statistics(runs: list[RunResult]) -> list[RunStatistics]:
        return [RunStatistics.of(run, goals, confidence, keep) for run in runs]

    if one_each:
        paired = same
        of_a, of_b = statistics(a_runs)[0], statistics(b_runs)[0]
        found, method = _by_requests(of_a, of_b, same, confidence, resamples, seed)
    else:
        pairs = _pairs_by_seed(a_runs, b_runs)
        paired = pairs is not None
        b_runs = [b_runs[i] for i in pairs] if pairs is not None else b_runs
        found, method = _by_runs(statistics(a_runs), statistics(b_runs), paired, confidence)
    return Comparison(
        differences=tuple(_judge(found, confidence)),
        runs=(len(a_runs), len(b_runs)),
        paired=paired,
        method=method,
        confidence=confidence,
        settings=_different_settings(a_runs, b_runs),
        warnings=tuple(_doubts("a", a_runs) + _doubts("b", b_runs) + (_doubts_of_one(same) if one_each else [])),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979): the chance that any true "no difference" is rejected stays below the level."""
    adjusted = [1.0] * len(p_values)
    reached = 0.0
    for rank, position in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        reached = max(reached, min(1.0, (len(p_values) - rank) * p_values[position]))
        adjusted[position] = reached
    return adjusted


def _check(a: list[RunResult], b: list[RunResult]) -> None:
    counts = len(a), len(b)
    if counts != (1, 1) and min(counts) < _ENOUGH_RUNS:
        raise BenchError(
            f"{counts[0]} and {counts[1]} runs cannot be compared: give one of each side, or at least "
            f"{_ENOUGH_RUNS} of each"
        )
    for side, runs in (("a", a), ("b", b)):
        if any(not any(record.ok for record in run.records) for run in runs):
            raise BenchError(f"a run of side {side} has no completed request: there is nothing to compare")


def _same_workload(a: RunResult, b: RunResult) -> bool:
    def planned(run: RunResult) -> dict[int, tuple[Any, ...]]:
        return {
            record.index: (record.planned_prompt_tokens, record.planned_output_tokens, record.class_name)
            for record in run.records
        }

    return planned(a) == planned(b) and all(a.settings.get(key) == b.settings.get(key) for key in _WORKLOAD)


def _shared_goals(runs: list[RunResult]) -> Goals:
    """What all the runs were asked to meet, from their settings; nothing where that differs."""
    stated = [run.settings.get("goodput") for run in runs]
    first = stated[0]
    if not first or any(each != first for each in stated):
        return NO_GOALS
    return {"": check_objectives(first, "goodput") if isinstance(first, Mapping) else parse_goodput(first)}


def _completed_in_both(a: RunResult, b: RunResult) -> set[int]:
    completed = ({record.index for record in run.records if record.ok} for run in (a, b))
    both = set.intersection(*completed)
    if not both:
        raise BenchError("no request completed in both runs: there is nothing to compare")
    return both


def _pairs_by_seed(a: list[RunResult], b: list[RunResult]) -> list[int] | None:
    """For each run of a the position of the run of b with its seed; None unless each seed occurs once in either."""
    seeds = [[run.settings.get("seed") for run in runs] for runs in (a, b)]
    if (
        None in seeds[0]
        or len(set(map(repr, seeds[0]))) < len(a)
        or sorted(map(repr, seeds[0])) != sorted(map(repr, seeds[1]))
    ):
        return None
    return [seeds[1].index(each) for each in seeds[0]]


def _doubts(side: str, runs: list[RunResult]) -> list[str]:
    lines = []
    for number, run in enumerate(runs, 1):
        name = side if len(runs) == 1 else f"{side} (run {number})"
        failed = sum(record.failed for record in run.records)
        if run.client.bound:
            lines.append(f"{name} was client-bound, so its latencies are partly the client's: {run.client.reasons[0]}")
        if run.interrupted:
            lines.append(f"{name} was interrupted")
        if failed:
            lines.append(f"{name} has {failed} failed of {len(run.records)} requests, whose latencies are not in it")
    return lines


def _doubts_of_one(same: bool) -> list[str]:
    drift = (
        "one run of each side does not show how much runs vary: drift of the machine looks like a real difference; "
        f"give at least {_ENOUGH_RUNS} runs of each, alternating"
    )
    workload = (
        "the workloads differ (seed, data set or planned lengths): requests are not paired, and differences may come "
        "from the workloads"
    )
    return [drift] if same else [drift, workload]


# What differs from run to run in any case: the server's metrics, and what keeps runs out of each other's prefix cache.
_OF_EACH_RUN = ("metrics", "cache_salt", "prompt_seed", "fingerprint")


def _different_settings(a: list[RunResult], b: list[RunResult]) -> dict[str, tuple[Any, Any]]:
    def values(runs: list[RunResult], of: str, key: str) -> Any:
        found = tuple((run.settings if of == "settings" else run.server).get(key) for run in runs)
        return found[0] if all(each == found[0] for each in found) else found

    different = {}
    for of in ("settings", "server"):
        keys = {key: None for run in a + b for key in (run.settings if of == "settings" else run.server)}
        for key in keys:
            pair = values(a, of, key), values(b, of, key)
            if pair[0] != pair[1] and key not in _OF_EACH_RUN:
                different[key if of == "settings" else f"server.{key}"] = pair
    return different


def _by_requests(
    a: RunStatistics, b: RunStatistics, same: bool, confidence: float, resamples: int, seed: int
) -> tuple[list[Difference], str]:
    block = max(block_length(series) for run in (a, b) for series in run.series())
    rng = np.random.default_rng(seed)
    found: list[Difference] = []
    for family in FAMILIES:
        statistics = [each for each in STATISTICS if each.family == family and a.exists(each) and b.exists(each)]
        units = a.units(family), b.units(family)
        claims = [each for each in statistics if a.value(each) is not None and b.value(each) is not None]
        seeds = rng.integers(0, 2**63, 2)
        if same and units[0] == units[1]:
            seeds[1] = seeds[0]  # the same draws for both: what the requests have in common cancels
        drawn = [_replicates(run, claims, block, resamples, int(own)) for run, own in zip((a, b), seeds, strict=True)]
        freedom = max(1.0, min(count / min(block, max(count, 1)) for count in units) - 1.0)
        for each in statistics:
            difference = _refused(each, [a], [b])
            if each in drawn[0] and difference.a is not None and difference.b is not None:
                moved = difference.b - difference.a
                difference = _with_estimate(
                    difference, moved, estimate(drawn[0][each], drawn[1][each], moved, freedom, confidence)
                )
            found.append(difference)
    how = "paired by request index" if same else "of each run by itself"
    return found, f"circular block bootstrap over requests, {how}, in blocks of {block}, {resamples} times"


def _replicates(
    run: RunStatistics, statistics: list[Statistic], block: int, resamples: int, seed: int
) -> dict[Statistic, np.ndarray]:
    """Each statistic in every resample, shape (resamples,); all from the same draws."""
    if not statistics:
        return {}
    units = run.units(statistics[0].family)
    replicators = {each: run.replicates(each) for each in statistics}
    pieces: dict[Statistic, list[np.ndarray]] = {each: [] for each in statistics}
    for weights in block_weights(np.random.default_rng(seed), units, min(block, units), resamples):
        for each, replicator in replicators.items():
            pieces[each].append(replicator(weights))
    return {each: np.concatenate(parts) for each, parts in pieces.items()}


def _by_runs(
    a: list[RunStatistics], b: list[RunStatistics], paired: bool, confidence: float
) -> tuple[list[Difference], str]:
    found = []
    for each in STATISTICS:
        if not all(run.exists(each) for run in a + b):
            continue
        difference = _refused(each, a, b)
        if difference.a is not None and difference.b is not None:
            values = [np.array([run.value(each) for run in runs], dtype=float) for runs in (a, b)]
            result = run_test(values[0], values[1], paired, confidence)
            difference = _with_estimate(difference, difference.b - difference.a, result)
        found.append(difference)
    return found, "paired t-test over the runs of each seed" if paired else "Welch's t-test over the runs"


def _refused(statistic: Statistic, a: list[RunStatistics], b: list[RunStatistics]) -> Difference:
    """A difference without a verdict: the values as far as they can be claimed, as means over the runs of a side."""
    values: list[float | None] = []
    for runs in (a, b):
        known = [value for run in runs if (value := run.value(statistic)) is not None]
        values.append(float(np.mean(known)) if len(known) == len(runs) else None)
    needs = [need for run in a + b if (need := run.needs(statistic)) is not None]
    return Difference(statistic.metric, statistic.name, values[0], values[1], needs=max(needs, default=None))


def _with_estimate(difference: Difference, moved: float, result: Estimate) -> Difference:
    ratio = difference.b / difference.a if difference.a and difference.b is not None else None
    return replace(difference, difference=moved, ratio=ratio, **asdict(result))


def _judge(differences: list[Difference], confidence: float) -> list[Difference]:
    adjusted = iter(holm([each.p_value for each in differences if each.p_value is not None]))
    judged = []
    for each in differences:
        if each.p_value is not None:
            p_value = next(adjusted)
            verdict = Verdict.REAL if p_value < 1.0 - confidence else Verdict.NOISE
            each = replace(each, adjusted_p_value=p_value, verdict=verdict)
        judged.append(each)
    return judged
