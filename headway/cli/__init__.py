"""The `headway` command: parses, calls, prints. A module for each command."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from headway import __version__
from headway.installation import EngineNotInstalled

COMMANDS = {
    "serve": "Serve a model over the OpenAI API.",
    "batch": "Answer a file of requests, with an engine of its own or by a server.",
    "calibrate": "Measure this machine and what the engine reaches of it, for about a minute, and store it for "
    "`headway plan`.",
    "keys": "API keys of tenants: add, list, revoke.",
    "bench": "Measure an OpenAI-compatible endpoint, and show where the time goes.",
    "plan": "What a model on hardware takes and gives: memory, TTFT, TPOT, throughput, cost, and what limits them.",
    "simulate": "What clients would see of a model on hardware under a workload, without either.",
}


class Commands(TyperGroup):
    """The modules of COMMANDS, each read when its command is run: a server need not wait for what others import."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, help=said) for name, said in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, typer.main.get_command(importlib.import_module(f"headway.cli.{name}").app), rest


app = typer.Typer(
    name="headway",
    cls=Commands,
    help="An LLM inference server built around latency.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headway {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """Entry point: bad input is one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to fail
    try:
        code = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except EngineNotInstalled as error:
        print(f"headway: {error}", file=sys.stderr)
        code = 2
    except Exception as error:
        # Typer's usage errors, whose class is its own affair, know how to say themselves in one line.
        say = getattr(error, "format_message", None)
        if say is None:
            raise
        if message := " ".join(say().split()):
            print(f"headway: {message}", file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
