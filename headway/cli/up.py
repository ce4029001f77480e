"""`headway up`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.commands import command, fail
from headway.cli.gateway import check_tenants
from headway.gateway.servers import read_up_file
from headway.gateway.settings import GatewaySettings
from headway.installation import require_engine


@command()
def up(
    settings: GatewaySettings,
    file: Annotated[str, typer.Argument(help="TOML file with the servers, and how their gateway treats them.")],
    log_dir: Annotated[Path | None, typer.Option(help="Folder for the servers' logs. Default: a new one.")] = None,
) -> None:
    """Serve several models of this machine behind one door."""
    require_engine()
    from headway.gateway.up import run_up
    from headway.server.edge.listening import Certificate, StartupError, bind

    try:
        read = read_up_file(file)
        settings.file = read.gateway
        check_tenants(settings)
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        certificate = Certificate.of(settings)
        with bind(settings.host, settings.port) as listener:
            run_up(listener, read, settings, certificate, log_folder=log_dir)
    except (ValueError, StartupError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot write logs to {log_dir}: {error.strerror}")
