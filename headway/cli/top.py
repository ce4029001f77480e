"""`headway top`: what a server does, in the terminal."""

from __future__ import annotations

import contextlib
import itertools
from typing import Annotated

import typer

from headway.cli.commands import command


@command()
def top(
    address: Annotated[
        str, typer.Argument(metavar="URL", help="Address of a server of Headway, vLLM or llama.cpp.")
    ] = "http://localhost:8000",
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2, max=3600.0)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print what happens within one interval, and exit.")] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar=["HEADWAY_METRICS_KEY", "HEADWAY_API_KEY"], help="Key that its /metrics needs.")
    ] = None,
) -> None:
    """Show what a server of Headway, vLLM or llama.cpp does, in the terminal.

    It reads the server's /metrics: requests, tokens a second, times, classes, and why requests wait or are refused.
    Ctrl-C ends it.
    """
    from rich.console import Console
    from rich.live import Live

    from headway.chat import as_url
    from headway.top import follow

    url = as_url(address) or f"http://{address}"
    console = Console()
    looks = follow(url.rstrip("/"), api_key, interval)
    if once or not console.is_terminal:
        last = [*itertools.islice(looks, 2)][-1]
        console.print(last.render(console.width))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as screen:
        for view in looks:
            screen.update(view.render(console.width), refresh=True)
