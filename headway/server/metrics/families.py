"""Metrics that are read when they are scraped, with the labels that all metrics of a server have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Values = Mapping[Any, float]  # keys are the values of further labels


@dataclass(frozen=True, slots=True, eq=False)
class Collector:
    """What a registry asks for metrics whenever it is scraped."""

    collect: Callable[[], Iterable[Metric]]


class Times:
    """Counts times in buckets, for a tenth of what prometheus_client's histogram takes.

    Args:
        bounds_s: upper bounds of the buckets, in seconds.
    """

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_ns = [round(bound * 1e9) for bound in bounds_s]
        self._names = [*map(str, bounds_s), "+Inf"]
        self._counts, self._sum_ns = [0] * len(self._names), 0

    def add(self, length_ns: int) -> None:
        self._counts[bisect_left(self._bounds_ns, length_ns)] += 1
        self._sum_ns += length_ns

    def include(self, others: Iterable[Times]) -> Times:
        """Count what others, which have the same buckets, have counted."""
        for other in others:
            self._counts = [own + more for own, more in zip(self._counts, other._counts, strict=True)]
            self._sum_ns += other._sum_ns
        return self

    def histogram(self) -> tuple[list[tuple[str, float]], float]:
        """The buckets by their bounds, each with those below it, and the sum in seconds."""
        return list(zip(self._names, accumulate(self._counts), strict=True)), self._sum_ns / 1e9


@dataclass(frozen=True, slots=True)
class Families:
    """Makes families."""

    prefix: str  # what all names begin with
    labels: Mapping[str, str]  # names and values of the labels that all metrics have

    def gauge(self, name: str, text: str, values: float | Values, *further: str) -> GaugeMetricFamily:
        """One gauge, or one for each combination of `further` labels."""
        family = GaugeMetricFamily(self.prefix + name, text, labels=[*self.labels, *further])
        self._fill(family, values)
        return family

    def counter(self, name: str, text: str, values: float | Values, *further: str) -> CounterMetricFamily:
        """One counter, or one for each combination of `further` labels."""
        family = CounterMetricFamily(self.prefix + name, text, labels=[*self.labels, *further])
        self._fill(family, values)
        return family

    def histogram(self, name: str, text: str, times: Mapping[Any, Times], *further: str) -> HistogramMetricFamily:
        """A histogram for each combination of `further` labels; the key of the only one without any is ()."""
        family = HistogramMetricFamily(self.prefix + name, text, labels=[*self.labels, *further])
        for key, each in times.items():
            family.add_metric([*self.labels.values(), *key], *each.histogram())
        return family

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, values: float | Values) -> None:
        rows: Values = values if isinstance(values, Mapping) else {(): values}
        for key, value in rows.items():
            family.add_metric([*self.labels.values(), *key], value)
