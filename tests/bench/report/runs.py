"""Runs that reports must cope with, and their summaries."""

from __future__ import annotations

import functools
from array import array

from headway.load.measures.numbers import Summary
from headway.load.measures.summary import summarise_all
from headway.load.record import ClientHealth, Failure, FailureKind, RequestRecord, RunResult
from tests.bench.report.simulated import BEGAN_NS, MS, simulated_run

OBJECTIVES = {"ttft": 200.0, "tpot": 30.0}
NASTY = "x</script><script>alert(1)</script>\"'&<img src=http://evil.example/a.png onerror=alert(1)> $\\frac$ {{7*7}}"


def empty() -> RunResult:
    return RunResult({}, [], BEGAN_NS, BEGAN_NS, ClientHealth())


def failed_only() -> RunResult:
    run = simulated_run(12)
    for record in run.records:
        record.failure = Failure(FailureKind.CONNECT, "connection refused")
        record.chunk_ns, record.chunk_tokens, record.timings = array("q"), array("i"), None
    return run


def one_token_each() -> RunResult:
    run = simulated_run(8, ledger=False)
    for record in run.records:
        record.chunk_ns, record.chunk_tokens, record.output_tokens = record.chunk_ns[:1], array("i", [1]), 1
        record.end_ns = record.chunk_ns[0]
    return run


def never_sent() -> RunResult:
    failure = Failure(FailureKind.ABANDONED, "never sent")
    records = [
        RequestRecord(i, scheduled_ns=BEGAN_NS + i * MS, end_ns=BEGAN_NS + 9 * MS, failure=failure) for i in range(3)
    ]
    return RunResult({}, records, BEGAN_NS, BEGAN_NS + 9 * MS, ClientHealth(), interrupted=True)


def nasty() -> RunResult:
    run = simulated_run(60, failures=3, classes=(NASTY, "plain"), model=NASTY)
    for record in run.records:
        if record.failure is not None:
            record.failure = Failure(FailureKind.SERVER_ERROR, NASTY, 500)
    run.client.reasons.append(NASTY)
    run.server["name"] = NASTY
    run.settings["base_url"] = NASTY
    return run


ODD = {
    "empty": empty,
    "one": functools.partial(simulated_run, 1),
    "failed only": failed_only,
    "one token each": one_token_each,
    "never sent": never_sent,
    "nasty": nasty,
}


@functools.cache
def usual() -> tuple[RunResult, list[Summary]]:
    """A run of a usual kind; not to be changed."""
    run = simulated_run(420, rate=24, failures=3, classes=("chat", "batch"), goodput=OBJECTIVES)
    run.probes = simulated_run(20).records
    return run, summarise_all(run, goals={"": OBJECTIVES}, price_per_hour=2.0)


@functools.cache
def sweep() -> tuple[list[RunResult], list[list[Summary]]]:
    runs = [simulated_run(400, rate=rate, seed=number) for number, rate in enumerate((8.0, 4.0, 16.0, 40.0))]
    return runs, [summarise_all(run, goals={"": OBJECTIVES}) for run in runs]
