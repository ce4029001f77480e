"""`headway bench`: measure any OpenAI-compatible endpoint."""

from __future__ import annotations

import typer

app = typer.Typer(name="bench", help="Measure an OpenAI-compatible endpoint.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    pass
