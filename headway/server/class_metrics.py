"""Metrics of each class of requests. The label service_class is a name in the table, or `other`."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from headway.engine.client import EngineClient
from headway.policy.service_class import ClassTable

OTHER = "other"
NS = 1e-9
_HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds", "Arrival until the first token is sent, by class."),
    "itl": ("inter_token_latency_seconds", "Time between a choice's outputs, by class."),
    "tpot": ("request_time_per_output_token_seconds", "Mean time per token after the first, by class."),
    "e2e": ("e2e_request_latency_seconds", "Arrival until the last token is sent, by class."),
}


class ClassMetrics:
    """Metrics with the label service_class, beside those that count everybody.

    Args:
        labels: names and values of the labels that all metrics have.
        buckets: of times, in seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        prefix: str,
        labels: Mapping[str, str],
        buckets: tuple[float, ...],
        engine: EngineClient,
    ) -> None:
        self._labels = labels
        self.names: tuple[str, ...] = ()
        by_class = (*labels, "service_class")

        def counter(name: str, text: str, *further: str) -> Counter:
            return Counter(f"{prefix}class_{name}", text, (*by_class, *further), registry=registry)

        self._histograms = {
            key: Histogram(f"{prefix}class_{name}", text, by_class, buckets=buckets, registry=registry)
            for key, (name, text) in _HISTOGRAMS.items()
        }
        self._children: dict[tuple[str, str], Histogram] = {}
        met_or_missed = "Choices by whether they met their objective; `all` means every objective of a choice."
        self._objectives = counter("objectives", met_or_missed, "objective", "result")
        self._refused = counter("requests_refused", "Refused requests, by reason.", "reason")
        self._yielded = counter(
            "yielded", "Choices that yielded to those that could still be in time, by reason.", "reason"
        )
        registry.register(_ClassGauges(prefix, self, engine))

    def set_classes(self, table: ClassTable) -> None:
        """The names that are labels from now on; all others are OTHER."""
        self.names = tuple(each.name for each in table)
        self._children.clear()

    def labels_of(self, service_class: str) -> dict[str, str]:
        return {**self._labels, "service_class": service_class if service_class in self.names else OTHER}

    def observe(self, key: str, service_class: str, length_ns: float) -> None:
        """Of ttft, itl, tpot or e2e."""
        child = self._children.get((key, service_class))
        if child is None:
            child = self._histograms[key].labels(**self.labels_of(service_class))
            self._children[key, service_class] = child
        child.observe(length_ns * NS)

    def judged(self, service_class: str, verdicts: Mapping[str, bool]) -> None:
        """A choice has ended; whether each of its objectives was met."""
        judged = {**verdicts, "all": all(verdicts.values())} if verdicts else {}
        for objective, met in judged.items():
            result = "met" if met else "missed"
            self._objectives.labels(**self.labels_of(service_class), objective=objective, result=result).inc()

    def yielded(self, service_class: str, reason: str) -> None:
        """A choice has ended that was put behind others."""
        self._yielded.labels(**self.labels_of(service_class), reason=reason).inc()

    def refused(self, service_class: str, reason: str) -> None:
        """A request is not served."""
        self._refused.labels(**self.labels_of(service_class), reason=reason).inc()


@dataclass(frozen=True, slots=True, eq=False)
class _ClassGauges:
    """What the engine last said, read when it is scraped."""

    prefix: str
    metrics: ClassMetrics
    engine: EngineClient

    def collect(self) -> Iterable[GaugeMetricFamily]:
        stats = self.engine.stats
        running, waiting = ({}, {}) if stats is None else (stats.running_of_class, stats.waiting_of_class)
        yield self._family("class_requests_running", "Choices in the batch, by class.", running)
        yield self._family("class_requests_waiting", "Choices waiting for the batch, by class.", waiting)

    def _family(self, name: str, text: str, counts: Mapping[str, int]) -> GaugeMetricFamily:
        labels = self.metrics.labels_of("")
        family = GaugeMetricFamily(self.prefix + name, text, labels=[*labels])
        totals: Counts[str] = Counts(dict.fromkeys(self.metrics.names, 0))
        for service_class, count in counts.items():
            totals[self.metrics.labels_of(service_class)["service_class"]] += count
        for service_class, count in totals.items():
            family.add_metric([*(labels | {"service_class": service_class}).values()], count)
        return family
