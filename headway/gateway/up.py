"""`headway up`: a gateway and the servers of one machine behind it, and one screen of how they are."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from headway.gateway.gateway import Gateway
from headway.gateway.member import clock
from headway.gateway.run import GatewayServer, run_gateway
from headway.gateway.servers import END_S, LocalServer, UpFile
from headway.gateway.settings import GatewaySettings
from headway.server.edge.listening import Certificate

SHOWN_EVERY_S = 0.5


class Screen:
    """Shows how servers are: a table that stays up to date on a terminal, a line for each change elsewhere."""

    def __init__(self, console: Console, gateway: Gateway, servers: list[LocalServer], url: str) -> None:
        self._console, self._gateway, self._servers, self._url = console, gateway, servers, url
        self._told: dict[str, str] = {}

    async def run(self) -> None:
        """Show it for ever."""
        if not self._console.is_terminal:
            while True:
                self._tell_changes()
                await asyncio.sleep(SHOWN_EVERY_S)
        with Live(self._table(), console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(self._table(), refresh=True)
                await asyncio.sleep(SHOWN_EVERY_S)

    def _state(self, name: str) -> str:
        server = next((each for each in self._servers if each.entry.name == name), None)
        if server is not None and server.state != "running":
            return server.state
        member = self._gateway.members[name]
        if server is not None and not member.is_known:
            return "starting"
        state = self._gateway.state_of(member, clock())
        return "ready" if state == "closed" else state

    def _table(self) -> Table:
        table = Table(title=f"Headway at {self._url}", title_justify="left", box=None, pad_edge=False)
        for heading in ("name", "models", "state"):
            table.add_column(heading)
        for heading in ("in flight", "answered", "failed", "restarts"):
            table.add_column(heading, justify="right")
        restarts = {each.entry.name: str(each.restarts) for each in self._servers}
        for name, member in self._gateway.members.items():
            ok = member.outcomes["ok"]
            failed = sum(member.outcomes.values()) - ok - member.outcomes["cancelled"] - member.outcomes["resent"]
            models = ", ".join(member.models)
            counts = str(member.in_flight), str(ok), str(failed), restarts.get(name, "")
            table.add_row(name, models, self._state(name), *counts)
        return table

    def _tell_changes(self) -> None:
        for name in self._gateway.members:
            state = self._state(name)
            if self._told.get(name) != state:
                self._told[name] = state
                self._console.print(f"{name}: {state}", highlight=False, soft_wrap=True)


def run_up(
    listener: socket.socket,
    file: UpFile,
    settings: GatewaySettings,
    certificate: Certificate | None = None,
    console: Console | None = None,
    log_folder: Path | None = None,
) -> None:
    """Run the servers and their gateway until a signal says stop. Requests finish first, then servers end.

    Args:
        log_folder: where servers write their logs; a new folder of its own by default.

    Raises:
        StartupError: the journal of quotas cannot be kept.
    """
    console = console or Console(stderr=True)
    folder = log_folder or Path(tempfile.mkdtemp(prefix="headway-up-"))
    more = [f"--service-classes={settings.service_classes.path}"] if settings.service_classes else []
    servers = [LocalServer(each, folder / f"{each.name}.log", more) for each in file.servers]
    settings.file = file.gateway

    @contextlib.asynccontextmanager
    async def servers_of(server: GatewayServer, url: str) -> AsyncIterator[None]:
        console.print(f"headway gateway at {url}; the servers' logs are in {folder}", highlight=False, soft_wrap=True)
        keeping = [asyncio.create_task(each.keep()) for each in servers]
        showing = asyncio.create_task(Screen(console, server.gateway, servers, url).run())
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.gather(*(each.end(settings.shutdown_timeout + END_S) for each in servers))
            for each in (showing, *keeping):
                each.cancel()
            await asyncio.gather(showing, *keeping, return_exceptions=True)

    run_gateway(listener, settings, certificate, servers_of)
    console.print("all servers have ended", highlight=False)
