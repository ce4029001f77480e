"""Speed over HTTP: Headway's server and its peers in turn, under the same load, on one model of random weights.

    python -m benchmarks.served --peer vllm=/path/to/vllm-venv/bin/vllm --peer llama.cpp=/path/to/llama-server \
        --client /path/to/vllm-venv/bin/vllm

One client, `vllm bench serve` or `headway bench`, loads all. Every server stays up for the whole sitting and is stopped
(SIGSTOP) while another one is measured. Each load is put on all servers, one right after the other, before the next
load: a shared machine drifts by more than the servers differ, and only neighbours in time can be compared. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.checkpoint import SHAPES
from benchmarks.clients import HEADWAY, Load, measure
from benchmarks.machine import about, own_file, save
from benchmarks.processes import Child, Died
from benchmarks.processes import running as running_child
from benchmarks.rounds import Rounds, number, spread
from benchmarks.servers import CHECKPOINTS, ENGINES, KV_CACHE_GIB, MODEL, OURS, Server, Settings, running
from benchmarks.weights import write_weights

HERE = Path(__file__).parent

MEASURES = {
    "output_throughput": "output tokens/s",
    "median_ttft_ms": "TTFT median, ms",
    "p99_ttft_ms": "TTFT P99, ms",
    "median_itl_ms": "ITL median, ms",
    "p99_itl_ms": "ITL P99, ms",
    "median_tpot_ms": "TPOT median, ms",
}
RATE = "output_throughput"
Result = TypeVar("Result")
COUNTS = {"failed": "requests failed, all rounds", "client_bound": "runs marked client-bound"}


def loads(arguments: argparse.Namespace) -> list[Load]:
    """A closed loop for each number of streams, then one open loop."""
    lengths = {"input_len": arguments.input_len, "output_len": arguments.output_len}
    ratio, rows = arguments.range_ratio, []
    for streams in arguments.streams:
        label = f"{streams} stream{'' if streams == 1 else 's'}"
        prompts = max(8, streams * arguments.prompts_per_stream)
        rows.append(Load(label, prompts=prompts, streams=streams, warmups=streams, range_ratio=ratio, **lengths))
    if arguments.rate:
        label = f"Poisson, {arguments.rate:g} requests/s"
        opened = {"prompts": arguments.rate_prompts, "rate": arguments.rate}
        rows.append(Load(label, warmups=1, range_ratio=ratio, **opened, **lengths))
    return rows


def put_load(client: list[str], server: Server, load: Load, tokenizer: Path, seed: int) -> dict[str, float]:
    """MEASURES, requests that failed, and whether the client said that it could not keep up, if it can tell."""
    with server.awake():
        result = measure(client, server.url, MODEL, tokenizer, load, seed)
    bound = result.get("headway", {}).get("client", {}).get("bound", False)
    return {key: float(result[key]) for key in MEASURES} | {
        "failed": float(result["failed"]),
        "client_bound": float(bound),
    }


def check_length(server: Server, tokens: int) -> None:
    """Every answer has the tokens asked for, as the client relies on.

    Raises:
        Died: this one has not.
    """
    body = {"model": MODEL, "prompt": "a b c", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with server.awake(), urllib.request.urlopen(request, timeout=60) as reply:
            made = json.loads(reply.read())["usage"]["completion_tokens"]
    except (OSError, HTTPException, ValueError, KeyError) as error:
        raise Died(f"{server.name} does not answer: {error}") from error
    if made != tokens:
        raise Died(f"{server.name} was asked for {tokens} tokens and made {made}")


def start(stack: ExitStack, name: str, binary: str, settings: Settings) -> Server:
    return stack.enter_context(running(name, binary, settings))


def opened(client: list[str], server: Server, opening: Load, checkpoint: Path, tokens: int) -> bool:
    check_length(server, tokens)
    put_load(client, server, opening, checkpoint, 0)
    return True


@dataclass
class Losses:
    """Servers that died. The others are measured on."""

    died: dict[str, Died] = field(default_factory=dict)

    def attempt(self, name: str, what: Callable[[], Result]) -> Result | None:
        """What it gives, or None where the server died, now or before."""
        if name in self.died:
            return None
        try:
            return what()
        except Died as end:
            self.died[name] = end
            print(f"{end}\ngoing on without {name}", file=sys.stderr)
            return None


def offline(name: str) -> str:
    """What the engine of one of our servers is called where it does the same work without a server."""
    return f"{name}, offline"


def offline_engine(name: str, settings: Settings, checkpoint: Path) -> list[str]:
    """The command of its process."""
    content = {
        "model": str(checkpoint),
        "quantization": OURS[name],
        "threads": settings.threads,
        "context": settings.context,
        "kv_bytes": KV_CACHE_GIB << 30,
        "vocabulary": SHAPES[settings.shape]["vocab_size"],
    }
    return [sys.executable, "-m", "benchmarks.closed_loop", json.dumps(content)]


def offline_rate(engine: Child, load: Load, seed: int) -> dict[str, float]:
    lengths = {"input_len": load.input_len, "output_len": load.output_len}
    return {RATE: engine.ask({"streams": load.streams, "prompts": load.prompts, "seed": seed, **lengths})["rate"]}


def tables(rounds: Rounds, first: str, peers: list[str]) -> str:
    """One for each load; in each cell the median over the rounds, then the range."""
    lines = []
    for load, measured in rounds.values.items():
        if first not in measured:  # it died before
            continue
        head = [load, first] + [title for peer in peers for title in (peer, f"{first} / {peer}")]
        lines += [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
        for key, title in MEASURES.items():
            cells = [title]
            for name in [first, *peers]:
                if name not in measured:
                    cells += ["-"] if name == first else ["-", "-"]
                    continue
                row = rounds.compared(load, name, key, first)
                cells.append(spread(row.median, row.low, row.high))
                if name != first:
                    cells.append(spread(row.ratio, row.ratio_low, row.ratio_high))
            lines.append(f"| {' | '.join(cells)} |")
        for key, title in COUNTS.items():
            counts = [f"{rounds.total(load, name, key):.0f}" if name in measured else "-" for name in [first, *peers]]
            lines.append(f"| {title} | {counts[0]} |" + "".join(f" {count} | |" for count in counts[1:]))
        if offline(first) in measured:
            row = rounds.compared(load, offline(first), RATE, first)
            blank = " | |" * len(peers)
            lines.append(f"| the same work offline, tokens/s | {spread(row.median, row.low, row.high)} |{blank}")
            lines.append(f"| share of it served | {spread(row.ratio, row.ratio_low, row.ratio_high)} |{blank}")
        lines.append("")
    return "\n".join(lines[:-1])


def report(
    arguments: argparse.Namespace, servers: list[Server], rounds: Rounds, finished: int, losses: Losses
) -> dict[str, Any]:
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": about(),
        "settings": settings_of(arguments),
        "rounds_finished": finished,
        "died": {name: end.line for name, end in losses.died.items()},
        "servers": {server.name: {"version": server.version, "arguments": server.arguments} for server in servers},
        "summary": [
            {"load": load, "beside": first, "server": name, "measure": key}
            | asdict(rounds.compared(load, name, key, first))
            for load, measured in rounds.values.items()
            for first in OURS
            if first in measured
            for name, measures in measured.items()
            for key in MEASURES
            if key in measures
        ],
        "values": rounds.values,
    }


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What decides what is measured."""
    left_out = ("peers", "output", "rounds", "append")
    settings = {name: value for name, value in vars(arguments).items() if name not in left_out}
    return settings | {"client": "vllm bench serve" if arguments.client else "headway bench"}


