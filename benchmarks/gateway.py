"""What `headway gateway` adds to a request, beside other proxies and beside no proxy at all.

    python -m benchmarks.gateway [--rate 500] [--seconds 10] [--rounds 3] [--streams 400] [--litellm PROGRAM]

The backend costs next to nothing (`trivial_server`) and has a core together with the client; each proxy has the other.
In each round every contestant gets the same requests, one contestant after the other:

* `rate`: answers of one token, Poisson arrivals at --rate. What a proxy adds is its percentile less that without one.
* `streams`: --streams answers at a time, 20 tokens a second each, through the proxies.
* With --litellm, whose PROGRAM is that of LiteLLM's proxy (`litellm`), the same of all contestants at --slow-rate and
  with --slow-streams: more is too much for one core of LiteLLM.

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
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.bench_client import GAP_MS, load, poisson, trivial_server
from benchmarks.machine import RESULTS, about, own_file, save
from benchmarks.processes import environment
from benchmarks.servers import free_port
from headway.load.request import PlannedRequest, Prompt

# A contestant that others keep from its core for more of the time falls behind, however little each request costs.
MOST_WAITED = 0.05
WARM_UP_RATE = 20.0
START_S = 300.0  # LiteLLM's proxy takes 10 s of processor time
DIRECT, GATEWAY, OLD, NGINX, LITELLM = "direct", "headway", "headway before", "nginx", "litellm"
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
    listen {host}:{port}; keepalive_requests 1000000;
    location / {{
      proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


_LITELLM_FILE = """
model_list:
  - model_name: trivial
    litellm_params: {{model: text-completion-openai/trivial, api_base: "{url}/v1", api_key: none}}
litellm_settings: {{telemetry: false}}
"""
_LITELLM_VARIABLES = {
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
}


_HEADWAY = "-m headway gateway {file} --host={host} --port={port} --log-level=warning"
HEADWAY = (sys.executable, "-P", *_HEADWAY.split())  # as of Proxy


@dataclass(frozen=True)
class Proxy:
    """How a proxy is started.

    Args:
        file: what its file says, by `url` or `address` of the backend, `host`, `port` and `folder`.
        command: the same of its command line, with the `file`.
        variables: of its environment.
        host: the address on which it listens.
    """

    file: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"


def proxies(litellm: str, old: Path | None) -> dict[str, Proxy]:
    """What is measured, by name: LiteLLM's proxy with its program, and the gateway of another checkout."""
    found = {GATEWAY: Proxy(_GATEWAY_FILE, HEADWAY)}
    if old is not None:
        found[OLD] = Proxy(_GATEWAY_FILE, HEADWAY, {"PYTHONPATH": str(old.resolve())})
    if shutil.which(NGINX):
        found[NGINX] = Proxy(_NGINX_FILE, (NGINX, "-p", "{folder}", "-c", "{file}"))
    if litellm:
        command = (litellm, "--config={file}", "--host={host}", "--port={port}", "--num_workers=1")
        found[LITELLM] = Proxy(_LITELLM_FILE, command, _LITELLM_VARIABLES)
    return found


