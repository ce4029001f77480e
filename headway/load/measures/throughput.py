"""Rates of a run, or of a part of it: requests and tokens per second, requests in flight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.load.measures.latencies import Floats, Integers, chunk_times
from headway.load.record import RequestRecord

SECOND_NS = 1_000_000_000


def whole_run_rates(records: Sequence[RequestRecord], began_ns: int, ended_ns: int) -> dict[str, float]:
    """Rates of the completed requests over the whole run. Keys are those of Summary.rates."""
    completed = [record for record in records if record.ok]
    output = sum(record.tokens for record in completed)
    prompt = sum(prompt_tokens(record) for record in completed)
    return _rates(len(completed), prompt, output, records, began_ns, ended_ns)


def window_rates(records: Sequence[RequestRecord], began_ns: int, ended_ns: int) -> dict[str, float]:
    """Rates of what came between two times, counting any completed request. Keys are those of Summary.rates.

    A request counts where its last token came, its prompt where its first token came, and each output token
    where its chunk came.
    """
    completed = [record for record in records if record.ok]
    times, tokens = token_arrivals(completed)
    inside = (times >= began_ns) & (times < ended_ns)
    prompt = sum(prompt_tokens(record) for record in completed if began_ns <= record.first_token_ns < ended_ns)
    finished = sum(began_ns <= record.last_token_ns < ended_ns for record in completed)
    return _rates(finished, prompt, float(tokens[inside].sum()), records, began_ns, ended_ns)


def prompt_tokens(record: RequestRecord) -> int:
    """Tokens of the prompt by the server's `usage`, or as planned if it has none."""
    if record.prompt_tokens is not None:
        return record.prompt_tokens
    return record.planned_prompt_tokens or 0


def token_arrivals(records: Sequence[RequestRecord]) -> tuple[Integers, Floats]:
    """When output tokens came, and how many: two arrays of shape (chunks,).

    Where the server did not say how many tokens a chunk brought, the tokens of its `usage` are spread evenly.
    """
    weights = [np.empty(0)]
    for record in records:
        if record.chunk_ns:
            in_chunk = np.frombuffer(record.chunk_tokens, np.int32).astype(np.float64)
            counted = in_chunk.sum()
            weights.append(in_chunk * (record.tokens / counted) if counted else np.zeros(len(record.chunk_ns)))
    return chunk_times(records), np.concatenate(weights)


def concurrency(records: Sequence[RequestRecord], began_ns: int, ended_ns: int) -> tuple[int, float]:
    """Most and mean requests in flight between two times, from their send to their end; failed ones too."""
    sent = [record for record in records if record.sent_ns]
    starts = np.array([record.sent_ns for record in sent], np.int64)
    ends = np.array([record.end_ns or record.last_token_ns or ended_ns for record in sent], np.int64)
    starts, ends = np.clip(starts, began_ns, ended_ns), np.clip(ends, began_ns, ended_ns)
    inside = ends > starts
    starts, ends = np.sort(starts[inside]), np.sort(ends[inside])
    if not len(starts):
        return 0, 0.0
    in_flight = np.arange(1, len(starts) + 1) - np.searchsorted(ends, starts, side="right")
    return int(in_flight.max()), float((ends - starts).sum() / (ended_ns - began_ns))


def _rates(
    requests: int, prompt: float, output: float, records: Sequence[RequestRecord], began_ns: int, ended_ns: int
) -> dict[str, float]:
    seconds = (ended_ns - began_ns) / SECOND_NS
    most, mean = concurrency(records, began_ns, ended_ns)
    return {
        "request_throughput": requests / seconds if seconds > 0 else 0.0,
        "output_throughput": output / seconds if seconds > 0 else 0.0,
        "total_token_throughput": (prompt + output) / seconds if seconds > 0 else 0.0,
        "max_output_tokens_per_s": _most_in_a_second(records, began_ns, ended_ns),
        "max_concurrent_requests": most,
        "mean_concurrent_requests": mean,
    }


def _most_in_a_second(records: Sequence[RequestRecord], began_ns: int, ended_ns: int) -> float:
    """Output tokens of the fullest second, of seconds counted from `began_ns`."""
    times, tokens = token_arrivals([record for record in records if record.ok])
    inside = (times >= began_ns) & (times <= ended_ns)
    if not inside.any():
        return 0.0
    return float(np.bincount((times[inside] - began_ns) // SECOND_NS, weights=tokens[inside]).max())
