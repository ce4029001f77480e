"""One row for each request of a run."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from headway.load.measures.latencies import NS_PER_MS, Floats, Latencies
from headway.load.measures.phases import phases_of
from headway.load.measures.slo import goals_of, missed_objectives
from headway.load.record import RequestRecord, RunResult
from headway.policy.step.ledger import Phase


def csv_text(result: RunResult) -> str:
    """A head and a row for each request, in order of index; empty where there is no such value.

    Seconds count from the run's begin, milliseconds from the send unless the name says otherwise. `met_objectives` is
    1 or 0. `phase_*_ms` are the server's ledger, one column for each phase.
    """
    columns = _columns(result, missed_objectives(result.records, goals_of(result.settings)))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for record in sorted(result.records, key=lambda record: record.index):
        writer.writerow([_cell(value_of(record)) for value_of in columns.values()])
    return text.getvalue()


def _columns(result: RunResult, missed: Mapping[int, tuple[str, ...]]) -> dict[str, Callable[[RequestRecord], object]]:
    """What each column has of a request."""
    latencies = Latencies.of(result.records)
    place = {record.index: at for at, record in enumerate(latencies.records)}
    longest = np.full(len(place), np.nan)
    np.fmax.at(longest, latencies.itl_request, latencies.itl_ms)
    ledgers = {record.index: found for record in result.records if (found := phases_of(record)) is not None}
    phases = [str(phase) for phase in Phase]
    phases += sorted({name for ledger in ledgers.values() for name in ledger} - set(phases))

    def measured(values: Floats) -> Callable[[RequestRecord], object]:
        return lambda r: float(values[place[r.index]]) if r.index in place else None

    def after_s(ns: int) -> float | None:
        return (ns - result.began_ns) / 1e9 if ns else None

    def since_send_ms(record: RequestRecord, ns: int) -> float | None:
        return (ns - record.sent_ns) / NS_PER_MS if ns and record.sent_ns else None

    def told(record: RequestRecord, key: str) -> Any:
        return (record.timings or {}).get(key) if record.index in ledgers else None

    def told_ms(key: str) -> Callable[[RequestRecord], object]:
        return lambda r: ns / NS_PER_MS if isinstance(ns := told(r, key), int) else None

    def phase_ms(name: str) -> Callable[[RequestRecord], object]:
        return lambda r: ledgers[r.index].get(name, 0) / NS_PER_MS if r.index in ledgers else None

    return {
        "index": lambda r: r.index,
        "class": lambda r: r.class_name,
        "scheduled_s": lambda r: after_s(r.scheduled_ns),
        "sent_s": lambda r: after_s(r.sent_ns),
        "start_lag_ms": lambda r: (r.sent_ns - r.scheduled_ns) / NS_PER_MS if r.sent_ns else None,
        "connect_ms": lambda r: since_send_ms(r, r.connected_ns),
        "headers_ms": lambda r: since_send_ms(r, r.headers_ns),
        "ttft_ms": measured(latencies.ttft("send")),
        "ttft_from_schedule_ms": measured(latencies.ttft("schedule")),
        "tpot_ms": measured(latencies.tpot_ms),
        "itl_max_ms": measured(longest),
        "e2el_ms": measured(latencies.e2el("send")),
        "e2el_from_schedule_ms": measured(latencies.e2el("schedule")),
        "normalized_latency_ms": measured(latencies.normalized("send")),
        "prompt_tokens": lambda r: r.prompt_tokens,
        "output_tokens": lambda r: r.output_tokens,
        "cached_tokens": lambda r: r.cached_tokens,
        "planned_prompt_tokens": lambda r: r.planned_prompt_tokens,
        "planned_output_tokens": lambda r: r.planned_output_tokens,
        "chunks": lambda r: len(r.chunk_ns),
        "finish_reason": lambda r: r.finish_reason,
        "resent": lambda r: r.resent,
        "failure": lambda r: r.failure and str(r.failure.kind),
        "status": lambda r: r.failure and r.failure.status,
        "message": lambda r: r.failure and r.failure.message,
        "met_objectives": lambda r: int(not missed[r.index]) if r.index in missed else None,
        "missed": lambda r: " ".join(missed.get(r.index, ())),
        "server_e2e_ms": told_ms("e2e_ns"),
        "server_ttft_ms": told_ms("ttft_ns"),
        "server_preemptions": lambda r: told(r, "preemptions"),
        "tenant": lambda r: r.tenant,
        **{f"phase_{name}_ms": phase_ms(name) for name in phases},
    }


def _cell(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.6f}" if math.isfinite(value) else ""
    return "" if value is None else value
