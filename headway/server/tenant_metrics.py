"""Metrics of tenants, read when they are scraped. The label tenant is one of the file's first names, or `other`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headway.policy.quota import TOTAL, UNITS
from headway.policy.tenants import ALL, DEFAULT_TENANT, NO_TENANTS, OTHER, TenantTable
from headway.server.quotas import TenantQuotas

Family = CounterMetricFamily | GaugeMetricFamily
MOST_LABELS = 50
_SUMS = {
    "reserved": "Requests and tokens reserved at admission, or used beyond that.",
    "settled": "Requests and tokens that were used.",
    "refunded": "Requests and tokens that were reserved but not used.",
}


class TenantMetrics:
    """A collector of what quotas say.

    Args:
        labels: names and values of the labels that all metrics have.

    Attributes:
        passed_over: how often choices of each tenant were.
    """

    def __init__(
        self, registry: CollectorRegistry, prefix: str, labels: Mapping[str, str], quotas: TenantQuotas
    ) -> None:
        self._prefix = prefix
        self._labels = labels
        self._quotas = quotas
        self.passed_over: Counter[str] = Counter()
        self.set_tenants(NO_TENANTS)
        registry.register(self)

    def set_tenants(self, table: TenantTable) -> None:
        """The names that are labels from now on; all others are OTHER."""
        self.names = {DEFAULT_TENANT, *[each.name for each in table][:MOST_LABELS]}

    def collect(self) -> Iterable[Family]:
        """A family for each sum, for what is left of budgets, and for refusals."""
        now, left = self._quotas.clock(), Counter[tuple[str, str]]()
        sums = {name: Counter[tuple[str, str]]() for name in _SUMS}
        for tenant, meters in self._quotas.quotas.meters.items():
            for unit, meter in zip(UNITS, meters, strict=True):
                key = self._label(tenant), unit
                if meter.limit:
                    left[key] += meter.left(now)
                if tenant != TOTAL:
                    for name, counts in sums.items():
                        counts[key] += getattr(meter, name)
        budget = GaugeMetricFamily(
            self._prefix + "tenant_budget_left",
            "Remaining budget; the tenant `all` is the total.",
            labels=[*self._labels, "tenant", "unit"],
        )
        yield self._filled(budget, left)
        refused: Counter[tuple[str, str]] = Counter()
        for (tenant, unit), count in self._quotas.refused.items():
            refused[self._label(tenant), unit] += count
        for name, text, counts in (
            *((name, text, sums[name]) for name, text in _SUMS.items()),
            ("refused", "Requests refused because a budget was used up, by its unit.", refused),
        ):
            family = CounterMetricFamily(f"{self._prefix}tenant_{name}", text, labels=[*self._labels, "tenant", "unit"])
            yield self._filled(family, counts)
        passed: Counter[tuple[str, ...]] = Counter()
        for tenant, count in self.passed_over.items():
            passed[(self._label(tenant),)] += count
        text = "Times that a choice waited while another tenant's that came later was admitted, whose turn it was."
        family = CounterMetricFamily(f"{self._prefix}tenant_passed_over", text, labels=[*self._labels, "tenant"])
        yield self._filled(family, passed)

    def _label(self, tenant: str) -> str:
        return ALL if tenant == TOTAL else tenant if tenant in self.names else OTHER

    def _filled(self, family: Family, values: Mapping[Any, int]) -> Family:
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *key], value)
        return family
