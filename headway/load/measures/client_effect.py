"""How much of each latency the client itself may have added, and what that spoils.

What the client does late it reads as the server's latency:

* A request that is sent late: its latency from the schedule holds the delay.
* An event loop that runs late, or bytes that wait unread: a token gets the time when the client came to read it.

A figure is spoilt when these delays, at its own percentile, may be more than a tenth of it. Then that figure is not
valid, and the others are. The run as a whole is not valid when its load was not offered, or every figure is spoilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.load.measures.latencies import Latencies, Since
from headway.load.measures.numbers import Distribution, Percentile
from headway.load.record import ClientHealth, RequestRecord

SPOILT = 0.10  # share of a figure
READ_BYTES_PER_MS = 16_000  # streams with a token per chunk are read at 16 MB/s of a core
FULL_CORE = 0.9  # work then queues for about ten times as long as it takes (1 / (1 - share))
FROM_SCHEDULE = frozenset({"ttft_ms", "e2el_ms", "normalized_latency_ms"})


@dataclass(frozen=True, slots=True)
class Delay:
    """How late the client is at a percentile, in ms: when it sends a request, and when it reads what has come."""

    send_ms: float
    read_ms: float

    @classmethod
    def of(cls, client: ClientHealth, p: float) -> Delay:
        unread_ms = _quantile(client.backlog_bytes, p) / READ_BYTES_PER_MS
        return cls(_quantile(client.start_lag_ms, p), max(_quantile(client.loop_lag_ms, p), unread_ms))

    def added_ms(self, metric: str, since: Since, tokens: float) -> float:
        """Milliseconds that the client adds to a latency, if answers have `tokens` tokens on average."""
        sent = self.send_ms if since == "schedule" and metric in FROM_SCHEDULE else 0.0
        if metric == "normalized_latency_ms":
            return (sent + self.read_ms) / max(tokens, 1.0)
        return self.read_ms / max(tokens - 1.0, 1.0) if metric == "tpot_ms" else sent + self.read_ms


def _quantile(values: Sequence[float], p: float) -> float:
    """The percentile `p` by nearest rank; 0 if there are no values."""
    return float(np.percentile(values, p, method="inverted_cdf")) if len(values) else 0.0


def with_client(
    found: Mapping[str, Distribution], client: ClientHealth, since: Since, tokens: float
) -> dict[str, Distribution]:
    """The distributions, each percentile with what the client may have added to it.

    Args:
        found: the distribution of each metric.
        tokens: the tokens of an answer, on average.
    """
    asked = {claim.p for each in found.values() for claim in each.percentiles}
    delays = {p: Delay.of(client, p) for p in asked}
    return {
        metric: replace(
            each,
            percentiles=tuple(
                replace(claim, client_ms=delays[claim.p].added_ms(metric, since, tokens)) for claim in each.percentiles
            ),
        )
        for metric, each in found.items()
    }


def is_spoilt(claim: Percentile) -> bool:
    return claim.client_share > SPOILT


def spoilt(found: Mapping[str, Distribution]) -> list[tuple[str, Percentile]]:
    """The figures that are not valid: metric and percentile, the most spoilt first."""
    claims = [(metric, claim) for metric, each in found.items() for claim in each.percentiles if is_spoilt(claim)]
    return sorted(claims, key=lambda each: -each[1].client_share)


def reasons(client: ClientHealth, records: Iterable[RequestRecord], waited_share: float = 0.0) -> list[str]:
    """Why the run as a whole is not valid, a sentence each; none where it is.

    Args:
        client: the client's health, with everything but its reasons.
        records: the records of the run.
        waited_share: part of the run in which the client was ready to run and had no core.
    """
    latencies = Latencies.of(records)
    found = [each for each in (_not_offered(client, latencies), _all_spoilt(client, latencies)) if each]
    if found and client.cpu_share > FULL_CORE:
        found.append(f"the client used {client.cpu_share:.2f} of a core: use fewer streams, or several clients")
    elif found and waited_share > 0.01:
        found.append(
            f"the client had no core {100 * waited_share:.0f} % of the time, though it used only "
            f"{client.cpu_share:.2f} of one: other processes, perhaps the server, delayed it"
        )
    return found


def _not_offered(client: ClientHealth, latencies: Latencies) -> str:
    """Whether requests were sent so late that the server saw another load than the one that was asked for."""
    due = [record.scheduled_ns for record in latencies.records]
    late_ms, span_ms = _quantile(client.start_lag_ms, 99.0), (max(due) - min(due)) / 1e6 if due else 0.0
    if not span_ms or late_ms <= SPOILT * span_ms:
        return ""
    return (
        f"the load was not offered: requests were sent up to {late_ms:,.0f} ms late (P99), more than "
        f"{100 * SPOILT:.0f} % of the {span_ms:,.0f} ms in which they were due"
    )


def _all_spoilt(client: ClientHealth, latencies: Latencies) -> str:
    """Whether even the medians are the client's."""
    delay = Delay.of(client, 50.0)
    tokens = float(np.mean(latencies.output_tokens)) if len(latencies.records) else 0.0
    shares = []
    for metric, values in latencies.metrics("schedule").items():
        if len(known := values[~np.isnan(values)]):
            shares.append(delay.added_ms(metric, "schedule", tokens) / max(float(np.median(known)), 1e-6))
    if not shares or min(shares) <= SPOILT:
        return ""
    return f"the client may have added {100 * min(shares):.0f} % or more to every median latency"
