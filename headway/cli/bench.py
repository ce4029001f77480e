"""`headway bench`: measure any OpenAI-compatible endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headway.bench.options import BenchOptions
from headway.cli.commands import fail, fold_objectives, with_flags
from headway.cli.help import Command, Group
from headway.cli.mock import mock
from headway.cli.pareto import pareto
from headway.cli.profile import profile
from headway.cli.quality import quality
from headway.load.errors import BenchError


class BenchGroup(Group):
    """Takes `--goodput ttft:200 tpot:50` as vLLM does: an option with as many values as follow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith(("http://", "https://")):
            fail(f"give the address with an option: headway bench --base-url {args[0]}")
        folded: list[str] = super().parse_args(ctx, fold_objectives(args))
        return folded


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
    from headway.report.page import ReportError

    try:
        if compare is not None:
            _refuse_others(given, {"config", "compare", "report"}, "--compare")
            from headway.bench.comparing import compare_files

            a, b = ([Path(path) for path in side.split(",")] for side in compare)
            compare_files(a, b, options.output.report)
            code = 0
        else:
            _needs(given, options)
            from headway.bench.jobs import run_job, with_arrivals

            code = run_job(with_arrivals(options))
    except (BenchError, ReportError) as error:
        fail(str(error))
    raise typer.Exit(code)


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


app.command(cls=Command)(profile)
app.command(cls=Command)(quality)
app.command(cls=Command)(mock)
app.command(cls=Command)(pareto)
