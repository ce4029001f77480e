"""Writes what a simulated server did as a trace in Chrome's format, which ui.perfetto.dev and chrome://tracing show.

A server is a process with its steps and the counters of each step's end. Each request has a span of its own: its time
to the first token, and from there to the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headway.files import write_files
from headway.simulator.answers import Answer
from headway.simulator.fleet import Fleet
from headway.simulator.log import StepLog

_REQUESTS = 0  # number of a process, as the format calls it; those of servers follow


def write_trace(path: Path, fleet: Fleet) -> None:
    """Write the file, and the folder that it is to be in.

    Raises:
        ValueError: it cannot be written; one line.
    """
    events = [_named(_REQUESTS, "requests")]
    for number, server in enumerate(fleet.servers, start=1):
        events += [_named(number, f"server {number}"), *_steps(server.steps, number)]
    events += [event for answer in fleet.answers for event in _request(answer)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_files({path: msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})})
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; choose another place with --trace-output") from None


def _named(number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}


def _event(kind: str, name: str, process: int, at_ns: int, **more: Any) -> dict[str, Any]:
    """An event; the format's times are microseconds."""
    return {"ph": kind, "name": name, "pid": process, "tid": 0, "ts": at_ns / 1e3, **more}


def _steps(steps: StepLog, number: int) -> Iterator[dict[str, Any]]:
    for at in range(len(steps)):
        began, ended = steps.planned_ns[at], steps.sampled_ns[at]
        did = {"tokens": steps.tokens[at], "sequences": steps.sequences[at], "preempted": steps.preempted[at]}
        yield _event("X", "step", number, began, dur=(ended - began) / 1e3, args=did)
        there = {"running": steps.running[at], "waiting": steps.waiting[at]}
        yield _event("C", "sequences", number, ended, args=there)
        yield _event("C", "KV blocks", number, ended, args={"held": steps.blocks[at]})


def _request(answer: Answer) -> Iterator[dict[str, Any]]:
    """A span for the whole of it with its ledger in ms, and inside it one up to its first token and one after it."""
    number = {"cat": "request", "id": f"{answer.request_id}/{answer.index}"}
    name = f"request {answer.request_id}" + (f", choice {answer.index}" if answer.index else "")
    ledger = {str(phase): length / 1e6 for phase, length in answer.ledger.phases_ns.items()}
    said = {
        "prompt_tokens": answer.prompt_len,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": len(answer.token_ns),
        "preemptions": answer.preemptions,
        "ended": answer.refused or str(answer.finish_reason),
        "ledger_ms": ledger,
    }
    marks = [answer.arrived_ns, *(answer.token_ns[:1]), answer.ended_ns]
    yield _event("b", name, _REQUESTS, answer.arrived_ns, **number, args=said)
    for part, began, ended in zip(("to the first token", "decode"), marks, marks[1:], strict=False):
        yield _event("b", part, _REQUESTS, began, **number)
        yield _event("e", part, _REQUESTS, ended, **number)
    yield _event("e", name, _REQUESTS, answer.ended_ns, **number)
