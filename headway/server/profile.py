"""The last steps of the engine as a trace in Chrome's format, which ui.perfetto.dev and chrome://tracing show.

The engine keeps what it needs for it anyway, so a profile is of steps that have been, and costs nothing before it is
asked for. All is on one axis, the machine's monotonic clock. One process has the steps, divided into what they
consist of; another one has a thread for each request, with its part of each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headway.engine.messages import ExplainedStep, Explanation

_ENGINE, _REQUESTS = 1, 2  # numbers of processes, as the format calls them
_STEPS, _INSIDE = 1, 2  # threads of the engine


def profile(told: Explanation) -> dict[str, Any]:
    """The trace of what the engine tells, with its parts."""
    events = [
        _named("process_name", _ENGINE, 0, "engine"),
        _named("thread_name", _ENGINE, _STEPS, "steps"),
        _named("thread_name", _ENGINE, _INSIDE, "inside a step"),
        _named("process_name", _REQUESTS, 0, "requests"),
    ]
    seen: set[int] = set()
    for step in told.steps:
        if step.sampled_ns:
            events += _step(step)
            for part in step.parts:
                if part.seq_id not in seen:
                    seen.add(part.seq_id)
                    events.append(_named("thread_name", _REQUESTS, part.seq_id, part.request_id or "ended before"))
    for sequence in told.sequences:
        ledger = {phase: length / 1e6 for phase, length in sequence.phases_ns.items()}
        args = {"phase": sequence.phase, "class": sequence.service_class, "ledger_ms": ledger}
        events.append(
            _event("i", f"{sequence.request_id} arrives", _REQUESTS, 0, sequence.arrival_ns, s="p", args=args)
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _step(step: ExplainedStep) -> Iterator[dict[str, Any]]:
    yield _span("step", _ENGINE, _STEPS, step.planned_ns, step.sampled_ns, {"decision": step.words})
    for name, began, ended in (
        ("plan and tensors", step.planned_ns, step.launched_ns),
        ("forward pass", step.launched_ns, step.computed_ns),
        ("sampling", step.computed_ns, step.sampled_ns),
    ):
        predicted = {"predicted_ms": step.predicted_ns / 1e6} if name == "forward pass" and step.predicted_ns else {}
        yield _span(name, _ENGINE, _INSIDE, began, ended, predicted)
    for part in step.parts:
        name = "decode" if part.decoding else f"prompt, {part.tokens} tokens"
        args = {"tokens": part.tokens, "computed before": part.start}
        yield _span(name, _REQUESTS, part.seq_id, step.launched_ns, step.sampled_ns, args)
    there = {"running": step.running, "waiting": step.waiting}
    yield _event("C", "sequences", _ENGINE, 0, step.planned_ns, args=there)


def _event(kind: str, name: str, process: int, thread: int, at_ns: int, **more: Any) -> dict[str, Any]:
    """An event; the format's times are microseconds."""
    return {"ph": kind, "name": name, "pid": process, "tid": thread, "ts": at_ns / 1e3, **more}


def _span(name: str, process: int, thread: int, began: int, ended: int, args: dict[str, Any]) -> dict[str, Any]:
    return _event("X", name, process, thread, began, dur=max(0, ended - began) / 1e3, args=args)


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
