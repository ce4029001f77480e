"""A client's connection: HTTP/1.1 and 1.0, read in turns of the event loop, with limits that hold while bytes come."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.server.edge.exchange import Exchange, Flow
from headway.server.edge.http_head import (
    MAX_HEAD,
    MAX_HEADERS,
    MAX_TARGET,
    check_head,
    malformed,
    request_id,
    too_long,
    too_much,
    unparsable,
    written,
)
from headway.server.edge.pacing import Pace
from headway.server.edge.probes import Probes
from headway.server.edge.streaming import ABORT_CONNECTION, WHEN_GONE, WRITE_NOW
from headway.server.edge.timer import Timer
from headway.server.errors import ApiError, too_many, unavailable

ARRIVED = "headway.arrived_ns"
# Requests of one connection that wait for the answer to an earlier one.
MAX_PIPELINED = 64
# Bytes that are parsed before others may have their turn, and the longest time that a turn is then shared.
SLICE, SLICE_NS = 16 * 2**10, 1_000_000
# A client that is refused while it sends hears the answer if it is done with sending within this time.
LINGER_S, LINGER_TLS_S, LINGER_AT_END_S = 30.0, 2.0, 0.5
# Seconds until a client that has closed its sending side is asked whether it is still there, and asked again; and how
# long the server waits for one that cannot be asked.
ASK_AFTER_S, ASK_AGAIN_S, UNASKED_S = 0.1, 1.0, 10.0
_TCP_CLOSE = 7
logger = logging.getLogger("headway.server")


class Connection(HttpToolsProtocol):
    """Uvicorn's connection. It limits what comes before a body, answers what is no request with an error object, notes
    when a request's first byte came, answers clients that have closed their sending side, and can be cut.

    Args:
        refusal: the answer to whatever the client sends; None for a connection that is served.
        read_timeout_s: seconds that a request may take from its first byte to its last, and a new connection to its
            first request.
        pace: decides how many connections are read in one turn of the event loop.
        probes: answers load balancers' questions at once.
        came_ns: when the first byte of the connection came.
    """

    def __init__(
        self,
        *args: Any,
        read_timeout_s: float,
        pace: Pace,
        probes: Probes,
        came_ns: int = 0,
        refusal: ApiError | None = None,
    ) -> None:
        super().__init__(*args)
        self._pace, self._probes = pace, probes
        self._held = b""  # bytes that wait for their turn; reading is paused meanwhile
        self._has_place = False  # a place in a later turn is on its way
        self._came_ns = came_ns  # when the bytes came that are being read
        self._read_timeout_s = read_timeout_s
        self._reading = Timer(self.loop, self._on_read_timeout)  # while a request is expected or incomplete
        self._kept = Timer(self.loop, self.timeout_keep_alive_handler)  # between two requests
        self._is_incomplete = False  # the first byte of a request has come, but not its last
        self._has_head = False  # all its headers have come
        self._has_framing = True  # its parser knows nothing but where its body ends
        self._finished_some = False  # the last byte of a request was among those that are parsed
        self._fed = self._head_bytes = self._num_headers = self._body_bytes = 0
        self._answering: Exchange | None = None  # the others wait in `pipeline`
        self._when_gone: Callable[[], None] | None = None  # wanted by whoever answers
        self._refusal = refusal  # follows the answers to earlier requests, and nothing follows it
        self._has_ended = False  # the client sends no more
        self._linger_s = LINGER_S
        self._closing: asyncio.TimerHandle | None = None  # nothing more is sent; what still comes is dropped
        self._asking: asyncio.TimerHandle | None = None

    # --- the connection -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport, self._go_on)
        self._reading.set(self._read_timeout_s)
        if self._refusal is not None:
            self._send_refusal()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.end()
        self._kept.end()
        for handle in (self._closing, self._asking):
            if handle is not None:
                handle.cancel()
        self._held = b""
        super().connection_lost(exc)
        for cycle, _ in self.pipeline:
            cycle.disconnected = True
        if (answering := self._answering) is not None:
            answering.disconnected = answering.disconnected or not answering.response_complete
            answering.message_event.set()
        if isinstance(self.flow, Flow):
            self.flow.forget()
        when_gone, self._when_gone = self._when_gone, None
        if when_gone is not None:
            when_gone()
        # A request's scope knows its connection. Cut that circle, so that both are freed without a full collection.
        self.cycle = self.scope = self._answering = None  # type: ignore[assignment]
        self.pipeline.clear()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Note that the client sends no more. Its requests are answered, if it is still there to read."""
        if self.scheme == "https" or self._closing is not None:  # TLS has no such state: the transport closes
            return False
        self._has_ended = True
        if not self._held and self._refusal is None:
            self._finish_input()
        return True

    def shutdown(self) -> None:
        """Close as soon as what is being answered is answered; half a request is refused."""
        if self._closing is not None:
            self.transport.close()
        elif self._is_incomplete and self._refusal is None:
            self._linger_s = LINGER_AT_END_S
            self._refuse(unavailable("the server is shutting down", "shutting_down", 5, "rejected-shutting-down"))
        else:
            super().shutdown()

    def reset(self) -> None:
        """Cut the connection, and let the kernel forget what the client has not read."""
        with contextlib.suppress(OSError), self._same_socket() as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _same_socket(self) -> socket.socket:
        return socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))

    # --- what an exchange needs of its transport ------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes of an answer."""
        self.transport.write(data)

    def is_closing(self) -> bool:
        """Whether nothing more can be sent."""
        return self._closing is not None or self.transport.is_closing()

    def close(self) -> None:
        """Close when all is sent. A client that is still sending would not hear its answer if its bytes were refused by
        the kernel, so they are read and dropped until it ends, for a while."""
        if self._closing is not None or self.transport.is_closing():
            return
        if self._answering is not None:
            self._answering.write_head()
        if self._has_ended or not (self._is_incomplete or self._held or self._refusal is not None):
            return self.transport.close()
        self._reading.stop()
        self._held = b""
        has_eof = self.transport.can_write_eof()  # a client of TLS sees the end by the answer's length alone
        linger_s = self._linger_s if has_eof else min(self._linger_s, LINGER_TLS_S)
        self._closing = self.loop.call_later(linger_s, self.transport.close)
        if has_eof:
            self.transport.write_eof()
        self.transport.resume_reading()

    # --- bytes that come ------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._kept.stop()
        if self._closing is not None or self._refusal is not None:
            return
        if self._held:  # bytes that were on their way when reading was paused
            self._held += data
        elif data.startswith(b"GET ") and self._is_idle and (answer := self._probes.answer(data)) is not None:
            self._reading.stop()
            self.transport.write(answer.data)
            if answer.ends:
                self.transport.close()
            self.on_response_complete()
        else:
            self._read(data)

    @property
    def _is_idle(self) -> bool:
        """Whether no request is here, nor a part of one, and the client reads."""
        answering = self._answering
        is_answered = answering is None or (answering.response_complete and not self.pipeline)
        return is_answered and not (self._is_incomplete or self.flow.write_paused)

    def _read(self, data: bytes) -> None:
        """Parse what this turn of the loop has room for; the rest waits, and nothing is read meanwhile."""
        while data:
            if self.flow.read_paused or not self._pace.claim():
                if not self._came_ns:
                    self._came_ns = time.monotonic_ns()
                self._held = data
                self.transport.pause_reading()
                return self._go_on()
            self._parse(data[:SLICE])
            if self._closing is not None or self._refusal is not None:
                return
            data = data[SLICE:]
        self._came_ns = 0
        if self._has_ended:
            self._finish_input()

    def _go_on(self) -> None:
        """Parse what is held in a turn of its own; where nothing is, read on."""
        if self.flow.read_paused or self.transport.is_closing():
            return
        if not self._held:
            self.transport.resume_reading()
        elif not self._has_place:
            self._has_place = True
            self._pace.later().add_done_callback(self._take_place)

    def _take_place(self, _: asyncio.Future[None]) -> None:
        self._has_place = False
        if not self._held or self.flow.read_paused or self.transport.is_closing():
            return
        data, self._held = self._held, b""
        self._parse(data[:SLICE])
        if self._closing is None and self._refusal is None:
            self._read(data[SLICE:])
        if not self._held:
            self._go_on()

    def _parse(self, data: bytes) -> None:
        began_ns = time.monotonic_ns()
        self._finished_some = False
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, ApiError) else unparsable(error, data))
        else:
            # What was parsed is counted where it was parsed. Here is what the parser keeps, or passes over: half a
            # header, extensions of chunks. A slice in which a request ended may be that request's.
            self._fed += 0 if self._finished_some else len(data)
            if self._is_incomplete and self._fed > MAX_HEAD + 2 * self._body_bytes:
                self._refuse(too_much(is_body=self._has_head))
            elif not self._reading.is_set and (self.cycle is None or self.cycle.response_complete):
                # Bytes between requests end the keep-alive timeout without beginning a request.
                self._reading.set(self._read_timeout_s)
        if time.monotonic_ns() - began_ns > SLICE_NS:
            self._pace.fill()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as end:
            # No protocol that a client offers is taken, so its request is one like any other, with a body. But this
            # parser takes everything behind the head for the other protocol, and another one has to go on.
            framing = [header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._has_framing = False
            self.parser.feed_data(b"POST / HTTP/1.1\r\n")
            self.parser.feed_data(b"".join(b"%b: %b\r\n" % header for header in framing))
            self.parser.feed_data(b"\r\n")
            self._feed(data[end.args[0] :])

    def _finish_input(self) -> None:
        """Go on when all that the client has sent has been parsed, and no more will come."""
        if self._is_incomplete:
            self._refuse(malformed("the connection ended before the request was complete"))
        elif self._answering is None or (self.cycle is self._answering and self.cycle.response_complete):
            self.transport.close()
        else:
            self.cycle.keep_alive = False
            self._asking = self.loop.call_later(ASK_AFTER_S, self._ask, self.loop.time() + UNASKED_S)

    def _ask(self, until: float) -> None:
        """Notice a client that has gone. One that only has closed its sending side looks the same until it is sent
        something, and then its kernel answers that there is nobody."""
        cycle = self._answering
        if cycle is None or self.is_closing():
            return
        with self._same_socket() as same:
            is_gone = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE
        may_ask = cycle.scope["http_version"] == "1.1"
        if is_gone or not (may_ask or cycle.response_started or self.loop.time() < until):
            return self.transport.abort()
        is_first = self.loop.time() < until - UNASKED_S + 2 * ASK_AFTER_S
        if may_ask and not cycle.response_started:
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        self._asking = self.loop.call_later(ASK_AFTER_S if is_first else ASK_AGAIN_S, self._ask, until)

    # --- what the parser finds --------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._has_framing:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            raise too_many(
                f"more than {MAX_PIPELINED} requests of this connection wait for an earlier one", "pipeline_full", 1
            )
        super().on_message_begin()
        self._is_incomplete, self._has_head = True, False
        self._fed = self._head_bytes = self._num_headers = self._body_bytes = 0
        self._reading.set(self._read_timeout_s)
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[ARRIVED] = self._came_ns or time.monotonic_ns()
        scope[ABORT_CONNECTION], scope[WRITE_NOW], scope[WHEN_GONE] = self.reset, self._write_now, self._call_when_gone

    def on_url(self, url: bytes) -> None:
        if not self._has_framing:
            return
        super().on_url(url)
        self._head_bytes = len(self.url)
        if self._head_bytes > MAX_TARGET:
            raise too_long()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_framing:
            return
        self._num_headers += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._num_headers > MAX_HEADERS or self._head_bytes > MAX_HEAD:
            raise too_much(is_body=self._has_head)
        if not self._has_head:  # trailers behind the body are no part of what was asked
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if not self._has_framing:
            self._has_framing = True
            return
        self._has_head = True
        method, version = self.parser.get_method(), self.parser.get_http_version()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["method"], scope["http_version"] = method.decode("ascii"), version
        self.expect_100_continue = check_head(method, version, self.headers)
        try:
            target = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            raise malformed(f"the request's target is {self.url[:60]!r}; it must be a path or a URL") from None
        raw_path = target.path or b"/"
        path = raw_path.decode("ascii")
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = raw_path, target.query or b""
        self.cycle = Exchange(
            scope=scope,  # type: ignore[arg-type]
            transport=self,  # type: ignore[arg-type]
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if self._answering is None or self._answering.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # the client offers another protocol, which is not taken; _feed goes on
            return
        self._finished_some, self._is_incomplete = True, False
        self._reading.stop()
        super().on_message_complete()
        if self.cycle.response_complete:  # refused before its end: nothing else limits what comes next
            self._reading.set(self._read_timeout_s)

    # --- answers --------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._when_gone = None
        self.server_state.total_requests += 1
        if self.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._kept.set(self.timeout_keep_alive)
        if self._refusal is not None and self._answering is not None and self._answering.response_complete:
            self._send_refusal()

    def _write_now(self, data: bytes) -> bool:
        """Send bytes of the body of the answer that has begun, past the layers around the application's `send`.

        Returns False, and sends nothing, where they would have to wait, and where the body is not sent in chunks.
        """
        cycle = self._answering
        if self.flow.write_paused or cycle is None or cycle.disconnected or not cycle.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _call_when_gone(self, callback: Callable[[], None]) -> None:
        """Call back, once, when the client has gone before the answer that is being made has ended."""
        if self._answering is None:
            return callback()
        self._when_gone = callback
        self.flow.resume_reading()  # only who reads hears of the end

    @property
    def _is_half(self) -> bool:
        """Whether the request of `cycle` has its head, but not its whole body."""
        return self._is_incomplete and self.cycle is not None and self.cycle.scope is self.scope

    def _refuse(self, error: ApiError) -> None:
        """Answer the last request with an error, after the answers to earlier ones, and close."""
        self._refusal = error
        self._reading.stop()
        logger.info("refused a request of %s: %d, %s", self.client, error.status, error.message)
        cycle, is_own = self.cycle, self._is_half
        if is_own and self.pipeline and self.pipeline[0][0] is cycle:  # it has not begun
            self.pipeline.popleft()
        elif is_own and cycle is self._answering:
            if cycle.response_complete:
                return self.close()
            if cycle.response_started:
                cycle.keep_alive = False
                return
            cycle.disconnected = True
            cycle.message_event.set()
            return self._send_refusal()
        if self._answering is None or self._answering.response_complete:
            self._send_refusal()

    def _send_refusal(self) -> None:
        error = self._refusal
        if error is None or self.is_closing():
            return
        self._kept.stop()
        given = dict(self.headers or ()).get(b"x-request-id", b"") if self._is_incomplete else b""
        answer = error.response()
        answer.headers["connection"], answer.headers["x-request-id"] = "close", request_id(given)
        is_head = self._is_incomplete and self._has_head and self.scope["method"] == "HEAD"
        self.transport.write(written(answer, self.server_state.default_headers, is_head))
        self.close()

    # --- a request's time ---------------------------------------------------------------------------------

    def _on_read_timeout(self) -> None:
        is_own, answering = self._is_half, self._answering
        if self.pipeline or (
            answering is not None and not answering.response_complete and not (is_own and answering is self.cycle)
        ):
            return self._reading.set(self._read_timeout_s)  # an earlier request of this connection is being answered
        if not self._is_incomplete or (is_own and answering is not None and answering.response_started):
            self.transport.close()
        else:
            after = f"{self._read_timeout_s:g} s after its first byte (--request-read-timeout)"
            self._refuse(ApiError(408, f"the request was not complete {after}", code="request_timeout"))
