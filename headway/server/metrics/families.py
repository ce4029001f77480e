"""Metrics that are read when they are scraped, with the labels that all metrics of a server have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Values = Mapping[Any, float]  # keys are the values of further labels


@dataclass(frozen=True, slots=True)
class Families:
    """Makes families.

    Args:
        prefix: what all names begin with.
        labels: names and values of the labels that all metrics have.
    """

    prefix: str
    labels: Mapping[str, str]

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

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, values: float | Values) -> None:
        rows: Values = values if isinstance(values, Mapping) else {(): values}
        for key, value in rows.items():
            family.add_metric([*self.labels.values(), *key], value)
