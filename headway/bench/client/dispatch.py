"""Decides which request is sent when: the state of a run under load.

Everything happens in callbacks of one event loop. A request is `due` at a time; from then on it is under way, or waits
for a place where the user capped the open loop; when it ends, what follows it becomes due.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from headway.bench.client.alarm import Alarm
from headway.bench.client.conversations import Conversations, continued
from headway.load.errors import BenchError
from headway.load.record import Failure, FailureKind, RequestRecord
from headway.load.request import PlannedRequest, Prompt


class LoadMode(StrEnum):
    OPEN = "open"  # at each request's arrival_s; with max_concurrency it may have to wait for a place
    CLOSED = "closed"  # max_concurrency users: each sends its next request when its last one has ended


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests are sent, and how long they are awaited.

    Raises:
        BenchError: the drain time is not finite.
    """

    mode: LoadMode = LoadMode.OPEN
    max_concurrency: int | None = None  # most requests under way; in mode CLOSED the number of users, and needed
    # In mode OPEN, of classes that are closed loops of their own.
    users: Mapping[str, int] = field(default_factory=dict)
    duration_s: float | None = None  # what is due later is not sent; what is under way then is awaited
    # When nothing is left to send, and for so long no request was sent or has ended, the run ends and the requests in
    # flight fail with DRAIN_LIMIT. None sets no limit.
    drain_s: float | None = None
    grace_s: float = 2.0  # how long requests under way are awaited after a run is stopped

    def __post_init__(self) -> None:
        if self.drain_s is not None and not 0 <= self.drain_s < math.inf:
            raise BenchError(f"the drain time is {self.drain_s} s; it must be 0 s or more, and finite")


class LoadStage(StrEnum):
    WARM_UP = "warm_up"
    LOAD = "load"
    DRAIN = "drain"  # nothing new is sent any more, requests under way are awaited
    DONE = "done"


class Sender(Protocol):
    """Sends one request: OpenAIClient, or a stand-in.

    It fills in the record, never raises for what a server does, and notes ABANDONED when it is cancelled.
    """

    async def send(self, planned: PlannedRequest, record: RequestRecord, prompt: Prompt | None = None) -> None:
        """Send a request. `prompt` takes the place of planned.prompt."""


class LoadListener:
    """A base class that is told what happens, within the event loop: the time it takes delays the client."""

    def stage(self, stage: LoadStage) -> None:
        """A new stage begins."""

    def began(self, at_ns: int) -> None:
        """The run has begun: `at_ns` is time 0 of the schedule, about now."""

    def started(self, record: RequestRecord) -> None:
        """A measured request is handed to the client."""

    def waiting(self, count: int) -> None:
        """`count` requests are due and wait for a place under max_concurrency."""

    def ended(self, record: RequestRecord) -> None:
        """A measured request was answered, failed, or was given up unsent (its sent_ns is 0)."""


Firsts = tuple[PlannedRequest, ...]  # the requests of a graph that wait for nothing


@dataclass(slots=True)
class Loop:
    """A closed loop: how many users it has, and the graphs that none of them has begun."""

    users: int
    unbegun: Iterator[Firsts]


@dataclass(slots=True)
class Graph:
    """Requests that wait for each other, such as the turns of a conversation, while they are sent."""

    began_ns: int  # when its first requests were due
    loop: Loop | None = None  # the closed loop whose user sends them; None in an open loop
    left: int = 0  # requests that are due or will be, and have not ended


@dataclass(slots=True)
class _Due:
    """A request and when it is due."""

    planned: PlannedRequest
    at_ns: int
    graph: Graph
    prompt: Prompt | None = None  # the prompt of one that goes on from another


