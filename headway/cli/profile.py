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

    With --base-url, measure a server that runs already.

    Ends with exit code 1 when a request failed.
    """
    if options.base_url is None or options.model is not None:
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

    stop, console = asyncio.Event(), Console()
    with interrupts(stop, Console(stderr=True)):
        if options.base_url is not None:
            from headway.bench.profile.remote import profile_server

            ok = (await profile_server(options, console, stop)).ok
        else:
            from headway.bench.profile.run import run_profile

            ok = (await run_profile(options, console, stop)).ok
    return 130 if stop.is_set() else 0 if ok else 1
