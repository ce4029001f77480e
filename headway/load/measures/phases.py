"""The phases of requests by the server's ledger (docs/ledger.md), beside those of the client.

A request's time is divided without a gap: `start_lag` from when it was due until it was sent, the server's phases, and
`network_and_client`, what neither covers: connecting, the network, the server's socket and this client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from headway.load.measures.latencies import NS_PER_MS, Floats
from headway.load.record import RequestRecord
from headway.policy.step.ledger import DECODE_STALLS, QUEUE_PHASES, Phase

STALL = (Phase.PREFILL_STALL, *DECODE_STALLS)
FAULTS = (Phase.STEP_RETRY, Phase.ENGINE_LOST, Phase.ENGINE_RESTART)
# Phases that lie wholly before the first token. The others (transport, schedule, sampling, faults) may be on both.
BEFORE_FIRST_TOKEN = (
    Phase.RECEIVE,
    Phase.GRAMMAR,
    Phase.TOKENIZE,
    *QUEUE_PHASES,
    Phase.PREFILL_COMPUTE,
    Phase.PREFILL_STALL,
    Phase.KV_TRANSFER,
)

START_LAG = "start_lag"
NETWORK_AND_CLIENT = "network_and_client"
SERVER_REST = "server_rest"  # the part of TTFT for transport, schedule and sampling until the first token

MEDIAN = (45.0, 55.0)
SLOWEST = (99.0, 100.0)

Metric = Literal["e2el", "ttft"]


def phases_of(record: RequestRecord) -> dict[str, int] | None:
    """Nanoseconds by phase, as the server gave them; None where it gave none, or nonsense."""
    timings = record.timings or {}
    phases = timings.get("phases_ns")
    if not isinstance(phases, Mapping) or not _is_time(timings.get("e2e_ns")):
        return None
    if not all(isinstance(name, str) and _is_time(length) for name, length in phases.items()):
        return None
    return dict(phases)


def phase_lengths(records: Iterable[RequestRecord]) -> dict[str, Floats]:
    """Milliseconds by phase, of the completed requests whose ledger was given: arrays of shape (such requests,).

    Phases come in the ledger's order, then the sums `queue` and `stall`, then `network_and_client`. Phases that no
    request spent time in are left out; where only some did, the others count with 0. Empty without ledgers.
    """
    with_ledger = _with_ledger(records)
    if not with_ledger:
        return {}
    phases = [of_record for _, of_record in with_ledger]
    lengths = {name: _column(phases, (name,)) for name in _in_order(phases)}
    lengths["queue"] = _column(phases, QUEUE_PHASES)
    lengths["stall"] = _column(phases, STALL)
    lengths[NETWORK_AND_CLIENT] = (
        np.array([record.end_ns - record.sent_ns - _server_e2e(record) for record, _ in with_ledger]) / NS_PER_MS
    )
    return lengths


def phase_composition(
    records: Iterable[RequestRecord], low: float, high: float, metric: Metric = "e2el"
) -> dict[str, float]:
    """The parts that make up the latency of requests between two of its percentiles.

    Args:
        low, high: percentiles, 0 to 100, of the latency from the schedule, among completed requests with a ledger.
            There is always at least one request between them.
        metric: `e2el`: from when a request was due to the end of its response. `ttft`: to its first token.

    Returns:
        Mean milliseconds by part, in the order of time as far as there is one; they sum to the mean latency of these
        requests. Empty where the server gave no ledgers.
    """
    with_ledger = _with_ledger(records)
    if metric == "ttft":
        with_ledger = [(record, phases) for record, phases in with_ledger if _is_time(_timings(record).get("ttft_ns"))]
    if not with_ledger:
        return {}
    until = {"e2el": lambda record: record.end_ns, "ttft": lambda record: record.first_token_ns}[metric]
    with_ledger.sort(key=lambda each: until(each[0]) - each[0].scheduled_ns)
    first = min(int(low / 100 * len(with_ledger)), len(with_ledger) - 1)
    chosen = with_ledger[first : max(first + 1, round(high / 100 * len(with_ledger)))]
    parts = [_parts(record, phases, metric) for record, phases in chosen]
    return {name: float(np.mean([part.get(name, 0) for part in parts])) / NS_PER_MS for name in _in_order(parts)}


def _parts(record: RequestRecord, phases: Mapping[str, int], metric: Metric) -> dict[str, int]:
    parts = {START_LAG: record.sent_ns - record.scheduled_ns}
    if metric == "e2el":
        server_ns = _server_e2e(record)
        parts |= phases
        # A ledger of another server might not close: what its phases leave open is shown, not lost.
        if rest := server_ns - sum(phases.values()):
            parts[SERVER_REST] = rest
        parts[NETWORK_AND_CLIENT] = record.end_ns - record.sent_ns - server_ns
        return parts
    server_ns = int(_timings(record)["ttft_ns"])
    before = {str(name): phases[name] for name in BEFORE_FIRST_TOKEN if name in phases}
    parts |= before
    parts[SERVER_REST] = server_ns - sum(before.values())
    parts[NETWORK_AND_CLIENT] = record.first_token_ns - record.sent_ns - server_ns
    return parts


def _in_order(of_requests: Iterable[Mapping[str, int]]) -> list[str]:
    """Names that occur, in the ledger's order; those that it does not know, before the client's."""
    known = [START_LAG, *(str(phase) for phase in Phase)]
    last = [SERVER_REST, NETWORK_AND_CLIENT]
    names = {str(name) for phases in of_requests for name in phases}
    unknown = sorted(names - set(known) - set(last))
    return [name for name in (*known, *unknown, *last) if name in names]


def _with_ledger(records: Iterable[RequestRecord]) -> list[tuple[RequestRecord, dict[str, int]]]:
    completed = ((record, phases_of(record)) for record in records if record.ok)
    return [(record, phases) for record, phases in completed if phases is not None]


def _column(of_requests: list[dict[str, int]], names: Iterable[str]) -> Floats:
    return np.array([sum(phases.get(name, 0) for name in names) for phases in of_requests]) / NS_PER_MS


def _server_e2e(record: RequestRecord) -> int:
    return int(_timings(record)["e2e_ns"])


def _timings(record: RequestRecord) -> dict[str, Any]:
    return record.timings or {}


def _is_time(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
