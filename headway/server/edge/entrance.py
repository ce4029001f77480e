"""Accepts connections, and lets those in that have said something, a few in a turn of the event loop.

A connection that is served costs a tenth of a millisecond before its first request is read. Thousands may come at once,
and whoever comes behind them waits for all. So a newcomer is no more than its socket until it has sent something. Who
asks whether the server is well then has the answer at once, and the others come in in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from headway.server.edge.http_head import malformed
from headway.server.edge.listening import Certificate
from headway.server.edge.probes import MAX_PROBE, Probes
from headway.server.errors import ApiError

# Newcomers in one turn of the event loop: how many are accepted, at some 10 us each; looked at, at 5 us, or 30 us where
# one is answered; let in, at 0.1 ms; and let in with TLS, at a millisecond.
ACCEPTED_PER_TURN, LOOKED_AT_PER_TURN, LET_IN_PER_TURN, HANDSHAKES_PER_TURN = 256, 256, 6, 2
# Seconds until a server without free file descriptors tries again.
ACCEPT_AGAIN_S = 0.5
TLS_HANDSHAKE = b"\x16"
# How long a client of HTTPS may take to say goodbye.
GOODBYE_S = 1.0
logger = logging.getLogger("headway.server")


class Entrance:
    """The way from a listening socket to connections.

    Args:
        connection: makes the protocol of a connection whose first byte came at that time; with an error it hears only
            that.
        timeout_s: seconds that a newcomer may say nothing.
        certificate: the certificate for HTTPS; None for HTTP.
        background: runs what serves a connection.
    """

    def __init__(
        self,
        connection: Callable[[int, ApiError | None], asyncio.Protocol],
        probes: Probes,
        timeout_s: float,
        certificate: Certificate | None,
        background: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._connection, self._probes, self._certificate = connection, probes, certificate
        self._timeout_s, self._background = timeout_s, background
        self._listeners: list[socket.socket] = []
        self._silent: dict[int, tuple[socket.socket, float]] = {}  # the oldest first; until when each may be so
        self._poll = select.epoll()  # watches the silent ones
        self._waiting: deque[tuple[socket.socket, int, ApiError | None]] = deque()  # they said something at that time
        self._closing_silent: asyncio.TimerHandle | None = None
        self._takes_newest = False

    def open(self, listeners: list[socket.socket]) -> None:
        """Accept connections from now on."""
        asyncio.get_running_loop().add_reader(self._poll.fileno(), self._look)
        for listener in listeners:
            listener.setblocking(False)
            self._listeners.append(listener)
            self._listen(listener)

    def close(self) -> None:
        """Accept no more, and close what is not served yet."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        loop.remove_reader(self._poll.fileno())
        self._poll.close()
        if self._closing_silent is not None:
            self._closing_silent.cancel()
        for connection in (*(each[0] for each in self._silent.values()), *(each[0] for each in self._waiting)):
            connection.close()
        self._listeners.clear()
        self._silent.clear()
        self._waiting.clear()

    def _listen(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._timeout_s
        for _ in range(ACCEPTED_PER_TURN):
            try:
                connection, _address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                logger.error("cannot accept a connection: %s", error)
                loop.remove_reader(listener)
                loop.call_later(ACCEPT_AGAIN_S, self._listen, listener)
                break
            connection.setblocking(False)
            self._silent[connection.fileno()] = connection, until
            self._poll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)
        if self._closing_silent is None:
            self._close_silent()

    def _close_silent(self) -> None:
        """Close those who have said nothing for too long."""
        loop = asyncio.get_running_loop()
        self._closing_silent = None
        while self._silent:
            number, (connection, until) = next(iter(self._silent.items()))
            if until > loop.time():
                self._closing_silent = loop.call_at(until, self._close_silent)
                break
            del self._silent[number]
            connection.close()

    def _look(self) -> None:
        """See what the silent ones have said, if anything."""
        now_ns = time.monotonic_ns()
        for number, _ in self._poll.poll(0, LOOKED_AT_PER_TURN):
            self._poll.unregister(number)
            connection, _until = self._silent.pop(number)
            try:
                first = connection.recv(MAX_PROBE, socket.MSG_PEEK)
                answer = None if self._certificate else self._probes.answer(first, ends=True)
                if answer is not None:
                    connection.recv(len(first))
                    connection.send(answer.data)
            except OSError:  # it has gone
                first, answer = b"", None
            if not first or answer is not None:
                connection.close()
                continue
            is_plain = self._certificate is not None and first[:1] != TLS_HANDSHAKE
            refusal = malformed("this port speaks HTTPS, not HTTP") if is_plain else None
            if not self._waiting:
                asyncio.get_running_loop().call_soon(self._let_in)
            self._waiting.append((connection, now_ns, refusal))

    def _let_in(self) -> None:
        """Serve those who came first. Of handshakes, of which a crowd takes seconds, every second is the newest."""
        for _ in range(LET_IN_PER_TURN if self._certificate is None else HANDSHAKES_PER_TURN):
            if not self._waiting:
                return
            takes_newest = self._certificate is not None and self._takes_newest
            connection, came_ns, refusal = self._waiting.pop() if takes_newest else self._waiting.popleft()
            task = self._background(self._serve(connection, came_ns, refusal))
            task.add_done_callback(partial(_close_if_cancelled, connection))
            self._takes_newest = not self._takes_newest
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._let_in)

    async def _serve(self, connection: socket.socket, came_ns: int, refusal: ApiError | None) -> None:
        context: ssl.SSLContext | None = None
        if self._certificate is not None and refusal is None:
            context = self._certificate.context
        with contextlib.suppress(OSError):  # the client has gone, or what is wrong it has been told
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connection(came_ns, refusal),
                connection,
                ssl=context,
                ssl_handshake_timeout=self._timeout_s if context else None,
                ssl_shutdown_timeout=GOODBYE_S if context else None,
            )


def _close_if_cancelled(connection: socket.socket, task: asyncio.Task[None]) -> None:
    """Close the connection of a task that was cancelled: if that was before it began, nobody else does."""
    if task.cancelled():
        connection.close()
