"""The latencies of requests, from what the client saw of them; docs/bench-definitions.md has the definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from headway.load.record import RequestRecord

Since = Literal["schedule", "send"]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of the completed requests, in the order in which they were due.

    Milliseconds; NaN where there is no such latency. Arrays have the shape (requests,) unless said otherwise:
    """

    records: list[RequestRecord]  # the completed requests themselves
    start_lag_ms: Floats  # the time from when it was due until it was sent
    ttft_ms: Floats  # the time from the send to the first token; NaN where nothing is generated (vectors, scores)
    e2el_ms: Floats  # the time from the send to the last token, or the end of an answer without tokens
    # (E2EL - TTFT) / (output tokens - 1); NaN for answers of one token, or that the client read at once.
    tpot_ms: Floats
    output_tokens: Integers  # their number by the server's `usage`, else by chunks
    steps: Integers  # the server's steps with a part of it, by Headway's `timings`, else by chunks
    itl_ms: Floats  # shape (gaps,), the gaps between chunks that brought tokens, of all requests
    itl_request: Integers  # shape (gaps,), the position in `records` that each gap belongs to

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> Latencies:
        """Requests that failed have no latency and are left out."""
        completed = sorted((record for record in records if record.ok), key=lambda record: record.scheduled_ns)
        sent = _integers(completed, lambda record: record.sent_ns)
        first = _integers(completed, lambda record: record.first_token_ns)
        last = _integers(completed, lambda record: record.last_token_ns)
        tokens = _integers(completed, lambda record: record.tokens)
        chunks = _integers(completed, lambda record: len(record.chunk_ns))
        ttft_ms = (first - sent) / NS_PER_MS
        ttft_ms[[record.is_vector for record in completed]] = np.nan
        several = (tokens > 1) & (last > first)
        tpot_ms = np.full(len(completed), np.nan)
        tpot_ms[several] = (last - first)[several] / (tokens[several] - 1) / NS_PER_MS
        itl_ms, itl_request = _gaps(completed, chunks)
        return cls(
            records=completed,
            start_lag_ms=(sent - _integers(completed, lambda record: record.scheduled_ns)) / NS_PER_MS,
            ttft_ms=ttft_ms,
            e2el_ms=(last - sent) / NS_PER_MS,
            tpot_ms=tpot_ms,
            output_tokens=tokens,
            steps=_integers(completed, steps_of),
            itl_ms=itl_ms,
            itl_request=itl_request,
        )

    def ttft(self, since: Since) -> Floats:
        return self.ttft_ms + self.start_lag_ms if since == "schedule" else self.ttft_ms

    def e2el(self, since: Since) -> Floats:
        return self.e2el_ms + self.start_lag_ms if since == "schedule" else self.e2el_ms

    def normalized(self, since: Since) -> Floats:
        """E2EL per output token (Yu et al., Orca, OSDI 2022); NaN where the server counted no tokens."""
        normalized = np.full(len(self.records), np.nan)
        counted = self.output_tokens > 0
        normalized[counted] = self.e2el(since)[counted] / self.output_tokens[counted]
        return normalized

    def metrics(self, since: Since) -> dict[str, Floats]:
        """Every metric by its name in a Summary; NaN still in it. Of shape (requests,), but for itl_ms."""
        return {
            "ttft_ms": self.ttft(since),
            "tpot_ms": self.tpot_ms,
            "itl_ms": self.itl_ms,
            "e2el_ms": self.e2el(since),
            "normalized_latency_ms": self.normalized(since),
        }


def steps_of(record: RequestRecord) -> int:
    """How many steps of the server an answer took: those of its prompt and its tokens; without its word, chunks."""
    told = (record.timings or {}).get("steps")
    return told if type(told) is int and told > 0 else len(record.chunk_ns)


def chunk_times(records: Iterable[RequestRecord]) -> Integers:
    """When each chunk of these requests came, one request after the other, in time.monotonic_ns()."""
    return np.concatenate(
        [np.empty(0, np.int64), *(np.frombuffer(record.chunk_ns, np.int64) for record in records if record.chunk_ns)]
    )


def _integers(records: list[RequestRecord], value: Callable[[RequestRecord], int]) -> Integers:
    return np.fromiter((value(record) for record in records), np.int64, len(records))


def _gaps(records: list[RequestRecord], chunks: Integers) -> tuple[Floats, Integers]:
    request = np.repeat(np.arange(len(records)), chunks)
    within = request[1:] == request[:-1]
    return np.diff(chunk_times(records))[within] / NS_PER_MS, request[1:][within]
