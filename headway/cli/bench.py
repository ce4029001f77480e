"""`headway bench`: measure any OpenAI-compatible endpoint, and its commands beside that."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.bench.mock import MockOptions, MockServer
from headway.bench.options import BenchOptions, ParetoOptions
from headway.bench.profile.options import ProfileOptions
from headway.cli.commands import fail, with_flags
from headway.cli.help import Command, Group
from headway.cli.quality import quality
from headway.installation import require_engine


class BenchGroup(Group):
    """Says what is wrong where an address stands in the place of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith(("http://", "https://")):
            fail(f"give the address with an option: headway bench --base-url {args[0]}")
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="bench", cls=BenchGroup, invoke_without_command=True, subcommand_metavar="[COMMAND]", add_completion=False
)


@app.callback()
@with_flags
def bench(
    context: typer.Context,
    options: BenchOptions,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            help="Compare two results and tell real differences from noise. Join several runs of a side with commas.",
            rich_help_panel="Results",
            metavar="A.json B.json",
        ),
    ] = None,
) -> None:
    """Measure any OpenAI-compatible server, and show where the time goes."""
    given = {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")
    }
    if context.invoked_subcommand is not None:
        _refuse_others(given, set(), f"headway bench {context.invoked_subcommand}")
        return
    if compare is not None:
        _refuse_others(given, {"config", "compare", "report"}, "--compare")
        from headway.bench.jobs import compare_files

        a, b = ([Path(path) for path in side.split(",")] for side in compare)
        compare_files(a, b, options.output.report)
        return
    _needs(given, options)
    from headway.bench.jobs import run_job, with_arrivals

    raise typer.Exit(run_job(with_arrivals(options)))


def _refuse_others(given: set[str], allowed: set[str], where: str) -> None:
    for name in sorted(given - allowed):
        fail(f"--{name.replace('_', '-')} does not apply to {where}; leave it out")


def _needs(given: set[str], options: BenchOptions) -> None:
    """Refuse flags that say something about another one that was not given."""
    target, output = options.target, options.output
    for when, there, names in (
        ("with --find-max-rate", options.find_max_rate, ("max_search_seconds", "stall_seconds")),
        ("with --repeat-until", options.repeat_until, ("max_repeats",)),
        ("with --goodput or --mix", options.claims.objectives or options.workload.mix, ("slo_attainment",)),
        ("with --save-result", output.save, ("save_detailed", "csv", "result_dir", "result_filename", "metadata")),
        ("with --save-result or --report", output.save or output.report, ("label",)),
        ("with an https:// address", target.url.startswith("https://"), ("insecure",)),
        ("without --base-url", not target.base_url, ("host", "port")),
        ("with --start", options.start, ("vary",)),
        ("without --start", not options.start, ("base_url", "host", "port", "result_filename")),
    ):
        for name in names:
            if name in given and not there:
                fail(f"--{name.replace('_', '-')} works only {when}")
    if "request_rate" in given and options.sweep is not None and options.sweep.over == "rate":
        fail("--sweep rate sets the request rates; leave out --request-rate")


@app.command(cls=Command)
@with_flags
def profile(options: ProfileOptions) -> None:
    """Serve a model, measure one request at a time, and compare each stage with the hardware's limit.

    With --base-url, measure a server that runs already.

    Ends with exit code 1 when a request failed.
    """
    if options.base_url is None or options.model is not None:
        require_engine()

    raise typer.Exit(asyncio.run(_profile(options)))


async def _profile(options: ProfileOptions) -> int:
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


app.command(cls=Command)(quality)


@app.command(cls=Command)
@with_flags
def mock(options: MockOptions) -> None:
    """Serve the OpenAI API without a model, at the times and with the faults that are asked for. Ctrl-C ends it."""
    import uvloop

    server = MockServer(options)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(server))
    except KeyboardInterrupt:
        print(f"Answered {server.answered:,} requests.")


async def _serve(server: MockServer) -> None:
    async with server.listening() as address:
        print(f"Serving {address}, without a model. Ctrl-C ends it.", flush=True)
        await asyncio.Event().wait()


@app.command(cls=Command)
@with_flags
def pareto(
    files: Annotated[list[Path], typer.Argument(metavar="RESULT.json...", help="Saved results of two runs or more.")],
    options: ParetoOptions,
) -> None:
    """Draw saved runs by tokens/s of a user against tokens/s of a device, and find those that no other one beats.

    Runs with the same --label, or of the same sweep, are one configuration.
    """
    from rich.console import Console
    from rich.text import Text

    from headway.bench.pareto import front_page, front_table, points_of
    from headway.report.console import print_table
    from headway.report.page import write_page

    out = Console()
    points, left_out = points_of(files, options)
    print_table(out, front_table(points))
    for each in left_out:
        out.print(Text(f"left out: {each}"), soft_wrap=True)
    if options.report is not None:
        write_page(options.report, front_page(points))
        out.print(Text(f"Report: {options.report}", style="dim"), soft_wrap=True)
