"""Speed over HTTP: Headway's server and its peers in turn, under the same load, on one model of random weights.

    python -m benchmarks.served --peer vllm=/path/to/vllm-venv/bin/vllm --peer llama.cpp=/path/to/llama-server

`headway bench` is the client of all. Every server stays up for the whole sitting and is stopped (SIGSTOP) while another
one is measured. Each load is put on all servers, one right after the other, before the next load: a shared machine
drifts by more than the servers differ, and only neighbours in time can be compared. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import SHAPES, write_checkpoint
from benchmarks.clients import HEADWAY, Load, measure
from benchmarks.offline import processor
from benchmarks.rounds import Rounds, number, spread
from benchmarks.servers import CHECKPOINTS, ENGINES, MODEL, Server, Settings, running

HERE = Path(__file__).parent

MEASURES = {
    "output_throughput": "output tokens/s",
    "median_ttft_ms": "TTFT median, ms",
    "p99_ttft_ms": "TTFT P99, ms",
    "median_itl_ms": "ITL median, ms",
    "p99_itl_ms": "ITL P99, ms",
    "median_tpot_ms": "TPOT median, ms",
}
COUNTS = {"failed": "requests failed, all rounds", "client_bound": "runs marked client-bound"}


def loads(arguments: argparse.Namespace) -> list[Load]:
    """A closed loop for each number of streams, then one open loop."""
    lengths = {"input_len": arguments.input_len, "output_len": arguments.output_len}
    rows = []
    for streams in arguments.streams:
        label = f"{streams} stream{'' if streams == 1 else 's'}"
        prompts = max(8, streams * arguments.prompts_per_stream)
        rows.append(Load(label, prompts=prompts, streams=streams, warmups=streams, **lengths))
    if arguments.rate:
        label = f"Poisson, {arguments.rate:g} requests/s"
        rows.append(Load(label, prompts=arguments.rate_prompts, rate=arguments.rate, warmups=1, **lengths))
    return rows


def put_load(server: Server, load: Load, tokenizer: Path, seed: int) -> dict[str, float]:
    """MEASURES, requests that failed, and whether the client said that it could not keep up."""
    with server.awake():
        result = measure(HEADWAY, server.url, MODEL, tokenizer, load, seed)
    counts = {"failed": float(result["failed"]), "client_bound": float(result["headway"]["client"]["bound"])}
    return {key: float(result[key]) for key in MEASURES} | counts


def tables(rounds: Rounds, servers: list[str]) -> str:
    """One for each load; in each cell the median over the rounds, then the range."""
    first, *peers = servers
    lines = []
    for load in rounds.values:
        head = [load, first] + [title for peer in peers for title in (peer, f"{first} / {peer}")]
        lines += [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
        for key, title in MEASURES.items():
            cells = [title]
            for name in servers:
                row = rounds.compared(load, name, key, first)
                cells.append(spread(row.median, row.low, row.high))
                if name != first:
                    cells.append(spread(row.ratio, row.ratio_low, row.ratio_high))
            lines.append(f"| {' | '.join(cells)} |")
        for key, title in COUNTS.items():
            counts = [f"{rounds.total(load, name, key):.0f}" for name in servers]
            lines.append(f"| {title} | {counts[0]} |" + "".join(f" {count} | |" for count in counts[1:]))
        lines.append("")
    return "\n".join(lines[:-1])


def report(arguments: argparse.Namespace, servers: list[Server], rounds: Rounds, finished: int) -> dict[str, Any]:
    names = [server.name for server in servers]
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("peers", "output")},
        "rounds_finished": finished,
        "servers": {server.name: {"version": server.version, "arguments": server.arguments} for server in servers},
        "summary": [
            {"load": load, "server": name, "measure": key, **asdict(rounds.compared(load, name, key, names[0]))}
            for load in rounds.values
            for name in names
            for key in MEASURES
        ],
        "values": rounds.values,
    }


def run(arguments: argparse.Namespace) -> None:
    rows = loads(arguments)
    most = max([*arguments.streams, 16])
    context = arguments.input_len + arguments.output_len + 64
    settings = Settings(arguments.shape, arguments.threads, context, most)
    tokenizer = write_checkpoint(arguments.shape, CHECKPOINTS)
    rounds = Rounds()
    with ExitStack() as stack:
        engines = [("headway", sys.executable), *arguments.peers]
        servers = [stack.enter_context(running(name, binary, settings)) for name, binary in engines]
        order = list(servers)
        for server in servers:  # nothing is at its speed from the start
            put_load(server, Load("opening", 32, 8, prompts=2 * most, streams=most), tokenizer, seed=0)
        for number_of_round in range(1, arguments.rounds + 1):
            for load in rows:
                for server in order:
                    measured = put_load(server, load, tokenizer, seed=number_of_round)
                    rounds.add(load.label, server.name, measured)
                    rate = number(measured["output_throughput"])
                    print(f"round {number_of_round}: {load.label}: {server.name} {rate} tokens/s", file=sys.stderr)
                order.append(order.pop(0))  # nobody always comes first
            # A sitting that is cut short leaves its whole rounds.
            content = report(arguments, servers, rounds, number_of_round)
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(content, indent=1) + "\n")
        print(tables(rounds, [server.name for server in servers]))


def peer(text: str) -> tuple[str, str]:
    name, separator, binary = text.partition("=")
    if not separator or not os.access(binary, os.X_OK) or Path(binary).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PROGRAM with the path of a server's program")
    if name not in ENGINES or name == "headway":
        known = ", ".join(each for each in ENGINES if each != "headway")
        raise argparse.ArgumentTypeError(f"{name!r} is not a peer known here; choose one of {known}")
    return name, binary


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.served", description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PROGRAM", dest="peers")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="closed loops to run")
    parser.add_argument(
        "--prompts-per-stream", type=int, default=4, help="requests of a closed loop; at least 8 in all"
    )
    parser.add_argument("--rate", type=float, default=0.75, help="requests/s of the open loop; 0 leaves it out")
    parser.add_argument("--rate-prompts", type=int, default=48, help="requests of the open loop")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of computation, for every server")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "served.json")
    arguments = parser.parse_args(argv)
    for name in ("streams", "prompts_per_stream", "rate_prompts", "input_len", "rounds", "threads"):
        value = min(arguments.streams) if name == "streams" else getattr(arguments, name)
        if value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if arguments.output_len < 2:
        parser.error(f"--output-len is {arguments.output_len}; the time between tokens needs at least 2")
    if arguments.rate < 0:
        parser.error(f"--rate is {arguments.rate:g}; it must not be negative")
    if len(dict(arguments.peers)) < len(arguments.peers):
        parser.error("a peer is named twice")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended too
    run(arguments)


if __name__ == "__main__":
    main()
