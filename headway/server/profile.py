"""Steps of the engine as a trace in Chrome's format, which ui.perfetto.dev and chrome://tracing show.

The engine keeps what it needs for it anyway, so a profile is of steps that have been, and costs nothing before it is
asked for; but kernels are only timed while somebody wants them. All is on one axis, the machine's monotonic clock. One
process has the steps, divided into what they consist of, and the kernels; another one has a thread for each request,
with its part of each step.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from headway.engine.messages import Explain, ExplainedStep, Explanation
from headway.policy.step.scheduler import DECISIONS_KEPT
from headway.server.errors import bad_request
from headway.server.service import Service

_ENGINE, _REQUESTS = 1, 2  # numbers of processes, as the format calls them
_STEPS, _INSIDE, _KERNELS = 1, 2, 3  # threads of the engine
# What a kernel is part of, by the beginning of its name; all others are `other`.
KINDS = {"attend": "attention", "product": "products"}
# How long a profile waits for steps, and how often it looks.
MOST_S, EVERY_S = 10.0, 0.05


class Profiles:
    """The profiles of one server's engine. Methods raise ApiError where the engine is not ready or has died."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._since_ns: int | None = None  # when a profile was started that is not stopped
        self._waiting = 0  # profiles of the next steps

    async def of_last(self, steps: int, after_ns: int = 0) -> dict[str, Any]:
        """The trace of the last steps that were decided after a time."""
        told = await self._service.explained(Explain(steps, after_ns, DECISIONS_KEPT, with_parts=True))
        return await asyncio.to_thread(profile, told)  # of thousands of kernels it takes some 10 ms

    async def of_next(self, steps: int) -> dict[str, Any]:
        """The trace of so many steps from now on, with kernels; of fewer where they take longer than MOST_S."""
        since_ns, ends = time.monotonic_ns(), time.monotonic() + MOST_S
        self._waiting += 1
        try:
            await self._time_kernels(True)
            while time.monotonic() < ends:
                told = await self._service.explained(Explain(steps, since_ns, with_words=False))
                if sum(each.took_ns > 0 for each in told.steps) >= steps:
                    break
                await asyncio.sleep(EVERY_S)
            return await self.of_last(steps, since_ns)
        finally:
            self._waiting -= 1
            await self._time_kernels(False)

    async def start(self) -> None:
        """Begin a profile, with kernels."""
        self._since_ns = time.monotonic_ns()
        await self._time_kernels(True)

    async def stop(self) -> dict[str, Any]:
        """The trace since start(), of the last steps where they are more than are kept. Raises ApiError 400 without."""
        since_ns, self._since_ns = self._since_ns, None
        if since_ns is None:
            raise bad_request("no profile was started; POST /start_profile first, or GET /debug/profile")
        try:
            return await self.of_last(DECISIONS_KEPT, since_ns)
        finally:
            await self._time_kernels(False)

    async def _time_kernels(self, wanted: bool) -> None:
        """Have kernels timed, or not, unless somebody else still wants them."""
        if wanted or not (self._waiting or self._since_ns is not None):
            await self._service.explained(Explain(0, kernels=wanted))


def profile(told: Explanation) -> dict[str, Any]:
    """The trace of what the engine tells, with its parts."""
    events = [
        _named("process_name", _ENGINE, 0, "engine"),
        _named("thread_name", _ENGINE, _STEPS, "steps"),
        _named("thread_name", _ENGINE, _INSIDE, "inside a step"),
        _named("thread_name", _ENGINE, _KERNELS, "kernels"),
        _named("process_name", _REQUESTS, 0, "requests"),
    ]
    events += [_span(name, _ENGINE, _KERNELS, began, ended, {}) for name, began, ended in told.kernels]
    seen: set[int] = set()
    for step in told.steps:
        if step.sampled_ns:
            events += _step(step, kinds_ms(step, told.kernels))
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


def kinds_ms(step: ExplainedStep, kernels: Sequence[tuple[str, int, int]]) -> dict[str, float]:
    """Milliseconds of the kernels of a step, by what they are part of; empty where none were timed.

    Args:
        kernels: oldest first.
    """
    kinds: dict[str, float] = {}
    first, end = (bisect_left(kernels, at, key=itemgetter(1)) for at in (step.launched_ns, step.sampled_ns))
    for name, began, ended in kernels[first:end]:
        kind = next((kind for beginning, kind in KINDS.items() if name.startswith(beginning)), "other")
        kinds[f"{kind}_ms"] = kinds.get(f"{kind}_ms", 0.0) + (ended - began) / 1e6
    return kinds


def _step(step: ExplainedStep, kernels_ms: dict[str, float]) -> Iterator[dict[str, Any]]:
    work = {"prompt_tokens": step.prompt_tokens, "decoding": step.decoding}
    args = {"decision": step.words, **work, **kernels_ms}
    yield _span("step", _ENGINE, _STEPS, step.planned_ns, step.sampled_ns, args)
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
