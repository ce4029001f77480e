"""Metrics of each class of requests. The label service_class is a name in the table, or `other`."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from headway.engine.client import EngineClient
from headway.policy.objectives.service_class import ClassTable
from headway.policy.step.ledger import Phase
from headway.server.metrics.families import Families, Times

OTHER = "other"
NS = 1e-9
# The phases that a server counts: not those of a gateway, or behind the end of the ledger.
_SPENT = sorted({*Phase} - {Phase.ROUTE, Phase.NETWORK, Phase.BACKEND, Phase.SEND, Phase.SEND_BLOCKED})
CLASS_HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds", "Arrival until the first token is sent, by class."),
    "tpot": ("request_time_per_output_token_seconds", "Mean time per token after the first, by class."),
    "e2e": ("e2e_request_latency_seconds", "Arrival until the last token is sent, by class."),
}


class ClassMetrics:
    """Metrics with the label service_class, beside those that count everybody.

    Args:
        buckets: upper bounds of the buckets of times, in seconds.
    """

    def __init__(
        self, registry: CollectorRegistry, families: Families, buckets: tuple[float, ...], engine: EngineClient
    ) -> None:
        self._families, self._engine = families, engine
        self._labels, prefix = families.labels, families.prefix
        self.names: tuple[str, ...] = ()
        by_class = (*self._labels, "service_class")

        def counter(name: str, text: str, *further: str) -> Counter:
            return Counter(f"{prefix}class_{name}", text, (*by_class, *further), registry=registry)

        self._histograms = {
            key: Histogram(f"{prefix}class_{name}", text, by_class, buckets=buckets, registry=registry)
            for key, (name, text) in CLASS_HISTOGRAMS.items()
        }
        self._children: dict[tuple[str, str], Histogram] = {}
        self.spent_ns: dict[tuple[str, str], int] = {}  # label, phase -> time of choices that have ended
        met_or_missed = "Choices by whether they met their objective; `all` means every objective of a choice."
        self._objectives = counter("objectives", met_or_missed, "objective", "result")
        self._refused = counter("requests_refused", "Refused requests, by reason.", "reason")
        self._yielded = counter(
            "yielded", "Choices that yielded to those that could still be in time, by reason.", "reason"
        )
        registry.register(self)
        self.gaps = Gaps(families, self, buckets)
        registry.register(self.gaps)

    def set_classes(self, table: ClassTable) -> None:
        """Take the names that are labels from now on; the label of all others is OTHER."""
        self.names = tuple(each.name for each in table)
        self._children.clear()
        self.gaps.forget_classes()

    def label_of(self, service_class: str) -> str:
        return service_class if service_class in self.names else OTHER

    def labels_of(self, service_class: str) -> dict[str, str]:
        return {**self._labels, "service_class": self.label_of(service_class)}

    def observe(self, key: str, service_class: str, length_ns: float) -> None:
        """Count a time in the histogram of ttft, tpot or e2e, which `key` names."""
        child = self._children.get((key, service_class))
        if child is None:
            child = self._histograms[key].labels(**self.labels_of(service_class))
            self._children[key, service_class] = child
        child.observe(length_ns * NS)

    def judged(self, service_class: str, verdicts: Mapping[str, bool]) -> None:
        """Count a choice that has ended, by whether it met each of its objectives."""
        judged = {**verdicts, "all": all(verdicts.values())} if verdicts else {}
        for objective, met in judged.items():
            result = "met" if met else "missed"
            self._objectives.labels(**self.labels_of(service_class), objective=objective, result=result).inc()

    def spent(self, service_class: str, phases_ns: Mapping[Phase, int]) -> None:
        """Count the ledger of a choice that has ended."""
        label, spent_ns = self.label_of(service_class), self.spent_ns
        for phase, length_ns in phases_ns.items():
            spent_ns[label, phase] = spent_ns.get((label, phase), 0) + length_ns

    def yielded(self, service_class: str, reason: str) -> None:
        """Count a choice that was put behind others and has ended."""
        self._yielded.labels(**self.labels_of(service_class), reason=reason).inc()

    def refused(self, service_class: str, reason: str) -> None:
        """Count a request that is not served."""
        self._refused.labels(**self.labels_of(service_class), reason=reason).inc()

    def collect(self) -> Iterable[Metric]:
        """What the engine last said of each class, and where the time of its choices went."""
        stats = self._engine.stats
        running, waiting = ({}, {}) if stats is None else (stats.running_of_class, stats.waiting_of_class)
        yield self._gauge("class_requests_running", "Choices in the batch, by class.", running)
        yield self._gauge("class_requests_waiting", "Choices waiting for the batch, by class.", waiting)
        text = "Time of choices that have ended, by class and phase of the ledger."
        # Each begins at 0: of a counter that begins with its first value, Prometheus does not see that one.
        spent = {(name, str(phase)): 0.0 for name in self.names for phase in _SPENT}
        spent |= {key: length_ns * NS for key, length_ns in self.spent_ns.items()}
        yield self._families.counter("class_request_phase_seconds", text, spent, "service_class", "phase")

    def _gauge(self, name: str, text: str, counts: Mapping[str, int]) -> Metric:
        totals = Counts({(each,): 0 for each in self.names})
        for service_class, count in counts.items():
            totals[(self.label_of(service_class),)] += count
        return self._families.gauge(name, text, totals, "service_class")


class Gaps:
    """Times between a choice's outputs, as a histogram of all and one by class.

    Every token adds to both, so it is counted only once, by class; the histogram of all is the sum.

    Args:
        bounds: upper bounds of the buckets, in seconds.
    """

    def __init__(self, families: Families, metrics: ClassMetrics, bounds: tuple[float, ...]) -> None:
        self._families, self._metrics, self._bounds = families, metrics, bounds
        self._rows: dict[tuple[str], Times] = {}  # by label
        self._row_of: dict[str, Times] = {}  # by class, that of its label

    def forget_classes(self) -> None:
        """Forget the labels of classes, which may be others from now on."""
        self._row_of.clear()

    def add(self, service_class: str, gap_ns: int) -> None:
        """Count tokens of a choice that came so long after those before."""
        row = self._row_of.get(service_class)
        if row is None:
            label = (self._metrics.label_of(service_class),)
            row = self._row_of[service_class] = self._rows.setdefault(label, Times(self._bounds))
        row.add(gap_ns)

    def collect(self) -> Iterable[Metric]:
        name, text = "inter_token_latency_seconds", "Time between a choice's outputs"
        of_all = {(): Times(self._bounds).include(self._rows.values())}
        yield self._families.histogram(name, f"{text}.", of_all)
        yield self._families.histogram(f"class_{name}", f"{text}, by class.", self._rows, "service_class")
