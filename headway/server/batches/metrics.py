"""Metrics of batches, read when they are scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric

from headway.server.batches.objects import OPEN
from headway.server.batches.worker import Batches
from headway.server.metrics.families import Families

RESULTS = ("completed", "failed", "refused")


def of_batches(families: Families, batches: Batches) -> Iterator[Metric]:
    """Batches that are not finished, and their requests."""
    runs, running = batches.runs.values(), batches.gate.inside
    statuses = Counter(run.batch.status for run in runs)
    by_status = {(status,): statuses[status] for status in OPEN}
    yield families.gauge("batches", "Batches that are not finished, by status.", by_status, "status")
    yield families.gauge("batch_requests_running", "Requests of batches in the server.", running)
    waiting = max(0, sum(run.left for run in runs) - running)
    yield families.gauge(
        "batch_requests_waiting", "Requests of batches in progress that are still to be sent.", waiting
    )
    results = {(result,): batches.results[result] for result in RESULTS}
    text = "Requests of batches, by result; refused ones are sent again."
    yield families.counter("batch_requests", text, results, "result")
