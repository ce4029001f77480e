"""`headway tune`: find the settings that meet objectives."""

from __future__ import annotations

import typer

from headway.advisor.tuning.options import TuneOptions
from headway.cli.commands import command, fail
from headway.installation import require_engine


@command()
def tune(options: TuneOptions) -> None:
    """Find the settings that meet objectives under a load, on this machine.

    It measures a baseline, ranks changes of the scheduler by simulation with the measured step times, tries the best
    live in pairs, and keeps what is proven. It writes a config to serve with and a report; an interrupted tuning goes
    on where it was.

    The exit code is 1 if the objectives are not met in the end.
    """
    require_engine()

    from rich.console import Console
    from rich.markdown import Markdown

    from headway.advisor.tuning.report import lines, meets, write
    from headway.advisor.tuning.tune import run_tuning
    from headway.bench.interrupts import Interrupted
    from headway.bench.reporting import INTERRUPTED

    progress = Console(stderr=True)
    try:
        found = run_tuning(options, progress)
        written = write(options, found)
    except Interrupted:
        progress.print(f"Stopped: the same command goes on, by the journal in {options.output}.")
        raise typer.Exit(INTERRUPTED) from None
    except ValueError as error:
        fail(str(error))
    console = Console()
    console.print(Markdown("\n".join(lines(options, found))))
    console.print(f"Wrote {' and '.join(map(str, written))}.", soft_wrap=True)
    raise typer.Exit(int(not meets(found.after, options.claims.attainment)))
