"""`headway gateway`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.commands import command, fail
from headway.config_files.gateway import read_gateway_file
from headway.gateway.settings import GatewaySettings
from headway.installation import require_engine
from headway.policy.objectives.service_class import BUILT_IN

if TYPE_CHECKING:
    from headway.gateway.run import GatewayServer


@command()
def gateway(
    settings: GatewaySettings,
    file: Annotated[str, typer.Argument(help="TOML file with the backends; a change of it is taken at once.")],
) -> None:
    """Serve many OpenAI-compatible servers behind one door."""
    require_engine()
    from headway.gateway.run import run_gateway
    from headway.server.edge.listening import Certificate, StartupError, bind

    try:
        settings.file = read_gateway_file(file)
        check_tenants(settings)
        certificate = Certificate.of(settings)
        with bind(settings.host, settings.port) as listener:
            run_gateway(listener, settings, certificate, _telling)
    except (ValueError, StartupError) as error:
        fail(str(error))


def check_tenants(settings: GatewaySettings) -> None:
    """Raise ValueError where keys of tenants name classes that there are not, or budgets are shared without tenants."""
    if settings.tenants is not None:
        settings.tenants.check_classes(settings.service_classes.table if settings.service_classes else BUILT_IN)
    elif settings.file.shared.redis:
        raise ValueError("[shared] shares what tenants may use, and there are none; give --tenants FILE")


@contextlib.asynccontextmanager
async def _telling(server: GatewayServer, url: str) -> AsyncIterator[None]:
    names = ", ".join(f"{each.entry.name} ({each.entry.url})" for each in server.gateway.members.values())
    print(f"headway gateway at {url}, in front of {names}", file=sys.stderr, flush=True)
    if server.gateway.settings.is_open:
        print("everybody who reaches this machine can use it; --api-key makes requests need a key", file=sys.stderr)
    yield
