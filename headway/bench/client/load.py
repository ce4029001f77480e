"""Send a workload on time, and record what came of it.

    outcome = await run_load(client, requests, Pace(LoadMode.CLOSED, max_concurrency=8), stop=stop)

In an open loop a request is sent when it is due, whatever became of those before it. One that is sent late keeps its
`scheduled_ns`, so that the delay is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from headway.bench.client.conversations import Conversations
from headway.bench.client.dispatch import Dispatch, LoadListener, LoadMode, LoadStage, Pace, Sender
from headway.bench.client.watch import LoopWatch, OpenSockets
from headway.bench.interrupts import Interrupted, unless_stopped
from headway.load.record import Failure, RequestRecord, RunResult
from headway.load.request import PlannedRequest

__all__ = ["LoadListener", "LoadMode", "LoadOutcome", "LoadStage", "Pace", "Sender", "run_load"]

WARM_UPS_AT_ONCE = 8
OPEN_LOOP = Pace()


@dataclass(slots=True)
class LoadOutcome(RunResult):
    """The result of a run. Its caller fills in the settings and what is known of the server.

    There is a record for each request that was due. One that was due and never sent has sent_ns == 0 and is
    ABANDONED: a request that it waited for failed, or it still had no place when the run ended. The client's start lags
    count from when a request was due, or got its place, to when it was sent.
    """

    never_due: int = 0  # requests whose time had not come when the run ended; they have no records
    # Requests of an open loop with a max_concurrency that were due and had to wait: as far as they did, the load was
    # not that of the schedule. Their latency from the schedule holds the wait.
    waited_for_place: int = 0
    longest_wait_ms: float = 0.0  # the longest wait of these
    abandoned_in_flight: int = 0  # requests cancelled because the run was stopped or its drain limit reached
    warm_up_failures: list[Failure] = field(default_factory=list)  # the failures of those warm-ups that failed
    gave_up: str | None = None  # why nothing was measured: all warm-ups failed. None otherwise.


async def run_load(
    client: Sender,
    requests: Sequence[PlannedRequest],
    pace: Pace = OPEN_LOOP,
    *,
    probes: Iterator[PlannedRequest] | None = None,
    warm_ups: Sequence[PlannedRequest] = (),
    as_messages: bool = False,
    before_load: Callable[[], Awaitable[None]] | None = None,
    begin: Callable[[], Awaitable[int]] | None = None,
    elsewhere: Callable[[asyncio.Event], Awaitable[LoadOutcome]] | None = None,
    stop: asyncio.Event | None = None,
    listener: LoadListener | None = None,
    sockets: OpenSockets | None = None,
) -> LoadOutcome:
    """Send the workload and wait for its answers.

    Args:
        client: keeps the answer's text (RequestRecord.text) of every request that another follows.
        requests: those of one run. In mode OPEN every first turn has an arrival_s, unless its class is a closed loop.
        probes: requests without end, each with an arrival_s; see `probing`.
        warm_ups: sent first, a few at a time, and not recorded. Where all of them fail, the run is not begun.
        as_messages: later turns go out as messages, as a chat needs them; else text goes out as one with what follows.
        before_load: awaited between the warm-ups and the first request that is measured.
        begin: awaited when all is ready; gives time 0 of the schedule, in time.monotonic_ns(). None begins at once.
        elsewhere: sends the requests in the place of this process, which only warms up and probes.
        stop: set it to end the run early (Ctrl-C); what was measured is returned.
        listener: is told what happens.
        sockets: gives the file descriptors of the client's busy sockets, to look for unread bytes.
    """
    listener, stop = listener or LoadListener(), stop or asyncio.Event()
    dispatch = Dispatch(client, Conversations(requests), pace, as_messages, listener)
    probed: list[RequestRecord] = []
    sent: LoadOutcome | None = None
    watch = LoopWatch(sockets)
    failures = await _warm_up(client, warm_ups, pace.max_concurrency or WARM_UPS_AT_ONCE, stop, listener)
    gives_up = 0 < len(failures) == len(warm_ups)
    if not gives_up:
        if before_load is not None:
            await before_load()
        with collector_off():
            at_ns = await begin() if begin is not None else None
            with watch:
                async with probing(client, probes or iter(()), pace.grace_s) as probed:
                    if elsewhere is None:
                        await dispatch.go(stop, at_ns)
                    else:
                        sent = await elsewhere(stop)
    listener.stage(LoadStage.DONE)
    outcome = sent or _outcome(dispatch, watch, len(requests))
    outcome.warm_up_failures, outcome.probes = failures, probed
    if gives_up:
        outcome.gave_up = f"all {len(failures)} warm-up requests failed, the first: {failures[0].message}"
    return outcome


def _outcome(dispatch: Dispatch, watch: LoopWatch, requests: int) -> LoadOutcome:
    """The outcome of a run of which `requests` were planned and some were dispatched."""
    records = sorted(dispatch.records, key=lambda record: record.index)
    return LoadOutcome(
        settings={},
        records=records,
        began_ns=dispatch.began_ns,
        ended_ns=max([dispatch.began_ns, *(record.end_ns for record in records)]),
        client=watch.health(records, dispatch.start_lag_ms()),
        interrupted=dispatch.interrupted,
        never_due=requests - len(records),
        waited_for_place=dispatch.waited_for_place,
        longest_wait_ms=dispatch.longest_wait_ns / 1e6,
        abandoned_in_flight=dispatch.abandoned_in_flight,
    )


async def _warm_up(
    client: Sender, warm_ups: Sequence[PlannedRequest], at_once: int, stop: asyncio.Event, listener: LoadListener
) -> list[Failure]:
    """The failures, in the order of the warm-ups; those that `stop` ended are none."""
    if not warm_ups:
        return []
    listener.stage(LoadStage.WARM_UP)
    places = asyncio.Semaphore(at_once)

    async def send(planned: PlannedRequest) -> Failure | None:
        async with places:
            record = RequestRecord(planned.index, scheduled_ns=time.monotonic_ns())
            await client.send(planned, record)
            return record.failure

    async def send_all() -> list[Failure | None]:
        return await asyncio.gather(*map(send, warm_ups))

    try:
        return [failure for failure in await unless_stopped(stop, send_all()) if failure is not None]
    except Interrupted:
        return []


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Turn garbage collection off inside.

    A collection over the plans and records of 100,000 requests would stop the loop for 0.1 s, which would be read as
    latency of the server. Reference counting frees whatever is not in a cycle, and a request makes none. Live objects
    are frozen too, so that an explicit collection has little to look at. They stay frozen if the process froze objects
    before.
    """
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextlib.asynccontextmanager
async def probing(
    client: Sender, requests: Iterator[PlannedRequest], grace_s: float
) -> AsyncIterator[list[RequestRecord]]:
    """Send requests at their times inside, whatever becomes of those before them. Time 0 is now.

    At the end nothing more is sent, and what is under way has `grace_s` left.

    Args:
        requests: in order of their arrival_s, which all have; there may be no end of them.

    Yields:
        Records of those that were due.

    Raises:
        Whatever is raised in the client.
    """
    records: list[RequestRecord] = []
    sent: list[asyncio.Task[None]] = []

    async def send(planned: PlannedRequest, due_ns: int) -> None:
        record = RequestRecord.of(planned, due_ns)
        records.append(record)
        await client.send(planned, record)

    async def send_on_time(began_ns: int) -> None:
        for planned in requests:
            due_ns = began_ns + round((planned.arrival_s or 0.0) * 1e9)
            while (left_ns := due_ns - time.monotonic_ns()) > 0:  # a loop may wake up a moment too early
                await asyncio.sleep(left_ns / 1e9)
            sent.append(asyncio.create_task(send(planned, due_ns)))

    sending = asyncio.create_task(send_on_time(time.monotonic_ns()))
    try:
        yield records
        sending.cancel()
        if sent:
            await asyncio.wait(sent, timeout=grace_s)
    finally:
        for task in (sending, *sent):
            task.cancel()
        ended = await asyncio.gather(sending, *sent, return_exceptions=True)
    for each in ended:
        if isinstance(each, Exception):
            raise each
