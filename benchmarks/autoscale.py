"""Replicas that come and go with a ramp of load: `headway deploy` beside Ray Serve's own autoscaler, and the simulator.

    python -m benchmarks.autoscale [--peak 4] [--rounds 1]

It needs Ray Serve: pip install "ray[serve]". All contestants run the same servers, one to `--most` of them, with the
same number of requests that one is to have (`--target`), and let one go when it was not needed for the same time. They
get the same requests at the same times: few, more and more, many, fewer and fewer, few. Three replicas, their door and
the client do not fit two cores, so each engine runs for a `--share` of the time only and is stopped in between, but
while it starts. That is how a replica can be of use to another, and what the simulator is told.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil

from benchmarks.clients import HEADWAY
from benchmarks.machine import RESULTS, heading, own_file, save
from benchmarks.processes import Died, environment, tail
from benchmarks.servers import CHECKPOINTS
from benchmarks.weights import write_weights
from headway.bench.results import load_json
from headway.calibration.store import CalibratedMachine
from headway.load.measures.slo import missed_objectives
from headway.load.record import FailureKind

DEPLOY, SERVE, AT_ONCE, SIMULATED = "headway deploy", "Ray Serve", "Ray Serve at once", "headway simulate"
# Where it differs from the defaults of Ray Serve 2.60, which waits for 30 s and looks at the 30 s before.
SETTINGS = {SERVE: {}, AT_ONCE: {"upscale_delay_s": 0.0, "metrics_interval_s": 1.0, "look_back_period_s": 2.0}}
PERIOD_S, STARTS_S, LOOKS_S = 0.02, 12.0, 0.5
_OF_ENGINES = ("score_s", "attention_s", "kernel_s", "step_s", "sequence_s", "launch_s")  # fields of Efficiency
_NOTHING: Mapping[str, str] = MappingProxyType({})
REFUSED = (FailureKind.RATE_LIMITED, FailureKind.REFUSED)  # by a server whose queue is full
MOST_WAITING = 1000  # of one replica at Ray Serve: its server queues itself
TITLES = ("in time, %", "TTFT P50, ms", "TTFT P99, ms", "replica-seconds", "most", "last", "refused", "lost")


def arrivals(arguments: argparse.Namespace, seed: int) -> list[float]:
    """The times of the ramp's requests in seconds: a Poisson process whose rate rises, stays and falls (thinned)."""
    drawn, least, peak, climb_s = random.Random(seed), arguments.least, arguments.peak, arguments.climb
    hold_s, times, at = arguments.hold, list[float](), 0.0
    while (at := at + drawn.expovariate(peak)) < (ends := 2 * hold_s + 2 * climb_s + arguments.plateau):
        height = min(1.0, max(0.0, min(at - hold_s, ends - hold_s - at) / climb_s))
        if drawn.random() * peak < least + (peak - least) * height:
            times.append(at)
    return times


