"""The life of a gateway from an open port to the last answer."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import uvloop

from headway.gateway.app import create_gateway_app
from headway.gateway.asking import Asker
from headway.gateway.gateway import Gateway
from headway.gateway.settings import GatewaySettings
from headway.server.edge.listening import Certificate, StartupError, Watched
from headway.server.edge.serving import EdgeServer, url_of

WATCH_EVERY_S = 1.0


async def watch_file(gateway: Gateway, every_s: float = WATCH_EVERY_S) -> None:
    """Read the files again when that of the backends has changed, and is as it was a moment ago: for ever."""
    watched = Watched(Path(gateway.file.path))
    while gateway.file.path:
        await asyncio.sleep(every_s)
        if watched.have_changed():
            gateway.reload_files()


class GatewayServer(EdgeServer):
    """The server of a gateway. It is made in a running event loop.

    Raises:
        ValueError: the journal of quotas cannot be kept.
    """

    def __init__(self, settings: GatewaySettings, certificate: Certificate | None = None) -> None:
        self.gateway = Gateway(settings)
        self.asker = Asker(self.gateway)
        app = create_gateway_app(self.gateway)
        super().__init__(app, self.gateway, settings, certificate, has_lifespan=False)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        gateway = self.gateway
        for work in (self.asker.run(), self.asker.resolve(), watch_file(gateway), gateway.keep_quotas()):
            gateway.background(work)
        try:
            await super().serve(sockets)
        finally:
            await gateway.close()


def run_gateway(
    listener: socket.socket,
    settings: GatewaySettings,
    certificate: Certificate | None = None,
    beside: Callable[[GatewayServer, str], AbstractAsyncContextManager[None]] = lambda server, url: nullcontext(),
) -> None:
    """Serve until a signal says stop.

    SIGHUP, and a change of the file of backends, has it read again without dropping a request.

    Args:
        beside: what goes on while it serves, given the server and its URL, at which clients can connect by then.

    Raises:
        StartupError: the journal of quotas cannot be kept.
    """

    async def serve() -> None:
        server = GatewayServer(settings, certificate)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
        server.gateway.full_collections.start()
        async with beside(server, url_of(listener, certificate is not None)):
            await server.serve(sockets=[listener])

    try:
        uvloop.run(serve())
    except ValueError as error:
        raise StartupError(str(error)) from None
