"""Connections to a backend: HTTP/1.1 without buffering, kept open and used again, and bounded.

A connection is an asyncio protocol over httptools, as the server's own are. Nothing wakes a task for a piece of an
answer: who asked is told in the turn of the event loop in which the piece has come.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import Protocol

import httptools

from headway.config_files.gateway import BackendEntry, Timeouts
from headway.server.edge.timer import Timer

MAX_HEAD = 256 * 2**10  # bytes of an answer's headers, and of what frames its body between two pieces
MAX_IDLE = 256  # connections that are kept open


class UpstreamFailed(Exception):
    """There was no answer, or not all of it.

    Args:
        kind: connect, cut, timeout, malformed, or down: the backend does not answer whether it is well.
        is_unheard: the backend closed a connection that had been idle, before any byte of an answer: it may never have
            seen the request.
    """

    def __init__(self, kind: str, message: str, is_unheard: bool = False) -> None:
        super().__init__(message)
        self.kind, self.is_unheard = kind, is_unheard


class Reader(Protocol):
    """Takes an answer as it comes."""

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Take the status and the headers, with names in lower case."""

    def on_piece(self, data: bytes) -> None:
        """Take the next bytes of the body: all that have come together."""

    def on_end(self, failure: UpstreamFailed | None) -> None:
        """Note that all has come, or that no more will. Nothing follows."""


