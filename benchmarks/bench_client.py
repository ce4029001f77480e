"""How well the client of `headway bench` keeps its schedule, and how late it reads tokens.

    python -m benchmarks.bench_client [--rate 1000] [--seconds 20] [--streams 2000] [--no-search]

The client has one core and a server that does next to nothing another; each is pinned. Three things are measured:

* `rate`: Poisson arrivals at --rate; start lag is from when a request was due to when its first byte was sent.
* `highest rate`: the same for a few seconds each at rates that double until the P99 start lag is 10 ms, and are then
  bracketed to 5 %.
* `streams`: --streams answers at a time, 20 tokens per second each. The server writes into each token when it sent it,
  so the reading error of every token is known: the time that the client noted less that time.

Nothing else may run on the two cores. Where that cannot be had, real-time priority comes close to it, as root:
`chrt -f 1 python -m benchmarks.bench_client`. Without either, the client says that it is client-bound.

Where aiohttp can be imported, the first and the last are repeated with a client made with it, on the same dispatcher.
The result goes to benchmarks/results/client.json (--output).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.machine import about, own_file, save
from headway.bench.client.load import LoadOutcome, Pace, run_load
from headway.bench.client.openai_client import OpenAIClient
from headway.load.endpoint import Endpoint
from headway.load.request import PlannedRequest, Prompt

HERE = Path(__file__).parent
GAP_MS = 50
TOKENS = 8  # length of an answer in the rate measurements
SEARCH_SECONDS = 5.0
MAX_START_LAG_MS = 10.0


@contextlib.contextmanager
def trivial_server(gap_ms: int, core: int | None) -> Iterator[str]:
    """The URL of a server of its own, on that core."""
    command = [sys.executable, "-m", "benchmarks.trivial_server", "--gap-ms", str(gap_ms)]
    server = subprocess.Popen(command, cwd=HERE.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    try:
        if core is not None:
            os.sched_setaffinity(server.pid, {core})
        yield server.stdout.readline().strip()
    finally:
        server.stdin.close()
        server.wait()


def client_for(kind: str, url: str, keep_text: bool) -> Any:
    if kind == "aiohttp":
        from benchmarks.aiohttp_client import AiohttpClient

        return AiohttpClient(url)
    return OpenAIClient(Endpoint(url, model="trivial"), keep_text=keep_text)


def load(
    kind: str, url: str, requests: list[PlannedRequest], *, keep_text: bool = False, **options: Any
) -> LoadOutcome:
    """One run, with some connections already open."""
    warm_ups = [PlannedRequest(i, Prompt(text="A short prompt."), 4, 1) for i in range(16)]

    async def measure() -> LoadOutcome:
        async with client_for(kind, url, keep_text) as client:
            return await run_load(client, requests, Pace(**options), warm_ups=warm_ups, sockets=client.busy_sockets)

    outcome = uvloop.run(measure())
    if outcome.gave_up:
        raise SystemExit(outcome.gave_up)
    return outcome


def poisson(rate: float, seconds: float, tokens: int) -> list[PlannedRequest]:
    rng, at_s = random.Random(0), 0.0
    requests: list[PlannedRequest] = []
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        requests.append(PlannedRequest(len(requests), Prompt(text="A short prompt."), 4, tokens, arrival_s=at_s))
    return requests


def spread(values: Any) -> dict[str, float]:
    """Percentiles and the maximum of values in ms."""
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99), "max": float(np.max(values))}


def seen(outcome: LoadOutcome) -> dict[str, Any]:
    health = outcome.client
    records = [each for each in outcome.records if each.ok]
    sent_s = (max(each.sent_ns for each in records) - outcome.began_ns) / 1e9
    return {
        "requests": len(records),
        "failed": len(outcome.records) - len(records),
        "sent_per_s": len(records) / sent_s,
        "start_lag_ms": spread(health.start_lag_ms),
        "loop_lag_ms": spread(health.loop_lag_ms),
        "cpu_share": health.cpu_share,
        "ttft_ms": spread([(each.first_token_ns - each.sent_ns) / 1e6 for each in records]),
        "client_bound": health.reasons,
    }


def measure_rate(kind: str, rate: float, seconds: float, core: int | None) -> dict[str, Any]:
    with trivial_server(0, core) as url:
        return {"rate": rate, **seen(load(kind, url, poisson(rate, seconds, TOKENS)))}


def highest_rate(kind: str, core: int | None) -> dict[str, Any]:
    """The highest rate, to 5 %, with a P99 start lag below 10 ms and no failure, in the better of two tries.

    0 where not even 250/s has it.
    """
    held: dict[str, Any] | None = None
    low, high, rate = 0.0, float("inf"), 1000.0
    while high / max(low, 1.0) > 1.05 and rate >= 250:
        result = measure_rate(kind, rate, SEARCH_SECONDS, core)
        if not is_on_time(result):  # something else may have had the core
            result = measure_rate(kind, rate, SEARCH_SECONDS, core)
        lag_ms = result["start_lag_ms"]["p99"]
        print(f"  {rate:6.0f}/s: P99 start lag {lag_ms:.2f} ms, {result['cpu_share']:.2f} of a core", file=sys.stderr)
        if is_on_time(result):
            low, held = rate, result
        else:
            high = rate
        rate = rate * 2 if high == float("inf") else rate / 2 if low == 0 else (low * high) ** 0.5
    return {"highest_rate": low, "there": held}


def is_on_time(result: dict[str, Any]) -> bool:
    return result["start_lag_ms"]["p99"] < MAX_START_LAG_MS and not result["failed"]


def measure_streams(kind: str, streams: int, seconds: float, core: int | None) -> dict[str, Any]:
    """All streams begin within a second and last for `seconds`."""
    tokens = round(seconds * 1000 / GAP_MS)
    requests = [
        PlannedRequest(i, Prompt(text="A short prompt."), 4, tokens, arrival_s=i / streams) for i in range(streams)
    ]
    with trivial_server(GAP_MS, core) as url:
        outcome = load(kind, url, requests, keep_text=True)
    by_stream = [reading_errors_ms(record) for record in outcome.records if record.ok]
    return {
        "streams": streams,
        "tokens_per_s": streams * 1000 / GAP_MS,
        "ttft_error_ms": spread([errors[0] for errors in by_stream]),
        "token_error_ms": spread(np.concatenate(by_stream)),
        **seen(outcome),
    }


def reading_errors_ms(record: Any) -> Any:
    """For each token, the time when the client says it came less the time when the server says that it sent it."""
    sent = np.array([int(word) for word in record.text.split()])
    return (np.array(record.chunk_ns) - sent) / 1e6


def line(name: str, kind: str, result: dict[str, Any]) -> str:
    lag, loop = result["start_lag_ms"], result["loop_lag_ms"]
    said = f"{name}, {kind}: start lag P50 {lag['p50']:.2f}, P99 {lag['p99']:.2f}, max {lag['max']:.1f} ms; "
    said += f"loop lag P99 {loop['p99']:.2f} ms; {result['cpu_share']:.2f} of a core"
    if (error := result.get("token_error_ms")) is not None:
        first = result["ttft_error_ms"]
        said += f"; tokens read late by P50 {error['p50']:.2f}, P99 {error['p99']:.2f}, max {error['max']:.1f} ms"
        said += f", first tokens by P99 {first['p99']:.2f} ms"
    if result["failed"]:
        said += f"; {result['failed']} requests failed"
    return said + "".join(f"\n  client-bound: {reason}" for reason in result["client_bound"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1000.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--streams", type=int, default=2000, help="at a time; 0 leaves that out")
    parser.add_argument("--search", action=argparse.BooleanOptionalAction, default=True, help="for the highest rate")
    parser.add_argument("--client", action="append", choices=("headway", "aiohttp"), help="both where aiohttp is there")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "client.json")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    has_aiohttp = importlib.util.find_spec("aiohttp") is not None
    kinds = arguments.client or (["headway", "aiohttp"] if has_aiohttp else ["headway"])
    cores = sorted(os.sched_getaffinity(0))
    server_core = cores[1] if len(cores) > 1 else None
    os.sched_setaffinity(0, {cores[0]})
    if server_core is None:
        print("There is one core only: client and server share it.", file=sys.stderr)
    report: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            **about(),
            "python": platform.python_version(),
            "real_time_priority": os.sched_getscheduler(0) == os.SCHED_FIFO,
        },
        "settings": {"rate": arguments.rate, "seconds": arguments.seconds, "streams": arguments.streams},
        "results": {},
    }
    for kind in kinds:
        found = report["results"][kind] = {}
        found["rate"] = measure_rate(kind, arguments.rate, arguments.seconds, server_core)
        print(line(f"{arguments.rate:g} requests/s", kind, found["rate"]))
        if arguments.streams:
            found["streams"] = measure_streams(kind, arguments.streams, arguments.seconds, server_core)
            print(line(f"{arguments.streams} streams", kind, found["streams"]))
        if arguments.search:
            found["search"] = highest_rate(kind, server_core)
            print(f"highest rate held, {kind}: {found['search']['highest_rate']:.0f} requests/s")
    save(report, own_file(arguments.output))


if __name__ == "__main__":
    main()
