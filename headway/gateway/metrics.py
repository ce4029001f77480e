"""What a gateway counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import Metric

from headway.gateway.member import Member, clock
from headway.server.metrics.families import Families, Times
from headway.server.metrics.tenants import TenantMetrics
from headway.server.quotas import Budgets

SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
    *(0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0),
)
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_COUNTERS = {
    "requests_refused": ("code", "Requests refused, by code."),
    "retries": ("reason", "Requests sent again, by reason."),
    "handovers": ("result", "Prompts computed by a backend for prompts, by result."),
    "reloads": ("result", "Files read again, by result."),
}
STATES = ("closed", "half_open", "open", "down", "unknown", "draining")

prometheus_client.disable_created_metrics()


class GatewayMetrics:
    """All metrics of one gateway, in a registry of their own.

    Args:
        members: gives the backends, by name.
        state_of: gives one of STATES for a backend at a time.
    """

    def __init__(
        self,
        prefix: str,
        quotas: Budgets | None,
        members: Callable[[], Mapping[str, Member]],
        state_of: Callable[[Member, int], str],
    ) -> None:
        self._members, self._state_of = members, state_of
        self.registry, self._of_tenants = CollectorRegistry(), CollectorRegistry()
        self._families = Families(prefix, {})
        self._ttft, self._e2e, self._route = Times(SECONDS), Times(SECONDS), Times(SECONDS)
        self._counters = {
            name: Counter(prefix + name, text, (label,), registry=self.registry)
            for name, (label, text) in _COUNTERS.items()
        }
        ProcessCollector(registry=self.registry)
        self.registry.register(self)  # type: ignore[arg-type]
        self.by_tenant: TenantMetrics | None = None
        if quotas is not None:
            self.by_tenant = TenantMetrics(self._of_tenants, self._families, quotas)

    def ended(self, arrived_ns: int, received_ns: int, sent_ns: int, first_token_ns: int) -> None:
        """Count a request that has its answer; `first_token_ns` is 0 where that came in one piece."""
        self._e2e.add(clock() - arrived_ns)
        self._route.add(sent_ns - received_ns)
        if first_token_ns:
            self._ttft.add(first_token_ns - arrived_ns)

    def count(self, name: str, value: str) -> None:
        """Count what a row of _COUNTERS is about, by the value of its label."""
        self._counters[name].labels(value).inc()

    def collect(self) -> Iterable[Metric]:
        """The families of times and of backends."""
        for times, name, of_what in (
            (self._ttft, "time_to_first_token", "First byte until the first token."),
            (self._e2e, "e2e_request_latency", "First byte until the answer has ended."),
            (self._route, "request_route_time", "Checked body until it was handed to a backend's connection."),
        ):
            yield self._families.histogram(f"{name}_seconds", of_what, {(): times})
        of, members, now = self._families, list(self._members().items()), clock()
        outcomes = {(name, key): count for name, each in members for key, count in each.outcomes.items()}
        yield of.counter("requests", "Requests by backend and outcome.", outcomes, "backend", "outcome")
        state = {(name, key): float(self._state_of(each, now) == key) for name, each in members for key in STATES}
        yield of.gauge("backend_state", "1 for the state that a backend is in.", state, "backend", "state")
        for key, text, value in (
            ("requests_in_flight", "Requests at a backend.", lambda each: each.in_flight),
            ("backend_connections", "Open connections to a backend.", lambda each: each.pool.num_open),
            ("backend_ejections", "Ejections that are not forgotten.", lambda each: each.breaker.ejections),
        ):
            yield of.gauge(key, text, {(name,): float(value(each)) for name, each in members}, "backend")

    def exposition(self, with_tenants: bool) -> bytes:
        """The text of all metrics."""
        own: bytes = prometheus_client.generate_latest(self.registry)
        return own + prometheus_client.generate_latest(self._of_tenants) if with_tenants else own