class Connection(asyncio.Protocol):
    """One connection, for one request at a time.

    Args:
        is_kept: others may use it when its answer has ended; whoever made it must not drop it then.
    """

    def __init__(self, pool: Pool, is_kept: bool) -> None:
        self._pool, self._is_kept = pool, is_kept
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser
        self._reader: Reader | None = None
        self._timer = Timer(pool.loop, self._on_time)  # since something came last
        self._timeout_s = 0.0
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []  # of the body, until all that has come with them is parsed
        self._has_head = self._ends_with_connection = False
        self._unframed = 0
        self._served = 0  # requests before this one
        self.is_paused = False
        self.is_open = False
        self.idle_since = 0.0

    # --- what whoever asks calls ------------------------------------------------------------------------

    def ask(self, request: bytes, reader: Reader, first_byte_s: float) -> None:
        """Send a request; `reader` is told of all that comes."""
        assert self._transport is not None and self._reader is None
        self._reader = reader
        self._reset()
        self._transport.write(request)
        self._timeout_s = first_byte_s
        self._timer.set(first_byte_s)

    def drop(self) -> None:
        """Close at once; the reader is told nothing any more."""
        self._reader = None
        self._timer.end()
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()
        self._pool.forget(self)

    def pause(self) -> None:
        """Read nothing until resume(): whoever gets the answer is slow."""
        if self._transport is not None and not (self.is_paused or self._transport.is_closing()):
            self.is_paused = True
            self._transport.pause_reading()
            self._timer.stop()

    def resume(self) -> None:
        """Read on."""
        if self._transport is None or not self.is_paused or self._transport.is_closing():
            return
        self.is_paused = False
        self._transport.resume_reading()
        if self._reader is not None:
            self._timer.set(self._timeout_s)

    # --- what asyncio calls -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._parser = httptools.HttpResponseParser(self)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._reader is None:
            return self.drop()  # a word that nobody asked for
        self._timer.since_s = self._pool.loop.time()
        self._unframed += len(data)
        if self._unframed > MAX_HEAD + len(data):
            return self._fail("malformed", f"more than {MAX_HEAD:,} bytes of headers or of framing")
        try:
            self._parser.feed_data(data)
            self._pass_on()
        except httptools.HttpParserUpgrade:
            self._fail("malformed", "it wants to speak another protocol than HTTP/1.1")
        except httptools.HttpParserError as error:
            self._fail("malformed", f"what it sends is not HTTP: {error}")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._reader is not None:
            if self._ends_with_connection and exc is None:
                self._end(None)
            else:
                how = "in the middle of its answer" if self._has_head else "before its answer"
                is_unheard = self._served > 0 and not (self._has_head or self._unframed)
                self._end(UpstreamFailed("cut", f"it closed the connection {how}", is_unheard))
        self._pool.forget(self)
        self._timer.end()
        del self._parser  # they hold each other

    # --- what the parser calls --------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return
        self._has_head = True
        self._ends_with_connection = not self._headers.keys() & {b"content-length", b"transfer-encoding"}
        self._timeout_s = self._pool.timeouts.stall_s
        self._timer.set(self._timeout_s)
        if self._reader is not None:
            self._reader.on_head(status, self._headers)

    def on_body(self, body: bytes) -> None:
        self._unframed = 0
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if not self._has_head:
            return self._reset()  # 1xx: the answer is still to come
        self.is_open = self.is_open and self._parser.should_keep_alive()
        self._end(None)

    # --- ends -------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._headers, self._has_head, self._ends_with_connection, self._unframed = {}, False, False, 0

    def _pass_on(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and self._reader is not None:
            self._reader.on_piece(b"".join(pieces))

    def _on_time(self) -> None:
        if self._has_head:
            self._fail("timeout", f"nothing came of its answer for {self._timeout_s:g} s")
        else:
            self._fail("timeout", f"its answer did not begin within {self._timeout_s:g} s")

    def _fail(self, kind: str, message: str) -> None:
        self._end(UpstreamFailed(kind, message))
        self.drop()

    def _end(self, failure: UpstreamFailed | None) -> None:
        self._pass_on()
        reader, self._reader = self._reader, None
        self._timer.stop()
        if reader is None:
            return
        self._served += 1
        if failure is None and self.is_open and self._is_kept:
            self.resume()
            self._pool.keep(self)
        elif self._transport is not None:
            self._transport.close()
        reader.on_end(failure)


class Pool:
    """The connections to one backend."""

    def __init__(self, entry: BackendEntry, timeouts: Timeouts) -> None:
        self.entry, self.timeouts = entry, timeouts
        self.loop = asyncio.get_running_loop()
        self._idle: deque[Connection] = deque()  # the latest last
        self._all: set[Connection] = set()
        self._ssl: ssl.SSLContext | None = None
        if entry.is_tls:
            self._ssl = ssl.create_default_context()
            self._ssl.set_alpn_protocols(["http/1.1"])

    def idle(self) -> Connection | None:
        """A connection that is open and does nothing, if there is one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def connect(self, is_kept: bool = True) -> Connection:
        """A new connection (see Connection). Raises UpstreamFailed."""
        entry = self.entry
        try:
            async with asyncio.timeout(self.timeouts.connect_s):
                _, connection = await self.loop.create_connection(
                    lambda: Connection(self, is_kept),
                    entry.address or entry.host,
                    entry.port,
                    ssl=self._ssl,
                    server_hostname=entry.host if self._ssl is not None else None,
                )
        except TimeoutError:
            raise UpstreamFailed("connect", f"no connection within {self.timeouts.connect_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise UpstreamFailed("connect", f"its certificate is not trusted: {error.verify_message}") from None
        except OSError as error:
            raise UpstreamFailed("connect", f"no connection: {error.strerror or error}") from None
        self._all.add(connection)
        return connection

    def keep(self, connection: Connection) -> None:
        """Keep a connection whose answer has ended."""
        connection.idle_since = self.loop.time()
        self._idle.append(connection)
        if len(self._idle) > MAX_IDLE:
            self._idle.popleft().drop()

    def close_old(self) -> None:
        """Close connections that have been idle for too long."""
        before = self.loop.time() - self.timeouts.keep_alive_s
        while self._idle and self._idle[0].idle_since < before:
            self._idle.popleft().drop()

    def forget(self, connection: Connection) -> None:
        """Note that a connection is gone."""
        self._all.discard(connection)

    def close(self) -> None:
        """Close all; requests under way are told nothing."""
        self._idle.clear()
        for connection in list(self._all):
            connection.drop()

    @property
    def num_open(self) -> int:
        return len(self._all)