def trace(arguments: argparse.Namespace, seed: int, path: Path) -> None:
    """Write the ramp as a Mooncake trace."""
    lengths = {"input_length": arguments.prompt, "output_length": arguments.answer}
    rows = [{"timestamp": round(1000 * at, 3)} | lengths for at in arrivals(arguments, seed)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- the contestants ----------------------------------------------------------------------------------------


def flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags of each replica's server."""
    return {"threads": 1, "max-num-seqs": arguments.seats, "max-model-len": 1024, "kv-cache-memory": "256M"}


def command(contestant: str, name: str, port: int, arguments: argparse.Namespace, folder: Path) -> list[str]:
    classes = folder / "classes.toml"
    classes.write_text(f'[[class]]\nname = "chat"\nttft_ms = {arguments.ttft}\n')
    model = write_weights(arguments.shape, CHECKPOINTS)
    if contestant == DEPLOY:
        own = ", ".join(f"{key} = {json.dumps(value)}" for key, value in flags(arguments).items())
        file = folder / "deploy.toml"
        file.write_text(
            f'[health]\nevery_s = 0.5\nslow_start_s = 0.1\n[[deployment]]\nname = "{name}"\nmodel = "{model}"\n'
            f"flags = {{ {own} }}\nreplicas = 1\nmax_replicas = {arguments.most}\nscale_at = {arguments.target}\n"
            f"scale_down_s = {arguments.down}\nnum_cpus = 0.1\n"
        )
        own_flags = [str(file), "--host=127.0.0.1", f"--port={port}", f"--service-classes={classes}"]
        return [sys.executable, "-m", "headway", "deploy", *own_flags]
    asked = {"name": name, "port": port, "model": str(model), "classes": str(classes), "contestant": contestant}
    asked |= {"flags": [f"--{key}={value}" for key, value in flags(arguments).items()]}
    asked |= {"most": arguments.most, "target": arguments.target, "down": arguments.down}
    return [sys.executable, "-m", "benchmarks.autoscale", "--ray-serve", json.dumps(asked)]


def ray_serve(asked: dict[str, Any]) -> None:
    """Serve replicas by Ray Serve, behind its own door, until a signal. Each is the actor of `headway deploy`."""
    import ray
    from ray import serve
    from starlette.background import BackgroundTask
    from starlette.requests import Request
    from starlette.responses import StreamingResponse

    from headway.gateway.deployed.cluster import Replica

    class Served:
        async def __init__(self) -> None:  # type: ignore[misc]  # which Ray Serve waits for
            key = secrets.token_urlsafe(24)
            more = [f"--service-classes={asked['classes']}"]
            self._own = Replica(asked["model"], "replica", asked["name"], asked["flags"], key, more, {})
            where = await self._own.where()
            bearer = {"authorization": f"Bearer {key}"}
            self._client = httpx.AsyncClient(base_url=where.url, headers=bearer, timeout=None)
            while not await _is_well(self._client):
                await asyncio.sleep(0.2)

        async def __call__(self, request: Request) -> StreamingResponse:
            kind, body = request.headers.get("content-type", "application/json"), await request.body()
            sent = self._client.build_request(
                request.method, request.url.path, content=body, headers={"content-type": kind}
            )
            answer = await self._client.send(sent, stream=True)
            kind, close = answer.headers.get("content-type"), BackgroundTask(answer.aclose)
            return StreamingResponse(answer.aiter_raw(), answer.status_code, media_type=kind, background=close)

        async def __del__(self) -> None:
            await self._own.end(30.0)

    ray.init(include_dashboard=False, log_to_driver=False)
    scaling = {"min_replicas": 1, "max_replicas": asked["most"], "target_ongoing_requests": asked["target"]}
    scaling |= {"downscale_delay_s": asked["down"]} | SETTINGS[asked["contestant"]]
    options: dict[str, Any] = {"autoscaling_config": scaling, "max_ongoing_requests": MOST_WAITING}
    deployment = serve.deployment(**options, ray_actor_options={"num_cpus": 0.1})(Served)
    serve.start(http_options={"host": "127.0.0.1", "port": asked["port"]})
    serve.run(deployment.bind())
    with contextlib.suppress(KeyboardInterrupt):
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()


async def _is_well(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await client.get("/health")).status_code == 200
    return False


@dataclass
class Watched:
    """The replicas of a contestant: it counts them, and stops their engines for a part of the time.

    Attributes:
        counts: when, and how many servers there were.
    """

    process: psutil.Process
    name: str
    share: float
    counts: list[tuple[float, int]] = field(default_factory=list)
    _kinds: dict[int, str] = field(default_factory=dict)
    _engines: list[psutil.Process] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        """Count servers, and find their engines."""
        found = self.process.children(recursive=True)
        for each in found:
            if each.pid not in self._kinds:
                with contextlib.suppress(psutil.Error):
                    self._kinds[each.pid] = self._kind(each)
        kinds, now = [(each, self._kinds.get(each.pid, "")) for each in found], time.time()
        self.counts.append((time.monotonic(), sum(kind == "server" for _, kind in kinds)))
        old = [each for each, kind in kinds if kind == "engine" and now - each.create_time() > STARTS_S]
        self._engines = old

    def _kind(self, process: psutil.Process) -> str:
        said, parent = process.cmdline(), process.parent()
        if "headway.engine" in said:
            return "engine"
        is_fork = parent is not None and parent.cmdline() == said
        return "server" if f"--served-model-name={self.name}" in said and not is_fork else ""

    def _send(self, number: int) -> None:
        for each in self._engines:
            with contextlib.suppress(psutil.Error):
                each.send_signal(number)

    def _run(self, step: Callable[[], None], pause_s: float) -> None:
        while not self._is_over.wait(pause_s):
            with contextlib.suppress(psutil.Error):
                step()

    def _turn(self) -> None:
        self._send(signal.SIGCONT)
        time.sleep(self.share * PERIOD_S)
        self._send(signal.SIGSTOP)

    @contextmanager
    def watched(self) -> Iterator[None]:
        turns = (self.look, LOOKS_S), (self._turn, (1 - self.share) * PERIOD_S)
        threads = [threading.Thread(target=self._run, args=turn, daemon=True) for turn in turns]
        for each in threads:
            each.start()
        try:
            yield
        finally:
            self._is_over.set()
            for each in threads:
                each.join()
            self._send(signal.SIGCONT)

    def between(self, began: float, ended: float) -> tuple[float, int, int]:
        """Replica-seconds, the most replicas and the last ones in this time."""
        within = [(at, count) for at, count in self.counts if began <= at <= ended]
        ends = [at for at, _ in within[1:]] + [ended]
        seconds = sum(count * (end - at) for (at, count), end in zip(within, ends, strict=True))
        return seconds, max(count for _, count in within), within[-1][1]


@contextmanager
def running(contestant: str, arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Watched, float]]:
    """Start a contestant with one replica; its URL, its replicas, and how long the first one took to be there."""
    name = f"ramp-{secrets.token_hex(4)}"
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    log = folder / f"{contestant}.log"
    with log.open("w") as file:
        asked = command(contestant, name, port, arguments, folder)
        process = psutil.Popen(asked, env=environment(), stdout=file, stderr=file, start_new_session=True)
    watched, until = Watched(process, name, arguments.share), time.monotonic() + 300
    try:
        with watched.watched():
            while not _is_there(f"http://127.0.0.1:{port}", name):
                if time.monotonic() > until or process.poll() is not None:
                    raise Died(f"{contestant} does not answer:\n{tail(log)}")
                time.sleep(0.2)
            placed = next(at for at, count in watched.counts if count)
            yield f"http://127.0.0.1:{port}", watched, time.monotonic() - placed
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(90)
        except psutil.TimeoutExpired:
            process.kill()


