"""Metrics of batches, read when they are scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headway.server.batches.objects import OPEN
from headway.server.batches.worker import Batches

RESULTS = ("completed", "failed", "refused")


@dataclass(frozen=True, slots=True, eq=False)
class BatchMetrics:
    """A collector of prometheus_client.

    Args:
        labels: names and values of the labels that all metrics have.
    """

    prefix: str
    labels: Mapping[str, str]
    batches: Batches

    def collect(self) -> Iterable[Metric]:
        runs = self.batches.runs.values()
        running = self.batches.gate.inside
        waiting = max(0, sum(run.left for run in runs) - running)
        statuses = Counter(run.batch.status for run in runs)
        names, values = [*self.labels], [*self.labels.values()]
        text = "Batches that are not finished, by status."
        batches = GaugeMetricFamily(f"{self.prefix}batches", text, labels=[*names, "status"])
        for status in OPEN:
            batches.add_metric([*values, status], statuses[status])
        yield batches
        for name, text, value in (
            ("batch_requests_running", "Requests of batches in the server.", running),
            ("batch_requests_waiting", "Requests of batches in progress that are still to be sent.", waiting),
        ):
            gauge = GaugeMetricFamily(self.prefix + name, text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        text = "Requests of batches, by result; refused ones are sent again."
        answered = CounterMetricFamily(f"{self.prefix}batch_requests", text, labels=[*names, "result"])
        for result in RESULTS:
            answered.add_metric([*values, result], self.batches.results[result])
        yield answered
