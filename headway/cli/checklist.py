"""`headway checklist`: the ten boxes of a tuned server."""

from __future__ import annotations

import typer

from headway.bench.options import Target
from headway.cli.commands import command
from headway.cli.doctor import Address, Json, Local, Seconds, probed


@command()
def checklist(
    target: Target, address: Address = None, seconds: Seconds = 30.0, local: Local = True, as_json: Json = False
) -> None:
    """Tick the ten boxes of a tuned server, each by a measurement.

    It sends the probe of `headway doctor`, and each box has its figure. The exit code is 1 unless all are ticked.
    """
    import json

    from rich.console import Console

    from headway.advisor.checklist import as_object, checked, print_checklist
    from headway.advisor.probe import Limits

    evidence, url = probed(target, address, Limits(seconds, machine=local))
    if as_json:
        print(json.dumps(as_object(url, evidence), indent=2, allow_nan=False))
    else:
        print_checklist(url, evidence, Console())
    raise typer.Exit(int(not all(verdict.ticked for _, verdict in checked(evidence))))