def earlier(arguments: argparse.Namespace) -> tuple[Rounds, int]:
    """Rounds that --append adds to, and their number.

    Raises:
        SystemExit: they were measured with other settings, or not to the end.
    """
    if not arguments.append or not arguments.output.exists():
        return Rounds(), 0
    content = json.loads(arguments.output.read_text())
    named = {*ours_of(arguments), *dict(arguments.peers)}
    if content["settings"] != settings_of(arguments) or set(content["servers"]) != named:
        raise SystemExit(f"{arguments.output} was measured with other settings or servers; --append needs the same")
    if died := ", ".join(content.get("died", {})):
        raise SystemExit(f"{arguments.output} has fewer rounds of {died}, which died; --append needs whole ones")
    return Rounds(content["values"]), content["rounds_finished"]


def ours_of(arguments: argparse.Namespace) -> list[str]:
    return [name for name, quantization in OURS.items() if quantization in arguments.quantization]


def run(arguments: argparse.Namespace) -> None:
    most = max([*arguments.streams, 16])
    context = math.ceil((1 + arguments.range_ratio) * (arguments.input_len + arguments.output_len)) + 64
    settings = Settings(arguments.shape, arguments.threads, context, most)
    checkpoint = write_weights(arguments.shape, CHECKPOINTS)
    client = [arguments.client, "bench", "serve", "--disable-tqdm"] if arguments.client else HEADWAY
    ours, losses = ours_of(arguments), Losses()
    rounds, done = earlier(arguments)
    with ExitStack() as stack:
        engines = [*((name, sys.executable) for name in ours), *arguments.peers]
        started = [losses.attempt(name, partial(start, stack, name, binary, settings)) for name, binary in engines]
        servers = [server for server in started if server is not None]
        offlines = {
            name: stack.enter_context(running_child(offline(name), offline_engine(name, settings, checkpoint)))
            for name in ours
        }
        opening = Load("opening", 32, 8, prompts=2 * most, streams=most)
        for server in servers:  # nothing is at its speed from the start
            losses.attempt(server.name, partial(opened, client, server, opening, checkpoint, arguments.output_len))
        for engine in offlines.values():
            offline_rate(engine, opening, seed=0)
        order = list(servers)
        for number_of_round in range(done + 1, done + arguments.rounds + 1):
            for load in loads(arguments):
                for server in order:
                    ask = partial(put_and_compare, client, server, offlines, load, checkpoint, number_of_round)
                    for name, values in (losses.attempt(server.name, ask) or {}).items():
                        rounds.add(load.label, name, values)
                        rate = number(values[RATE])
                        print(f"round {number_of_round}: {load.label}: {name} {rate} tokens/s", file=sys.stderr)
                order = [*order[1:], *order[:1]]  # nobody always comes first
            # A sitting that is cut short leaves its whole rounds.
            save(report(arguments, servers, rounds, number_of_round, losses), arguments.output)
        peers = [name for name, _ in arguments.peers]
        print("\n\n".join(tables(rounds, name, peers) for name in ours))
    if losses.died:
        ends = [str(end) for end in losses.died.values()]
        sys.exit("\n\n".join(["These died; what was measured before is kept.", *ends]))


