"""Requests of several classes at once: with which scheduling do the most of them keep their objectives?

    python -m benchmarks.classes --vllm /path/to/vllm-venv/bin/vllm

The contestants are Headway's scheduling policies and vLLM with its default token budget, and a sweep of static budgets
for each engine. Each is started in turn, once in a round, and gets all mixes; who comes first rotates. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoint import SHAPES
from benchmarks.classes_figure import draw
from benchmarks.clients import HEADWAY
from benchmarks.machine import RESULTS, about, own_file, save
from benchmarks.processes import Died
from benchmarks.rounds import Compared, Rounds, compare, number, spread
from benchmarks.served import Losses
from benchmarks.servers import CHECKPOINTS, MODEL, Server, Settings, running
from benchmarks.steal import stolen_seconds
from benchmarks.weights import write_weights
from headway.bench.results import load_json
from headway.load.measures.latencies import Floats, Latencies
from headway.load.measures.slo import missed_objectives
from headway.load.measures.throughput import window_rates
from headway.load.record import RunResult
from headway.load.workload.mix import load_mix

MIXES = Path(__file__).parent / "mixes"
SLO, FCFS = "headway slo", "headway fcfs"
GOODPUT, TOKENS = "goodput", "tokens"
TITLES = {
    GOODPUT: "goodput, requests/s",
    "itl": "ITL P99 of the first class, ms",
    "ttft": "its TTFT P99, ms",
    TOKENS: "all tokens/s",
    "stranger": "TTFT P99 of probes, ms",
}


@dataclass(frozen=True)
class Contestant:
    """A server as it is started.

    Args:
        engine: of servers.ENGINES.
        flags: of its command line, beside those that all servers of the engine get. CLASSES stands for the file of
            service classes.
        budget: it is one of a sweep of static token budgets.
    """

    name: str
    engine: str
    flags: tuple[str, ...] = ()
    budget: bool = False


CLASSES = "{classes}"


def contestants(budgets: Sequence[int], vllm: bool) -> list[Contestant]:
    """The one that the others are held against comes first."""
    fcfs = ("--scheduling-policy", "fcfs")
    rows = [
        Contestant(SLO, "headway", ("--scheduling-policy", "slo", "--service-classes", CLASSES)),
        Contestant(FCFS, "headway", fcfs),
    ]
    # A static budget is all that keeps prompts from holding up tokens.
    alone = (*fcfs, "--max-prefill-stall-ms", "inf")
    rows += [Contestant(f"{FCFS}, {size} tokens", "headway", (*alone, *_budget(size)), True) for size in budgets]
    if vllm:
        rows.append(Contestant("vllm", "vllm"))
        rows += [Contestant(f"vllm, {size} tokens", "vllm", _budget(size), True) for size in budgets]
    return rows


def _budget(size: int) -> tuple[str, ...]:
    return ("--max-num-batched-tokens", str(size))


def service_classes(mixes: Sequence[Path]) -> str:
    """What a server is told of the classes, in TOML: the objectives that the mixes are judged by, the first class the
    most urgent one.

    Raises:
        SystemExit: two mixes have a class with different objectives.
    """
    found: dict[str, dict[str, float]] = {}
    for path in mixes:
        for each in load_mix(path).classes:
            if found.setdefault(each.name, each.objectives) != each.objectives:
                raise SystemExit(f"class {each.name!r} of {path} has other objectives than in another mix")
    lines = [f'default = "{next(iter(found))}"']
    for name, objectives in found.items():
        lines += ["", "[[class]]", f'name = "{name}"']
        lines += [f"{key}_ms = {limit:g}" for key, limit in objectives.items() if key in ("ttft", "tpot")]
        if "e2el" in objectives:  # which a server is not told: it may let them wait for half of that
            lines.append(f"starvation_s = {objectives['e2el'] / 2000:g}")
    return "\n".join(lines) + "\n"


def put_mix(
    server: Server, mix: Path, arguments: argparse.Namespace, load: float, seconds: float, seed: int
) -> tuple[RunResult, float]:
    """One run of `headway bench`, and the share of the processors' time that was stolen meanwhile.

    Raises:
        Died: it left no result, or nothing was answered.
    """
    before = stolen_seconds()
    with tempfile.TemporaryDirectory(prefix="bench-client-") as folder:
        file = Path(folder) / "result.json"
        command = [*HEADWAY, "--base-url", server.url, "--model", MODEL, "--mix", str(mix), "--duration", str(seconds)]
        command += ["--tokenizer", str(CHECKPOINTS / arguments.shape), "--seed", str(seed), "--time-scale", str(load)]
        command += ["--probe-rate", str(arguments.probe_rate), "--result-dir", folder, "--result-filename", file.name]
        with server.awake():
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        run = load_json(file) if file.exists() else None
    if run is None or not any(record.ok for record in run.records):
        said = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise Died(f"{server.name} answered nothing (exit code {done.returncode}):\n{' '.join(command)}\n{said}")
    return run, (stolen_seconds() - before) / (run.duration_s * (os.cpu_count() or 1))


def figures(run: RunResult, seconds: float) -> dict[str, float]:
    """What counts of a run, by the keys of TITLES, and for each class its goodput and the share of it that met.

    Rates are of the time in which requests came: what a server still does when no more come is no merit of its.
    """
    missed = missed_objectives(run.records, run.settings["goodput_by_class"])
    names = list(run.settings["goodput_by_class"])
    found = {GOODPUT: sum(not reasons for reasons in missed.values()) / seconds}
    for name in names:
        of_class = [record for record in run.records if record.class_name == name]
        met = sum(missed.get(record.index) == () for record in of_class)
        found[f"{GOODPUT} {name}"] = met / seconds
        found[f"met {name}"] = met / len(of_class) if of_class else 0.0
    first = Latencies.of(record for record in run.records if record.class_name == names[0])
    within = window_rates(run.records, run.began_ns, run.began_ns + round(seconds * 1e9))
    return found | {
        "itl": _p99(first.itl_ms),
        "ttft": _p99(first.ttft("schedule")),
        TOKENS: within["total_token_throughput"],
        "stranger": _p99(Latencies.of(run.probes).ttft("schedule")),
        "failed": float(sum(record.failed for record in run.records)),
        "cancelled": float(sum(record.cancelled for record in run.records)),
        "client_bound": float(run.client.bound),
    }


def _p99(values: Floats) -> float:
    """The P99 of values; 0 without a value."""
    return float(np.percentile(values, 99)) if len(values) else 0.0


def table(load: str, measured: dict[str, dict[str, list[float]]], first: str) -> str:
    """Markdown: a row for each contestant, in each cell the median over the rounds and then the range."""
    classes = [key for key in measured[first] if key.startswith(f"{GOODPUT} ")]
    keys = [GOODPUT, *classes, *(key for key in TITLES if key != GOODPUT)]
    head = [load, *(TITLES.get(key, key) for key in keys), f"goodput, {first} / it"]
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for name, values in measured.items():
        rows = [compare(measured[first][key], values[key]) for key in keys]
        cells = [spread(row.median, row.low, row.high) for row in rows]
        lines.append(f"| {' | '.join([name, *cells, _ratio(rows[0])])} |")
    return "\n".join(lines)


def _ratio(row: Compared) -> str:
    return spread(row.ratio, row.ratio_low, row.ratio_high)


def best_budget(measured: dict[str, dict[str, list[float]]], rows: Sequence[Contestant], engine: str) -> str | None:
    """The budget of the engine's sweep with the highest median goodput; None if none was measured."""
    names = [each.name for each in rows if each.budget and each.engine == engine and each.name in measured]
    return max(names, key=lambda name: statistics.median(measured[name][GOODPUT]), default=None)


