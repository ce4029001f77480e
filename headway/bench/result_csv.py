"""One row for each request of a run."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence

import numpy as np

from headway.load.measures.latencies import NS_PER_MS, Floats, Latencies
from headway.load.measures.phases import phases_of
from headway.load.measures.slo import Objectives, missed_objectives
from headway.load.record import RequestRecord, RunResult
from headway.policy.step.ledger import Phase

COLUMNS = (
    "index",
    "class",
    "scheduled_s",
    "sent_s",
    "start_lag_ms",
    "connect_ms",
    "headers_ms",
    "ttft_ms",
    "ttft_from_schedule_ms",
    "tpot_ms",
    "itl_max_ms",
    "e2el_ms",
    "e2el_from_schedule_ms",
    "normalized_latency_ms",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "planned_prompt_tokens",
    "planned_output_tokens",
    "chunks",
    "finish_reason",
    "resent",
    "failure",
    "status",
    "message",
    "met_objectives",
    "missed",
    "server_e2e_ms",
    "server_ttft_ms",
    "server_preemptions",
    "tenant",
)


def csv_text(
    result: RunResult, objectives: Objectives | None = None, by_class: Mapping[str, Objectives] | None = None
) -> str:
    """A head and a row for each request, in order of index; empty where there is no such value.

    Seconds count from the run's begin, milliseconds from the send unless the name says otherwise. `met_objectives` is
    1 or 0. `phase_*_ms` are the server's ledger, one column for each phase.
    """
    missed = missed_objectives(result.records, objectives, by_class)
    latencies = Latencies.of(result.records)
    columns = _latency_columns(latencies)
    position_of = {record.index: position for position, record in enumerate(latencies.records)}
    unknown = {name for record in result.records for name in phases_of(record) or ()} - {str(name) for name in Phase}
    phases = [*(str(phase) for phase in Phase), *sorted(unknown)]
    head = (*COLUMNS, *(f"phase_{name}_ms" for name in phases))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for record in sorted(result.records, key=lambda record: record.index):
        values = _request(record, result.began_ns) | _outcome(record, missed.get(record.index))
        if (position := position_of.get(record.index)) is not None:
            values |= {name: float(of_all[position]) for name, of_all in columns.items()}
        values |= _server(record, phases)
        writer.writerow([_cell(values.get(name)) for name in head])
    return text.getvalue()


def _request(record: RequestRecord, began_ns: int) -> dict[str, object]:
    def after_s(ns: int) -> float | None:
        return (ns - began_ns) / 1e9 if ns else None

    def since_send_ms(ns: int) -> float | None:
        return (ns - record.sent_ns) / NS_PER_MS if ns and record.sent_ns else None

    return {
        "index": record.index,
        "class": record.class_name,
        "scheduled_s": after_s(record.scheduled_ns),
        "sent_s": after_s(record.sent_ns),
        "start_lag_ms": (record.sent_ns - record.scheduled_ns) / NS_PER_MS if record.sent_ns else None,
        "connect_ms": since_send_ms(record.connected_ns),
        "headers_ms": since_send_ms(record.headers_ns),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "planned_prompt_tokens": record.planned_prompt_tokens,
        "planned_output_tokens": record.planned_output_tokens,
        "chunks": len(record.chunk_ns),
        "finish_reason": record.finish_reason,
        "resent": record.resent,
        "tenant": record.tenant,
    }


def _outcome(record: RequestRecord, missed: Sequence[str] | None) -> dict[str, object]:
    values: dict[str, object] = {}
    if record.failure is not None:
        values |= {
            "failure": str(record.failure.kind),
            "status": record.failure.status,
            "message": record.failure.message,
        }
    if missed is not None:
        values |= {"met_objectives": int(not missed), "missed": " ".join(missed)}
    return values


def _latency_columns(latencies: Latencies) -> dict[str, Floats]:
    """Arrays of shape (completed requests,)."""
    longest = np.full(len(latencies.records), np.nan)
    np.fmax.at(longest, latencies.itl_request, latencies.itl_ms)
    return {
        "ttft_ms": latencies.ttft("send"),
        "ttft_from_schedule_ms": latencies.ttft("schedule"),
        "tpot_ms": latencies.tpot_ms,
        "itl_max_ms": longest,
        "e2el_ms": latencies.e2el("send"),
        "e2el_from_schedule_ms": latencies.e2el("schedule"),
        "normalized_latency_ms": latencies.normalized("send"),
    }


def _server(record: RequestRecord, phases: Sequence[str]) -> dict[str, object]:
    of_record = phases_of(record)
    if of_record is None or record.timings is None:
        return {}
    values: dict[str, object] = {f"phase_{name}_ms": of_record.get(name, 0) / NS_PER_MS for name in phases}
    for ours, theirs in (("server_e2e_ms", "e2e_ns"), ("server_ttft_ms", "ttft_ns")):
        if isinstance(length := record.timings.get(theirs), int):
            values[ours] = length / NS_PER_MS
    values["server_preemptions"] = record.timings.get("preemptions")
    return values


def _cell(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.6f}" if math.isfinite(value) else ""
    return "" if value is None else value