def put_and_compare(
    client: list[str], server: Server, offlines: dict[str, Child], load: Load, checkpoint: Path, seed: int
) -> dict[str, dict[str, float]]:
    """What one load gives, by the name of the server; of ours, the engine alone does a closed loop's work beside it, if
    all requests are alike.
    """
    measured = {server.name: put_load(client, server, load, checkpoint, seed)}
    if server.name in offlines and load.streams and not load.range_ratio:
        measured[offline(server.name)] = offline_rate(offlines[server.name], load, seed)
    return measured


def peer(text: str) -> tuple[str, str]:
    name, separator, binary = text.partition("=")
    if not separator or not os.access(binary, os.X_OK) or Path(binary).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PROGRAM with the path of a server's program")
    if name not in ENGINES or name in OURS:
        known = ", ".join(each for each in ENGINES if each not in OURS)
        raise argparse.ArgumentTypeError(f"{name!r} is not a peer known here; choose one of {known}")
    return name, binary


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.served", description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=PROGRAM", dest="peers")
    parser.add_argument("--client", metavar="PROGRAM", help="vllm, whose `bench serve` replaces headway bench")
    parser.add_argument("--quantization", choices=OURS.values(), nargs="+", default=["none"], help="of Headway")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="closed loops to run")
    parser.add_argument(
        "--prompts-per-stream", type=int, default=4, help="requests of a closed loop; at least 8 in all"
    )
    parser.add_argument("--rate", type=float, default=0.75, help="requests/s of the open loop; 0 leaves it out")
    parser.add_argument("--rate-prompts", type=int, default=48, help="requests of the open loop")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--range-ratio", type=float, default=0.0, help="lengths differ by as much, 0.5 is ±50 %%")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of computation, for every server")
    parser.add_argument("--append", action="store_true", help="add the rounds to those in --output")
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
    if not 0 <= arguments.range_ratio < 1:
        parser.error(f"--range-ratio is {arguments.range_ratio:g}; it must be at least 0 and below 1")
    if arguments.range_ratio and "llama.cpp" in dict(arguments.peers):
        parser.error("--range-ratio: clients cannot count the tokens of llama.cpp's answers; leave it out")
    if arguments.client and not os.access(arguments.client, os.X_OK):
        parser.error(f"--client {arguments.client!r} is not a program; name bin/vllm of vLLM's environment")
    if len(dict(arguments.peers)) < len(arguments.peers):
        parser.error("a peer is named twice")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    arguments.output = own_file(arguments.output)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended too
    run(arguments)


if __name__ == "__main__":
    main()
