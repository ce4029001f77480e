"""Metrics of tenants, read when they are scraped. The label tenant is one of the file's first names, or `other`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from headway.policy.admission.quota import TOTAL, UNITS
from headway.policy.admission.tenants import ALL, DEFAULT_TENANT, NO_TENANTS, OTHER, TenantTable
from headway.server.metrics.families import Families
from headway.server.quotas import Budgets

MOST_LABELS = 50
_SUMS = {
    "reserved": "Requests and tokens reserved at admission, or used beyond that.",
    "settled": "Requests and tokens that were used.",
    "refunded": "Requests and tokens that were reserved but not used.",
}


class TenantMetrics:
    """A collector of what quotas say.

    Attributes:
        passed_over: how often choices of each tenant were passed over.
    """

    def __init__(self, registry: CollectorRegistry, families: Families, quotas: Budgets) -> None:
        self._families, self._quotas = families, quotas
        self.passed_over: Counter[str] = Counter()
        self.set_tenants(NO_TENANTS)
        registry.register(self)

    def set_tenants(self, table: TenantTable) -> None:
        """Take the names that are labels from now on; the label of all others is OTHER."""
        self.names = {DEFAULT_TENANT, *[each.name for each in table][:MOST_LABELS]}

    def collect(self) -> Iterable[Metric]:
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
        of, by = self._families, ("tenant", "unit")
        yield of.gauge("tenant_budget_left", "Remaining budget; the tenant `all` is the total.", left, *by)
        refused: Counter[tuple[str, str]] = Counter()
        for (tenant, unit), count in self._quotas.refused.items():
            refused[self._label(tenant), unit] += count
        for name, text, counts in (
            *((name, text, sums[name]) for name, text in _SUMS.items()),
            ("refused", "Requests refused because a budget was used up, by its unit.", refused),
        ):
            yield of.counter(f"tenant_{name}", text, counts, *by)
        passed: Counter[tuple[str, ...]] = Counter()
        for tenant, count in self.passed_over.items():
            passed[(self._label(tenant),)] += count
        text = "Times that a choice waited while another tenant's that came later was admitted, whose turn it was."
        yield of.counter("tenant_passed_over", text, passed, "tenant")

    def _label(self, tenant: str) -> str:
        return ALL if tenant == TOTAL else tenant if tenant in self.names else OTHER