def verdicts(load: str, measured: dict[str, dict[str, list[float]]], rows: Sequence[Contestant], first: str) -> str:
    """What the first one has of others: of the defaults, and of the best static budget of each engine."""
    engines = dict.fromkeys(each.engine for each in rows)
    best = [name for engine in engines if (name := best_budget(measured, rows, engine))]
    others = [each.name for each in rows if not each.budget and each.name != first and each.name in measured] + best
    lines = []
    for name in others:
        goodput, tokens = (compare(measured[first][key], measured[name][key]) for key in (GOODPUT, TOKENS))
        said = f"{load}: {first} has {_ratio(goodput)} times the goodput of {name}"
        lines.append(
            f"{said}{', its best static budget,' if name in best else ''} and {_ratio(tokens)} times its tokens/s"
        )
    return "\n".join(lines)


def report(
    arguments: argparse.Namespace, rows: Sequence[Contestant], rounds: Rounds, finished: int, losses: Losses
) -> dict[str, Any]:
    first = rows[0].name
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": about(),
        "settings": settings_of(arguments),
        "mixes": mixes_of(arguments),
        "rounds_finished": finished,
        "died": {name: end.line for name, end in losses.died.items()},
        "contestants": [asdict(each) for each in rows],
        "summary": [
            {"load": load, "beside": first, "contestant": name, "measure": key}
            | asdict(rounds.compared(load, name, key, first))
            for load, measured in rounds.values.items()
            if first in measured
            for name, measures in measured.items()
            for key in measures
        ],
        "values": rounds.values,
    }


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What decides what is measured."""
    left_out = ("vllm", "output", "rounds", "append", "only", "mixes")  # mixes_of() has them
    return {name: str(value) for name, value in vars(arguments).items() if name not in left_out}


def mixes_of(arguments: argparse.Namespace) -> dict[str, str]:
    return {path.stem: path.read_text() for path in arguments.mixes}


def earlier(arguments: argparse.Namespace) -> tuple[Rounds, int]:
    """Rounds that --append adds to, and their number.

    Raises:
        SystemExit: they were measured with other settings.
    """
    if not arguments.append or not arguments.output.exists():
        return Rounds(), 0
    content = json.loads(arguments.output.read_text())
    if (content["settings"], content["mixes"]) != (settings_of(arguments), mixes_of(arguments)):
        raise SystemExit(f"{arguments.output} was measured with other settings; --append needs the same")
    return Rounds(content["values"]), content["rounds_finished"]


def take_turn(contestant: Contestant, arguments: argparse.Namespace, classes: Path, rounds: Rounds, seed: int) -> bool:
    """All loads of one contestant in one round; what was measured before it died counts."""
    binary = arguments.vllm if contestant.engine == "vllm" else sys.executable
    flags = [str(classes) if flag == CLASSES else flag for flag in contestant.flags]
    flags += ["--max-num-seqs", str(arguments.streams)]
    with running(contestant.name, binary, settings(arguments), contestant.engine, flags) as server:
        put_mix(server, arguments.mixes[0], arguments, 1.0, arguments.opening, seed=0)  # nothing is at its speed yet
        for mix in arguments.mixes:
            for load in arguments.loads:
                label = mix.stem if load == 1 else f"{mix.stem}, {load:g}x"
                run, stolen = put_mix(server, mix, arguments, load, arguments.seconds, seed)
                measured = figures(run, arguments.seconds) | {"stolen": stolen}
                rounds.add(label, contestant.name, measured)
                shown = f"{number(measured[GOODPUT])} requests/s, {number(measured[TOKENS])} tokens/s"
                print(f"round {seed}: {label}: {contestant.name}: {shown}", file=sys.stderr)
    return True


def settings(arguments: argparse.Namespace) -> Settings:
    return Settings(arguments.shape, arguments.threads, arguments.context, arguments.streams)


def run(arguments: argparse.Namespace) -> None:
    write_weights(arguments.shape, CHECKPOINTS)
    rounds, done = earlier(arguments)
    had = {name for measured in rounds.values.values() for name in measured}
    known = contestants(arguments.budgets, vllm=True)
    order = [each for each in known if arguments.vllm or each.engine != "vllm"]
    order = [each for each in order if not arguments.only or each.name in arguments.only]
    rows = [each for each in known if each in order or each.name in had]
    losses = Losses()
    with tempfile.TemporaryDirectory(prefix="classes-") as folder:
        classes = Path(folder) / "classes.toml"
        classes.write_text(service_classes(arguments.mixes))
        for seed in range(done + 1, done + arguments.rounds + 1):
            for contestant in order:
                losses.attempt(contestant.name, partial(take_turn, contestant, arguments, classes, rounds, seed))
            order = [*order[1:], *order[:1]]  # nobody always comes first
            # A sitting that is cut short leaves its whole rounds.
            save(report(arguments, rows, rounds, seed, losses), arguments.output)
            draw(rounds.values, arguments.output.with_suffix(".png"))
    for load, measured in rounds.values.items():
        first = next(each.name for each in rows if each.name in measured)
        print(f"{table(load, measured, first)}\n\n{verdicts(load, measured, rows, first)}\n")
    if losses.died:
        sys.exit("\n\n".join(["These died; what was measured before is kept.", *map(str, losses.died.values())]))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.classes", description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", metavar="PROGRAM", help="vllm of its environment, as a contestant")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contestants to measure, by their names in the table")
    parser.add_argument("--budgets", type=int, nargs="*", default=[256, 512, 1024, 2048], help="static, in tokens")
    mixes = [MIXES / f"{name}.toml" for name in ("tuned", "untuned", "unseen", "offline")]
    parser.add_argument("--mixes", type=Path, nargs="+", default=mixes)
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0], help="arrivals so many times as fast")
    parser.add_argument("--seconds", type=float, default=40.0, help="in which requests come, in each run")
    parser.add_argument("--opening", type=float, default=5.0, help="seconds of the first mix that are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--probe-rate", type=float, default=1.0, help="requests/s of a stranger beside the load")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-30m")
    parser.add_argument("--context", type=int, default=17408, help="longest prompt and output, in tokens")
    parser.add_argument("--streams", type=int, default=64, help="most requests at once in a server")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of computation, for every server")
    parser.add_argument("--append", action="store_true", help="add the rounds to those in --output")
    parser.add_argument("--output", type=Path, default=RESULTS / "classes.json")
    arguments = parser.parse_args(argv)
    for name in ("loads", "budgets", "seconds", "opening", "rounds", "probe_rate", "context", "streams", "threads"):
        value = getattr(arguments, name)
        if not min(value if isinstance(value, list) else [value], default=1) > 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    if arguments.vllm and not os.access(arguments.vllm, os.X_OK):
        parser.error(f"--vllm {arguments.vllm!r} is not a program; name bin/vllm of vLLM's environment")
    names = [each.name for each in contestants(arguments.budgets, arguments.vllm is not None)]
    for name in arguments.only or []:
        if name not in names:
            parser.error(f"--only {name!r} is no contestant; there are {', '.join(names)}")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    arguments.output = own_file(arguments.output)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended too
    run(arguments)


if __name__ == "__main__":
    main()
