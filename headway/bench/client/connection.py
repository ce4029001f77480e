"""HTTP/1.1 for a load generator: little work for each chunk, and the time at which it came.

What a client spends is taken from the server that it measures when they share a machine, and a reading of the clock
that waits behind other streams' parsing is counted as the server's. So a connection is an asyncio protocol over
httptools; a read only notes the time and the bytes, and all that came in one round of the event loop is parsed after
the last of it has its time. Reads go into one buffer: allocating one for each costs more than the read itself. Nothing
wakes a task before its response is complete.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod

import httptools

from headway.bench.client.failures import RequestFailed
from headway.load.record import FailureKind, RequestRecord

MAX_HEADER_BYTES = 256 * 1024  # also of what frames a body, between two pieces of it
MAX_BODY_BYTES = 512 * 2**20  # largest body of one response
LINGER_S = 0.05  # for the end of a response of which all that was wanted has come
READ_BYTES = 64 * 1024
_now = time.monotonic_ns


class Receiver(ABC):
    """Reads a response into a record. Times are time.monotonic_ns(). It may raise RequestFailed.

    Attributes:
        is_satisfied: all that is wanted has come, so it does not matter any more how the response ends.
    """

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.status = 0
        self.response_headers: dict[bytes, bytes] = {}
        self.is_satisfied = False

    def connected(self, now_ns: int) -> None:
        """The connection stands; not called for one that was kept open."""
        self.record.connected_ns = now_ns

    def resent(self) -> None:
        """A kept connection lost the request before any byte of the response; it is sent again on a new one."""
        self.record.resent += 1

    def headers(self, status: int, headers: dict[bytes, bytes], now_ns: int) -> None:
        """The status line and all headers, with lower-case names."""
        self.status, self.response_headers = status, headers
        self.record.headers_ns = now_ns

    @abstractmethod
    def body(self, data: bytes, now_ns: int) -> None:
        """The next bytes of the body."""


class Connection(asyncio.BufferedProtocol):
    """One connection, for one request at a time."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser  # while it is connected: they hold each other
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._unread_bytes = 0  # bytes that came since the last piece of a body
        self._body_bytes = 0
        self._now_ns = 0
        self._headers_complete = False
        self._ends_with_connection = False
        self.connected_ns = 0
        self.response_began = False
        self.is_open = False

    # --- what the client calls ----------------------------------------------------------------------

    def send(self, request: bytes, receiver: Receiver) -> asyncio.Future[None]:
        """Send a request. The future ends with its response, or with RequestFailed."""
        assert self._transport is not None and self._done is None
        self._receiver = receiver
        self._done = done = self._inbox.loop.create_future()
        self.response_began = False
        self._unread_bytes = self._body_bytes = 0
        self._reset_message()
        self._transport.write(request)
        return done

    def close(self) -> None:
        """Close the connection at once. A request under way ends with RequestFailed; its receiver gets nothing more."""
        self.is_open = False
        self._end(RequestFailed(FailureKind.CUT, "the client closed the connection"))
        if self._transport is not None:
            self._transport.abort()

    def fileno(self) -> int:
        """Return the file descriptor of the socket; -1 when the connection is closed."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        return -1 if sock is None or not self.is_open else int(sock.fileno())

    def fail(self, kind: FailureKind, message: str) -> None:
        """End the request under way, and the connection: what else comes on it belongs to nobody."""
        self._end(RequestFailed(kind, message))
        self.close()

    # --- what asyncio calls -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._parser = httptools.HttpResponseParser(self)
        self.connected_ns = _now()
        self.is_open = True

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._inbox.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._inbox.put(self, nbytes, _now())

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._inbox.parse()
        self.is_open = False
        self._end_with_connection(exc)
        del self._parser  # no garbage is collected in a run

    def _end_with_connection(self, exc: Exception | None) -> None:
        if self._done is None:
            return
        if self._ends_with_connection and exc is None:
            return self._end(None)
        how = "was reset" if isinstance(exc, ConnectionResetError) else "was closed"
        if exc is not None and not isinstance(exc, ConnectionResetError):
            how = f"broke ({exc})"
        when = "in the middle of the response" if self._headers_complete else "before the response"
        if self.response_began and not self._headers_complete:
            when = "in the middle of the response's headers"
        self._end(RequestFailed(FailureKind.CUT, f"the connection {how} by the server {when}"))

    def parse(self, data: bytes, now_ns: int) -> None:
        """Take in bytes that came at `now_ns`."""
        if self._done is None:
            return self.close()  # a word nobody asked for, or the rest of a response that failed
        self.response_began = True
        self._now_ns = now_ns
        self._unread_bytes += len(data)
        if self._unread_bytes > MAX_HEADER_BYTES + READ_BYTES:  # a last piece may be behind it
            where = "of the body's framing" if self._headers_complete else "of headers"
            return self.fail(FailureKind.MALFORMED, f"more than {MAX_HEADER_BYTES:,} bytes {where}")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._failed_in_callback(error)
        except httptools.HttpParserUpgrade:
            self.fail(FailureKind.MALFORMED, "the server wants to speak another protocol than HTTP/1.1")
        except httptools.HttpParserError as error:
            where = "in the response's body" if self._headers_complete else f"in {data[:60]!r}"
            self.fail(FailureKind.MALFORMED, f"not HTTP: {error} {where}")
        if self._receiver is not None and self._receiver.is_satisfied:
            self._inbox.loop.call_later(LINGER_S, self._linger, self._done)

    # --- what the parser calls ----------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headers_complete:  # else it is a trailer
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            return
        headers = self._headers
        self._headers_complete = True
        self._ends_with_connection = b"content-length" not in headers and b"transfer-encoding" not in headers
        if self._receiver is not None:
            self._receiver.headers(status, headers, self._now_ns)

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            raise RequestFailed(FailureKind.MALFORMED, f"the response has more than {MAX_BODY_BYTES:,} bytes")
        if self._receiver is not None:
            self._receiver.body(body, self._now_ns)

    def on_message_complete(self) -> None:
        if not self._headers_complete:
            return self._reset_message()  # 1xx: the response itself is still to come
        if not self._parser.should_keep_alive():
            self.is_open = False
        self._end(None)

    # --- ends ---------------------------------------------------------------------------------------

    def _linger(self, done: asyncio.Future[None]) -> None:
        """All that was wanted came a while ago, and the response has not ended: its rest is not waited for."""
        if self._done is done:
            self._end(None)
            self.close()

    def _reset_message(self) -> None:
        self._headers = {}
        self._headers_complete = self._ends_with_connection = False

    def _failed_in_callback(self, error: Exception) -> None:
        cause = error.__context__
        if isinstance(cause, RequestFailed):
            self._end(cause)
        else:
            self._end(cause or error)
        self.close()

    def _end(self, error: BaseException | None) -> None:
        done, receiver, self._done, self._receiver = self._done, self._receiver, None, None
        if done is None or done.done():
            return
        if isinstance(error, RequestFailed) and receiver is not None and receiver.is_satisfied:
            error = None
        if error is None:
            done.set_result(None)
        else:
            # Its traceback says nothing here, and holds frames that hold it.
            done.set_exception(error.with_traceback(None) if isinstance(error, RequestFailed) else error)


class Inbox:
    """Bytes that came in one round of the event loop. They are parsed after all of them have their time of arrival."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        # One for all connections: a read is copied out before the next one begins.
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._arrived: list[tuple[Connection, bytes, int]] = []

    def put(self, connection: Connection, nbytes: int, now_ns: int) -> None:
        """The first `nbytes` of the buffer came for `connection` at `now_ns`."""
        if not self._arrived:
            self.loop.call_soon(self.parse)
        self._arrived.append((connection, bytes(self.buffer[:nbytes]), now_ns))

    def parse(self) -> None:
        arrived, self._arrived = self._arrived, []
        for connection, data, now_ns in arrived:
            connection.parse(data, now_ns)
