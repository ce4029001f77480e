"""Results in a terminal: what `headway bench` prints when a run is over."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from headway.bench.options import Claims
from headway.bench.report import tables, verdict
from headway.bench.report.brief import brief, fleet_line
from headway.bench.report.comparison import comparison_banners, comparison_table, settings_table
from headway.bench.report.search import search_banners, search_table
from headway.bench.report.views import Run, load_name, load_of
from headway.load.measures.compare import Comparison
from headway.load.measures.numbers import Summary
from headway.load.measures.search import SearchResult
from headway.load.record import RunResult
from headway.report.console import print_banner, print_lines, print_table


def print_brief(
    console: Console, result: RunResult, summaries: Sequence[Summary], claims: Claims = verdict.USUAL
) -> None:
    """A run in about ten lines; the summaries are those of `summarise_all`."""
    print_lines(console, list(brief(result, summaries, claims)))


def print_summary(
    console: Console, result: RunResult, summaries: Sequence[Summary], claims: Claims = verdict.USUAL
) -> None:
    """Everything that a run says, the verdict last, where the eye ends."""
    parts = [
        tables.overview(summaries),
        *tables.latency_tables(summaries),
        *tables.part_tables(summaries),
        tables.probe_table(summaries),
        tables.phase_table(summaries[0]),
        tables.metrics_table(result.server.get("metrics") or {}),
        tables.failure_table(result),
        tables.client_table(result.client),
    ]
    for table in parts:
        if table is not None:
            print_table(console, table)
    if fleet := fleet_line(result.server):
        print_lines(console, [fleet])
    for note in verdict.other_notes(summaries[0]):
        console.print(Text(f"note: {note}", style="yellow"))
    console.print()
    for banner in reversed(verdict.banners(result, summaries, claims)):
        print_banner(console, banner)
    console.print(Text(verdict.headline(result, summaries, claims), style="bold"))


def print_runs(console: Console, runs: Sequence[Run], claims: Claims = verdict.USUAL) -> None:
    """A sweep: a row for each run, by rising load, and up to which load the objectives held."""
    ordered, load = sorted(runs, key=lambda run: load_of(run[0])), load_name([result for result, _ in runs])
    print_table(console, tables.sweep_table(ordered, load, claims, intervals=False))
    for banner in reversed(verdict.of_runs(ordered, claims.attainment)):
        print_banner(console, banner)


def print_comparison(console: Console, comparison: Comparison, a: str = "a", b: str = "b") -> None:
    """Print which differences between two sides are real: the conclusion, then the table. a and b are their names."""
    for banner in comparison_banners(comparison, a, b):
        print_banner(console, banner)
    print_table(console, comparison_table(comparison, a, b))
    settings = settings_table(comparison)
    if settings is not None:
        print_table(console, settings)


def print_search(console: Console, found: SearchResult, target: float = 0.99) -> None:
    """The rates that were tried, and the highest that held."""
    print_table(console, search_table(found))
    for banner in reversed(search_banners(found, target)):
        print_banner(console, banner)
