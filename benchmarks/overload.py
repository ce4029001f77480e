"""What becomes of a server that gets five times what it can serve, and of those whom it admits.

    python -m benchmarks.overload

First a closed loop shows how many requests a second the server ends when it is full: its capacity. Then requests come
at half of that, at --times that rate, and at half of it again. The class of all requests refuses those whose first
token can't be in time. The figures: of the admitted requests those that kept their objectives, how soon the others
were refused, what failed in another way, the memory of the server's processes, and how long after the end of the
overload requests still missed. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.classes import MIXES
from benchmarks.clients import HEADWAY
from benchmarks.machine import RESULTS, keep
from benchmarks.processes import Died
from benchmarks.servers import CHECKPOINTS, MODEL, Server, Settings, running
from benchmarks.weights import write_weights
from headway.bench.results import load_json
from headway.load.measures.slo import missed_objectives
from headway.load.record import RequestRecord, RunResult

MIX = MIXES / "overload.toml"
CLASSES = """[[class]]
name = "interactive"
ttft_ms = 1000
tpot_ms = 100
when_late = "refuse"

[[class]]
name = "offline"
"""
REFUSALS = (429, 503)
USERS = 32  # users in the closed loop


@dataclass(frozen=True)
class Figures:
    """Figures of one stretch of load. Times are milliseconds; they are 0 if there was no request.

    Args:
        offered: requests a second.
        met: of those that were answered, the share that kept all objectives.
        refused: with a typed answer that says when to come again.
        failed: in any other way.
        memory_mb: of the server's processes at its end.
        last_miss_s: when, from its beginning on, the last request came that was refused or missed an objective.
    """

    offered: float
    seconds: float
    requests: int
    answered: int
    met: float
    ttft_p99_ms: float
    itl_p99_ms: float
    refused: int
    refusal_p50_ms: float
    refusal_p99_ms: float
    failed: int
    memory_mb: float
    last_miss_s: float


def put(server: Server, flags: list[str], shape: str, seconds: float, seed: int) -> RunResult:
    """One run of `headway bench`. Raises Died where it leaves no result."""
    with tempfile.TemporaryDirectory(prefix="bench-client-") as folder:
        command = [*HEADWAY, "--base-url", server.url, "--model", MODEL, "--duration", str(seconds), *flags]
        command += ["--tokenizer", str(CHECKPOINTS / shape), "--seed", str(seed), "--result-dir", folder]
        done = subprocess.run(
            [*command, "--result-filename", "result.json"], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        file = Path(folder) / "result.json"
        if not file.exists():
            raise Died(f"the client left no result (exit code {done.returncode}):\n{done.stdout}\n{done.stderr}")
        return load_json(file)


def is_refused(record: RequestRecord) -> bool:
    failure = record.failure
    return failure is not None and failure.status in REFUSALS and "Retry-After" in failure.message


def figures(run: RunResult, offered: float, seconds: float, memory_mb: float) -> Figures:
    missed = missed_objectives(run.records, run.settings["goodput_by_class"])
    answered = [record for record in run.records if record.ok]
    refused = [record for record in run.records if is_refused(record)]
    met = [record for record in answered if missed.get(record.index) == ()]
    bad = [record.scheduled_ns for record in run.records if missed.get(record.index) != ()]
    ttft = [(record.first_token_ns - record.scheduled_ns) / 1e6 for record in answered]
    itl = [gap / 1e6 for record in answered for gap in np.diff(np.asarray(record.chunk_ns))]
    refusal = [(record.end_ns - record.scheduled_ns) / 1e6 for record in refused]
    return Figures(
        offered=offered,
        seconds=seconds,
        requests=len(run.records),
        answered=len(answered),
        met=len(met) / max(1, len(answered)),
        ttft_p99_ms=_percentile(ttft, 99),
        itl_p99_ms=_percentile(itl, 99),
        refused=len(refused),
        refusal_p50_ms=_percentile(refusal, 50),
        refusal_p99_ms=_percentile(refusal, 99),
        failed=len(run.records) - len(answered) - len(refused),
        memory_mb=memory_mb,
        last_miss_s=max(0.0, (max(bad) - run.began_ns) / 1e9) if bad else 0.0,
    )


def _percentile(values: list[float], which: float) -> float:
    return float(np.percentile(values, which)) if values else 0.0


def memory_mb(group: int) -> float:
    """Resident memory of all processes of a group."""
    done = subprocess.run(["ps", "-e", "-o", "pgid=,rss="], capture_output=True, text=True, check=True)
    rows = (line.split() for line in done.stdout.splitlines())
    return sum(int(rss) for pgid, rss in rows if int(pgid) == group) / 1024


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    write_weights(arguments.shape, CHECKPOINTS)
    with tempfile.TemporaryDirectory(prefix="overload-") as folder:
        classes = Path(folder) / "classes.toml"
        classes.write_text(CLASSES)
        flags = ["--service-classes", str(classes), "--max-num-seqs", str(arguments.streams)]
        settings = Settings(arguments.shape, os.cpu_count() or 1, arguments.context, arguments.streams)
        with running("headway", sys.executable, settings, "headway", flags) as server, server.awake():
            return measure(server, arguments)


def measure(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    full = [
        "--random-input-len",
        "200",
        "--random-output-len",
        "48",
        "--max-concurrency",
        str(USERS),
        "--num-prompts",
        "5000",
    ]
    full += ["--extra-body", '{"service_class": "offline"}']  # refusals would let a closed loop spin
    closed = put(server, full, arguments.shape, arguments.seconds_beside, seed=0)
    capacity = sum(record.ok for record in closed.records) / closed.duration_s
    print(f"capacity: {capacity:.2f} requests/s", file=sys.stderr)
    stretches = [
        ("before", capacity / 2, arguments.seconds_beside),
        ("overload", capacity * arguments.times, arguments.seconds),
        ("after", capacity / 2, arguments.seconds_beside),
    ]
    found: dict[str, Figures] = {}
    for seed, (name, rate, seconds) in enumerate(stretches, start=1):
        mix = ["--mix", str(MIX), "--time-scale", str(rate)]
        ran = put(server, mix, arguments.shape, seconds, seed)
        found[name] = figures(ran, rate, seconds, memory_mb(server.process_group))
        print(f"{name}: {found[name]}", file=sys.stderr)
    return {
        "capacity": capacity,
        "stretches": {name: asdict(each) for name, each in found.items()},
    }


def table(content: dict[str, Any]) -> str:
    """Markdown, a row for each stretch."""
    heads = {
        "offered": "requests/s",
        "requests": "requests",
        "answered": "answered",
        "met": "of these in time",
        "ttft_p99_ms": "TTFT P99, ms",
        "itl_p99_ms": "ITL P99, ms",
        "refused": "refused",
        "refusal_p50_ms": "after, P50, ms",
        "refusal_p99_ms": "P99, ms",
        "failed": "failed",
        "memory_mb": "memory, MB",
        "last_miss_s": "last miss, s",
    }
    lines = [f"| | {' | '.join(heads.values())} |", "|---" + "|---:" * len(heads) + "|"]
    for name, row in content["stretches"].items():
        shown = [f"{row[key]:.1%}" if key == "met" else f"{row[key]:.4g}" for key in heads]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=float, default=5.0, help="of the capacity")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--seconds-beside", type=float, default=15.0, help="of the closed loop, and before and after")
    parser.add_argument("--shape", default="qwen2-30m")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS / "overload.json")
    keep(parser.parse_args(argv), run, table)


if __name__ == "__main__":
    main()
