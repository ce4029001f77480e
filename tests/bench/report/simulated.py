"""Runs to draw: a queue with a few seats, simulated, so that latencies, stalls and tails look like a server's."""

from __future__ import annotations

import heapq
import random
from array import array
from typing import Any

from headway.load.record import ClientHealth, Failure, FailureKind, RequestRecord, RunResult

MS = 1_000_000
BEGAN_NS = 5_000_000_000_000


def simulated_run(
    requests: int = 200,
    rate: float = 20.0,
    seats: int = 16,
    seed: int = 0,
    failures: int = 0,
    ledger: bool = True,
    classes: tuple[str, ...] = ("",),
    goodput: dict[str, float] | None = None,
    model: str = "tiny",
) -> RunResult:
    """A first-come-first-served server of `seats` places with Poisson arrivals; a record for each request."""
    random_ = random.Random(seed)
    free_at = [0.0] * seats
    heapq.heapify(free_at)
    records, now = [], 0.0
    for index in range(requests):
        now += random_.expovariate(rate)
        begins = max(now, heapq.heappop(free_at))
        record, ends = _served(random_, index, now, begins, ledger, classes[index % len(classes)])
        heapq.heappush(free_at, ends)
        records.append(record)
    for index in random_.sample(range(requests), failures):
        _fail(records[index], index)
    health = ClientHealth(
        loop_lag_ms=[abs(random_.gauss(0.2, 0.2)) for _ in range(500)],
        backlog_bytes=[0] * 500,
        start_lag_ms=[(record.sent_ns - record.scheduled_ns) / 1e6 for record in records],
        cpu_share=0.31,
    )
    ended = max((record.end_ns for record in records), default=BEGAN_NS)
    return RunResult(_settings(rate, seed, goodput, model), records, BEGAN_NS, ended, health, server=_server(model))


def _served(
    random_: random.Random, index: int, due: float, begins: float, ledger: bool, name: str
) -> tuple[RequestRecord, float]:
    prompt = random_.randint(20, 400)
    tokens = random_.randint(8, 60)
    lag = random_.expovariate(1 / 0.0004)
    prefill = 0.004 + prompt * 0.0002
    scheduled = BEGAN_NS + round(due * 1e9)
    sent = scheduled + round(lag * 1e9)
    first = max(begins, due + lag) + prefill
    stall = 0
    at, chunks = first, [first]
    for _ in range(tokens - 1):
        late = random_.random() < 0.06
        step = 0.012 + (random_.uniform(0.02, 0.09) if late else random_.uniform(0, 0.002))
        stall += round((step - 0.012) * 1e9) if late else 0
        at += step
        chunks.append(at)
    record = RequestRecord(
        index=index,
        class_name=name,
        planned_prompt_tokens=prompt,
        planned_output_tokens=tokens,
        scheduled_ns=scheduled,
        sent_ns=sent,
        connected_ns=sent + (300_000 if index % 7 == 0 else 0),
        headers_ns=sent + MS,
        chunk_ns=array("q", [BEGAN_NS + round(t * 1e9) for t in chunks]),
        chunk_tokens=array("i", [1] * tokens),
        end_ns=BEGAN_NS + round(at * 1e9) + MS // 2,
        prompt_tokens=prompt,
        output_tokens=tokens,
        cached_tokens=prompt // 4,
        finish_reason="length",
    )
    if ledger:
        record.timings = _timings(record, begins, due + lag, prefill, stall)
    return record, at


def _timings(record: RequestRecord, begins: float, arrived: float, prefill: float, stall: int) -> dict[str, Any]:
    phases = {
        "receive": 200_000,
        "tokenize": 300_000,
        "queue_capacity": max(round((begins - arrived) * 1e9), 0),
        "prefill_stall": round(prefill * 0.2e9),
        "prefill_compute": round(prefill * 0.7e9),
        "decode_stall_prefill": stall,
        "sampling": 200_000 * record.tokens,
        "schedule": 100_000 * record.tokens,
    }
    whole = record.end_ns - record.sent_ns - 400_000
    phases["decode_compute"] = max(whole - sum(phases.values()), 0)
    return {
        "e2e_ns": whole,
        "ttft_ns": record.first_token_ns - record.sent_ns,
        "phases_ns": {name: length for name, length in phases.items() if length},
        "tokens": record.tokens,
    }


def _fail(record: RequestRecord, index: int) -> None:
    kinds = (FailureKind.SERVER_ERROR, FailureKind.CUT, FailureKind.CONNECT)
    kind = kinds[index % 3]
    record.failure = Failure(kind, f"{kind}: <b>injected</b> & broken", 500 if index % 3 == 0 else None)
    record.timings = None
    if kind is FailureKind.CONNECT:
        record.chunk_ns, record.chunk_tokens = array("q"), array("i")
    record.output_tokens = None


def _settings(rate: float, seed: int, goodput: dict[str, float] | None, model: str) -> dict[str, Any]:
    return {
        "base_url": "http://127.0.0.1:8000",
        "model": model,
        "endpoint": "/v1/completions",
        "workload": "random",
        "arrivals": "poisson",
        "request_rate": rate,
        "max_concurrency": None,
        "seed": seed,
        "goodput": goodput or {},
    }


def _server(model: str) -> dict[str, Any]:
    return {"name": "headway", "version": "0.1.0", "model": model, "max_model_len": 4096}
