"""What becomes of runs that are over: numbers, files, what is printed, and a report."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from headway.bench.interrupts import Interrupted, interruptible
from headway.bench.options import BenchOptions, Output
from headway.bench.report import verdict
from headway.bench.report.console import print_brief, print_summary
from headway.bench.report.run_page import report_page
from headway.bench.results import default_file_name, to_json, write_csv, write_json
from headway.load.errors import BenchError
from headway.load.measures.numbers import Summary
from headway.load.measures.slo import goals_of
from headway.load.measures.summary import summarise_all
from headway.load.record import RunResult
from headway.report.page import write_page
from headway.report.parts import Section

VALID, NOT_VALID, INTERRUPTED = 0, 1, 130
Run = tuple[RunResult, list[Summary]]


def check_places(output: Output) -> None:
    """Check before the measurement, not after it, that its results can be written.

    Raises:
        BenchError: they cannot.
    """
    places = {"--result-dir": output.result_dir / (output.result_filename or "result.json")} if output.save else {}
    if output.report is not None:
        places["--report"] = output.report
    if output.csv and places["--result-dir"].suffix == ".csv":
        raise BenchError(
            f"--result-filename is {output.result_filename}, and so is the table of --csv; end it in .json"
        )
    for flag, path in places.items():
        check_place(flag, path)


def check_place(flag: str, path: Path) -> None:
    """Raises BenchError where no file can be made."""
    there = next((each for each in path.absolute().parents if each.exists()), path)
    if path.is_dir() or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise BenchError(f"cannot write {path}: no file can be made there; choose another place with {flag}")


class Reporting:
    """Keeps what comes of runs, and tells it.

    `title` is that of the report; where it is None, the report says what was run.

    Args:
        stop: is set when the user has had enough.
        out: the console for results.
        progress: the console for what happens meanwhile.
    """

    title: str | None = None
    keeps_probes = True  # those of a search; False where they cost nothing to repeat

    def __init__(self, options: BenchOptions, stop: asyncio.Event, out: Console, progress: Console) -> None:
        self.options, self.claims, self.output = options, options.claims, options.output
        self.stop, self.out, self.progress = stop, out, progress

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """May be interrupted by the user, which sets `stop`. Raises Interrupted."""
        try:
            with interruptible():
                yield
        except Interrupted:
            self.stop.set()
            raise

    def summarise(self, result: RunResult, notes: Sequence[str] = (), price: float | None = None) -> list[Summary]:
        """The numbers of a run.

        Args:
            notes: those of its workload.
            price: of all servers in an hour; None is that of the claims.
        """
        claims = self.claims
        summaries = summarise_all(
            result,
            percentiles=claims.percentiles,
            goals=goals_of(result.settings),
            price_per_hour=claims.price_per_hour if price is None else price,
        )
        summaries[0].notes.extend(notes)
        return summaries

    def save(self, run: Run, number: int | None = None, more: Mapping[str, Any] | None = None) -> None:
        """Write the files of one run that were asked for, and say where. Arguments are those of `write`."""
        if path := self.write(run, number, more):
            self.out.print(Text(f"Result: {path}", style="dim"), soft_wrap=True)

    def write(self, run: Run, number: int | None = None, more: Mapping[str, Any] | None = None) -> Path | None:
        """Write the files of one run that were asked for.

        Args:
            number: tells the runs of a sweep or search apart.
            more: further keys under "headway".

        Returns:
            The JSON file; None where none was asked for.
        """
        output, (result, summaries) = self.output, run
        if not output.save:
            return None
        name = Path(output.result_filename or default_file_name(result))
        if number is not None:
            name = name.with_stem(f"{name.stem}-{number}")
        path = output.result_dir / name
        values = to_json(result, summaries, percentiles=self.claims.percentiles, save_detailed=output.detailed)
        values["headway"] |= more or {}
        write_json(path, values)
        if output.csv:
            write_csv(path.with_suffix(".csv"), result)
        return path

    def report(self, runs: Sequence[Run], extra: Sequence[Section] = ()) -> None:
        """Write the HTML report, where one was asked for."""
        path = self.output.report
        if path is None or not runs:
            return
        try:
            with self.progress.status("Drawing the report ..."), self.stoppable():
                write_page(path, report_page(runs, extra=extra, title=self.title, claims=self.claims))
        except Interrupted:
            self.progress.print("Stopped: there is no report.")
            return
        self.out.print(Text(f"Report: {path}", style="dim"), soft_wrap=True)

    def print(self, run: Run) -> None:
        (print_summary if self.output.verbose else print_brief)(self.out, *run, self.claims)

    def exit_code(self, runs: Sequence[Run]) -> int:
        if self.stop.is_set():
            return INTERRUPTED
        return VALID if all(verdict.is_valid(*run, self.claims) for run in runs) else NOT_VALID
