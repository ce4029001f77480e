"""What `headway bench` does: one run, a sweep, a search, or a comparison of runs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from headway.bench.interrupts import Interrupted, interrupts, unless_stopped
from headway.bench.max_rate import search
from headway.bench.options import BenchOptions
from headway.bench.repeats import repeat
from headway.bench.report import verdict
from headway.bench.report.console import print_comparison, print_runs
from headway.bench.report.run_page import comparison_page
from headway.bench.reporting import INTERRUPTED, NOT_VALID, Run, check_places
from headway.bench.results import load_json
from headway.bench.runs import Bench, Runner, is_made_up, load_name, load_of, sweep_loads
from headway.bench.server_sweep import ServerSweep, check
from headway.bench.session import Session
from headway.load.errors import BenchError
from headway.load.measures.compare import compare
from headway.load.measures.numbers import Summary
from headway.load.measures.slo import goals_of
from headway.load.measures.summary import summarise_all
from headway.load.record import RunResult
from headway.load.workload.arrivals import make_arrival
from headway.report.page import write_page


def run_job(options: BenchOptions) -> int:
    """Do what was asked, print what was found, write the results.

    Returns:
        The exit code: 0 for a valid run, 1 for one whose numbers are not the server's (nothing or too little was
        answered, the client could not keep up), 130 when it was interrupted.

    Raises:
        BenchError: bad input, or no server to measure.
    """
    import uvloop

    check_places(options.output)
    if options.start is not None:
        check(options)
    progress = Console(stderr=True)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run_job(options, progress))
    except Interrupted:
        progress.print("Stopped: nothing was measured.")
    except asyncio.CancelledError:
        progress.print("Stopped at once: the last measurement is lost.")
    return INTERRUPTED


async def _run_job(options: BenchOptions, progress: Console) -> int:
    out, stop = Console(), asyncio.Event()
    with interrupts(stop, progress):
        if options.start is not None:
            return await ServerSweep(options, stop, out, progress).run()
        with progress.status("Looking at the server ..."):
            opening = Session.open(options.target, made_up=is_made_up(options.workload))
            session = await unless_stopped(stop, opening)
        return await carry_out(Bench(options, session, stop, out, progress))


async def carry_out(bench: Runner) -> int:
    """The runs that its options ask for. Returns the exit code.

    Raises:
        BenchError: bad input, or nothing could be measured.
        Interrupted: before anything was measured.
    """
    if bench.options.repeat_until:
        if bench.options.find_max_rate or bench.options.sweep is not None:
            raise BenchError("--repeat-until repeats a single load; leave out --sweep and --find-max-rate")
        return await repeat(bench)
    if bench.options.find_max_rate:
        if bench.options.stop_at:
            raise BenchError("--stop-at would end the runs by which --find-max-rate decides; leave one of them out")
        return await search(bench)
    if bench.options.sweep is not None:
        return await _sweep(bench)
    return await _single(bench)


async def _single(bench: Runner) -> int:
    run = await bench.run(load_of(bench.options.workload, bench.options.max_concurrency))
    bench.print(run)
    bench.save(run)
    bench.report([run])
    return bench.exit_code([run])


async def _sweep(bench: Runner) -> int:
    """One run after the other: the same arrivals and lengths, so that points compare, and new prompts in each, so that
    none finds its own in the server's prefix cache.

    A server that is lost on the way ends the sweep; what was measured before is kept.
    """
    runs: list[Run] = []
    lost = False
    for number, load in enumerate(sweep_loads(bench.options), start=1):
        if bench.stop.is_set():
            break
        try:
            run = await bench.run(load, load_name(load))
        except Interrupted:
            break
        except BenchError as error:
            if not runs:
                raise
            bench.out.print(Text(f"{load_name(load)}: not measured: {error}"))
            lost = True
            break
        if bench.output.verbose:
            bench.print(run)
        bench.save(run, number)
        bench.out.print(Text(f"{load_name(load)}: {verdict.headline(*run)}"))
        runs.append(run)
        if "ended_early" in run[0].settings:
            break
    if not runs:
        raise Interrupted
    print_runs(bench.out, runs, bench.options.claims)
    bench.report(runs)
    return NOT_VALID if lost else bench.exit_code(runs)


def with_arrivals(options: BenchOptions) -> BenchOptions:
    """The workload with the arrival process that the flags describe. Raises BenchError where they describe none."""
    flags, spec, sweep = options.arrivals, options.workload, options.sweep
    has_rate = flags.arrival in ("poisson", "gamma", "constant") or flags.burstiness is not None
    if sweep is not None and sweep.over == "rate" and has_rate:
        flags = dataclasses.replace(flags, request_rate=sweep.values[0])  # the process is made with it, then for each
    arrival = make_arrival(flags, None if spec.mix else spec.dataset_name)
    return dataclasses.replace(options, workload=dataclasses.replace(spec, arrival=arrival))


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
    return summarise_all(run, goals=goals_of(run.settings))


def _name(runs: Sequence[RunResult], paths: Sequence[Path]) -> str:
    label = runs[0].settings.get("label")
    name = str(label) if label else paths[0].stem
    return name if len(runs) == 1 else f"{name} and {len(runs) - 1} more"
