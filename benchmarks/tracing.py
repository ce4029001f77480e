"""What watching costs: a server without traces beside servers that send 1 %, 10 % and 100 % of them, and one that times
its kernels, under the same load.

    python -m benchmarks.tracing --rounds 9

All servers of a round are stopped (SIGSTOP) while another one is measured; each load is put on all of them, one right
after the other, before the next. Servers that do the same differ by some percent, by where their memory lies. So each
round starts new ones, in another order, and has a second one without traces, whose column says what chance does. Spans
go to a collector on this machine that drops them, so its work counts as cost, too. Requests are short: a trace costs
the same for a long one.
"""

from __future__ import annotations

import argparse
import http.server
import os
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checkpoint import SHAPES
from benchmarks.clients import HEADWAY, Load
from benchmarks.machine import RESULTS, heading, own_file, save
from benchmarks.rounds import Rounds, number, spread
from benchmarks.served import MEASURES, Losses, opened, put_load
from benchmarks.servers import CHECKPOINTS, Server, Settings, running
from benchmarks.weights import write_weights

OFF, KERNELS, AGAIN = "off", "kernels timed", "off again"
SHARES = {"1 %": "0.01", "10 %": "0.1", "100 %": "1"}
CPU = "cpu_ms"
SHOWN = {**MEASURES, CPU: "processor time of a request, ms"}
CONTESTANTS = (OFF, *SHARES, KERNELS, AGAIN)


class _Drops(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[str]:
    """The address of a collector that drops what it gets, in a thread of this process, which only waits otherwise."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Drops)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def flags_of(name: str, address: str) -> list[str]:
    """What a contestant's server is started with."""
    return ["--otlp-endpoint", address, "--trace-sample", SHARES[name]] if name in SHARES else []


def loads(arguments: argparse.Namespace) -> list[Load]:
    lengths = {"input_len": arguments.input_len, "output_len": arguments.output_len, "prompts": arguments.prompts}
    closed = Load(f"{arguments.streams} streams", streams=arguments.streams, warmups=arguments.streams, **lengths)
    return [closed, Load(f"Poisson, {arguments.rate:g} requests/s", rate=arguments.rate, warmups=1, **lengths)]


def measured(server: Server, load: Load, tokenizer: Path, seed: int) -> dict[str, float]:
    """MEASURES of one load. The kernels of the server of that name are timed from here to its end."""
    if server.name == KERNELS:
        with server.awake():
            urllib.request.urlopen(urllib.request.Request(f"{server.url}/start_profile", b""), timeout=60).close()
    began_s = _cpu_seconds(server)
    values = put_load(HEADWAY, server, load, tokenizer, seed)
    used_s = _cpu_seconds(server) - began_s
    return {key: values[key] for key in MEASURES} | {CPU: 1e3 * used_s / (load.prompts + load.warmups)}


def _cpu_seconds(server: Server) -> float:
    """The processor time of all its processes so far."""
    root = psutil.Process(server.process_group)
    times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def table(rounds: Rounds) -> str:
    """For each load and measure, a column of medians without traces, and the change that each contestant makes."""
    lines = []
    for load, found in rounds.values.items():
        names = [name for name in CONTESTANTS if name in found]
        lines += [f"| {load} | {' | '.join(names)} |", "|---" + "|---:" * len(names) + "|"]
        for key, title in SHOWN.items():
            base = rounds.compared(load, OFF, key, OFF)
            cells = [spread(base.median, base.low, base.high)]
            for name in names[1:]:
                row = rounds.compared(load, name, key, OFF)
                changes = [100 / ratio - 100 if ratio else None for ratio in (row.ratio, row.ratio_high, row.ratio_low)]
                cells.append(_change(*changes))
            lines.append(f"| {title} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines[:-1])


def _change(middle: float | None, low: float | None, high: float | None) -> str:
    """A change in percent, and its range over the rounds."""
    if middle is None or low is None or high is None:
        return "-"
    return f"{middle:+.1f} % ({low:+.1f} .. {high:+.1f})"


def report(arguments: argparse.Namespace, rounds: Rounds, losses: Losses) -> dict[str, Any]:
    summary = [
        {"load": load, "traces": name, "measure": key} | asdict(rounds.compared(load, name, key, OFF))
        for load, found in rounds.values.items()
        for name in found
        for key in SHOWN
    ]
    died = {name: end.line for name, end in losses.died.items()}
    return heading(arguments) | {"died": died, "summary": summary, "values": rounds.values}


def run(arguments: argparse.Namespace) -> None:
    settings = Settings(arguments.shape, arguments.threads, 2 * (arguments.input_len + arguments.output_len), 64)
    tokenizer = write_weights(arguments.shape, CHECKPOINTS)
    rounds, losses, order = Rounds(), Losses(), CONTESTANTS
    opening = Load("opening", arguments.input_len, arguments.output_len, prompts=64, streams=arguments.streams)
    for number_of_round in range(1, arguments.rounds + 1):
        with ExitStack() as stack:
            address = stack.enter_context(collector())
            servers = [
                stack.enter_context(running(name, sys.executable, settings, "headway", flags_of(name, address)))
                for name in order
            ]
            for server in servers:
                losses.attempt(server.name, partial(opened, HEADWAY, server, opening, tokenizer, arguments.output_len))
            for load in loads(arguments):
                for server in servers:
                    found = losses.attempt(server.name, partial(measured, server, load, tokenizer, number_of_round))
                    if found is not None:
                        rounds.add(load.label, server.name, found)
                        rate = number(found["output_throughput"])
                        print(f"round {number_of_round}: {load.label}: {server.name} {rate} tokens/s", file=sys.stderr)
        order = (*order[1:], *order[:1])  # nobody always comes first
        save(report(arguments, rounds, losses), arguments.output)
    print(table(rounds))
    if losses.died:
        sys.exit("\n\n".join(map(str, losses.died.values())))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="story")
    parser.add_argument("--streams", type=int, default=8, help="of the closed loop")
    parser.add_argument("--rate", type=float, default=20.0, help="requests/s of the open loop")
    parser.add_argument("--prompts", type=int, default=400, help="requests of a load")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of computation")
    parser.add_argument("--output", type=Path, default=RESULTS / "tracing.json")
    arguments = parser.parse_args(argv)
    for name in ("streams", "rate", "prompts", "input_len", "rounds", "threads"):
        if getattr(arguments, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name):g}; it must be above 0")
    if arguments.output_len < 2:
        parser.error(f"--output-len is {arguments.output_len}; the time between tokens needs at least 2")
    arguments.output = own_file(arguments.output)
    return arguments


if __name__ == "__main__":
    run(parse())
