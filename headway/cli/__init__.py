"""The `headway` command: parses, calls, prints. A module for each command."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from headway import __version__
from headway.installation import EngineNotInstalled


class Commands(TyperGroup):
    """The modules of COMMANDS, each read when it is asked for: a server need not wait for what others import."""

    NAMES = ("serve", "calibrate", "bench", "plan")

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.NAMES)

    def get_command(self, ctx: Any, name: str) -> Any:
        for each in (name,) if name in self.NAMES else self.NAMES:  # what nobody knows is compared with all of them
            if each not in self.commands:
                self.commands[each] = typer.main.get_command(importlib.import_module(f"headway.cli.{each}").app)
        return self.commands.get(name)


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
