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
    "gateway": "Serve many OpenAI-compatible servers behind one door.",
    "up": "Serve several models of this machine behind one door.",
    "deploy": "Serve models on a Ray cluster behind one door, with as many replicas as their objectives need.",
    "batch": "Answer a file of requests, with its own engine or a running server.",
    "chat": "Talk to a model in the terminal, and see the timings of each answer.",
    "top": "Show what a server of Headway, vLLM or llama.cpp does, in the terminal.",
    "doctor": "Find what slows a running server of Headway, vLLM, SGLang or llama.cpp down.",
    "checklist": "Tick the ten boxes of a tuned server, each by a measurement.",
    "tune": "Find the settings that meet objectives under a load, on this machine.",
    "models": "List the models that can be served here, or that a server serves.",
    "quantize": "Write a quantised checkpoint of a model, for Headway and vLLM.",
    "calibrate": "Measure this machine (one to three minutes), so that `headway plan` can plan for it.",
    "cache": "List or clear what Headway keeps on disk: packed weights, compiled kernels, GGUF configs.",
    "keys": "Manage the API keys of tenants: add, list, revoke.",
    "dashboard": "Write a Grafana dashboard and Prometheus alert rules for headway serve.",
    "bench": "Measure any OpenAI-compatible server, and show where the time goes.",
    "plan": "Predict memory, TTFT, TPOT, throughput and cost of a model on given hardware, and what limits them.",
    "replay": "Make the decisions of a recording again, and play them in a page.",
    "simulate": "Predict what clients would see: run a workload through the real scheduler on a virtual clock.",
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
        return name, command_of(name), rest


def command_of(name: str) -> Any:
    """The command of that name, from its module: a function, or a group `app`."""
    module = importlib.import_module(f"headway.cli.{name}")
    return typer.main.get_command(getattr(module, "app", None) or getattr(module, name))


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


# The words for what a value must be, by the type of pydantic's error.
_MUST_BE = {
    "int_parsing": "it must be a whole number",
    "float_parsing": "it must be a number",
    "less_than_equal": "it must be at most {le:g}",
    "greater_than_equal": "it must be at least {ge:g}",
}


def _value_error(error: Any) -> str | None:
    """Names the option, its value and the limit, where pydantic refused the value."""
    errors, parameter = getattr(error.__cause__, "errors", None), getattr(error, "param", None)
    if errors is None or parameter is None:
        return None
    found = errors()[0]
    said = _MUST_BE.get(found["type"], "")
    if found["type"] == "value_error":
        said = "choose one of " + found["msg"].partition("is not one of ")[2].rstrip(".").replace("'", "")
        said += spellings.OF_VALUES.get(parameter.opts[0], "")
    name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.human_readable_name
    return f"{name} is {found['input']!r}; {said.format(**found.get('ctx', {}))}" if said else None


def _usage_error(error: Any, message: str) -> str:
    """Say a usage error in our words. For an unknown option, this names what it is called here."""
    if said := _value_error(error):
        return said
    if message == "Missing option '--hardware'.":
        return "give --hardware, such as H100-SXM; `headway plan --list` lists all"
    if message.startswith("Missing option"):
        return f"give {message.removeprefix('Missing option ').rstrip('.').replace(chr(39), '').split(' / ')[0]}"
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None or not hasattr(error, "possibilities"):
        return message
    parameters = context.command.params
    known = [name for each in parameters for name in each.opts if name.startswith("--")]
    takes_model = any(each.name == "model" and each.param_type_name == "argument" for each in parameters)
    near = spellings.hint(option, known, takes_model)
    where = " ".join(context.command_path.removesuffix("model").split())
    listing = f"{where} {'--help-all' if '--help-all' in known else '--help'} lists its options"
    return f"{where} has no option {option}; {near or listing}"


def main() -> NoReturn:
    """Run the command: bad input is one line on stderr and exit code 2."""
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
        # Typer's usage errors format themselves in one line. Their class is private to Typer.
        say = getattr(error, "format_message", None)
        if say is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(say())
        elif message := " ".join(_usage_error(error, say()).split()):
            print(f"headway: {message}", file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
