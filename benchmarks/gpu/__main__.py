"""Everything that a GPU is to show, in one command: `make gpu`. See benchmarks/README.md.

    python -m benchmarks.gpu [PART ...] [--again] [--seconds 540] [--results FOLDER]

It exits with 0 where all that could be run is well, 1 where something failed or is left for want of time, and 2 with
one line where nothing can be run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import environment
from benchmarks.gpu.parts import PARTS, ROOT, Part

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
SECONDS = 540.0
_MOST_SHARES = 8  # processes at a time, each with a context and models on the device
_LEAST_S = 10.0  # for a part: with less it is not begun


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the parts, and print what they found; returns the exit code."""
    arguments = parse(argv, parts)
    began = time.monotonic()
    packages = {*environment.NEEDED, *(name for part in parts for name in part.needs)}
    try:
        found = environment.look(tuple(sorted(packages)))
        if arguments.device == "cuda":
            environment.check(found)
        elif missing := [name for name in found["missing"] if name in environment.NEEDED]:
            raise environment.NotHere(f"{found['python']['executable']} has no {', '.join(missing)}")
    except environment.NotHere as reason:
        print(f"gpu: {reason}", file=sys.stderr)
        return 2
    return _run(arguments, parts, found, began)


def _run(arguments: argparse.Namespace, parts: Sequence[Part], found: dict[str, Any], began: float) -> int:
    from benchmarks.gpu import tables
    from benchmarks.gpu.record import Record

    name = found["gpus"][0]["name"] if arguments.device == "cuda" else platform.processor() or platform.machine()
    record = Record.open(arguments.results, found, name)
    print(tables.heading(found, record.commit), flush=True)
    log = record.path.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts if part.name in (arguments.part or [each.name for each in parts])]
    try:
        for part in chosen:
            if arguments.again:
                record.parts.pop(part.name, None)
            _run_part(part, record, found["missing"], log, arguments, began + arguments.seconds)
    except KeyboardInterrupt:
        print("gpu: interrupted; the same command goes on where this one was", file=sys.stderr)
        return 130
    finally:
        print(tables.report(record, [part.name for part in chosen], log), flush=True)
    bad = any(record.kept(part.name).errors or record.kept(part.name).cut for part in chosen)
    return 1 if bad else 0


def _run_part(
    part: Part, record: Any, missing: list[str], log: Path, arguments: argparse.Namespace, deadline: float
) -> None:
    from benchmarks.gpu import runner

    if record.is_done(part.name):
        print(f"{part.name}: done before, {record.parts[part.name]['date']}", flush=True)
        return
    outcome, lacking = record.kept(part.name), [name for name in part.needs if name in missing]
    if lacking:
        print(f"{part.name}: left out, there is no {', '.join(lacking)}", flush=True)
        record.add(part.name, runner.Outcome(), lacking, 0.0)
        return
    seconds = min(part.seconds, deadline - time.monotonic())
    if seconds < _LEAST_S:
        print(f"{part.name}: left for want of time", flush=True)
        outcome.cut = True
        record.add(part.name, outcome, [], 0.0)
        return
    print(f"{part.name}: {part.says} ({seconds:.0f} s at most)", flush=True)
    with log.open("a") as file:
        file.write(f"\n== {part.name}\n")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headway-gpu-") as name:
        folder = Path(name)
        machine = folder / "machine.json"
        machine.write_text(json.dumps(_machine(record, arguments.device, folder)))
        try:
            count = min(_MOST_SHARES, (os.cpu_count() or 1) // 2) if part.shared else 1
            runner.run_shared(
                lambda lines, done: part.command(lines, done, machine),
                *(outcome, log, folder, seconds, part.task_seconds, max(1, count)),
            )
        except KeyboardInterrupt:
            outcome.cut = True
            raise
        finally:
            record.add(part.name, outcome, [], time.monotonic() - began)
    failed, left = len(outcome.errors), f", {len(outcome.left)} left" if outcome.cut else ""
    print(f"  {len(outcome.tasks)} tasks, {failed} failed{left}, {time.monotonic() - began:.0f} s", flush=True)


def _machine(record: Any, device: str, folder: Path) -> dict[str, Any]:
    """The fields of part.Machine, as JSON has them."""
    calibrations = record.rows("calibration")
    return {
        "device": device,
        "small": device == "cpu",
        "folder": str(folder),
        "limits": {row["name"]: row["rate"] for row in record.rows("limits")},
        "peaks": calibrations[-1]["machine"]["peaks"] if calibrations else None,
    }


def parse(argv: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    described = "\n".join(f"  {part.name:12} {part.says}" for part in parts)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=f"Measure this machine's GPU and find what is wrong with the CUDA path.\n\nparts:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="*", help="only these parts; default: all, in this order")
    parser.add_argument("--again", action="store_true", help="run also what is done with the same sources and versions")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together (%(default).0f)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result and of all output")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes, to try the parts")
    arguments = parser.parse_args(argv)
    names = [part.name for part in parts]
    if unknown := [name for name in arguments.part if name not in names]:
        parser.error(f"there is no part {', '.join(unknown)}; choose of {', '.join(names)}")
    if arguments.seconds < _LEAST_S:
        parser.error(f"--seconds is {arguments.seconds:g}; it must be at least {_LEAST_S:.0f}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
