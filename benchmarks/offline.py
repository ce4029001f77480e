"""Speed without a server: Headway and its peers in turn, on one model of random weights.

    python -m benchmarks.offline --peer vllm=/path/to/vllm-venv/bin/python

Every engine runs in a process of its own that stays up for the whole sitting and is stopped (SIGSTOP) while another
one is measured. Each point is measured on all engines, one right after the other, before the next point: a shared
machine drifts by more than the engines differ, and only neighbours in time can be compared. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import SHAPES, write_checkpoint
from benchmarks.offline_worker import ENGINES

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Point:
    """One row of the table: what runs, and which of its rates counts."""

    label: str
    rate: str  # decode or prefill
    batch: int
    prompt: int
    new: int


def points(batches: list[int], prompt: int, new: int, prefill: int) -> list[Point]:
    rows = [Point(f"decode, batch {b}", "decode", b, prompt, new) for b in batches]
    return [*rows, Point(f"prefill, 1 x {prefill}", "prefill", 1, prefill, 1)]


class Worker:
    """An engine's process. It is stopped but while it is asked something."""

    def __init__(self, name: str, python: str, arguments: list[str]) -> None:
        self.name = name
        self.log = tempfile.NamedTemporaryFile(prefix=f"offline-{name}-", suffix=".log", delete=False)  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(HERE / "offline_worker.py"), name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)} if name == "headway" else None,
            start_new_session=True,
            text=True,
        )
        self.about = self._reply()
        self._signal(signal.SIGSTOP)

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "".join(Path(self.log.name).read_text(errors="replace").splitlines(keepends=True)[-15:])
            raise SystemExit(
                f"{self.name} ended with exit code {self._process.wait()}; its log ({self.log.name}):\n{tail}"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _signal(self, which: signal.Signals) -> None:
        os.killpg(self._process.pid, which)

    def measure(self, point: Point, seed: int) -> float:
        """Tokens a second."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        ask = {"batch": point.batch, "prompt": point.prompt, "new": point.new, "seed": seed}
        self._process.stdin.write(json.dumps(ask) + "\n")
        self._process.stdin.flush()
        reply = self._reply()
        self._signal(signal.SIGSTOP)
        return float(reply[point.rate])

    def close(self) -> None:
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait()
        Path(self.log.name).unlink(missing_ok=True)


@contextmanager
def running(name: str, python: str, arguments: list[str]) -> Iterator[Worker]:
    print(f"starting {name} ...", file=sys.stderr)
    worker = Worker(name, python, arguments)
    try:
        print(f"{name} {worker.about['version']} ready after {worker.about['start_seconds']:.1f} s", file=sys.stderr)
        yield worker
    finally:
        worker.close()


@dataclass
class Results:
    """Rates by point label and engine name, in the order measured."""

    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, point: Point, engine: str, rate: float) -> None:
        self.rates.setdefault(point.label, {}).setdefault(engine, []).append(rate)

    def summary(self, first: str) -> list[dict[str, Any]]:
        """For each point and engine: median, range, and the ratio of `first`'s median to this one's.

        The range of the ratio is over rounds, each round's neighbours compared with one another.
        """
        rows = []
        for label, engines in self.rates.items():
            for engine, rates in engines.items():
                pairs = [a / b for a, b in zip(engines[first], rates, strict=True)]
                rows.append(
                    {
                        "point": label,
                        "engine": engine,
                        "median": statistics.median(rates),
                        "low": min(rates),
                        "high": max(rates),
                        "ratio": statistics.median(engines[first]) / statistics.median(rates),
                        "ratio_low": min(pairs),
                        "ratio_high": max(pairs),
                    }
                )
        return rows


def table(rows: list[dict[str, Any]], first: str) -> str:
    lines = [
        f"| tokens/s | engine | median | lowest .. highest | {first} / engine | by round |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        ratio, by_round = f"{row['ratio']:.2f}", f"{row['ratio_low']:.2f} .. {row['ratio_high']:.2f}"
        if row["engine"] == first:
            ratio = by_round = ""
        spread = f"{row['low']:.1f} .. {row['high']:.1f}"
        lines.append(f"| {row['point']} | {row['engine']} | {row['median']:.1f} | {spread} | {ratio} | {by_round} |")
    return "\n".join(lines)


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def peer(text: str) -> tuple[str, str]:
    name, separator, python = text.partition("=")
    if not separator or not Path(python).exists():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PYTHON with the path of a Python interpreter")
    if name not in ENGINES:
        raise argparse.ArgumentTypeError(f"{name!r} is not an engine known here; choose one of {', '.join(ENGINES)}")
    return name, python


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offline", description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PYTHON", dest="peers")
    parser.add_argument("--no-headway", action="store_true", help="measure the peers alone")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prefill-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, default=HERE / "results" / "offline.json")
    arguments = parser.parse_args(argv)
    for name in ("batches", "rounds", "threads", "prompt_len", "prefill_len"):
        value = min(getattr(arguments, name)) if name == "batches" else getattr(arguments, name)
        if value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if arguments.new_tokens < 2:
        parser.error(f"--new-tokens is {arguments.new_tokens}; a decode rate needs at least 2")
    if arguments.no_headway and not arguments.peers:
        parser.error("--no-headway leaves nothing to measure; name a --peer")
    return arguments


def run(engines: list[tuple[str, str]], arguments: argparse.Namespace) -> tuple[Results, dict[str, Any]]:
    checkpoint = write_checkpoint(arguments.shape, HERE / "checkpoints")
    results = Results()
    rows = points(arguments.batches, arguments.prompt_len, arguments.new_tokens, arguments.prefill_len)
    with ExitStack() as stack:
        settings = [str(checkpoint), arguments.dtype, str(arguments.threads)]
        workers = [stack.enter_context(running(name, python, settings)) for name, python in engines]
        for round_number in range(arguments.rounds + 1):
            for point in rows:
                for worker in workers:
                    rate = worker.measure(point, seed=round_number)
                    print(f"round {round_number}: {point.label}: {worker.name} {rate:.1f}", file=sys.stderr)
                    if round_number:  # the first round only warms up
                        results.add(point, worker.name, rate)
                workers.append(workers.pop(0))  # nobody always comes first
        return results, {worker.name: worker.about for worker in workers}


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended too
    engines = ([] if arguments.no_headway else [("headway", sys.executable)]) + arguments.peers
    results, about = run(engines, arguments)
    rows = results.summary(engines[0][0])
    report = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("peers", "output", "no_headway")},
        "engines": about,
        "summary": rows,
        "rates": results.rates,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(table(rows, engines[0][0]))


if __name__ == "__main__":
    main()