def _is_there(url: str, name: str) -> bool:
    asked = {"model": name, "prompt": "The", "max_tokens": 1}
    try:
        return httpx.post(f"{url}/v1/completions", json=asked, timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


# --- what is measured ---------------------------------------------------------------------------------------


def workload(arguments: argparse.Namespace, requests: Path, folder: Path) -> list[str]:
    said = ["--dataset-name", "mooncake", "--dataset-path", str(requests), "--goodput", f"ttft:{arguments.ttft:g}"]
    return [*said, "--result-dir", str(folder), "--result-filename", "result.json", "--save-result"]


def figures(result: Path, ttft_ms: float) -> dict[str, float]:
    """What clients saw, of a result of `headway bench` or `headway simulate`."""
    run = load_json(result)
    missed = missed_objectives(run.records, {"": {"ttft": ttft_ms}})
    first = sorted((each.chunk_ns[0] - each.scheduled_ns) / 1e6 for each in run.records if each.chunk_ns)
    quantiles = statistics.quantiles(first, n=100, method="inclusive")
    met = sum(not reasons for reasons in missed.values()) / len(run.records)
    refused = sum(each.failure is not None and each.failure.kind in REFUSED for each in run.records)
    lost = sum(each.failed for each in run.records) - refused
    found = {"met": 100 * met, "p50": quantiles[49], "p99": quantiles[98]}
    return found | {"refused": float(refused), "lost": float(lost)}


def asked(command: list[str], result: Path, variables: Mapping[str, str] = _NOTHING) -> None:
    own = {**environment(), **variables}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=own)
    if not result.exists():
        raise Died("\n".join(["there is no result:", *(done.stdout + done.stderr).splitlines()[-15:]]))


