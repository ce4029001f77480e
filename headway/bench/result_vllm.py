"""The results of a run in the words of `vllm bench serve` (vLLM 0.32), and a run from what it has written.

The numbers here are computed as it computes them: from the send, with plain percentiles, 0 where there is no value.
docs/bench-definitions.md lists how ours differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec
import numpy as np

from headway.bench.result_columns import Count
from headway.load.measures.latencies import Floats, Integers, Latencies
from headway.load.measures.slo import goals_of, missed_objectives
from headway.load.measures.throughput import prompt_tokens, whole_run_rates
from headway.load.record import ClientHealth, Failure, FailureKind, RequestRecord, RunResult

DETAILED = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
NS = 1e-9

# What its one line about a failed request begins with or contains, and what that was.
_ERRORS = (
    ("Never received a valid chunk", FailureKind.NO_TOKENS),
    ("Too Many Requests", FailureKind.RATE_LIMITED),
    ("Unauthorized", FailureKind.AUTH),
    ("Forbidden", FailureKind.AUTH),
    ("Not Found", FailureKind.NOT_FOUND),
    ("Bad Request", FailureKind.CLIENT_ERROR),
    ("SSL", FailureKind.TLS),
    ("Cannot connect", FailureKind.CONNECT),
    ("ConnectionRefused", FailureKind.CONNECT),
    ("Timeout", FailureKind.TIMEOUT),
    ("JSONDecodeError", FailureKind.MALFORMED),
    ("ServerDisconnected", FailureKind.CUT),
    ("ClientPayloadError", FailureKind.CUT),
    ("ConnectionReset", FailureKind.CUT),
)


def vllm_keys(result: RunResult, percentiles: Sequence[float], date: datetime, detailed: bool) -> dict[str, Any]:
    """The object that `vllm bench serve --save-result` writes; `detailed` as with its --save-detailed."""
    settings = result.settings
    rate = settings.get("request_rate")
    backend = settings.get("backend") or "openai"
    values = {
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": settings.get("label"),
        "model_id": model_name(result),
        "tokenizer_id": settings.get("tokenizer"),
        "num_prompts": settings.get("num_prompts", len(result.records)),
        **(settings.get("metadata") or {}),
        "request_rate": "inf" if rate is None or rate == float("inf") else rate,
        "burstiness": settings.get("burstiness", 1.0),
        "max_concurrency": settings.get("max_concurrency"),
        **_totals(result),
        **_request_lists(result.records),
    }
    for name, latencies in _latencies(result.records).items():
        values |= _statistics(name, latencies, percentiles)
    return values if detailed else {key: value for key, value in values.items() if key not in DETAILED}


def model_name(result: RunResult) -> str:
    return str(result.settings.get("model") or result.server.get("model") or "unknown")


def _totals(result: RunResult) -> dict[str, Any]:
    completed = [record for record in result.records if record.ok]
    rates = whole_run_rates(result.records, result.began_ns, result.ended_ns)
    fullest, concurrent = _fullest_second(completed)
    goodput = None
    if any((goals := goals_of(result.settings)).values()):
        missed = missed_objectives(completed, goals, since="send")
        met = sum(not reasons for reasons in missed.values())
        goodput = met / result.duration_s if result.duration_s > 0 else 0.0
    return {
        "duration": result.duration_s,
        "completed": len(completed),
        "failed": len(result.records) - len(completed),
        "total_input_tokens": sum(prompt_tokens(record) for record in completed),
        "total_output_tokens": sum(record.tokens for record in completed),
        "request_throughput": rates["request_throughput"],
        "request_goodput": goodput,
        "output_throughput": rates["output_throughput"],
        "total_token_throughput": rates["total_token_throughput"],
        "max_output_tokens_per_s": fullest,
        "max_concurrent_requests": concurrent,
        "rtfx": 0.0,
    }


def _request_lists(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """Seconds; 0 or [] where a request had no tokens."""
    return {
        "input_lens": [prompt_tokens(record) for record in records],
        "output_lens": [record.tokens if record.ok else 0 for record in records],
        "ttfts": [(record.first_token_ns - record.sent_ns) * NS if record.chunk_ns else 0.0 for record in records],
        "itls": [(np.diff(np.frombuffer(record.chunk_ns, np.int64)) * NS).tolist() for record in records],
        "latencies": [(record.last_token_ns - record.sent_ns) * NS if record.chunk_ns else 0.0 for record in records],
        "start_times": [record.sent_ns * NS for record in records],
        "queue_times": [(record.sent_ns - record.scheduled_ns) * NS if record.sent_ns else 0.0 for record in records],
        "generated_texts": [record.text or "" for record in records],
        "errors": [_error(record) for record in records],
    }


def _error(record: RequestRecord) -> str:
    if record.failure is None:
        return "" if record.chunk_ns else "no tokens"
    return record.failure.message or str(record.failure.kind)


def _latencies(records: Sequence[RequestRecord]) -> dict[str, Floats]:
    """An answer of several tokens in one chunk has a TPOT of 0 here."""
    latencies = Latencies.of(records)
    if any(record.is_vector for record in latencies.records):
        return {"e2el": latencies.e2el_ms}
    several = latencies.output_tokens > 1
    return {
        "ttft": latencies.ttft_ms,
        "tpot": np.nan_to_num(latencies.tpot_ms[several]),
        "itl": latencies.itl_ms,
        "e2el": latencies.e2el_ms,
    }


def _statistics(name: str, values_ms: Floats, percentiles: Sequence[float]) -> dict[str, float]:
    if not len(values_ms):
        values_ms = np.zeros(1)
    statistics = {
        f"mean_{name}_ms": float(np.mean(values_ms)),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(np.std(values_ms)),
    }
    for p in percentiles:
        statistics[f"p{p:g}_{name}_ms"] = float(np.percentile(values_ms, p))
    return statistics


def _fullest_second(completed: Sequence[RequestRecord]) -> tuple[float, int]:
    """Most chunks in a second, and most requests that any part of a second belongs to, from the first send."""
    if not completed:
        return 0.0, 0
    first_ns = min(record.sent_ns for record in completed)
    seconds = [_seconds(np.frombuffer(record.chunk_ns, np.int64) - first_ns) for record in completed]
    chunks = np.bincount(np.concatenate(seconds))
    requests = np.zeros(len(chunks) + 1, np.int64)
    for record, of_record in zip(completed, seconds, strict=True):
        requests[int((record.sent_ns - first_ns) * NS)] += 1
        requests[of_record[-1] + 1] -= 1
    return float(chunks.max()), int(np.cumsum(requests).max())


def _seconds(after_ns: Integers) -> Integers:
    return np.asarray(after_ns // 1_000_000_000, np.int64)


Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class _Detailed(msgspec.Struct):
    """The fields of a detailed result that a run is read from."""

    start_times: list[Seconds]
    ttfts: list[Seconds]
    itls: list[list[Seconds]]
    input_lens: list[Count]
    output_lens: list[Count]
    errors: list[str]
    duration: Seconds
    queue_times: list[Seconds] | None = None
    generated_texts: list[str] | None = None
    request_rate: float | str | None = None


def read_vllm(values: Mapping[str, Any]) -> RunResult:
    """A run from the object of `vllm bench serve --save-detailed`, as far as that tells.

    It has no ledger, no classes and nothing of the client's health. A failed request has its error as a message, and a
    kind guessed from it.

    Raises:
        ValueError, OverflowError, msgspec.ValidationError: it is no such object.
    """
    detailed = msgspec.convert(values, _Detailed)
    starts = detailed.start_times
    # Only --max-concurrency makes its requests wait; without, it is the start lag of a microsecond or so.
    waits = detailed.queue_times or [0.0] * len(starts)
    columns = (detailed.ttfts, detailed.itls, detailed.input_lens, detailed.output_lens, detailed.errors)
    texts = detailed.generated_texts or [""] * len(starts)
    rows = zip(starts, waits, *columns, texts, strict=True)
    records = [_record(index, *row) for index, row in enumerate(rows)]
    began_ns = min((record.scheduled_ns for record in records), default=0)
    rate = detailed.request_rate
    return RunResult(
        settings={
            "source": "vllm bench serve",
            "model": values.get("model_id"),
            "backend": values.get("backend"),
            "tokenizer": values.get("tokenizer_id"),
            "num_prompts": values.get("num_prompts"),
            "request_rate": None if rate == "inf" else rate,
            "burstiness": values.get("burstiness"),
            "max_concurrency": values.get("max_concurrency"),
        },
        records=records,
        began_ns=began_ns,
        ended_ns=began_ns + round(detailed.duration / NS),
        client=ClientHealth(),
        server={"model": values.get("model_id")},
    )


def _record(
    index: int,
    start_s: float,
    wait_s: float,
    ttft_s: float,
    itls_s: Sequence[float],
    input_len: int,
    output_len: int,
    error: str,
    text: str,
) -> RequestRecord:
    sent_ns = round(start_s / NS)
    chunk_ns = array("q", [sent_ns + round(after / NS) for after in np.cumsum([ttft_s, *itls_s])] if ttft_s else [])
    return RequestRecord(
        index=index,
        planned_prompt_tokens=input_len,
        scheduled_ns=sent_ns - round(wait_s / NS),
        sent_ns=sent_ns,
        connected_ns=sent_ns,
        chunk_ns=chunk_ns,
        chunk_tokens=array("i", [1] * len(chunk_ns)),
        end_ns=chunk_ns[-1] if chunk_ns else sent_ns,
        prompt_tokens=None if error else input_len,
        output_tokens=None if error else output_len,
        failure=_failure(error),
        text=text or None,
    )


def _failure(error: str) -> Failure | None:
    if not error:
        return None
    kind = next((kind for words, kind in _ERRORS if words in error), FailureKind.SERVER_ERROR)
    return Failure(kind, error.strip().splitlines()[-1])
