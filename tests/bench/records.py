"""Requests and runs made by hand, in milliseconds after the run's begin."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from headway.load.record import ClientHealth, Failure, FailureKind, RequestRecord, RunResult

BEGAN_NS = 5_000_000_000
MS = 1_000_000


def at(ms: float) -> int:
    """A time of the run in time.monotonic_ns()."""
    return BEGAN_NS + round(ms * MS)


def request(
    index: int,
    chunks: Sequence[float] = (),
    *,
    due: float = 0.0,
    sent: float | None = None,
    end: float | None = None,
    tokens: int | None = None,
    prompt: int | None = 10,
    **fields: Any,
) -> RequestRecord:
    """A request whose tokens came at `chunks`; one to a chunk, as many by `usage`, unless `tokens` says otherwise."""
    sent = due if sent is None else sent
    end = max([sent, *chunks]) if end is None else end
    return RequestRecord(
        index=index,
        planned_prompt_tokens=10,
        planned_output_tokens=len(chunks),
        scheduled_ns=at(due),
        sent_ns=at(sent),
        connected_ns=at(sent),
        headers_ns=at(chunks[0]) if chunks else 0,
        chunk_ns=array("q", [at(ms) for ms in chunks]),
        chunk_tokens=array("i", [1] * len(chunks)),
        end_ns=at(end),
        prompt_tokens=prompt,
        output_tokens=len(chunks) if tokens is None else tokens,
        finish_reason="length" if chunks else None,
        **fields,
    )


def failed(
    index: int, kind: FailureKind = FailureKind.SERVER_ERROR, *, due: float = 0.0, **fields: Any
) -> RequestRecord:
    status = 500 if kind is FailureKind.SERVER_ERROR else None
    return request(index, due=due, prompt=None, failure=Failure(kind, f"a {kind} failure", status), **fields)


def run(records: Sequence[RequestRecord], seconds: float = 10.0, **fields: Any) -> RunResult:
    settings = {"model": "org/tiny", "request_rate": 4.0, "max_concurrency": None, "seed": 1}
    return RunResult(
        settings=fields.pop("settings", settings),
        records=list(records),
        began_ns=BEGAN_NS,
        ended_ns=at(1000 * seconds),
        client=fields.pop("client", ClientHealth()),
        **fields,
    )
