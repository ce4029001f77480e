"""Simulated servers: queues of known load, as records of requests."""

from __future__ import annotations

import heapq
from array import array

import numpy as np

from headway.load.record import RequestRecord

BEGAN_NS = 10**12


def record(index: int, due_s: float, first_s: float, end_s: float, tokens: int = 2) -> RequestRecord:
    """A completed request; times in seconds after the start of the run."""
    due, first, end = (BEGAN_NS + round(each * 1e9) for each in (due_s, first_s, end_s))
    return RequestRecord(
        index=index,
        planned_prompt_tokens=10,
        planned_output_tokens=tokens,
        scheduled_ns=due,
        sent_ns=due,
        connected_ns=due,
        headers_ns=first,
        chunk_ns=array("q", np.linspace(first, end, tokens).astype(np.int64)),
        chunk_tokens=array("i", [1] * tokens),
        end_ns=end,
        prompt_tokens=10,
        output_tokens=tokens,
    )


def served(arrivals_s: np.ndarray, service_s: np.ndarray, servers: int) -> list[RequestRecord]:
    """First come, first served, by `servers` at a time. The first token comes when service begins."""
    free = [0.0] * servers
    records = []
    for index, (due, takes) in enumerate(zip(arrivals_s, service_s, strict=True)):
        begins = max(due, heapq.heappop(free))
        heapq.heappush(free, begins + takes)
        records.append(record(index, due, begins + 1e-3, begins + takes + 1e-3))
    return records


def poisson_run(rng: np.random.Generator, load: float, count: int, servers: int = 4) -> list[RequestRecord]:
    """M/M/c that starts empty, with a mean service time of 1 s."""
    arrivals = np.cumsum(rng.exponential(1.0 / (load * servers), count))
    return served(arrivals, rng.exponential(1.0, count), servers)


def closed_run(rng: np.random.Generator, concurrency: int, count: int) -> list[RequestRecord]:
    """`concurrency` clients, each of which asks again when it has its answer."""
    due = [0.0] * concurrency
    records = []
    for index in range(count):
        began = heapq.heappop(due)
        end = began + float(rng.gamma(4.0, 0.25))
        heapq.heappush(due, end)
        records.append(record(index, began, began + 0.05, end))
    return records


def ended_ns(records: list[RequestRecord]) -> int:
    return max(each.end_ns for each in records)
