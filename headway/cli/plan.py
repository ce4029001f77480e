"""`headway plan`: what to expect of a model on hardware before either is there."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.commands import fail, with_flags
from headway.cli.help import Command, Group
from headway.planner.request import PlanError, PlanOptions, PlanRequest, SpeculationFlags


class PlanGroup(Group):
    """`headway plan MODEL ...`: what is not the name of another command is of the command for one model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = ["model", *(args or ["--help"])]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == "model" else name), command, rest


app = typer.Typer(
    name="plan",
    cls=PlanGroup,
    add_completion=False,
    help="Predict memory, TTFT, TPOT, throughput and cost of a model on given hardware, and what limits them.",
)


def _list_all(wanted: bool) -> None:
    """The callback of --list."""
    if not wanted:
        return
    from headway.cost import catalogue
    from headway.planner.resolve import calibrated

    print("Models (or a folder with a config.json):")
    for key, model in catalogue.models().items():
        print(f"  {key.ljust(24)}  {model.parameters_b:g}B in {model.weights}")
    print("\nHardware:")
    machines = [each.hardware for each in calibrated("")]
    for device in [*machines, *catalogue.hardware().values()]:
        memory, rate = device.memory_bytes / 2**30, device.bytes_per_s / 1e9
        print(f"  {device.key.ljust(24)}  {memory:,.0f} GiB, {rate:,.0f} GB/s{', calibrated here' * device.measured}")
    if not machines:
        print("\nTo add this machine, run `headway calibrate`.")
    raise typer.Exit


List = Annotated[
    bool,
    typer.Option("--list", callback=_list_all, is_eager=True, help="List the known models and hardware, and exit."),
]
_output = functools.partial(typer.Option, rich_help_panel="Output")
Json = Annotated[bool, _output("--json", help="Print JSON and nothing else.")]


@app.command("model", cls=Command, hidden=True)
@with_flags
def plan(
    request: PlanRequest,
    speculation: SpeculationFlags,
    as_json: Json = False,
    list_all: List = False,
    verbose: Annotated[bool, _output("--verbose", help="Print all tables and assumptions.")] = False,
    explain: Annotated[bool, _output("--explain", help="Print each formula with its numbers and its source.")] = False,
    plot: Annotated[
        Path | None, _output(metavar="DIR", help="Also write plan.html and its figures to this folder.")
    ] = None,
) -> None:
    """Predict memory, TTFT, TPOT, throughput and cost of a model on given hardware, and what limits them.

    Ends with exit code 1 when the model or the load does not fit. See also: plan compare, plan levers.
    """
    from headway.planner.make import make_plan

    outputs = [name for name, wanted in (("--json", as_json), ("--explain", explain), ("--verbose", verbose)) if wanted]
    if len(outputs) > 1:
        fail(f"{' and '.join(outputs)} contradict each other; give one")
    made = make_plan(replace(request, speculation=speculation.speculation()))
    written: list[Path] = []
    if plot is not None:  # before anything is printed, so that an error about the folder is all that is said
        from headway.planner.page import write_plan

        written = write_plan(plot.expanduser(), made)
    if as_json:
        from headway.planner.json import to_json

        print(to_json(made))
    else:
        from rich.console import Console

        from headway.planner.console import print_brief, print_explained, print_plan

        (print_explained if explain else print_plan if verbose else print_brief)(made, Console())
        if written:
            print(f"\nWrote {written[0]} and {len(written) - 1} pictures.")
    raise typer.Exit(1 if made.problem else 0)


@app.command("compare", cls=Command)
@with_flags
def compare(
    plans: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL@HARDWARE...",
            help="Such as llama-3.1-8b@H100-SXM @2xL40S:quantization=fp8,tp=2: a missing model or "
            "hardware is that of the first plan; a count goes before the hardware, flags of one plan after a colon.",
        ),
    ],
    shared: PlanOptions,
    speculation: SpeculationFlags,
    as_json: Json = False,
) -> None:
    """Compare plans side by side. Flags apply to all of them; a plan's own flags override them.

    The best value of each row is marked *, and values that cannot be distinguished from it ~.

    The exit code is 1 if none of the plans works.
    """
    from headway.planner.compare import comparison_json, count_hint, merged, parse_plans, print_comparison
    from headway.planner.make import make_plan

    made, wanted = [], parse_plans(plans)
    for each in wanted:
        try:
            made.append(make_plan(merged(shared, speculation, each)))
        except PlanError as error:
            fail(f"plan {each.text!r}: {error}{count_hint(each)}")
    if as_json:
        print(comparison_json(wanted, made))
    else:
        from rich.console import Console

        print_comparison(made, Console())
    raise typer.Exit(1 if all(each.problem for each in made) else 0)


@app.command("levers", cls=Command)
@with_flags
def levers(
    request: PlanRequest,
    speculation: SpeculationFlags,
    objective: Annotated[
        str | None,
        typer.Option(
            rich_help_panel="Objectives and price",
            help="What to rank by: ttft, tpot, e2el, throughput (of a device) or cost. Default: the first of --slo "
            "that is missed, else throughput.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rank changes to a plan by their gain: precision, batch, speculation, prefixes, parallelism, hardware.

    Each row changes one thing of the plan that the flags describe; then the best changes are combined.

    The exit code is 1 if the plan does not fit and no change makes it fit.
    """
    from rich.console import Console

    from headway.planner.levers import find_levers

    asked = replace(request, speculation=speculation.speculation())
    with Console(stderr=True).status("trying changes") as status:
        found = find_levers(asked, objective, lambda made: status.update(f"trying changes: {made} plans made"))
    from headway.planner.levers_report import print_levers, to_json

    if as_json:
        print(to_json(found))
    else:
        print_levers(found, Console())
    raise typer.Exit(0 if found.base.fits or found.ranked else 1)
