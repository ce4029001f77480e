"""`headway dashboard`: the files that show a server's metrics in Grafana, and alert from Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.commands import command, fail
from headway.files import write_files
from headway.installation import require_engine


@command()
def dashboard(
    output: Annotated[Path | None, typer.Option(help="Folder to write to. Default: this one.", metavar="DIR")] = None,
    metrics_prefix: Annotated[str, typer.Option(help="Prefix of metric names, as headway serve has it.")] = "headway:",
) -> None:
    """Write a Grafana dashboard and Prometheus alert rules for headway serve."""
    require_engine()
    from headway.cli.serve import check_metrics_prefix
    from headway.server.metrics.dashboards import dashboard as as_json
    from headway.server.metrics.dashboards import rules

    check_metrics_prefix(metrics_prefix)
    folder = output or Path()
    files = {
        folder / "grafana" / "headway.json": as_json(metrics_prefix).encode(),
        folder / "prometheus" / "headway-rules.yml": rules(metrics_prefix).encode(),
    }
    try:
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_files(files)
    except OSError as error:
        fail(f"cannot write to {folder}: {error.strerror}; choose another folder with --output")
    for path in files:
        print(path)
