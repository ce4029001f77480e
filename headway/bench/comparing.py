"""`--compare`: which differences between saved results are real."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from headway.bench.report.console import print_comparison
from headway.bench.report.run_page import comparison_page
from headway.bench.results import load_json
from headway.load.errors import BenchError
from headway.load.measures.compare import compare
from headway.load.measures.numbers import Summary
from headway.load.measures.summary import summarise_all
from headway.load.record import RunResult
from headway.report.page import write_page


def compare_files(a: Sequence[Path], b: Sequence[Path], report: Path | None = None) -> None:
    """Print how the runs of b differ from those of a, and write a report where one is wanted: it shows the first run
    of either side in full.

    Args:
        a, b: results of one run, or of three and more, on either side.

    Raises:
        BenchError: a file cannot be read, or the runs cannot be compared.
    """
    for paths in (a, b):
        if len({path.resolve() for path in paths}) < len(paths):
            raise BenchError(f"a file is given twice in {','.join(map(str, paths))}; name each run once")
    sides = [[load_json(path) for path in paths] for paths in (a, b)]
    names = [_name(runs, paths) for runs, paths in zip(sides, (a, b), strict=True)]
    if names[0] == names[1]:
        names = [str(a[0]), str(b[0]) if a[0] != b[0] else f"{b[0]} again"]
    comparison = compare(*sides)
    out = Console()
    print_comparison(out, comparison, *names)
    if report is None:
        return
    shown = {name: (runs[0], _summaries(runs[0])) for name, runs in zip(names, sides, strict=True)}
    written = write_page(report, comparison_page(comparison, shown))
    out.print(Text(f"Report: {written[0]}", style="dim"), soft_wrap=True)


def _summaries(run: RunResult) -> list[Summary]:
    of_classes = run.settings.get("goodput_by_class") or None
    return summarise_all(run, objectives=run.settings.get("goodput") or None, objectives_by_class=of_classes)


def _name(runs: Sequence[RunResult], paths: Sequence[Path]) -> str:
    label = runs[0].settings.get("label")
    name = str(label) if label else paths[0].stem
    return name if len(runs) == 1 else f"{name} and {len(runs) - 1} more"
