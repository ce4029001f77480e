"""A stand-in for the client, workloads for it, and what the tests of the load ask of an outcome."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from typing import Any

from headway.bench.client.load import LoadListener, LoadOutcome, LoadStage
from headway.load.record import Failure, FailureKind, RequestRecord
from headway.load.request import PlannedRequest, Prompt

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class FakeClient:
    """Answers when it is allowed to: `answer_after` sends have happened, or after `delay_s`."""

    def __init__(self, answer_after: int = 0, delay_s: float = 0.0, failing: tuple[int, ...] = ()) -> None:
        self.sent: list[int] = []
        self.prompts: dict[int, Prompt] = {}
        self.most = self.now = 0
        self.collector: set[bool] = set()
        self.answer_after = answer_after
        self.delay_s = delay_s
        self.failing = failing
        self.may_answer: asyncio.Event | None = None

    async def send(self, planned: PlannedRequest, record: RequestRecord, prompt: Prompt | None = None) -> None:
        self.may_answer = self.may_answer or asyncio.Event()
        record.sent_ns = time.monotonic_ns()
        self.sent.append(planned.index)
        self.prompts[planned.index] = prompt or planned.prompt
        self.collector.add(gc.isenabled())
        self.now += 1
        self.most = max(self.most, self.now)
        if len(self.sent) >= self.answer_after:
            self.may_answer.set()
        try:
            await self.may_answer.wait()
            await asyncio.sleep(self.delay_s)
            if planned.index in self.failing:
                record.failure = Failure(FailureKind.SERVER_ERROR, "500: scripted")
            else:
                record.chunk_ns.append(time.monotonic_ns())
                record.text = f"answer {planned.index}"
        except asyncio.CancelledError:
            record.failure = Failure(FailureKind.ABANDONED, "cancelled")
            raise
        finally:
            self.now -= 1
            record.end_ns = time.monotonic_ns()


def at(*arrivals: float) -> list[PlannedRequest]:
    return [PlannedRequest(i, Prompt(text=str(i)), 1, 8, arrival_s=due) for i, due in enumerate(arrivals)]


def turns(count: int, think_s: float = 0.0, first: int = 0, arrival_s: float | None = 0.0) -> list[PlannedRequest]:
    made = [PlannedRequest(first, Prompt(text=f"turn {first};"), 1, 8, arrival_s=arrival_s)]
    for index in range(first + 1, first + count):
        prompt = Prompt(text=f";turn {index};")
        made.append(PlannedRequest(index, prompt, 1, 8, follows=index - 1, think_s=think_s))
    return made


def indices(outcome: LoadOutcome) -> list[int]:
    return [record.index for record in outcome.records]


def kinds(outcome: LoadOutcome) -> dict[int, str]:
    return {record.index: record.failure.kind.value for record in outcome.records if record.failure}


class Listening(LoadListener):
    """Notes what it is told, and sets `stop` when so many requests have been started, or one of them ended."""

    def __init__(self, stop_after_starts: int = 0, stop_after_ends: int = 0) -> None:
        self.stages: list[LoadStage] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.most_waiting = 0
        self.stop_after = (stop_after_starts, stop_after_ends)
        self.stop = asyncio.Event()

    def stage(self, stage: LoadStage) -> None:
        self.stages.append(stage)

    def waiting(self, count: int) -> None:
        self.most_waiting = max(self.most_waiting, count)

    def started(self, record: RequestRecord) -> None:
        self.starts.append(record.index)
        self._stop_if_time()

    def ended(self, record: RequestRecord) -> None:
        self.ends.append(record.index)
        self._stop_if_time()

    def _stop_if_time(self) -> None:
        starts, ends = self.stop_after
        if starts and len(self.starts) >= starts and len(self.ends) >= ends:
            self.stop.set()
