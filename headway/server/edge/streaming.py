"""Server-sent events to one client: a bounded buffer, and an end when the client stops reading or goes away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headway.server.edge.settings import EdgeSettings
from headway.server.errors import ApiError, ClientGone, internal

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
# Keys of the connection's functions in a request's scope: one cuts the connection, one is EventWriter's `write_now`,
# and one takes a function that is called if the client goes before it has its answer.
ABORT_CONNECTION, WRITE_NOW = "headway.abort_connection", "headway.write_now"
WHEN_GONE = "headway.when_gone"
logger = logging.getLogger("headway.server")


def event(encoded: bytes) -> bytes:
    return b"data: " + encoded + b"\n\n"


async def wait_until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientGone: the client went away.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(wait_until_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await _end(working, gone)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _tell_sent(callbacks: list[Callable[[int], None]]) -> None:
    for callback in callbacks:
        callback(time.monotonic_ns())


def drop(scope: Scope, reason: str) -> None:
    """Cut the connection, as a client that does not read would not read an error either."""
    logger.warning("dropped a stream to %s that is not read: %s", scope.get("client"), reason)
    if (abort := scope.get(ABORT_CONNECTION)) is not None:
        abort()


class SlowReader(Exception):
    """The client reads more slowly than the bounds allow."""


class EventWriter:
    """Sends what push() is given as fast as the client reads. What gathers meanwhile goes out together.

    A token that the connection takes at once is sent by push() itself: run() would have to be woken, and at a few
    streams, when nothing of the server is in the processor's caches any more, that takes longer than to send.

    Args:
        headers: headers of the answer, which go out with the first bytes.
        max_buffer: bytes that may wait here, on top of those that the operating system holds.
        timeout_s: seconds that one write may wait.
        write_now: sends bytes of the body as `send` does, but at once; False where it would have to wait.

    Attributes:
        waiting_bytes: that were pushed and not handed to the connection.
        is_drained: all that was pushed has been handed to the connection.
    """

    def __init__(
        self,
        send: Send,
        headers: list[tuple[bytes, bytes]],
        max_buffer: int,
        timeout_s: float,
        write_now: Callable[[bytes], bool] = lambda data: False,
    ) -> None:
        self._send, self._write_now = send, write_now
        self._head: Message | None = {"type": "http.response.start", "status": 200, "headers": headers}
        self.has_begun = False
        self._max_buffer, self._timeout_s = max_buffer, timeout_s
        self._pending: list[bytes] = []
        self.waiting_bytes, self.is_drained = 0, True
        self._when_sent: list[Callable[[int], None]] = []
        self._closed = False
        self._is_slow = False
        self._watching: asyncio.Handle
        self._wake, self._drained = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.overflow: asyncio.Future[None] = self._loop.create_future()

    def push(self, data: bytes) -> None:
        """Send bytes, or queue them for sending.

        Raises:
            SlowReader: more than max_buffer bytes wait; what waits is dropped.
        """
        self.has_begun = True
        if self._head is None and self.is_drained and self._write_now(data):
            if self._when_sent:
                callbacks, self._when_sent = self._when_sent, []
                _tell_sent(callbacks)
            return
        self._pending.append(data)
        self.waiting_bytes += len(data)
        self.is_drained = False
        self._drained.clear()
        self._wake.set()
        if self.waiting_bytes > self._max_buffer:
            self._pending.clear()
            if not self.overflow.done():
                self.overflow.set_result(None)
            raise SlowReader(f"{self.waiting_bytes} bytes wait for the client, more than {self._max_buffer}")

    def when_sent(self, callback: Callable[[int], None]) -> None:
        """Call back with time.monotonic_ns() when the bytes that are pushed next have been handed to the connection."""
        self._when_sent.append(callback)

    def refuse(self, error: ApiError) -> None:
        """Answer with this error and its status instead of a stream; nothing may have been pushed."""
        answer = error.response()
        self._head = {"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers}
        self.push(bytes(answer.body))

    def close(self) -> None:
        """Say that no more will be pushed; run() returns when all is sent."""
        self._closed = True
        self._wake.set()

    async def drained(self) -> None:
        """Wait until all that was pushed has been handed to the connection."""
        if not self.is_drained:
            await self._drained.wait()

    async def run(self) -> None:
        """Send until closed.

        Raises:
            SlowReader: a write waited longer than the timeout.
        """
        writing = asyncio.current_task(self._loop)
        assert writing is not None
        try:
            while not await self._write_pending(writing):
                self._wake.clear()
                await self._wake.wait()
        except asyncio.CancelledError:
            if not self._is_slow or writing.uncancel():
                raise
            raise SlowReader(f"the client read nothing for {self._timeout_s:g} s") from None

    async def _write_pending(self, writing: asyncio.Task[Any]) -> bool:
        """Send all that waits. Returns whether the answer has ended with it."""
        has_ended = False
        while (self._pending or self._closed) and not has_ended:
            data, has_ended = b"".join(self._pending), self._closed
            self._pending.clear()
            self.waiting_bytes = 0
            callbacks, self._when_sent = self._when_sent, []
            self._watching = self._loop.call_soon(self._watch, writing)
            try:
                await self._write(data, more=not has_ended)
            finally:
                self._watching.cancel()
            _tell_sent(callbacks)
        self.is_drained = True
        self._drained.set()
        return has_ended

    async def _write(self, data: bytes, more: bool) -> None:
        head, self._head = self._head, None
        if head is not None:
            await self._send(head)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def _watch(self, writing: asyncio.Task[Any]) -> None:
        """Give a write that is not done in its turn of the loop so much time; most are."""
        self._watching = self._loop.call_later(self._timeout_s, self._on_slow, writing)

    def _on_slow(self, writing: asyncio.Task[Any]) -> None:
        self._is_slow = True
        writing.cancel()


Events = Callable[[EventWriter], Awaitable[None]]


class EventStream(Response):
    """An answer in server-sent events.

    Args:
        events: pushes the events; cancelling it frees what it uses. An ApiError that it raises becomes the last event,
            or the whole answer when no event was pushed before.
        done: called once when the answer has ended, however it ended.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, settings: EdgeSettings, done: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._settings, self._done = events, settings, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._stream(scope, receive, send)
        finally:
            self._done()

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._settings
        write_now = scope.get(WRITE_NOW, lambda data: False)
        writer = EventWriter(send, self.raw_headers, settings.max_stream_buffer, settings.send_timeout, write_now)
        producing = asyncio.create_task(self._produce(writer))
        writing = asyncio.create_task(writer.run())
        gone = asyncio.create_task(wait_until_gone(receive))
        try:
            await asyncio.wait({writing, gone, writer.overflow}, return_when=asyncio.FIRST_COMPLETED)
            stuck = writer.overflow.done() or (writing.done() and writing.exception() is not None)
        finally:
            await _end(producing, writing, gone)
        if stuck:
            drop(scope, "its buffer is full" if writing.cancelled() else str(writing.exception()))

    async def _produce(self, writer: EventWriter) -> None:
        try:
            await self._events(writer)
        except SlowReader:
            return
        except ApiError as error:
            self._fail(writer, error)
        except Exception:
            logger.exception("a stream failed")
            self._fail(writer, internal("the server failed on this request"))
        writer.close()

    def _fail(self, writer: EventWriter, error: ApiError) -> None:
        if writer.has_begun:
            writer.push(event(msgspec.json.encode(error.body())))
        else:
            writer.refuse(error)
