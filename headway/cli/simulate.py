"""`headway simulate`: what clients of a server would see, with the server's own policy on a virtual clock."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from headway.cli.bench import fold_lists
from headway.cli.commands import fail, with_flags
from headway.simulator.run import SimulateOptions


class SimulateCommand(TyperCommand):
    """Takes a list of objectives as `headway bench` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parsed: list[str] = super().parse_args(ctx, fold_lists(args, {"--goodput"}))
        return parsed


app = typer.Typer(add_completion=False)


@app.command(cls=SimulateCommand)
@with_flags
def simulate(options: SimulateOptions) -> None:
    """What clients would see of a model on hardware under a workload, without either.

    Workloads are those of `headway bench`, and so is what is printed and written.
    """
    from headway.report.page import ReportError
    from headway.simulator.run import run_simulation

    try:
        code = run_simulation(options)
    except (ValueError, ReportError) as error:
        fail(str(error))
    raise typer.Exit(code)
