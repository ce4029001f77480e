"""`headway bench --start COMMAND --vary NAME=A,B`: the same loads on servers with different flags.

Each combination of values starts a server, which all loads are put on, one after the other. Each run is written when it
has ended and noted in a journal, so that the same command, also with further values, goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from headway.bench.interrupts import Interrupted, unless_stopped
from headway.bench.journal import Journal
from headway.bench.options import BenchOptions, ParetoOptions
from headway.bench.pareto import front_page, front_table, points_of
from headway.bench.profile.local_server import StartedServer
from headway.bench.report import verdict
from headway.bench.report.console import print_runs
from headway.bench.reporting import NOT_VALID, Reporting
from headway.bench.results import load_json
from headway.bench.runs import Bench, Load, is_made_up, load_name, load_of, sweep_loads
from headway.bench.session import Session
from headway.bench.start_command import check_placeholders, free_port, placeholders, words
from headway.load.errors import BenchError
from headway.report.console import print_table
from headway.report.page import write_page

READY_S = 900.0  # for a server to load, where --ready-check-timeout-sec does not say


@dataclass(frozen=True, slots=True)
class Setting:
    """A value for each name that is varied."""

    values: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values) or "as given"


def settings_of_servers(vary: dict[str, tuple[str, ...]]) -> list[Setting]:
    """All combinations, the last name changing first."""
    return [Setting(tuple(zip(vary, values, strict=True))) for values in itertools.product(*vary.values())]


def check(options: BenchOptions) -> None:
    """Raises BenchError where the options do not go together."""
    start = options.start or ""
    try:
        check_placeholders(start, options.vary)
    except ValueError as error:
        raise BenchError(str(error)) from None
    if unused := set(options.vary) - placeholders(start):
        raise BenchError(
            f"--vary has {min(unused)}, and --start no {{{min(unused)}}}; write it where its value belongs"
        )
    if options.find_max_rate or options.repeat_until:
        other = "--find-max-rate" if options.find_max_rate else "--repeat-until"
        raise BenchError(f"--start measures loads of one run each; leave out {other}")
    if not options.output.save:
        raise BenchError("--start goes on from the files of its runs; leave out --no-save-result")


class ServerSweep(Reporting):
    """Measures every cell: a setting of the server under a load. Arguments as those of Reporting.

    Attributes:
        folder: where its files are; another one for each start command and kind of load.
    """

    def __init__(self, options: BenchOptions, stop: asyncio.Event, out: Console, progress: Console) -> None:
        super().__init__(options, stop, out, progress)
        about = _about(options)
        digest = hashlib.sha256(repr(about).encode()).hexdigest()[:8]
        self.folder = options.output.result_dir / f"sweep-{digest}"
        self.failed: list[str] = []
        try:
            self._journal = Journal(self.folder / "sweep.jsonl", about)
        except ValueError as error:
            raise BenchError(str(error)) from None

    async def run(self) -> int:
        """Measure what is missing, and print what is there. Returns the exit code."""
        options = self.options
        loads = sweep_loads(options) if options.sweep else [load_of(options.workload, options.max_concurrency)]
        settings = settings_of_servers(options.vary)
        cells = [(setting, load) for setting in settings for load in loads]
        if known := sum(self._file(*cell) is not None for cell in cells):
            self.out.print(Text(f"{known} of {len(cells)} runs are there already, in {self.folder}"), soft_wrap=True)
        for setting in settings:
            missing = [load for load in loads if self._file(setting, load) is None]
            if self.stop.is_set() or not missing:
                continue
            try:
                await self._measure(setting, missing)
            except Interrupted:
                break
            except BenchError as error:
                self.failed.append(f"{setting.name}: {error}")
                self.out.print(Text(f"not measured: {self.failed[-1]}"), soft_wrap=True)
        files = [path for cell in cells if (path := self._file(*cell)) is not None]
        if self.stop.is_set():
            self.progress.print(f"Stopped: the same command goes on, by the journal in {self.folder}.", soft_wrap=True)
        if not files:
            if self.stop.is_set():
                raise Interrupted
            raise BenchError(f"nothing was measured; the first server: {self.failed[0]}")
        return self._told(files)

    async def _measure(self, setting: Setting, loads: Sequence[Load]) -> None:
        """Start a server and put the loads on it. Raises BenchError where it does not start or dies; Interrupted."""
        port, options = free_port(), self.options
        url = f"http://127.0.0.1:{port}"
        target = dataclasses.replace(options.target, base_url=url)
        command = words(options.start or "", dict(setting.values) | {"port": str(port)})
        server = StartedServer(command, url, target.ready_timeout_s or READY_S)
        async with contextlib.AsyncExitStack() as stack:
            with self.progress.status(f"Starting the server with {setting.name} ..."):
                await unless_stopped(self.stop, stack.enter_async_context(server))
                opening = Session.open(target, made_up=is_made_up(options.workload))
                session = await unless_stopped(self.stop, opening)
            for load in loads:
                name = f"{setting.name}, {load_name(load)}"
                label = " ".join(filter(None, (options.output.label, setting.name)))
                file = re.sub(r"[^\w.+=-]+", "-", name)[:80] + f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}.json"
                output = dataclasses.replace(options.output, label=label, result_dir=self.folder, result_filename=file)
                own = dataclasses.replace(options, target=target, output=output)
                bench = Bench(own, session, self.stop, self.out, self.progress)
                run = await bench.run(load, name)
                if died := server.died():
                    raise BenchError(f"{load_name(load)}: {died}")
                if run[0].interrupted:
                    raise Interrupted
                bench.write(run)
                self._journal.add(_question(setting, load), file)
                self.out.print(Text(f"{name}: {verdict.headline(*run)}"))

    def _file(self, setting: Setting, load: Load) -> Path | None:
        """The file of a cell that was measured; None of one that was not, or whose file is gone."""
        name = self._journal.answer(_question(setting, load))
        path = None if name is None else self.folder / str(name)
        return path if path is not None and path.is_file() else None

    def _told(self, files: Sequence[Path]) -> int:
        """Print the table, write the picture. Returns the exit code."""
        claims = self.claims
        runs = [(result, self.summarise(result)) for result in map(load_json, files)]
        try:
            points, left_out = points_of(files, ParetoOptions())
        except BenchError:  # too few runs for a front
            points, left_out = [], []
            print_runs(self.out, runs, claims)
        if points:
            print_table(self.out, front_table(points))
        for each in left_out:
            self.out.print(Text(f"left out: {each}"), soft_wrap=True)
        if points and self.output.report is not None:
            write_page(self.output.report, front_page(points))
            self.out.print(Text(f"Report: {self.output.report}", style="dim"), soft_wrap=True)
        if not points:
            self.report(runs)
        self.out.print(Text(f"Results: {self.folder}", style="dim"), soft_wrap=True)
        return self.exit_code(runs) or (NOT_VALID if self.failed else 0)


def _question(setting: Setting, load: Load) -> str:
    return f"{setting.name} | {load_name(load)}"


def _about(options: BenchOptions) -> dict[str, str]:
    """What two sweeps must have in common to be one: all but the values that are varied."""
    spec = dataclasses.replace(options.workload, arrival=None) if options.sweep else options.workload
    target = dataclasses.replace(options.target, api_key=None, tenant_keys={})
    limits = (options.max_concurrency, options.probe_rate, options.num_warmups, options.client_processes)
    return {
        "start": options.start or "",
        "varied": " ".join(options.vary),
        "load": repr((spec, limits, options.sweep and options.sweep.over)),
        "target": repr(target),
    }
