"""The `headway` command: parses, calls, prints. A module for each command."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from headway import __version__
from headway.cli import spellings
from headway.cli.commands import fail
from headway.cli.help import Group
from headway.installation import EngineNotInstalled

COMMANDS = {
    "serve": "Serve a model over the OpenAI API.",
    "batch": "Answer a file of requests, with an engine of its own or by a server.",
    "chat": "Talk to a model in the terminal, and see the timings of each answer.",
    "models": "List the models that can be served here, or that a server serves.",
    "calibrate": "Measure this machine for one to three minutes, so that `headway plan` can plan for it.",
    "keys": "API keys of tenants: add, list, revoke.",
    "bench": "Measure any OpenAI-compatible server, and show where the time goes.",
    "plan": "Predict memory, TTFT, TPOT, throughput and cost of a model on given hardware, and what limits them.",
    "simulate": "Simulate a workload on a model and hardware that you need not have.",
}


class Commands(Group):
    """The modules of COMMANDS, each read when its command is run: a server need not wait for what others import."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, help=said) for name, said in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and (ours := spellings.COMMANDS.get(args[0].lower())):
            fail(f"there is no command {args[0]!r}; use {ours}")
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


def _in_our_words(error: Any, message: str) -> str:
    """What a usage error says; of an unknown option, what it is called here."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None or not hasattr(error, "possibilities"):
        return message
    parameters = context.command.params
    known = [name for each in parameters for name in each.opts if name.startswith("--")]
    takes_model = any(each.name == "model" and each.param_type_name == "argument" for each in parameters)
    near = spellings.hint(option, known, takes_model)
    where = " ".join(context.command_path.removesuffix("model").split())
    return f"{where} has no option {option}; {near or f'{where} --help-all lists its options'}"


def main() -> NoReturn:
    """Entry point: bad input is one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to fail
    try:
        code = app(prog_name="headway", standalone_mode=False)
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
        if message := " ".join(_in_our_words(error, say()).split()):
            print(f"headway: {message}", file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
