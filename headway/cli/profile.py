"""`headway bench profile`: where the time of a single request goes, on a machine with nothing else to do."""

from __future__ import annotations

import typer

from headway.bench.profile.options import ProfileOptions
from headway.cli.commands import fail, with_flags
from headway.installation import require_engine
from headway.load.errors import BenchError


@with_flags
def profile(options: ProfileOptions) -> None:
    """Serve a model, measure one request at a time, and compare each stage with the hardware's limit.

    Ends with exit code 1 when a request failed.
    """
    require_engine()

    import asyncio

    from headway.report.page import ReportError

    try:
        code = asyncio.run(_profile(options))
    except (BenchError, ReportError) as error:
        fail(str(error))
    raise typer.Exit(code)


async def _profile(options: ProfileOptions) -> int:
    import asyncio

    from rich.console import Console

    from headway.bench.interrupts import interrupts
    from headway.bench.profile.run import run_profile

    stop, console = asyncio.Event(), Console()
    with interrupts(stop, Console(stderr=True)):
        result = await run_profile(options, console, stop)
    return 130 if stop.is_set() else 0 if result.ok else 1
