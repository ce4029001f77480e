"""What is different from uvicorn in one request and its answer, and in when a connection is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle
from uvicorn.protocols.utils import get_client_addr, get_path_with_query_string

# The characters that headers may have: no control characters but tabs (RFC 9110, section 5.5).
_ALLOWED = bytes([9, *range(32, 127), *range(128, 256)])


class Flow(FlowControl):
    """Uvicorn's flow control. What has been received already is parsed before more is read.

    Args:
        go_on: called when the application wants more.
    """

    def __init__(self, transport: asyncio.Transport, go_on: Callable[[], None]) -> None:
        super().__init__(transport)
        self._go_on = go_on

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._go_on()

    def forget(self) -> None:
        """Let go of a connection that has ended: nothing goes on, and no circle of references holds it."""
        self._go_on = lambda: None


class Exchange(RequestResponseCycle):
    """One request and its answer. Its head goes with what follows at once, as each write takes a while."""

    _head = b""  # until it is written
    _until_close = False  # nothing but the connection's end tells the client that the answer is complete

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if self.response_complete or self.response_started != (message["type"] == "http.response.body"):
            raise RuntimeError(f"an answer has {message['type']} at a wrong place")
        if self.response_started:
            self._write(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            self.response_started = True
            self._head = self._written(message["status"], [*self.default_headers, *message.get("headers", ())])
            self.transport.loop.call_soon(self.write_head)  # type: ignore[attr-defined]

    def write_head(self) -> None:
        """Write the head, if it still waits for what follows."""
        if self._head and not self.disconnected:
            head, self._head = self._head, b""
            self.transport.write(head)

    def _written(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        """The head of the answer, which says how its body is framed."""
        if self.access_log:
            method, path = self.scope["method"], get_path_with_query_string(self.scope)
            where = get_client_addr(self.scope), method, path, self.scope["http_version"]
            self.access_logger.info('%s - "%s %s HTTP/%s" %d', *where, status)
        if self.waiting_for_100_continue:  # nobody knows whether the body still comes
            self.keep_alive = self.waiting_for_100_continue = False
        named, lines = dict(headers), [b": ".join(header) for header in headers]
        if b"".join(lines).translate(None, _ALLOWED):
            raise RuntimeError("a header of an answer has a character that is not allowed")
        if named.get(b"connection", b"").lower().find(b"close") >= 0:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close")
        if (length := named.get(b"content-length")) is not None:
            self.expected_content_length, self.chunked_encoding = int(length), False
        elif self.scope["http_version"] == "1.0":
            self._until_close, self.chunked_encoding = True, False
        elif self.scope["method"] != "HEAD" and status not in (204, 304):
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked")
        return STATUS_LINE[status] + b"\r\n".join(lines) + b"\r\n\r\n"

    def _write(self, body: bytes, is_last: bool) -> None:
        """Write a part of the body."""
        if self.scope["method"] == "HEAD":
            body, self.expected_content_length = b"", 0
        elif self.chunked_encoding:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if is_last else b"")
        elif not self._until_close:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (is_last and self.expected_content_length):
                raise RuntimeError("the body of an answer has another length than its head says")
        head, self._head = self._head, b""
        self.transport.write(head + body)
        if is_last:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