@contextlib.contextmanager
def running(proxy: Proxy, backend: str = "", cores: Collection[int] = ()) -> Iterator[tuple[str, psutil.Process]]:
    """The URL of a proxy in front of the backend, and its process, which has these cores, or any."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="gateway-") as folder:
        file = Path(folder) / "config.yaml"
        known = {"folder": folder, "host": proxy.host, "port": port, "url": backend}
        known["address"] = backend.removeprefix("http://")
        file.write_text(proxy.file.format(**known))
        command = [each.format(file=file, **known) for each in proxy.command]
        with (Path(folder) / "log").open("wb") as log:
            variables = {**environment(), **proxy.variables}
            pin = partial(os.sched_setaffinity, 0, cores or os.sched_getaffinity(0))
            process = psutil.Popen(command, stdout=log, stderr=log, env=variables, preexec_fn=pin)
            try:
                _await(proxy.host, port, process, Path(folder) / "log")
                yield f"http://{proxy.host}:{port}", process
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(30)


def _await(host: str, port: int, process: psutil.Popen, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
            return
        time.sleep(0.1)
    raise SystemExit(f"the proxy did not start:\n{log.read_text()}")


def measure(
    proxy: Proxy | None, requests: list[PlannedRequest], gap_ms: int, cores: tuple[int, int]
) -> dict[str, float]:
    """One run through one proxy, or none. Times are milliseconds, rates are for each second of its processor time."""
    with contextlib.ExitStack() as stack:
        url, process = stack.enter_context(trivial_server(gap_ms, cores[0])), None
        if proxy is not None:
            url, process = stack.enter_context(running(proxy, url, cores[1:]))
        load("headway", url, poisson(WARM_UP_RATE, 1.0, 1))
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
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def _waited_s(process: psutil.Process | None) -> float:
    """Seconds for which it could have run, and something else had its core."""
    return 0.0 if process is None else int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1]) / 1e9


def streams(count: int, seconds: float) -> list[PlannedRequest]:
    tokens = round(seconds * 1000 / GAP_MS)
    return [PlannedRequest(i, Prompt(text="A short prompt."), 4, tokens, arrival_s=i / count) for i in range(count)]


def run(arguments: argparse.Namespace, cores: tuple[int, int]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over the rounds, by load and contestant."""
    seconds, known = arguments.seconds, proxies(arguments.litellm, arguments.old)
    quick = [name for name in known if name != LITELLM]
    loads = {
        "rate": (poisson(arguments.rate, seconds, 1), 0, [DIRECT, *quick]),
        "streams": (streams(arguments.streams, seconds), GAP_MS, quick),
    }
    if arguments.litellm:
        loads["slow rate"] = poisson(arguments.slow_rate, seconds, 1), 0, [DIRECT, *known]
        loads["slow streams"] = streams(arguments.slow_streams, seconds), GAP_MS, [*known]
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in loads}
    for _ in range(arguments.rounds):
        for name, (requests, gap_ms, kinds) in loads.items():
            for kind in kinds:
                found[name].setdefault(kind, []).append(measure(known.get(kind), requests, gap_ms, cores))
    return {
        name: {
            kind: {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
            for kind, rounds in of_load.items()
        }
        for name, of_load in found.items()
    }


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    for name, of_load in results.items():
        direct = of_load.get(DIRECT)
        if direct is not None:
            print(f"{name}, direct: P50 {direct['e2e_p50_ms']:.2f} ms, P99 {direct['e2e_p99_ms']:.2f} ms")
        for kind, found in of_load.items():
            if kind == DIRECT:
                continue
            if direct is not None:
                added = [found[key] - direct[key] for key in ("e2e_p50_ms", "e2e_p99_ms")]
                said = f"adds {added[0]:.2f} ms at P50, {added[1]:.2f} ms at P99; "
                said += f"{found['requests_a_core_second']:,.0f} requests a core and second"
            else:
                said = f"{found['chunks_a_core_second']:,.0f} chunks a core and second, {found['memory_mb']:.0f} MiB"
            print(f"{name}, {kind}: {said}; {found['failed']:.0f} failed")
            if found["share_waited"] > MOST_WAITED:
                print(f"  it waited {found['share_waited']:.0%} of the time for its core: the machine was busy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=400, help="at a time")
    parser.add_argument("--litellm", default="", metavar="PROGRAM", help="measure LiteLLM's proxy, too")
    parser.add_argument("--old", type=Path, metavar="CHECKOUT", help="measure the gateway of another checkout, too")
    parser.add_argument("--slow-rate", type=float, default=5.0, help="requests per second, beside LiteLLM's proxy")
    parser.add_argument("--slow-streams", type=int, default=5, help="at a time, beside LiteLLM's proxy")
    parser.add_argument("--output", type=Path, default=RESULTS / "gateway.json")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this needs two cores: one for the proxies, one for client and backend")
    os.sched_setaffinity(0, {cores[0]})
    results = run(arguments, (cores[0], cores[1]))
    show(results)
    settings: dict[str, Any] = {key: value for key, value in vars(arguments).items() if key not in ("output", "old")}
    save({"machine": about(), "settings": settings, "results": results}, own_file(arguments.output))


if __name__ == "__main__":
    main()
