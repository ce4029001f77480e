"""`headway bench pareto`: which configurations are on the front of tokens/s of users and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.bench.pareto_options import ParetoOptions
from headway.cli.commands import fail, with_flags
from headway.load.errors import BenchError


@with_flags
def pareto(
    files: Annotated[list[Path], typer.Argument(metavar="RESULT.json...", help="Saved results of two runs or more.")],
    options: ParetoOptions,
) -> None:
    """Draw saved runs by tokens/s of a user against tokens/s of a device, and find those that no other one beats.

    Runs with the same --label, or of the same sweep, are one configuration.
    """
    from rich.console import Console
    from rich.text import Text

    from headway.bench.pareto import front_page, front_table, points_of
    from headway.report.console import print_table
    from headway.report.page import ReportError, write_page

    out = Console()
    try:
        points, left_out = points_of(files, options)
        print_table(out, front_table(points))
        for each in left_out:
            out.print(Text(f"left out: {each}"), soft_wrap=True)
        if options.report is not None:
            write_page(options.report, front_page(points))
            out.print(Text(f"Report: {options.report}", style="dim"), soft_wrap=True)
    except (BenchError, ReportError) as error:
        fail(str(error))
    raise typer.Exit(0)
