"""`headway calibrate`: measure the machine it runs on, and store it for every command that plans."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headway.cli.commands import command, fail
from headway.installation import require_engine

if TYPE_CHECKING:
    from rich.console import Console

    from headway.calibration.store import CalibratedMachine

_PROGRESS = re.compile(r"([01]\.\d{4}) (.+)")  # the share that is done, and what is being measured
_REDRAWS = 2  # a second: drawing takes time of the machine that is measured


@command()
def calibrate(
    name: Annotated[
        str | None, typer.Option(help="Name of the entry. Default: from the processor's or GPU's name.")
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="What to measure.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: as headway serve.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute; coarse.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Several minutes: more sizes and repeats.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the entry here, and store nothing.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the entry as JSON and nothing else.")] = False,
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Only choose the fastest CPU kernels again, and compile those of most models."),
    ] = False,
) -> None:
    """Measure this machine (one to three minutes), so that `headway plan` can plan for it.

    Use an idle machine. Ctrl-C ends the measurement and writes nothing.
    """
    require_engine()

    from rich.console import Console

    from headway.calibration.store import check_name, check_place, path_of, save

    if quick and full:
        fail("--quick and --full contradict each other; give one")
    if kernels:
        if any((name, device == "cuda", threads, quick, full, output)):
            fail("--kernels measures one thread of the CPU for itself; give no other option than --json")
        _kernels(as_json)
        return
    effort = ["--quick"] if quick else ["--full"] if full else []
    try:
        if name is not None:
            check_name(name)
        check_place(output)
        machine = _measured(
            ["--machine", *effort, *_given("--name", name), *_given("--threads", threads), "--device", device]
        )
        key = machine.hardware.key
        known = output is None and path_of(key).exists()
        path = save(machine, output)
    except ValueError as error:
        fail(str(error))
    if as_json:
        sys.stdout.write(machine.to_json().decode() + "\n")
        return
    console = Console()
    print_machine(console, machine)
    console.print(f"{'Replaced' if known else 'Written to'} {path}", highlight=False, soft_wrap=True)
    if output is None:
        console.print(f"To plan with it: headway plan MODEL --hardware {key}", highlight=False, soft_wrap=True)


def _kernels(as_json: bool) -> None:
    from rich.console import Console

    from headway.cli.machine_tables import kernels_table
    from headway.report.console import print_table

    try:
        with _shown() as show:
            printed = _run(["--kernels"], show)
    except ValueError as error:
        fail(str(error))
    if as_json:
        sys.stdout.write(printed.decode())
    else:
        print_table(Console(), kernels_table(json.loads(printed)))


def _given(flag: str, value: object) -> list[str]:
    return [] if value is None else [flag, str(value)]


def _measured(arguments: list[str]) -> CalibratedMachine:
    from headway.calibration.store import CalibratedMachine

    with _shown() as show:
        return CalibratedMachine.from_json(_run(arguments, show))


@contextmanager
def _shown() -> Iterator[Callable[[float, str], None]]:
    """The progress of a process of its own, which needs torch; on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, refresh_per_second=_REDRAWS, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("starting", total=1.0)

        def show(done: float, stage: str) -> None:
            progress.update(task, completed=done, description=stage)

        yield show


def _run(arguments: list[str], on_progress: Callable[[float, str], None]) -> bytes:
    """Run the calibration in a child process and return what it prints.

    Raises:
        ValueError: it could not measure; its last words.
    """
    from headway.bench.profile.machine import run_calibration

    def on_line(line: str) -> None:
        if found := _PROGRESS.fullmatch(line):
            on_progress(float(found[1]), found[2])

    code, last, printed = asyncio.run(run_calibration(arguments, on_line))
    if code != 0:
        raise ValueError(last.removeprefix("headway: ") if code == 2 else f"measuring ended with code {code}: {last}")
    return printed


def print_machine(console: Console, machine: CalibratedMachine) -> None:
    """Print what was measured, figure by figure, with its meaning, and then the warnings."""
    from headway.cli.machine_tables import engine_table, machine_table
    from headway.report.console import print_banner, print_table
    from headway.report.parts import Banner

    print_table(console, machine_table(machine))
    print_table(console, engine_table(machine))
    if machine.busy:
        print_banner(
            console, Banner("the machine was busy", (f"{machine.busy}; calibrate again when it is quiet",), "warn")
        )
