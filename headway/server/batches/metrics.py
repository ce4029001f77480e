"""Metrics of batches, read when they are scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import Metric

from headway.server.batches.objects import OPEN
from headway.server.batches.worker import Batches
from headway.server.metrics.families import Families

RESULTS = ("completed", "failed", "refused")


@dataclass(frozen=True, slots=True, eq=False)
class BatchMetrics:
    """A collector of prometheus_client."""

    families: Families
    batches: Batches

    def collect(self) -> Iterable[Metric]:
        of, runs, running = self.families, self.batches.runs.values(), self.batches.gate.inside
        statuses = Counter(run.batch.status for run in runs)
        by_status = {(status,): statuses[status] for status in OPEN}
        yield of.gauge("batches", "Batches that are not finished, by status.", by_status, "status")
        yield of.gauge("batch_requests_running", "Requests of batches in the server.", running)
        waiting = max(0, sum(run.left for run in runs) - running)
        text = "Requests of batches in progress that are still to be sent."
        yield of.gauge("batch_requests_waiting", text, waiting)
        results = {(result,): self.batches.results[result] for result in RESULTS}
        text = "Requests of batches, by result; refused ones are sent again."
        yield of.counter("batch_requests", text, results, "result")
