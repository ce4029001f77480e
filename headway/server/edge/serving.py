"""Serves an application behind the edge, from an open port to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import signal
import socket
import threading
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import LOGGING_CONFIG
from uvicorn.server import HANDLED_SIGNALS

from headway.server.edge.connection import Connection
from headway.server.edge.entrance import Entrance
from headway.server.edge.in_flight import InFlight
from headway.server.edge.last_signal import kill_at_the_next
from headway.server.edge.listening import Certificate
from headway.server.edge.probes import Probes
from headway.server.edge.settings import EdgeSettings

DATED_EVERY_S = 1.0
# After a second signal: how long the event loop may be busy with something else, and how long the end may take then.
LOOP_ANSWERS_S, ENDED_S = 1.0, 10.0
# How long answers then have to end with an error.
CUT_AFTER_S = 0.5
logger = logging.getLogger("headway.server")


def url_of(listener: socket.socket, is_tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http{'s' * is_tls}://{host}:{port}"


def _log_config(level: str) -> dict[str, Any]:
    """The settings of uvicorn's logging and ours. They drop uvicorn's start and stop messages: ours say the same."""
    config = copy.deepcopy(LOGGING_CONFIG)
    quiet = "WARNING" if level == "info" else level.upper()
    config["loggers"]["uvicorn.error"]["level"] = quiet
    config["loggers"]["uvicorn.access"]["level"] = level.upper()
    config["loggers"]["headway"] = {"handlers": ["default"], "level": level.upper(), "propagate": False}
    return config


class EdgeServer(uvicorn.Server):
    """Uvicorn, but it lets requests finish before it ends, and then exits with 0.

    Attributes:
        failure: why it has ended, where that was not by a signal.
    """

    def __init__(
        self,
        app: ASGIApp,
        behind: InFlight,
        settings: EdgeSettings,
        certificate: Certificate | None = None,
        has_lifespan: bool = True,
    ) -> None:
        self._behind, self._certificate = behind, certificate
        self._is_watched = certificate is not None and settings.enable_ssl_refresh
        self._signals = 0
        probes = Probes(self._behind.check_ready, lambda: self.server_state.default_headers)
        connection = partial(
            Connection, read_timeout_s=settings.request_read_timeout, pace=self._behind.reads, probes=probes
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=connection,  # type: ignore[arg-type]
                ws="none",
                lifespan="on" if has_lifespan else "off",
                log_config=_log_config(settings.log_level),
                access_log=settings.log_level in ("debug", "info"),
                server_header=False,
                proxy_headers=False,  # the edge looks at them
                timeout_graceful_shutdown=5,
            )
        )
        self._entrance = Entrance(
            lambda came_ns, refusal: connection(
                self.config, self.server_state, self.lifespan.state, came_ns=came_ns, refusal=refusal
            ),
            probes,
            settings.request_read_timeout,
            certificate,
            self._behind.background,
        )
        self._drain_timeout_s = settings.shutdown_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self.failure: str | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED_SIGNALS:
                kill_at_the_next(number)
        self._entrance.open(sockets or [])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._entrance.close()
        await super().shutdown([])

    async def main_loop(self) -> None:
        """Wait for the end, and keep the date of answers right to the second. Uvicorn's wakes up ten times a second."""
        while not await self.on_tick(0):
            if self._certificate is not None and self._is_watched:
                self._certificate.refresh()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATED_EVERY_S):
                    await self._ending.wait()

    def reload(self) -> None:
        """Read the files of classes, tenants and the certificate again."""
        self._behind.reload_files()
        if self._certificate is not None:
            self._certificate.reload()

    def end(self) -> None:
        """Stop serving."""
        self.should_exit = True
        self._ending.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at once at the second, whatever the process is busy with."""
        assert self._loop is not None
        self._signals += 1
        if self._signals > 1:
            signal.setitimer(signal.ITIMER_REAL, LOOP_ANSWERS_S)  # then the kernel ends the process
        signal.signal(sig, self.handle_exit)
        kill_at_the_next(sig)
        self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Finish what is in flight, within the shutdown timeout, then stop. A second call stops now."""
        if self._draining is not None:
            if self._signals > 1:
                signal.setitimer(signal.ITIMER_REAL, ENDED_S)
            self._behind.end_drain()
            asyncio.get_running_loop().call_later(CUT_AFTER_S, self._cut)
            return
        self._draining = asyncio.create_task(self._drain())

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    async def _drain(self) -> None:
        logger.info(
            "shutting down; %d requests have at most %g s to finish, and another signal ends them at once",
            self._behind.in_flight,
            self._drain_timeout_s,
        )
        await self._behind.drain(self._drain_timeout_s)
        self.end()
