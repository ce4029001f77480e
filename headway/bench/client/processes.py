"""A load that several client processes send together, where one would be too slow to read all that comes.

Each process has a share of the graphs (single requests, conversations, agents), and of the users or places. All begin
at one moment of the system's monotonic clock, which they share. Records come back whole, so that what is computed of
them is what one process would have computed. Messages are pickled, each with its length before it; only a process that
was started here is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headway.bench.client.conversations import Conversations
from headway.bench.client.dispatch import LoadListener, LoadMode, LoadStage, Pace
from headway.bench.client.load import LoadOutcome, run_load
from headway.bench.client.openai_client import OpenAIClient
from headway.bench.profile.local_server import child_options
from headway.load.endpoint import Endpoint
from headway.load.errors import BenchError
from headway.load.record import ClientHealth, Failure, FailureKind, RequestRecord
from headway.load.request import PlannedRequest

TOLD_EVERY_S = 0.25
AHEAD_NS = 50_000_000  # from the word to begin to time 0, beside 5 us for each request
_LENGTH = struct.Struct(">Q")


@dataclass(slots=True)
class Share:
    """What one process sends, and how."""

    endpoint: Endpoint
    keep_text: bool
    requests: list[PlannedRequest]
    pace: Pace


@dataclass(slots=True)
class Told:
    """What has happened in a process since it last told, as far as a view shows it."""

    started: list[tuple[int, int]] = field(default_factory=list)  # index and time due
    # Index, times due, sent, of the first and the last chunk, tokens, and the kind of a failure or "".
    ended: list[tuple[int, int, int, int, int, int, str]] = field(default_factory=list)
    waiting: int = 0
    draining: bool = False


def shares_of(whole: Share, count: int) -> list[Share]:
    """A load dealt out to up to `count` processes: graphs in turn, in a closed loop to the users in turn.

    A closed loop, or an open one with a limit of requests in flight, is dealt to no more processes than it has users or
    places.
    """
    graphs, pace, most = Conversations(whole.requests).graphs, whole.pace, whole.pace.max_concurrency
    count = max(1, min(count, len(graphs), *([most] if most else [])))
    closed = most if pace.mode is LoadMode.CLOSED else None
    dealt: Counter[str] = Counter()
    owner: dict[int, int] = {}
    for firsts in graphs:
        loop = firsts[0].class_name if firsts[0].class_name in pace.users else ""
        owner[firsts[0].root] = dealt[loop] % (pace.users.get(loop) or closed or count) % count
        dealt[loop] += 1
    requests: list[list[PlannedRequest]] = [[] for _ in range(count)]
    for each in whole.requests:
        requests[owner[each.root]].append(each)
    shares = []
    for number in range(count):
        users = {name: _part(of_class, count, number) for name, of_class in pace.users.items()}
        own = replace(pace, max_concurrency=None if most is None else _part(most, count, number), users=users)
        shares.append(replace(whole, requests=requests[number], pace=own))
    return shares


def _part(whole: int, count: int, number: int) -> int:
    """How many of `whole` the process of that number has, if they are dealt out in turn."""
    return len(range(number, whole, count))


class ClientProcesses:
    """Sends a load by several processes. Use as an async context manager: after it, they are gone, whatever happened.

    Raises:
        BenchError: a process ends before its load has.
    """

    def __init__(self, shares: Sequence[Share], listener: LoadListener) -> None:
        self._shares, self._listener = shares, listener
        self._children: list[asyncio.subprocess.Process] = []
        self._records: dict[int, RequestRecord] = {}  # under way, as far as a view needs them
        self._waiting = [0] * len(shares)
        self._draining = 0

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    async def __aenter__(self) -> ClientProcesses:
        """Start them; they are ready when they have their shares."""
        try:
            await asyncio.gather(*map(self._start, self._shares))
            await asyncio.gather(*(self._read(number) for number in range(len(self._children))))
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _start(self, share: Share) -> None:
        options = child_options() | {"stdin": subprocess.PIPE}
        command = (sys.executable, "-c", f"from {__name__} import serve; serve()")
        child = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )
        self._children.append(child)
        await _write(child.stdin, share)

    async def go(self, stop: asyncio.Event) -> LoadOutcome:
        """Begin, tell the listener what happens, and return the outcome of all. `stop` ends all of them early."""
        at_ns = time.monotonic_ns() + AHEAD_NS + 5_000 * max(len(share.requests) for share in self._shares)
        self._listener.stage(LoadStage.LOAD)
        self._listener.began(at_ns)
        await asyncio.gather(*(_write(child.stdin, at_ns) for child in self._children))
        stopping = asyncio.create_task(self._stop_when(stop))
        try:
            outcomes = await asyncio.gather(*map(self._follow, range(len(self._children))))
        finally:
            stopping.cancel()
        return merged(outcomes)

    async def _stop_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        for child in self._children:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await _write(child.stdin, None)

    async def _follow(self, number: int) -> LoadOutcome:
        while not isinstance(said := await self._read(number), LoadOutcome):
            self._tell(number, said)
        return said

    async def _read(self, number: int) -> Any:
        """The next message of a process. Raises BenchError where it has died."""
        child = self._children[number]
        assert child.stdout is not None and child.stderr is not None
        try:
            return await _next(child.stdout)
        except asyncio.IncompleteReadError:
            code, said = await child.wait(), (await child.stderr.read()).decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
            raise BenchError(
                f"client process {number + 1} of {len(self._children)} ended with code {code}: {last}; this run is lost"
            ) from None

    def _tell(self, number: int, told: Told) -> None:
        for index, due_ns in told.started:
            self._records[index] = record = RequestRecord(index, scheduled_ns=due_ns)
            self._listener.started(record)
        for index, due_ns, sent_ns, first_ns, last_ns, tokens, kind in told.ended:
            record = self._records.pop(index, RequestRecord(index))
            record.scheduled_ns, record.sent_ns, record.output_tokens = due_ns, sent_ns, tokens
            record.chunk_ns.extend([first_ns, last_ns] if first_ns else [])
            record.failure = Failure(FailureKind(kind), "") if kind else None
            self._listener.ended(record)
        if told.waiting != self._waiting[number]:
            self._waiting[number] = told.waiting
            self._listener.waiting(sum(self._waiting))
        self._draining += told.draining
        if told.draining and self._draining == len(self._shares):
            self._listener.stage(LoadStage.DRAIN)

    async def _end(self) -> None:
        for child in self._children:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
        await asyncio.gather(*(child.wait() for child in self._children))


def merged(outcomes: Sequence[LoadOutcome]) -> LoadOutcome:
    """One outcome of those of all processes: all records by index, and samples of delays together."""
    clients = [each.client for each in outcomes]
    return LoadOutcome(
        settings={},
        records=sorted((record for each in outcomes for record in each.records), key=lambda record: record.index),
        began_ns=min(each.began_ns for each in outcomes),
        ended_ns=max(each.ended_ns for each in outcomes),
        client=ClientHealth(
            loop_lag_ms=[lag for each in clients for lag in each.loop_lag_ms],
            backlog_bytes=[count for each in clients for count in each.backlog_bytes],
            start_lag_ms=[lag for each in clients for lag in each.start_lag_ms],
            cpu_share=max(each.cpu_share for each in clients),
            sample_interval_s=clients[0].sample_interval_s,
            reasons=[
                f"client process {number}: {reason}"
                for number, each in enumerate(clients, 1)
                for reason in each.reasons
            ],
        ),
        interrupted=any(each.interrupted for each in outcomes),
        never_due=sum(each.never_due for each in outcomes),
        waited_for_place=sum(each.waited_for_place for each in outcomes),
        longest_wait_ms=max(each.longest_wait_ms for each in outcomes),
        abandoned_in_flight=sum(each.abandoned_in_flight for each in outcomes),
    )


# --- in the process -------------------------------------------------------------------------------------


class _Teller(LoadListener):
    """Keeps what has happened until it is told."""

    def __init__(self) -> None:
        self.told = Told()

    def stage(self, stage: LoadStage) -> None:
        self.told.draining = self.told.draining or stage is LoadStage.DRAIN

    def started(self, record: RequestRecord) -> None:
        self.told.started.append((record.index, record.scheduled_ns))

    def waiting(self, count: int) -> None:
        self.told.waiting = count

    def ended(self, record: RequestRecord) -> None:
        kind = str(record.failure_kind) if record.failure is not None else ""
        self.told.ended.append(
            (record.index, record.scheduled_ns, record.sent_ns, record.first_token_ns, record.last_token_ns,
             record.tokens, kind)
        )  # fmt: skip

    def take(self) -> Told:
        told, self.told = self.told, Told(waiting=self.told.waiting)
        return told


async def _next(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises IncompleteReadError at the end."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def _packed(message: Any) -> bytes:
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


async def _write(writer: asyncio.StreamWriter | None, message: Any) -> None:
    assert writer is not None
    writer.write(_packed(message))
    await writer.drain()


async def _serve(out: int) -> None:
    """Take a share, say that it is there, begin when told, and return what came of it."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    share: Share = await _next(reader)
    stop, teller = asyncio.Event(), _Teller()

    async def listen() -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await _next(reader)
        stop.set()  # told so, or the parent is gone

    async def tell() -> None:
        while True:
            await asyncio.sleep(TOLD_EVERY_S)
            _send(out, teller.take())

    async def begin() -> int:
        _send(out, "ready")
        at_ns: int = await _next(reader)
        tasks.append(asyncio.create_task(listen()))
        tasks.append(asyncio.create_task(tell()))
        return at_ns

    tasks: list[asyncio.Task[None]] = []
    client = OpenAIClient(share.endpoint, keep_text=share.keep_text)
    try:
        async with client:
            outcome = await run_load(
                client,
                share.requests,
                share.pace,
                as_messages=share.endpoint.is_chat,
                begin=begin,
                stop=stop,
                listener=teller,
                sockets=client.busy_sockets,
            )
    finally:
        for task in tasks:
            task.cancel()
    _send(out, teller.take())
    _send(out, outcome)


def _send(out: int, message: Any) -> None:
    """Write to the parent, which always reads."""
    content = memoryview(_packed(message))
    while content:
        content = content[os.write(out, content) :]


def serve() -> None:
    """The whole life of a client process: standard input says what it is to do."""
    import uvloop

    out = os.dup(1)
    os.dup2(2, 1)  # what anything else writes does not belong among the messages
    with contextlib.suppress(BrokenPipeError, asyncio.IncompleteReadError):
        uvloop.run(_serve(out))
