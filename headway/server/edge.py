"""Where a request enters: its time of arrival, its id, and whether it may come in."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.server.errors import ApiError, internal
from headway.server.pacing import Pace
from headway.server.streaming import ABORT_CONNECTION, WRITE_NOW
from headway.tenant_file import Access, key_digest

ARRIVED = "headway.arrived_ns"
OPEN_PATHS = frozenset({"/", "/health", "/ping", "/metrics", "/version", "/openapi.json", "/docs"})
MAX_ID_LENGTH = 128
# Known, but without effect so far. llm-d's router sets them on all traffic, so refusing them would refuse all of it.
IGNORED_HEADERS = ("x-llm-d-inference-fairness-id",)
# In a request's scope: names of its headers that were left aside, and what comes with its API key.
IGNORED, ACCESS = "headway.ignored_headers", "headway.access"
logger = logging.getLogger("headway.server")


class Connection(HttpToolsProtocol):
    """Uvicorn's connection. It also notes when a request's first byte came, and can be cut.

    Args:
        read_timeout_s: seconds that a request may take from its first byte to its last, and a new connection to its
            first request.
        pace: how many connections are read in one turn of the event loop.
    """

    def __init__(self, *args: Any, read_timeout_s: float, pace: Pace, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pace = pace
        self._held = b""  # bytes that wait for their turn; reading is paused meanwhile
        self._came_ns = 0  # when they came
        self._read_timeout_s = read_timeout_s
        self._reading: asyncio.TimerHandle | None = None  # runs while a request is expected or incomplete
        self._is_incomplete = False  # the first byte of a request has come, but not its last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        super().connection_lost(exc)
        # A request's scope knows its connection. Cut that circle, so that both are freed without a full collection.
        self.cycle = self.scope = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._held:  # bytes that were on their way when reading was paused
            self._held += data
        elif self._pace.claim():
            self._take(data)
        else:
            self._held, self._came_ns = data, time.monotonic_ns()
            self.transport.pause_reading()
            self._pace.later().add_done_callback(self._take_held)

    def _take_held(self, _: asyncio.Future[None]) -> None:
        data, self._held = self._held, b""
        if not self.transport.is_closing():
            if not self.flow.read_paused:
                self.transport.resume_reading()
            self._take(data)
        self._came_ns = 0

    def _take(self, data: bytes) -> None:
        # Bytes between requests end the keep-alive timeout without beginning a request.
        if self._reading is None and self.cycle.response_complete:
            self._start_reading()
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_incomplete = True
        self._start_reading()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[ARRIVED] = self._came_ns or time.monotonic_ns()
        scope[ABORT_CONNECTION], scope[WRITE_NOW] = self.reset, self._write_now

    def on_message_complete(self) -> None:
        self._is_incomplete = False
        self._stop_reading()
        super().on_message_complete()
        if self.cycle.response_complete:  # refused before its end: nothing else limits what comes next
            self._start_reading()

    def _start_reading(self) -> None:
        self._stop_reading()
        self._reading = self.loop.call_later(self._read_timeout_s, self._on_read_timeout)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _on_read_timeout(self) -> None:
        is_own = self.cycle is not None and self.cycle.scope is self.scope
        if self.pipeline or (self.cycle is not None and not is_own and not self.cycle.response_complete):
            return self._start_reading()  # an earlier request of this connection is being answered
        self._reading = None
        if self._is_incomplete and not (is_own and self.cycle.response_started):
            logger.warning("cut off %s: its request was not complete in time", self.client)
            self.transport.write(self._timed_out())
        self.transport.close()

    def _timed_out(self) -> bytes:
        error = ApiError(
            408,
            f"the request was not complete {self._read_timeout_s:g} s after its first byte (--request-read-timeout)",
            code="request_timeout",
            headers={"connection": "close", "x-request-id": _request_id(dict(self.headers).get(b"x-request-id", b""))},
        )
        answer = error.response()
        head = b"".join(b"%b: %b\r\n" % header for header in answer.raw_headers)
        return b"HTTP/1.1 408 Request Timeout\r\n%b\r\n%b" % (head, bytes(answer.body))

    def reset(self) -> None:
        """Cut the connection, and let the kernel forget what the client has not read."""
        connection = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _write_now(self, data: bytes) -> bool:
        """Send bytes of the body of the answer that has begun, without what is around its `send`.

        False where that would have to wait, and where `cycle` may be that of a later request.
        """
        cycle = self.cycle
        if self.pipeline or self.flow.write_paused or cycle is None or cycle.disconnected or not cycle.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class Edge:
    """The outermost layer: it echoes or makes up x-request-id, names headers without effect, checks API keys, and turns
    failures into a 500.

    Args:
        keys: the API keys that it accepts, by their digests; without any it is open.
    """

    def __init__(self, app: ASGIApp, keys: Callable[[], Mapping[bytes, Access]], pace: Pace) -> None:
        self._app = app
        self._pace = pace
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope.setdefault(ARRIVED, time.monotonic_ns())
        if scope["path"] not in OPEN_PATHS:
            await self._pace.turn()
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        ignored = scope[IGNORED] = [name for name in IGNORED_HEADERS if name.encode() in headers]

        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                answer = MutableHeaders(scope=message)
                answer["x-request-id"] = request_id
                if ignored:
                    answer["x-headway-ignored-headers"] = ", ".join(ignored)
            await send(message)

        if ACCESS not in scope:  # a request from within the server brings it
            scope[ACCESS] = self._access_of(headers.get(b"authorization", b""))
        if scope[ACCESS] is None and scope["path"] not in OPEN_PATHS:
            refusal = ApiError(
                401,
                "this server needs a valid API key, as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            return await refusal.response()(scope, receive, send_with_id)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if started:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await internal("the server failed on this request; see its log").response()(scope, receive, send_with_id)

    def _access_of(self, authorization: bytes) -> Access | None:
        """What comes with the key; None when a key is needed and this is not one."""
        keys = self._keys()
        if not keys:
            return Access()
        scheme, _, key = authorization.partition(b" ")
        given = key_digest(key.strip())
        # Every key is compared, so that the time it takes tells nothing.
        matches = [access for known, access in keys.items() if hmac.compare_digest(given, known)]
        return matches[0] if matches and scheme.lower() == b"bearer" else None


def _request_id(given: bytes) -> str:
    text = given.decode("latin-1")
    return text if 0 < len(text) <= MAX_ID_LENGTH and text.isascii() and text.isprintable() else uuid.uuid4().hex
