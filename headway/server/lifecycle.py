"""The life of a server from an open port to the last answer: load, serve, drain."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

from fastapi import FastAPI

from headway.engine.client import EngineClient, EngineDead
from headway.engine.messages import Ready
from headway.server.app import create_app
from headway.server.edge.listening import Certificate, StartupError
from headway.server.edge.serving import EdgeServer, url_of
from headway.server.encoder import share_cores
from headway.server.service import Service
from headway.server.settings import ServerSettings
from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import Tokenizer


class Server(EdgeServer):
    """The server of an application over an engine."""

    def __init__(self, app: FastAPI, settings: ServerSettings, certificate: Certificate | None = None) -> None:
        self._service: Service = app.state.service
        super().__init__(app, self._service, settings, certificate)
        self._service.connections = self.server_state.connections  # type: ignore[assignment]

    async def watch_startup(self, on_ready: Callable[[Ready, str], None], url: str) -> None:
        """Report the engine's first start. When it fails, end the server."""
        try:
            ready = await self._service.engine.wait_ready()
        except EngineDead as error:
            if self._draining is None:
                self.failure = str(error)
                self.end()
            return
        self._service.metrics.on_ready(ready)
        self._service.full_collections.start()
        self._service.background(self._service.activity.report())
        if self._service.auto_tune is not None:
            self._service.background(self._service.auto_tune.run())
        on_ready(ready, url)


def run_server(
    listener: socket.socket,
    engine: EngineClient,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    template: ChatTemplate | None = None,
    on_ready: Callable[[Ready, str], None] = lambda ready, url: None,
    certificate: Certificate | None = None,
) -> None:
    """Serve until a signal says stop. The port answers, with 503, while the engine loads.

    SIGHUP has the files of service classes, of tenants and of the certificate read again, where there are any.

    Args:
        listener: the socket from `bind`; it is closed at the end.

    Raises:
        StartupError: the journal of quotas or the data folder can't be used, or the engine could not start.
        TextError: create_app() raises it.
    """
    share_cores(tokenizer)
    try:
        app = create_app(engine, tokenizer, settings, template)
    except ValueError as error:
        raise StartupError(str(error)) from None
    server = Server(app, settings, certificate)

    async def serve() -> None:
        if settings.service_classes is not None or settings.tenants is not None or certificate is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
        watching = asyncio.create_task(server.watch_startup(on_ready, url_of(listener, certificate is not None)))
        try:
            await server.serve(sockets=[listener])
        finally:
            watching.cancel()

    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(serve())
    if server.failure is not None:
        raise StartupError(server.failure)
