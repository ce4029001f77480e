"""One try of a request at one backend: what comes of its answer, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from headway.gateway.events import BrokenStream, EventReader, Part
from headway.gateway.failures import BUSY
from headway.gateway.member import Member, clock
from headway.gateway.upstream import Connection, UpstreamFailed
from headway.policy.admission.queue_bound import Place
from headway.policy.fleet.backend import Ask
from headway.server.edge.streaming import EventWriter, SlowReader

# The most bytes of an answer in one piece, which is held until all of it is there; and those that may wait for a client
# before nothing more is read from the backend.
MAX_ANSWER, MAX_WAITING = 256 * 2**20, 64 * 2**10
EVENT_STREAM = b"text/event-stream"


@dataclass(slots=True)
class Head:
    """The status of an answer, its headers, with names in lower case, and whether it comes as events."""

    status: int
    headers: dict[bytes, bytes]
    is_stream: bool


# Makes of an event of an attempt, and of what it says, what the client gets; empty for nothing.
Edit: TypeAlias = "Callable[[bytes, Part | None, Attempt], bytes]"


class Attempt:
    """A request at a backend. It reads the answer (see Reader), and tells a writer of a stream's events.

    Args:
        when_sent: called once when the request is on its way. What it returns is told how long the first token of a
            stream took, in nanoseconds.
        on_token: called once, when the first token has come, and the client has it if it can.
        tokens: of the prompt, those that are computed there.

    Attributes:
        edit: None where the client gets all as it is.
        ready: done when the first event of a stream is there, or all of another answer. Until then nothing has gone to
            the client, and the request may be tried elsewhere. Its exception is UpstreamFailed.
    """

    def __init__(
        self,
        member: Member,
        ask: Ask,
        when_sent: Callable[[], Callable[[int], None]] | None,
        edit: Edit | None,
        on_token: Callable[[Attempt], None],
        tokens: int,
    ) -> None:
        self.member = member
        self.head: Head | None = None
        self.body = bytearray()
        self.events = EventReader()
        self.ready: asyncio.Future[None] = member.pool.loop.create_future()
        self._is_done = False  # nothing more will come
        self._failure: UpstreamFailed | None = None  # why, where it has failed
        self._when_done: Callable[[UpstreamFailed | None], None] | None = None
        self.sent_ns = self.first_token_ns = 0
        self.edit, self._on_token, self._when_sent = edit, on_token, when_sent
        self._learn: Callable[[int], None] | None = None
        self._place = Place(member.seen.queues.of_all, member.seen.queues.of_class[ask.service_class])
        self._place.count(ask.choices, [tokens])
        self._connection: Connection | None = None
        self._writer: EventWriter | None = None
        self._queued: list[bytes] = []
        self._resuming: asyncio.Task[None] | None = None
        self._given_up: UpstreamFailed | None = None
        self._has_ended = False
        member.in_flight += 1
        member.waiting[self] = None
        member.breaker.sent(clock())

    # --- what the exchange calls ------------------------------------------------------------------------

    async def begin(self, request: bytes) -> None:
        """Send the request and wait until `ready`. A connection that had been idle may be found closed: then a new one
        is made. Raises UpstreamFailed.
        """
        pool = self.member.pool
        kept = connection = pool.idle()
        while True:
            if connection is None:
                self._note_sent()  # others are routed meanwhile
                connection = await pool.connect()
            if self._given_up is not None:
                connection.drop()
                raise self._given_up
            self._connection, self.sent_ns = connection, self.sent_ns or clock()
            connection.ask(request, self, pool.timeouts.first_byte_s)
            self._note_sent()
            try:
                return await self.ready
            except UpstreamFailed as error:
                if kept is None or not error.is_unheard:
                    raise
            self.member.outcomes["resent"] += 1
            self.ready = self.ready.get_loop().create_future()
            self._is_done, self._failure, self._connection = False, None, None
            kept = connection = None

    @property
    def is_busy(self) -> bool:
        """Whether its answer is one that another backend may not give."""
        return self.head is not None and self.head.status in BUSY

    def attach(self, writer: EventWriter | None, when_done: Callable[[UpstreamFailed | None], None]) -> None:
        """Hand the writer what has come, and from now on what comes; at the end, tell `when_done` why it failed.

        Args:
            writer: None where nobody reads it.
        """
        self._writer = writer
        queued, self._queued = b"".join(self._queued), []
        self._write(queued)
        if self._is_done:
            when_done(self._failure)
        else:
            self._when_done = when_done

    def move(self) -> None:
        """Fail, so that the request goes to another backend; nothing has come of its answer."""
        if not self.ready.done():
            self.give_up(UpstreamFailed("down", "it does not answer whether it is well"))

    def give_up(self, failure: UpstreamFailed) -> None:
        """End the attempt as one that has failed in this way, if it has not ended."""
        if self._connection is None:
            self._given_up = failure
        elif not self._is_done:
            self._fail(failure)

    def end(self, outcome: str, is_failure: bool | None) -> None:
        """Give back what the request has there. Only the first call counts.

        Args:
            outcome: a word for the metrics.
            is_failure: whether the backend has failed; None where nothing can be said.
        """
        if self._has_ended:
            return
        self._has_ended, self._when_done = True, None
        member, now = self.member, clock()
        if self._connection is not None and not self._is_done:
            self._connection.drop()
        member.in_flight -= 1
        member.waiting.pop(self, None)
        member.outcomes[outcome] += 1
        self._place.close(now)
        if self._resuming is not None:
            self._resuming.cancel()
        if is_failure is None:
            member.breaker.gave_up()
        elif is_failure:
            member.breaker.failed(now)
        else:
            member.breaker.succeeded(now)
        if self.ready.done() and not self.ready.cancelled():
            self.ready.exception()  # looked at, or asyncio complains

    # --- what the connection calls ----------------------------------------------------------------------

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        is_stream = status == 200 and headers.get(b"content-type", b"").lower().startswith(EVENT_STREAM)
        self.head = Head(status, headers, is_stream)

    def on_piece(self, data: bytes) -> None:
        assert self.head is not None
        if not self.head.is_stream:
            self.body += data
            if len(self.body) > MAX_ANSWER:
                self._fail(UpstreamFailed("malformed", f"its answer has more than {MAX_ANSWER:,} bytes"))
            return
        found: list[bytes] = []
        try:
            for raw, part in self.events.whole(data):
                found.append(raw if self.edit is None else self.edit(raw, part, self))
        except BrokenStream as error:
            self._write(b"".join(found))
            return self._fail(UpstreamFailed("malformed", str(error)))
        if found:
            is_first = self.events.pieces and not self.first_token_ns
            if is_first:
                self.first_token_ns = clock()
            self._write(b"".join(found))
            if is_first:  # what is learnt of it has time until the client has it
                self.ready.get_loop().call_soon(self._note_token)

    def on_end(self, failure: UpstreamFailed | None) -> None:
        if self.head is not None and self.head.is_stream:
            if self.events.ended:
                failure = None  # the stream itself has come to its end
            elif failure is None and not self.events.is_complete:
                failure = UpstreamFailed("cut", "its stream ended before its last event")
        self._finish(failure)

    # --- inside -------------------------------------------------------------------------------------------

    def _note_sent(self) -> None:
        if self._when_sent is not None:
            self._learn, self._when_sent = self._when_sent(), None

    def _note_token(self) -> None:
        self._place.had_output(0, self.first_token_ns)
        if self._learn is not None:
            self._learn(self.first_token_ns - self.sent_ns)
        self._on_token(self)

    def _write(self, data: bytes) -> None:
        if not data:
            return
        if self._writer is None:
            self._queued.append(data)
            self._is_ready()
            if self._connection is not None and sum(map(len, self._queued)) > MAX_WAITING:
                self._connection.pause()
            return
        try:
            self._writer.push(data)
        except SlowReader:
            return  # the stream's own end follows
        connection = self._connection
        if connection is None or self._resuming is not None:
            return
        if self._writer.waiting_bytes > MAX_WAITING:
            connection.pause()
        if connection.is_paused:
            self._resuming = asyncio.create_task(self._resume(self._writer, connection))

    async def _resume(self, writer: EventWriter, connection: Connection) -> None:
        await writer.drained()
        self._resuming = None
        connection.resume()

    def _is_ready(self) -> None:
        self.member.waiting.pop(self, None)
        if not self.ready.done():
            self.ready.set_result(None)

    def _fail(self, failure: UpstreamFailed) -> None:
        if self._connection is not None:
            self._connection.drop()
        self._finish(failure)

    def _finish(self, failure: UpstreamFailed | None) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        if not self.ready.done():
            if failure is None:
                self._is_ready()
            else:
                self.ready.set_exception(failure)
        if not self._is_done:
            self._is_done, self._failure = True, failure
            when_done, self._when_done = self._when_done, None
            if when_done is not None:
                when_done(failure)