class Dispatch:
    """Sends the requests of one run; go() once.

    Attributes:
        records: the records of all requests that were due, in no particular order.
        began_ns: time 0 of the schedule.
        waited_for_place, longest_wait_ns: how many requests were due while max_concurrency were under way, and the
            longest wait of one.
        abandoned_in_flight: how many had to be cancelled.
        interrupted: `stop` ended it.
    """

    def __init__(
        self, client: Sender, conversations: Conversations, pace: Pace, as_messages: bool, listener: LoadListener
    ) -> None:
        self.records: list[RequestRecord] = []
        self.began_ns = time.monotonic_ns()
        self.waited_for_place = 0
        self.longest_wait_ns = 0
        self.abandoned_in_flight = 0
        self.interrupted = False
        self._client = client
        self._conversations = conversations
        # A closed loop is limited by the number of its users.
        self._max_concurrency = pace.max_concurrency if pace.mode is LoadMode.OPEN else None
        self._loops, self._scheduled = loops_of(conversations.graphs, pace)
        self._prompts: dict[int, Prompt] = {}  # of requests that go on from an answer and wait for others
        self._pace = pace
        self._as_messages = as_messages
        self._listener = listener
        self._deadline_ns: int | None = None
        self._later: list[tuple[int, int, _Due]] = []  # heap by time, then index
        self._waiting: deque[_Due] = deque()
        self._under_way: dict[asyncio.Task[None], tuple[_Due, RequestRecord]] = {}
        self._ready_ns: list[tuple[RequestRecord, int]] = []
        self._draining = self._no_more_waiting = self._closing = False
        self._last_ns = self.began_ns  # when a request was sent last, or ended
        self._end: Failure | None = None  # the failure of what the drain limit ends
        self._finished = asyncio.Event()
        self._error: BaseException | None = None

    async def go(self, stop: asyncio.Event, at_ns: int | None = None) -> None:
        """Run until all is done, or nothing happens for `drain_s`, or `stop` is set and the grace over.

        Args:
            at_ns: time 0 of the schedule; None is as soon as it can be.
        """
        self._alarm = Alarm(self._ring)
        self._stop = stop
        try:
            self._begin(at_ns)
            await self._wait(stop, self._deadline_ns)
            if self._is_too_late(time.monotonic_ns()) and not (self._finished.is_set() or stop.is_set()):
                self._drain()
                self._no_more_waiting = True
                self._give_up_waiting("it still had no place when the run ended")
                await self._wait(stop, None)
            if not self._finished.is_set():
                self.interrupted = stop.is_set()
                self._closing = True
                self._later.clear()
                if not self.interrupted:
                    silent_s = self._pace.drain_s or 0.0
                    limit = f"nothing was left to send and no request ended for {silent_s:g} s (--drain-timeout)"
                    self._end = Failure(FailureKind.DRAIN_LIMIT, f"drain limit: {limit}")
                self._give_up_waiting("it still had no place when the run was stopped")
                if self.interrupted and self._under_way:
                    await asyncio.wait(self._under_way, timeout=self._pace.grace_s)
        finally:
            self._closing = True
            self._alarm.close()
            await self._cancel_all()
        if self._error is not None:
            raise self._error

    def start_lag_ms(self) -> list[float]:
        """For each request that was sent, how long after it could have been sent, in ms."""
        return [max(0, record.sent_ns - ready) / 1e6 for record, ready in self._ready_ns if record.sent_ns]

    # --- beginning and end --------------------------------------------------------------------------

    def _begin(self, at_ns: int | None) -> None:
        graphs = self._conversations.graphs
        # Time 0 is when the list below has been made.
        self.began_ns = at_ns or time.monotonic_ns() + 10_000_000 + 5_000 * len(graphs)
        if self._pace.duration_s is not None:
            self._deadline_ns = self.began_ns + round(self._pace.duration_s * 1e9)
        self._listener.stage(LoadStage.LOAD)
        self._listener.began(self.began_ns)
        self._last_ns = self.began_ns
        for firsts in self._scheduled:
            self._begin_graph(firsts, self.began_ns + round((firsts[0].arrival_s or 0.0) * 1e9))
        for loop in self._loops:
            for _ in range(min(loop.users, len(graphs))):
                self._next_graph(loop, self.began_ns)
        self._check_finished()

    async def _wait(self, stop: asyncio.Event, until_ns: int | None) -> None:
        """Wait until all is done, `stop` is set, it is `until_ns`, or the drain limit is reached."""
        waits = [asyncio.create_task(self._finished.wait()), asyncio.create_task(stop.wait())]
        try:
            while not (self._finished.is_set() or stop.is_set()):
                limits = [] if until_ns is None else [until_ns]
                if self._pace.drain_s is not None:
                    limits.append(self._last_event_ns() + round(self._pace.drain_s * 1e9))
                left_s = (min(limits) - time.monotonic_ns()) / 1e9 if limits else None
                if left_s is not None and left_s <= 0.0:
                    break
                await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
            await asyncio.wait(waits)

    def _last_event_ns(self) -> int:
        """The time when a request was last sent or ended, or when one is still to be sent."""
        return max(self._last_ns, self._later[0][0]) if self._later else self._last_ns

    def _drain(self) -> None:
        if not self._draining:
            self._draining = True
            self._listener.stage(LoadStage.DRAIN)

    def _check_finished(self) -> None:
        if not (self._under_way or self._later or self._waiting):
            self._finished.set()

    async def _cancel_all(self) -> None:
        self.abandoned_in_flight = len(self._under_way)
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(list(self._under_way))
            await asyncio.sleep(0)  # their callbacks

    def _fail(self, error: BaseException) -> None:
        """End the run with an error of this module, the client or the listener."""
        self._error = self._error or error
        self._finished.set()

    # --- a request's way ----------------------------------------------------------------------------

    def _at(self, due: _Due) -> None:
        """Make a request due at its time, if the run lasts so long. After `stop` it only counts as left."""
        if self._closing or self._is_too_late(due.at_ns):
            return
        if due.at_ns <= time.monotonic_ns() and not self._stop.is_set():
            return self._start_or_wait(due)
        entry = (due.at_ns, due.planned.index, due)
        heapq.heappush(self._later, entry)
        if self._later[0] is entry:
            self._alarm.set(due.at_ns)

    def _is_too_late(self, at_ns: int) -> bool:
        return self._deadline_ns is not None and at_ns >= self._deadline_ns

    def _ring(self) -> None:
        """Start whatever is due."""
        if self._stop.is_set():
            return
        try:
            now = time.monotonic_ns()
            while self._later and self._later[0][0] <= now:
                self._start_or_wait(heapq.heappop(self._later)[2])
            if self._later:
                self._alarm.set(self._later[0][0])
            self._check_finished()
        except Exception as error:
            self._fail(error)

    def _start_or_wait(self, due: _Due) -> None:
        full = self._max_concurrency is not None and len(self._under_way) >= self._max_concurrency
        if not full or due.graph.loop is not None:
            return self._start(due, due.at_ns)
        self.waited_for_place += 1
        self._waiting.append(due)
        if self._no_more_waiting:
            self._give_up_waiting("it had no place when the time was up")
        self._listener.waiting(len(self._waiting))

    def _start(self, due: _Due, ready_ns: int) -> None:
        record = self._record(due.planned, due.at_ns)
        self._last_ns = time.monotonic_ns()
        self._ready_ns.append((record, ready_ns))
        task = asyncio.get_running_loop().create_task(self._serve(due, record))
        self._under_way[task] = (due, record)
        task.add_done_callback(self._task_done)
        self._listener.started(record)
        if len(self.records) == len(self._conversations):
            self._drain()

    async def _serve(self, due: _Due, record: RequestRecord) -> None:
        await self._client.send(due.planned, record, due.prompt)
        # This is not in the callback, which is called a turn of the loop later: a closed loop would lose that turn.
        task = asyncio.current_task()
        assert task is not None
        self._under_way.pop(task, None)
        self._ended(due, record)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        """Handle a task that was cancelled or raised, so that _serve did not end by itself."""
        entry = self._under_way.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        elif entry is not None:
            try:
                self._abandon(entry[1], "it was under way when the run ended")
            except Exception as error:
                self._fail(error)

    # --- what follows -------------------------------------------------------------------------------

    def _ended(self, due: _Due, record: RequestRecord) -> None:
        record.end_ns = record.end_ns or time.monotonic_ns()
        self._last_ns = time.monotonic_ns()
        self._listener.ended(record)
        followers, graph = self._followers(due, record), due.graph
        graph.left += len(followers) - 1
        if graph.loop is None:
            self._fill_place(record.end_ns)
        for follower in followers:
            self._at(follower)
        if graph.loop is not None and not graph.left:
            self._next_graph(graph.loop, record.end_ns)
        self._check_finished()

    def _followers(self, due: _Due, record: RequestRecord) -> list[_Due]:
        """The requests that this answer allows. Where there was none, all that wait for it are given up."""
        index, conversations = due.planned.index, self._conversations
        later = conversations.after(index)
        if not later or self._closing:
            return []
        if record.failure is not None:
            if self._is_too_late(record.end_ns):
                return []
            given_up = Failure(
                FailureKind.CANCELLED if record.cancelled else FailureKind.ABANDONED,
                f"request {index}, which it waited for, failed ({record.failure.kind.value})",
            )
            for planned in conversations.lost(index):
                self._give_up(self._record(planned, record.end_ns), given_up)
            return []
        history = due.prompt or due.planned.prompt
        for planned in later:
            if planned.follows == index:
                if record.text is None:
                    raise RuntimeError(f"the client did not keep the answer to request {index}, which others follow")
                self._prompts[planned.index] = continued(
                    history, record.text, planned.prompt, self._as_messages, record.calls
                )
        return [
            _Due(
                planned,
                due_after(planned, record.end_ns, due.graph.began_ns),
                due.graph,
                self._prompts.pop(planned.index, None),
            )
            for planned in conversations.answered(index)
        ]

    def _next_graph(self, loop: Loop, free_ns: int) -> None:
        """A user of a closed loop begins the next conversation."""
        if firsts := next(loop.unbegun, None):
            self._begin_graph(firsts, free_ns, loop)

    def _begin_graph(self, firsts: Firsts, at_ns: int, loop: Loop | None = None) -> None:
        graph = Graph(at_ns, loop, len(firsts))
        for first in firsts:
            self._at(_Due(first, at_ns, graph))

    def _fill_place(self, free_ns: int) -> None:
        if not self._waiting or self._closing or self._stop.is_set():
            return
        due = self._waiting.popleft()
        ready_ns = max(free_ns, due.at_ns)
        self.longest_wait_ns = max(self.longest_wait_ns, ready_ns - due.at_ns)
        self._start(due, ready_ns)
        self._listener.waiting(len(self._waiting))

    # --- records ------------------------------------------------------------------------------------

    def _record(self, planned: PlannedRequest, due_ns: int) -> RequestRecord:
        record = RequestRecord.of(planned, due_ns)
        self.records.append(record)
        return record

    def _abandon(self, record: RequestRecord, reason: str) -> None:
        self._give_up(record, self._end or record.failure or Failure(FailureKind.ABANDONED, reason))

    def _give_up(self, record: RequestRecord, failure: Failure) -> None:
        record.end_ns = record.end_ns or time.monotonic_ns()
        record.failure = failure
        self._listener.ended(record)

    def _give_up_waiting(self, reason: str) -> None:
        """Record requests that were due but never sent as failures of the run, so that none goes missing."""
        now = time.monotonic_ns()
        while self._waiting:
            due = self._waiting.popleft()
            self.longest_wait_ns = max(self.longest_wait_ns, now - due.at_ns)
            self._abandon(self._record(due.planned, due.at_ns), reason)


def due_after(planned: PlannedRequest, ended_ns: int, began_ns: int) -> int:
    """When a request is due: some time after what it waited for has ended, or its graph has begun."""
    return max(ended_ns + round(planned.think_s * 1e9), began_ns + round(planned.not_before_s * 1e9))


def loops_of(graphs: Sequence[Firsts], pace: Pace) -> tuple[list[Loop], list[Firsts]]:
    """The closed loops of a load, and the graphs that are in none."""
    if pace.mode is LoadMode.CLOSED:
        return [Loop(pace.max_concurrency or 1, iter(graphs))], []
    loops = [
        Loop(count, iter([each for each in graphs if each[0].class_name == name])) for name, count in pace.users.items()
    ]
    return loops, [each for each in graphs if each[0].class_name not in pace.users]
