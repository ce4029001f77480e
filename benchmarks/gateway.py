"""What `headway gateway` adds to a request, beside nginx and beside no proxy at all.

    python -m benchmarks.gateway [--rate 500] [--seconds 10] [--rounds 3] [--streams 400]

The backend costs next to nothing (`trivial_server`) and has a core together with the client; each proxy has the other.
In each round every contestant gets the same requests, one contestant after the other:

* `rate`: answers of one token, Poisson arrivals at --rate. What a proxy adds is its percentile less that without one.
* `streams`: --streams answers at a time, 20 tokens a second each, through the gateway and nginx.

How much a proxy can do on one core is what it did for each second of processor time that it used. nginx is
left out where there is none. The result goes to benchmarks/results/gateway.json (--output).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.bench_client import GAP_MS, load, poisson, trivial_server
from benchmarks.machine import RESULTS, about, own_file, save
from benchmarks.processes import environment
from headway.load.request import PlannedRequest, Prompt

# A contestant that others keep from its core for more of the time falls behind, however little each request costs.
MOST_WAITED = 0.05
DIRECT, GATEWAY, NGINX = "direct", "headway", "nginx"
_GATEWAY_FILE = """
[[backend]]
name = "trivial"
url = "{url}"
models = ["trivial"]
health_path = ""
max_requests = 100000
"""
_NGINX_FILE = """
daemon off; master_process off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream backend {{ server {address}; keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port}; keepalive_requests 1000000;
    location / {{
      proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@contextlib.contextmanager
def proxy(kind: str, backend: str, core: int) -> Iterator[tuple[str, psutil.Process | None]]:
    """The URL of a proxy in front of the backend, on that core, and its process; of none for DIRECT."""
    if kind == DIRECT:
        yield backend, None
        return
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="gateway-") as folder:
        file = Path(folder) / "config"
        if kind == GATEWAY:
            file.write_text(_GATEWAY_FILE.format(url=backend))
            command = [sys.executable, "-m", "headway", "gateway", str(file), "--host=127.0.0.1", f"--port={port}"]
            command.append("--log-level=warning")
        else:
            address = backend.removeprefix("http://")
            file.write_text(_NGINX_FILE.format(folder=folder, address=address, port=port))
            command = ["nginx", "-p", folder, "-c", str(file)]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
            try:
                os.sched_setaffinity(process.pid, {core})
                _await(port, process, Path(folder) / "log")
                yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(30)


def _free_port() -> int:

    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port


def _await(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise SystemExit(f"the proxy did not start:\n{log.read_text()}")


def measure(kind: str, requests: list[PlannedRequest], gap_ms: int, cores: tuple[int, int]) -> dict[str, float]:
    """One run through one contestant. Times are milliseconds, rates are for each second of its processor time."""
    with trivial_server(gap_ms, cores[0]) as backend, proxy(kind, backend, cores[1]) as (url, process):
        began, waited, at = _seconds_of(process), _waited_s(process), time.monotonic()
        outcome = load("headway", url, requests)
        used, waited = _seconds_of(process) - began, (_waited_s(process) - waited) / (time.monotonic() - at)
        memory = 0.0 if process is None else process.memory_info().rss / 2**20
    records = [each for each in outcome.records if each.ok]
    first = [(each.first_token_ns - each.sent_ns) / 1e6 for each in records]
    whole = [(each.end_ns - each.sent_ns) / 1e6 for each in records]
    chunks = sum(len(each.chunk_ns) for each in records)
    found = {"failed": float(len(outcome.records) - len(records)), "memory_mb": memory, "share_waited": waited}
    for name, values in (("ttft", first), ("e2e", whole)):
        found |= {f"{name}_p{p}_ms": float(np.percentile(values, p)) for p in (50, 99)}
    if process is not None:
        used = max(used, 0.01)  # the clock of processes has that resolution
        found |= {"requests_a_core_second": len(records) / used, "chunks_a_core_second": chunks / used}
    return found


def _seconds_of(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


def _waited_s(process: psutil.Process | None) -> float:
    """Seconds for which it could have run, and something else had its core."""
    return 0.0 if process is None else int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9


def streams(count: int, seconds: float) -> list[PlannedRequest]:
    tokens = round(seconds * 1000 / GAP_MS)
    return [PlannedRequest(i, Prompt(text="A short prompt."), 4, tokens, arrival_s=i / count) for i in range(count)]


def run(arguments: argparse.Namespace, cores: tuple[int, int]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over the rounds, by load and contestant."""
    proxies = [GATEWAY, NGINX] if shutil.which("nginx") else [GATEWAY]
    loads = {
        "rate": (poisson(arguments.rate, arguments.seconds, 1), 0, [DIRECT, *proxies]),
        "streams": (streams(arguments.streams, arguments.seconds), GAP_MS, proxies),
    }
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in loads}
    for _ in range(arguments.rounds):
        for name, (requests, gap_ms, kinds) in loads.items():
            for kind in kinds:
                found[name].setdefault(kind, []).append(measure(kind, requests, gap_ms, cores))
    return {
        name: {
            kind: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
            for kind, rounds in of_load.items()
        }
        for name, of_load in found.items()
    }


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    direct = results["rate"][DIRECT]
    print(f"direct: P50 {direct['e2e_p50_ms']:.2f} ms, P99 {direct['e2e_p99_ms']:.2f} ms")
    for kind, of_kind in results["rate"].items():
        if kind != DIRECT:
            added = [of_kind[key] - direct[key] for key in ("e2e_p50_ms", "e2e_p99_ms")]
            print(
                f"{kind}: adds {added[0]:.2f} ms at P50, {added[1]:.2f} ms at P99; "
                f"{of_kind['requests_a_core_second']:,.0f} requests a core and second; {of_kind['failed']:.0f} failed"
            )
    for kind, of_kind in results["streams"].items():
        print(
            f"{kind}: {of_kind['chunks_a_core_second']:,.0f} chunks a core and second, "
            f"{of_kind['memory_mb']:.0f} MiB; {of_kind['failed']:.0f} failed"
        )
    for of_load in results.values():
        for kind, of_kind in of_load.items():
            if of_kind["share_waited"] > MOST_WAITED:
                print(f"{kind} waited {of_kind['share_waited']:.0%} of the time for its core: the machine was busy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=400, help="at a time")
    parser.add_argument("--output", type=Path, default=RESULTS / "gateway.json")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this needs two cores: one for the proxies, one for client and backend")
    os.sched_setaffinity(0, {cores[0]})
    results = run(arguments, (cores[0], cores[1]))
    show(results)
    settings: dict[str, Any] = {key: value for key, value in vars(arguments).items() if key != "output"}
    save({"machine": about(), "settings": settings, "results": results}, own_file(arguments.output))


if __name__ == "__main__":
    main()
