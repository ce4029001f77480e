"""The request log: a line of JSON for each choice that has ended, and a warning for each that was slow, with its cause.

The lines have numbers, names and ids, and no text of prompts or answers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from headway.policy.step.ledger import QUEUE_PHASES, Phase
from headway.server.aside import Aside
from headway.server.ended import Ended
from headway.server.settings import ServerSettings

NS_PER_MS = 1e6
# Warnings of slow requests in a second; further ones are only counted.
MOST_WARNINGS = 10
# The phases in which a request waits for something that can be changed, and what that is (docs/ledger.md, "How to read
# it").
CAUSES = {
    Phase.QUEUE_CAPACITY: "more requests than seats or tokens of a step",
    Phase.QUEUE_POLICY: "others go first by priority or objective",
    Phase.QUEUE_BLOCKS: "the KV cache is full",
    Phase.QUEUE_WINDOW: "the engine waited for more requests",
    Phase.QUEUE_ADAPTER: "more adapters than slots (--max-loras), or its adapter was being loaded",
    Phase.PREFILL_STALL: "its prompt shared its steps with others",
    Phase.PREFILL_COMPUTE: "a long prompt, little of it cached",
    Phase.DECODE_COMPUTE: "a long answer, or slow steps",
    Phase.DRAFT: "drafts were made",
    Phase.VERIFY: "drafts were verified",
    Phase.DECODE_STALL_PREFILL: "prompts of others",
    Phase.DECODE_STALL_LOGPROBS: "log-probabilities of others' prompts",
    Phase.DECODE_STALL_POLICY: "left out for requests with objectives",
    Phase.DECODE_STALL_PREEMPTED: "preempted",
    Phase.DECODE_STALL_RECOMPUTE: "computed again after a preemption",
    Phase.SAMPLING: "large batches or many sampling parameters",
    Phase.SCHEDULE: "work between steps; the engine lacks a core",
    Phase.STEP_RETRY: "a step failed because of a request",
    Phase.ENGINE_LOST: "the engine died",
    Phase.ENGINE_RESTART: "the engine was started again",
    Phase.TRANSPORT: "long steps, or the server lacks a core",
    Phase.RECEIVE: "the request came slowly, or a crowd came with it",
    Phase.TOKENIZE: "a long text, or many at once",
    Phase.GRAMMAR: "its grammar took long to compile",
}


_BEFORE_FIRST = {
    *QUEUE_PHASES,
    *(Phase.RECEIVE, Phase.GRAMMAR, Phase.TOKENIZE, Phase.TRANSPORT, Phase.PREFILL_COMPUTE, Phase.PREFILL_STALL),
}
logger = logging.getLogger("headway.server")


class RequestLog(Aside):
    """Writes the log in a thread. The file is opened for each batch, so it may be moved away at any time.

    Args:
        path: the file of the lines; None for none.
        slow_ms: requests that take longer are slow, and those that missed an objective; None for no warnings.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, path: Path | None, slow_ms: float | None, wall_clock: Callable[[], int] = time.time_ns) -> None:
        super().__init__("request-log")
        self._path, self._slow_ms, self._wall_clock = path, slow_ms, wall_clock
        self._second, self._warnings, self._left_out = 0.0, 0, 0
        if path is not None:
            try:
                self._append(path, b"")
            except OSError as error:
                raise ValueError(
                    f"cannot write the request log {path}: {error.strerror}; name another file with --request-log"
                ) from None

    def handle(self, taken: list[Ended]) -> None:
        offset = self._wall_clock() - time.monotonic_ns()
        lines = [(each, _line(each, offset)) for each in taken]
        if self._slow_ms is not None:
            for each, line in lines:
                if line["e2e_ms"] > self._slow_ms or not all(each.verdicts.values()):
                    self._warn(line)
        if self._path is None:
            return
        try:
            self._append(self._path, b"".join(msgspec.json.encode(line) + b"\n" for _, line in lines))
        except OSError as error:
            self.dropped += len(lines)
            self.complain("%d lines are missing in the request log %s: %s", self.dropped, self._path, error.strerror)

    @staticmethod
    def _append(path: Path, content: bytes) -> None:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        try:
            while content:
                content = content[os.write(file, content) :]
        finally:
            os.close(file)

    def _warn(self, line: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._second >= 1.0:
            if self._left_out:
                logger.warning("%d more requests were slow", self._left_out)
            self._second, self._warnings, self._left_out = now, 0, 0
        if self._warnings >= MOST_WARNINGS:
            self._left_out += 1
            return
        self._warnings += 1
        logger.warning("slow request %s", slow_words(line))


def log_of(settings: ServerSettings) -> RequestLog | None:
    """The log that the settings ask for. Raises ValueError as RequestLog."""
    if settings.request_log is None and settings.slow_request_ms is None:
        return None
    return RequestLog(settings.request_log, settings.slow_request_ms)


def slow_words(line: dict[str, Any]) -> str:
    """A slow request with its ledger and its cause, as one line for people."""
    parts = [f"{line['id']} of class {line['service_class']}: {line['e2e_ms']:,.0f} ms"]
    for name in ("ttft", "tpot", "e2e"):
        if line[f"{name}_met"] is False:
            parts.append(f"{name.upper()} {line[f'{name}_ms']:,.1f} ms missed its objective")
    if line["phases_ms"]:
        largest = sorted(line["phases_ms"].items(), key=lambda pair: -pair[1])[:3]
        parts.append("most of it in " + ", ".join(f"{phase} {length:,.0f} ms" for phase, length in largest))
        parts.append(f"cause: {line['cause']}")
    if line["trace_id"]:
        parts.append(f"trace {line['trace_id']}")
    return "; ".join(parts)


def _line(ended: Ended, offset: int) -> dict[str, Any]:
    """The line of a choice.

    Args:
        offset: what is added to time.monotonic_ns() for the time since 1970.
    """
    stamps, timings, verdicts, phases_ns = ended.stamps, ended.timings, ended.verdicts, ended.phases_ns
    tpot_ns = stamps.tpot_ns(ended.tokens)
    arrived = datetime.fromtimestamp((stamps.arrived_ns + offset) / 1e9, UTC)
    return {
        "time": arrived.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "id": ended.name,
        "index": ended.index,
        "client_request_id": ended.client_request_id,
        "trace_id": ended.parent.trace_id.hex(),
        "operation": ended.operation,
        "model": ended.model,
        "service_class": ended.terms.service.name,
        "tenant": ended.terms.tenant,
        "finish_reason": ended.reason,
        "error": ended.error,
        "prompt_tokens": ended.prompt_tokens,
        "cached_tokens": ended.cached_tokens,
        "output_tokens": ended.tokens,
        "e2e_ms": ended.e2e_ns / NS_PER_MS,
        "ttft_ms": None if ended.ttft_ns is None else ended.ttft_ns / NS_PER_MS,
        "tpot_ms": None if tpot_ns is None else tpot_ns / NS_PER_MS,
        "ttft_met": verdicts.get("ttft"),
        "tpot_met": verdicts.get("tpot"),
        "e2e_met": verdicts.get("e2e"),
        "steps": None if timings is None else timings.steps,
        "preemptions": None if timings is None else timings.preemptions,
        "phases_ms": {phase: length / NS_PER_MS for phase, length in phases_ns.items()},
        "cause": cause(phases_ns, verdicts.get("ttft") is False),
    }


def cause(phases_ns: dict[str, int], was_late: bool = False) -> str:
    """Why a request took as long as it did: the cause of the phase that most of its time went to.

    Args:
        was_late: its first token was, so what came after that is left aside.
    """
    known = {Phase(phase): length for phase, length in phases_ns.items() if phase in CAUSES}
    if was_late:
        known = {phase: length for phase, length in known.items() if phase in _BEFORE_FIRST}
    return CAUSES[max(known, key=known.__getitem__)] if known else ""
