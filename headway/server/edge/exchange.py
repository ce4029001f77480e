"""What is different from uvicorn in one request and its answer, and in when a connection is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


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
    """One request and its answer, of HTTP/1.0 or with a body that the client holds back until it is asked for."""

    _until_close = False  # nothing but the connection's end tells the client that the answer is complete

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if self.waiting_for_100_continue:  # nobody knows whether the body still comes
                self.keep_alive = False
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if self.scope["http_version"] == "1.0" and not has_length:
                self._until_close, self.chunked_encoding = True, False
        elif self._until_close:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
