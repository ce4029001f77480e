"""The statistics of one run that a comparison looks at, and how each is drawn again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headway.load.measures.bootstrap import Replicates, quantile, ratio_of_sums
from headway.load.measures.latencies import Latencies
from headway.load.measures.numbers import Distribution
from headway.load.measures.percentiles import distribution, samples_needed
from headway.load.measures.slo import Goals, missed_objectives
from headway.load.measures.throughput import whole_run_rates
from headway.load.record import RequestRecord, RunResult

LATENCY, COMPLETION, JUDGED = "latency", "completion", "judged"
FAMILIES = (LATENCY, COMPLETION, JUDGED)  # what is drawn: completed requests, their completions, judged requests

_PERCENTILE_OF = {"median": 50.0, "p90": 90.0, "p99": 99.0}


@dataclass(frozen=True, slots=True)
class Statistic:
    family: str
    metric: str
    name: str


STATISTICS = (
    *(
        Statistic(LATENCY, metric, name)
        for metric in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
        for name in ("mean", "median", "p90", "p99")
    ),
    Statistic(COMPLETION, "request_throughput", "rate"),
    Statistic(COMPLETION, "output_throughput", "rate"),
    Statistic(JUDGED, "attainment", "share"),
)


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """What is known of one run. `unit` arrays say which of the drawn requests a value belongs to."""

    # Metric to (values, unit), shapes (n,): latencies from the schedule.
    samples: dict[str, tuple[np.ndarray, np.ndarray]]
    distributions: dict[str, Distribution]  # the distributions of the same metrics
    # completion_gap_s, completion_tokens: in the order of completion, the time since the completion before and the
    # output tokens; shape (completed,).
    completion_gap_s: np.ndarray
    completion_tokens: np.ndarray
    met: np.ndarray  # 1.0 for each judged request that met its objectives, 0.0 for others
    rates: dict[str, float]  # the rates of the whole run
    latency_units: int  # requests that have a latency here
    needed: int

    @classmethod
    def of(
        cls,
        run: RunResult,
        goals: Goals,
        confidence: float,
        keep: set[int] | None = None,
    ) -> RunStatistics:
        """Args:
        keep: indexes of the requests whose latencies are taken, all completed: then both runs have the same units,
            in the order of their index; None takes all completed requests, in the order in which they were due.
        """
        paired = keep is not None
        latencies = Latencies.of(record for record in run.records if keep is None or record.index in keep)
        completed = sorted((record for record in run.records if record.ok), key=lambda record: record.last_token_ns)
        ends = np.array([run.began_ns, *(record.last_token_ns for record in completed)], dtype=np.int64)
        missed = missed_objectives(run.records, goals)
        judged = sorted((record for record in run.records if record.index in missed), key=_order(paired))
        samples, distributions = _samples(latencies, paired, confidence)
        return cls(
            samples=samples,
            distributions=distributions,
            completion_gap_s=np.diff(ends) / 1e9,
            completion_tokens=np.array([record.tokens for record in completed], dtype=float),
            met=np.array([missed[record.index] == () for record in judged], dtype=float),
            rates=whole_run_rates(run.records, run.began_ns, run.ended_ns),
            latency_units=len(latencies.records),
            needed=samples_needed(50.0, confidence),
        )

    def units(self, family: str) -> int:
        """The number of requests that draws are made from."""
        return {LATENCY: self.latency_units, COMPLETION: len(self.completion_gap_s), JUDGED: len(self.met)}[family]

    def series(self) -> list[np.ndarray]:
        """Latencies whose order shows how long requests depend on each other."""
        found = []
        for metric in ("ttft_ms", "e2el_ms"):
            values, unit = self.samples.get(metric, (np.empty(0), np.empty(0, np.int64)))
            found.append(values[np.argsort(unit, kind="stable")])
        return found

    def value(self, statistic: Statistic) -> float | None:
        """None where there is no such metric, or too few samples for the claim."""
        if statistic.family == COMPLETION:
            return self.rates[statistic.metric] if self.units(COMPLETION) >= self.needed else None
        if statistic.family == JUDGED:
            return float(np.mean(self.met)) if len(self.met) >= self.needed else None
        found = self.distributions.get(statistic.metric)
        if found is None or self.needs(statistic) is not None:
            return None
        if statistic.name == "mean":
            return found.mean
        percentile = found.percentile(_PERCENTILE_OF[statistic.name])
        return percentile.value if percentile is not None else None

    def exists(self, statistic: Statistic) -> bool:
        """Whether the run has such a metric at all, be it of too few samples."""
        if statistic.family == LATENCY:
            return statistic.metric in self.distributions
        if statistic.metric == "output_throughput" and not self.completion_tokens.any():
            return False  # vectors and scores
        return self.units(statistic.family) > 0

    def needs(self, statistic: Statistic) -> int | None:
        """Samples that the claim would take, where they are too few. A mean takes what a median takes."""
        if statistic.family != LATENCY:
            return self.needed if self.units(statistic.family) < self.needed else None
        found = self.distributions.get(statistic.metric)
        percentile = found.percentile(_PERCENTILE_OF.get(statistic.name, 50.0)) if found is not None else None
        return percentile.needs if percentile is not None else self.needed

    def replicates(self, statistic: Statistic) -> Replicates:
        """How the statistic follows from weights of the requests of its family."""
        if statistic.family == JUDGED:
            return ratio_of_sums(self.met, np.ones(len(self.met)))
        if statistic.family == COMPLETION:
            by_token = statistic.metric == "output_throughput"
            amount = self.completion_tokens if by_token else np.ones(len(self.completion_tokens))
            return ratio_of_sums(amount, self.completion_gap_s)
        values, unit = self.samples[statistic.metric]
        if statistic.name == "mean":
            sums = np.bincount(unit, weights=values, minlength=self.latency_units)
            return ratio_of_sums(sums, np.bincount(unit, minlength=self.latency_units).astype(float))
        return quantile(values, unit, self.latency_units, _PERCENTILE_OF[statistic.name] / 100.0)


def _order(paired: bool) -> Callable[[RequestRecord], int]:
    return (lambda record: record.index) if paired else (lambda record: record.scheduled_ns)


def _samples(
    latencies: Latencies, paired: bool, confidence: float
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], dict[str, Distribution]]:
    unit_of = np.arange(len(latencies.records))
    if paired:
        unit_of = np.argsort(np.argsort([record.index for record in latencies.records]))
    samples = {}
    distributions = {}
    percentiles = list(_PERCENTILE_OF.values())
    for metric, values in latencies.metrics("schedule").items():
        known = ~np.isnan(values)
        if metric == "normalized_latency_ms" or not known.any():
            continue
        gaps = metric == "itl_ms"
        request = latencies.itl_request[known] if gaps else np.flatnonzero(known)
        samples[metric] = values[known], unit_of[request]
        distributions[metric] = distribution(
            values[known], percentiles, groups=request if gaps else None, confidence=confidence
        )
    return samples, distributions