def measure(contestant: str, arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """One ramp at one contestant."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autoscale-")))
        requests = folder / "ramp.jsonl"
        trace(arguments, seed, requests)
        url, watched, start_s = stack.enter_context(running(contestant, arguments, folder))
        time.sleep(max(0.0, STARTS_S - start_s))
        own = ["--base-url", url, "--model", watched.name, "--tokenizer", str(CHECKPOINTS / arguments.shape)]
        began = time.monotonic()
        asked([*HEADWAY, *own, *workload(arguments, requests, folder)], folder / "result.json")
        seconds, most, last = watched.between(began, time.monotonic())
        found = figures(folder / "result.json", arguments.ttft)
        return found | {"seconds": seconds, "most": float(most), "last": float(last), "start": start_s}


def simulate(arguments: argparse.Namespace, seed: int, start_s: float) -> dict[str, float]:
    """The prediction of the same ramp, by what this machine takes when it is calibrated now."""
    with tempfile.TemporaryDirectory(prefix="autoscale-") as name:
        folder = Path(name)
        requests, machine, result = folder / "ramp.jsonl", folder / "headway/hardware/ramp.json", folder / "result.json"
        trace(arguments, seed, requests)
        machine.parent.mkdir(parents=True)
        headway = [sys.executable, "-m", "headway"]
        asked([*headway, "calibrate", "--quick", "--threads=1", "--name=ramp", f"--output={machine}"], machine)
        machine.write_bytes(slowed(CalibratedMachine.from_json(machine.read_text()), arguments.share).to_json())
        said = ["--hardware=ramp", "--replicas=1", f"--max-replicas={arguments.most}", f"--scale-at={arguments.target}"]
        said += [f"--scale-down-seconds={arguments.down}", f"--startup-seconds={start_s:g}"]
        said += [f"--{key}={value}" for key, value in flags(arguments).items() if key != "threads"]
        model = str(CHECKPOINTS / arguments.shape)
        own = {"XDG_CONFIG_HOME": name}
        asked([*headway, "simulate", model, *said, *workload(arguments, requests, folder)], result, own)
        seconds = 3600 * float(load_json(result).server["replica_hours"])
        return figures(result, arguments.ttft) | {"seconds": seconds, "start": start_s}


def slowed(machine: CalibratedMachine, share: float) -> CalibratedMachine:
    """A machine whose engine runs for a share of the time. What is outside of engines takes as long."""
    hardware, efficiency = machine.hardware, machine.efficiency
    rates = {key: value * share for key, value in hardware.flops_per_s.items()}
    reads = tuple((size, rate * share) for size, rate in hardware.reads)
    hardware = replace(hardware, bytes_per_s=hardware.bytes_per_s * share, flops_per_s=rates, reads=reads)
    times = {key: getattr(efficiency, key) / share for key in _OF_ENGINES}
    return replace(machine, hardware=hardware, efficiency=replace(efficiency, **times))


def table(rounds: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: medians over the rounds."""
    keys = ("met", "p50", "p99", "seconds", "most", "last", "refused", "lost")
    lines = [f"| | {' | '.join(TITLES)} |", "|---" + "|---:" * len(TITLES) + "|"]
    for name, values in rounds.items():
        cells = [f"{statistics.median(each[key] for each in values):,.0f}" if key in values[0] else "" for key in keys]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", nargs="+", choices=(DEPLOY, *SETTINGS), default=[DEPLOY, *SETTINGS])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--least", type=float, default=0.8, help="requests/s at the ends")
    parser.add_argument("--peak", type=float, default=4.0, help="requests/s in the middle")
    parser.add_argument("--hold", type=float, default=30.0, help="seconds of few requests at each end")
    parser.add_argument("--climb", type=float, default=60.0, help="seconds in which the rate rises, and falls")
    parser.add_argument("--plateau", type=float, default=60.0, help="seconds of many requests")
    parser.add_argument("--ttft", type=float, default=2000.0, help="objective of the first token, in milliseconds")
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--answer", type=int, default=32, help="tokens")
    parser.add_argument("--shape", default="qwen2-30m")
    parser.add_argument("--share", type=float, default=0.25, help="of the time for which an engine runs")
    parser.add_argument("--seats", type=int, default=8, help="requests that a replica answers at once")
    parser.add_argument("--most", type=int, default=3, help="replicas")
    parser.add_argument("--target", type=int, default=6, help="requests that one replica is to have")
    parser.add_argument("--down", type=float, default=20.0, help="seconds until a replica goes that is not needed")
    parser.add_argument("--output", type=Path, default=RESULTS / "autoscale.json")
    parser.add_argument("--ray-serve", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    if arguments.ray_serve is not None:
        return ray_serve(arguments.ray_serve)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in (*arguments.contestants, SIMULATED)}
    for seed in range(arguments.rounds):
        for name in arguments.contestants:
            rounds[name].append(measure(name, arguments, seed))
            print(name, rounds[name][-1], file=sys.stderr, flush=True)
        starts = [each["start"] for name in arguments.contestants for each in rounds[name]]
        rounds[SIMULATED].append(simulate(arguments, seed, statistics.median(starts)))
    print(table(rounds))
    save(heading(arguments) | {"rounds": rounds}, own_file(arguments.output))


if __name__ == "__main__":
    main()
