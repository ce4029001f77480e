"""How fast servers are simulated: requests of the lengths of Azure's conversation trace on H100s.

    python -m benchmarks.simulation --requests 100000
    python -m benchmarks.simulation --requests 1000000 --replicas 100

Prints seconds of processor time, what that is for a token and a step, and for each tenth of the requests what one took
and the most memory until then: a longer trace costs no more for each request. With --profile it prints where the time
goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.machine import about, save
from headway.bench.client.load import collector_off
from headway.policy.fleet.routing import router_of
from headway.policy.step.options import SchedulingOptions
from headway.simulator.answers import Answer
from headway.simulator.deployed import ServerOptions, deploy
from headway.simulator.fleet import Fleet
from headway.simulator.traffic import Arrival, arrival

# Mean and coefficient of variation of tokens (AzureLLMInferenceTrace_conv, 2023), as lognormal lengths.
PROMPT, ANSWER = (1155, 1.0), (211, 0.8)
MOST_TOKENS = 8000
PARTS = 10
OUTPUT = Path(__file__).parent / "results" / "simulation.json"


def lengths(mean: float, cv: float, count: int, rng: np.random.Generator) -> list[int]:
    sigma = np.sqrt(np.log1p(cv * cv))
    drawn: list[int] = (
        rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count).clip(1, MOST_TOKENS).astype(int).tolist()
    )
    return drawn


def arrivals(requests: int, rate: float) -> Iterator[Arrival]:
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1e9 / rate, requests)).astype(int).tolist()
    drawn = zip(times, lengths(*PROMPT, requests, rng), lengths(*ANSWER, requests, rng), strict=True)
    return (arrival(number, *each) for number, each in enumerate(drawn))


@dataclass(slots=True)
class Seen:
    """What came of the requests, and what it took up to each tenth of them.

    Args:
        marks: processor seconds and megabytes.
    """

    requests: int
    ended: int = 0
    tokens: int = 0
    marks: list[tuple[float, float]] = field(default_factory=list)

    def after(self, answers: list[Answer]) -> list[Arrival]:
        """Count answers. Nobody sends anything because of them, so this returns no arrivals."""
        self.ended += 1
        self.tokens += sum([len(answer.token_ns) for answer in answers])
        if self.ended * PARTS % self.requests < PARTS:
            self.marks.append((time.process_time(), _megabytes()))
        return []


def run(requests: int, rate: float, replicas: int) -> tuple[Fleet, Seen]:
    """Simulate requests that come at `rate` a second for each replica."""
    options, scheduling = ServerOptions(model="llama-3.1-8b", hardware="H100-SXM"), SchedulingOptions()
    made = [deploy(options, scheduling) for _ in range(replicas)]
    servers = [replace(each, timing=made[0].timing).server() for each in made]
    seen = Seen(requests)
    fleet = Fleet(servers, router_of("least-loaded", scheduling.classes), seen.after, keeps_answers=False)
    with collector_off():
        fleet.run(arrivals(requests, rate * replicas))
    return fleet, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second, of each replica")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--beside", type=Path, help="another checkout, which takes turns with this one")
    parser.add_argument("--rounds", type=int, default=5, help="with --beside")
    parser.add_argument("--output", type=Path, help="file for the result")
    args = parser.parse_args()
    if args.beside is not None:
        return compare(args.beside, args.rounds, args.requests, args.rate, args.replicas, args.output or OUTPUT)
    if args.profile:
        cProfile.runctx("run(args.requests, args.rate, args.replicas)", globals(), locals(), sort="tottime")
        return
    began = time.process_time()
    fleet, seen = run(args.requests, args.rate, args.replicas)
    seconds = time.process_time() - began
    steps = sum(len(server.steps) for server in fleet.servers)
    times = [at for at, _ in seen.marks]
    found = {
        "requests": args.requests,
        "replicas": args.replicas,
        "steps": steps,
        "tokens": seen.tokens,
        "processor_s": round(seconds, 1),
        "us_a_token": round(1e6 * seconds / seen.tokens, 2),
        "us_a_step": round(1e6 * seconds / steps),
        "ms_a_request_by_part": [
            round(1e3 * PARTS * (then - before) / args.requests, 3)
            for before, then in zip([began, *times], times, strict=False)
        ],
        "megabytes_by_part": [round(memory) for _, memory in seen.marks],
        "seconds_for_100000": round(seconds * 100_000 / args.requests),
    }
    print(f"{args.requests} requests in {seconds:.1f} s: {steps} steps of {seen.tokens / steps:.1f} sequences")
    print(json.dumps(found, indent=1))
    if args.output is not None:
        save(found | {"machine": about()}, args.output)


def compare(before: Path, rounds: int, requests: int, rate: float, replicas: int, output: Path) -> None:
    """Processor seconds of both checkouts, in turns, as other work on the machine slows both down."""
    here = Path(__file__).parents[1]
    seconds: dict[Path, list[float]] = {before: [], here: []}
    for _ in range(rounds):
        for folder, taken in seconds.items():
            given = f"--requests={requests}", f"--rate={rate}", f"--replicas={replicas}"
            command = [sys.executable, "benchmarks/simulation.py", *given]
            environment = os.environ | {"PYTHONPATH": str(folder.resolve())}
            out = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
            print(f"{folder.name}: {out.stdout}", end="")
            taken.append(float(out.stdout.split(" requests in ")[1].split()[0]))
    medians = {folder: statistics.median(taken) for folder, taken in seconds.items()}
    report = {
        "machine": about(),
        "requests": requests,
        "replicas": replicas,
        "seconds": seconds[here],
        "seconds_before": seconds[before],
        "ratio": medians[here] / medians[before],
    }
    save(report, output)
    print(f"{report['ratio']:.2f} times as long as before")


def _megabytes() -> float:
    """The most megabytes of memory until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
