"""A backend's stream on its way to the client: no task waits for it but the one that writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from starlette.types import Receive, Scope, Send

from headway.gateway.attempt import Attempt
from headway.gateway.upstream import UpstreamFailed
from headway.server.edge.settings import EdgeSettings
from headway.server.edge.streaming import WRITE_NOW, EventWriter, SlowReader, drop

HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)


class Relay:
    """An answer in server-sent events.

    Args:
        headers: headers of the answer, beside those that every stream has.
        finish: called when the backend's stream has ended, with the writer, for a last event, and why it failed. It
            returns whether another attempt goes on with the stream, which follow() is given, or else the writer's end.
        done: called once when the answer has ended, however it ended.
    """

    def __init__(
        self,
        attempt: Attempt,
        settings: EdgeSettings,
        headers: list[tuple[bytes, bytes]],
        finish: Callable[[EventWriter, UpstreamFailed | None], bool],
        done: Callable[[], None],
    ) -> None:
        self._headers = [*HEADERS, *headers]
        self._attempt, self._settings, self._finish, self._done = attempt, settings, finish, done
        self._has_ended_well = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings, write_now = self._settings, scope.get(WRITE_NOW, lambda data: False)
        writer = EventWriter(send, self._headers, settings.max_stream_buffer, settings.send_timeout, write_now)
        writer.overflow.add_done_callback(lambda _: drop(scope, "its buffer is full"))
        try:
            self.follow(self._attempt, writer)
            await writer.run()
        except SlowReader as error:
            drop(scope, str(error))
        finally:
            if self._has_ended_well:
                self._finish(writer, None)
            self._done()

    def follow(self, attempt: Attempt, writer: EventWriter) -> None:
        """Pass on what comes of an attempt."""
        attempt.attach(writer, partial(self._ended, writer))

    def _ended(self, writer: EventWriter, failure: UpstreamFailed | None) -> None:
        if failure is None:  # nothing is added to it, so the client has its end before it is counted
            self._has_ended_well = True
            return writer.close()
        goes_on = False
        try:
            with contextlib.suppress(SlowReader):  # the connection is being cut
                goes_on = self._finish(writer, failure)
        finally:
            if not goes_on:
                writer.close()
