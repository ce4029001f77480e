"""Evidence as a probe would have it, made up: times in milliseconds."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from headway.advisor.evidence import Evidence, Stage, increase
from headway.advisor.machine import MachineLook
from headway.load.record import RequestRecord

LENGTHS = (48, 768)


def record(
    index: int, ttft: float, tokens: int = 2, gap: float = 5.0, sent: float = 0.0, **phases: float
) -> RequestRecord:
    """A request that was sent at a time, and whose tokens came `ttft` later and then each `gap`."""
    first = sent + ttft
    came = [round((first + number * gap) * 1e6) for number in range(tokens)]
    told = {"phases_ns": {name: round(value * 1e6) for name, value in phases.items()}} if phases else None
    return RequestRecord(
        index,
        sent_ns=round(sent * 1e6),
        chunk_ns=array("q", came),
        chunk_tokens=array("i", [1] * tokens),
        end_ns=came[-1],
        timings=told,
    )


def metrics(**counters: float) -> str:
    """The text of /metrics of Headway with these samples."""
    return "".join(f"headway:{name} {value}\n" for name, value in counters.items())


def stage(*records: RequestRecord, **counters: float) -> Stage:
    return Stage(list(records), increase("", metrics(**counters)) if counters else None)


def healthy(kind: str = "headway", **changes: Any) -> Evidence:
    """What a healthy server shows: a step takes 5 ms, a long prompt 60 ms, and nothing else takes time."""
    ledger = {"prefill_compute": 8.0, "decode_compute": 150.0} if kind == "headway" else {}
    cached = replace_cached([record(number, 14.0, 4, **ledger) for number in range(3)], 700)
    evidence = Evidence(
        kind,
        {"name": kind, "version": "1", "model": "m", "max_model_len": 1024},
        lengths=LENGTHS,
        alone=stage(*(record(number, 12.0, 32, **ledger) for number in range(5))),
        first=stage(*(record(number, 60.0, 4, **ledger) for number in range(3)), num_preemptions_total=0.0),
        again=stage(*cached),
        crowd=stage(
            *(record(number, 40.0 + number, 32, 9.0, **ledger) for number in range(16)), num_preemptions_total=0.0
        ),
        beside=stage(*(record(number, 20.0, 100, 6.0, **ledger) for number in range(3)), num_preemptions_total=0.0),
        prompts=stage(*(record(number, 150.0, 2, sent=60.0, **ledger) for number in range(6))),
        machine=MachineLook(3.0, cores=2, cores_used=1.9, workers=2, waited=0.02, steal=0.0, resident_bytes=2**28),
        metrics=frozenset({"num_preemptions_total"}),
    )
    return replace(evidence, **changes)


def replace_cached(records: list[RequestRecord], tokens: int) -> list[RequestRecord]:
    """The records with so many prompt tokens found in the cache, each."""
    for each in records:
        each.cached_tokens = tokens
    return records
