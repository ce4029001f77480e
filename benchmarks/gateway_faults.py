"""The gateway on a virtual clock, in front of backends that fail in every way; and what must hold whatever happens.

    python -m benchmarks.gateway_faults --requests 1000000 --processes 2
    python -m benchmarks.gateway_faults --seed 4711        one world again, as a violation names it

All of the gateway is the real one, from its edge to its connections: routing, retries, breakers, health, the relay of
streams, lookups of names. The event loop's clock is virtual, and so is the network: a connection leads to a backend
that a seed has written, and which is killed, frozen, cut off, restarted without a word, slow, in error, breaks streams
in five ways, or leaves its name for another one. Clients come by chance; some go away.

What must hold: every request ends, in bounded time; an answer that ends well is whole; every other one has an error
that says so; no backend and no queue counts a request that has ended; no connection is lost. The table says how many
attempts at a backend failed for each fault, how many requests got an error, and after how long a backend was in use
again. The result goes to benchmarks/results/gateway_faults.json (--output).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, about, own_file, save
from benchmarks.virtual_backends import FAULTS, TOKENS, Backend, Episodes, Timeless, Violation, VirtualLoop
from headway.bench.client.load import collector_off
from headway.config_files.gateway import parse_gateway_file
from headway.gateway.app import create_gateway_app
from headway.gateway.asking import Asker
from headway.gateway.gateway import Gateway
from headway.gateway.settings import GatewaySettings
from headway.server.edge.connection import ARRIVED
from headway.server.edge.streaming import WHEN_GONE

BACKENDS, REQUESTS, RATE = 6, 10_000, 120.0  # of a world; requests per second
EVERY_S, LASTS_S = 30.0, 12.0  # mean time between two faults of a backend, and of one
LEAVE, LEAVE_S = 0.05, 0.1  # the share of clients that go away, and within how many seconds
# None of the timeouts adds up to more, with two retries.
MOST_S = 60.0
_NO_FAILURES = ("ok", "cancelled", "resent")
_FILE = """
routing = "{routing}"
[timeouts]
connect_s = 2
first_byte_s = 6
stall_s = 4
[health]
every_s = 2
timeout_s = 1
eject_s = 2
most_eject_s = 20
slow_start_s = 5
"""
_BACKEND = '[[backend]]\nname = "{0}"\nurl = "http://{0}.test:80"\nmodels = ["m"]\nresolve = true\n'


class World:
    """A gateway, its backends, and its clients.

    Attributes:
        ended: requests by how they ended.
        took_s: the longest time of one.
    """

    def __init__(self, seed: int, requests: int) -> None:
        self.seed, self.requests = seed, requests
        self.rng = random.Random(seed)
        self.loop = VirtualLoop()
        self.episodes = Episodes()
        self.ended: Counter[str] = Counter()
        self.took_s = 0.0
        self.backends = [Backend(f"b{at}", self.loop, self.rng, self.episodes) for at in range(BACKENDS)]
        self._addresses = {each.name: f"{at}.0" for at, each in enumerate(self.backends)}
        self.loop.backends = {self._addresses[each.name]: each for each in self.backends}
        self._moves = 0

    async def run(self) -> None:
        """Go on until the last request has ended. Raises Violation."""
        routing = self.rng.choice(
            ("slack=2,prefix-hits,least-loaded", "least-loaded", "round-robin", "predicted-ttft,least-loaded")
        )
        text = _FILE.format(routing=routing) + "".join(_BACKEND.format(each.name) for each in self.backends)
        settings = GatewaySettings(log_level="critical", file=parse_gateway_file("gateway.toml", text))
        gateway = self.gateway = Gateway(settings)
        app, asker = create_gateway_app(gateway), Asker(gateway, self._look_up)
        for work in (asker.resolve(), asker.run()):
            gateway.background(work)
        await asyncio.sleep(1.0)
        faults = [asyncio.create_task(self._trouble(each)) for each in self.backends]
        clients = []
        for number in range(self.requests):
            await asyncio.sleep(self.rng.expovariate(RATE))
            clients.append(asyncio.create_task(self._client(app, number)))
        for ended in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise Violation(f"{type(ended).__name__}: {ended}") from ended
        for task, backend in zip(faults, self.backends, strict=True):
            task.cancel()
            self._count_attempts(backend)
        self._check(gateway)
        await gateway.close()

    async def _look_up(self, host: str) -> list[str]:
        return [self._addresses[host.partition(".")[0]]]

    async def _trouble(self, backend: Backend) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / EVERY_S))
            fault = self.rng.choice(FAULTS)
            self._count_attempts(backend)
            backend.begin(fault)
            if fault == "renamed":  # it is at another address now; what it has begun at the old one, it ends there
                self._moves += 1
                old = self._addresses[backend.name]
                self._addresses[backend.name] = address = f"{old.partition('.')[0]}.{self._moves}"
                self.loop.backends[address] = self.loop.backends[old]
                self.loop.backends[old] = Backend("gone", self.loop, self.rng, self.episodes, fault="renamed")
            else:
                await asyncio.sleep(self.rng.expovariate(1 / LASTS_S))
            backend.end()

    def _count_attempts(self, backend: Backend) -> None:
        own = [each for name, each in self.gateway.members.items() if name.startswith(f"{backend.name}@")]
        failed = sum(count for each in own for name, count in each.outcomes.items() if name not in _NO_FAILURES)
        self.episodes.attempts[backend.last] += max(0, failed - backend.counted)
        backend.counted = failed

    # --- clients ----------------------------------------------------------------------------------------

    async def _client(self, app: Any, number: int) -> None:
        began_s, stream = self.loop.time(), self.rng.random() < 0.8
        said: list[dict[str, Any]] = []
        bodies = [{"type": "http.request", "body": _body(number, stream)}]
        leaves = self.rng.random() < LEAVE
        when_gone: list[Callable[[], None]] = []

        async def receive() -> dict[str, Any]:
            return bodies.pop() if bodies else {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            said.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            ARRIVED: self.loop.time_ns(),
            WHEN_GONE: when_gone.append,
        }
        answering = asyncio.create_task(app(scope, receive, send))
        if leaves:
            await asyncio.wait([answering], timeout=self.rng.random() * LEAVE_S)
            if not answering.done():
                for tell in when_gone:
                    tell()
                await asyncio.wait([answering], timeout=MOST_S)
                if not answering.done():
                    raise Violation(f"request {number} goes on though its client has gone")
                self.ended["left"] += 1
                return
        await answering
        self.took_s = max(self.took_s, self.loop.time() - began_s)
        self._judge(number, said, stream)

    def _judge(self, number: int, said: list[dict[str, Any]], stream: bool) -> None:
        if not said or said[-1].get("more_body", False):
            raise Violation(f"request {number} has no end: {said[-2:]}")
        status, body = said[0]["status"], b"".join(each.get("body", b"") for each in said[1:])
        events = [line[6:] for line in body.split(b"\n\n") if line.startswith(b"data: ")] if status == 200 else []
        if status == 200 and (not stream or events[-1:] == [b"[DONE]"]):
            parts = [json.loads(each) for each in events[:-1]] if stream else [json.loads(body)]
            text = "".join(choice["text"] for part in parts for choice in part["choices"])
            if len(text.split()) != TOKENS or (stream and text != "".join(f"{at} " for at in range(TOKENS))):
                raise Violation(f"request {number} ended well with {text!r}")
            self.ended["whole"] += 1
            return
        error = json.loads(events[-1] if status == 200 else body).get("error")
        if not error or not error.get("message") or error.get("code") == "internal_error":
            raise Violation(f"request {number} ended with {status} and {body[-300:]!r}")
        self.ended[f"{status} {'in a stream' if stream and status == 200 else error.get('code')}"] += 1
        name = error["message"].removeprefix("backend ").partition(":")[0].partition("@")[0]
        fault = next((each.last for each in self.backends if each.name == name), "")
        self.episodes.failed[fault or ("5xx" if error["message"] == "bad" else "nobody left")] += 1

    def _check(self, gateway: Gateway) -> None:
        """What must hold when all is over. Raises Violation."""
        if self.took_s > MOST_S:
            raise Violation(f"a request took {self.took_s:.1f} s")
        if gateway.in_flight or gateway.generations or gateway.admission.queues.of_all.choices:
            raise Violation(f"the gateway still counts {gateway.in_flight} requests")
        for name, member in gateway.members.items():
            bound = member.seen.queues.of_all
            if member.in_flight or member.waiting or bound.choices or bound.tokens or member.is_leaving:
                raise Violation(f"backend {name} still counts {member.in_flight}, {bound.choices}, {bound.tokens}")
        known = sum(each.pool.num_open for each in gateway.members.values())
        there = sum(len(each.wires) for each in self.loop.backends.values())
        if known < there:
            raise Violation(f"{there} connections are open, of which the gateway knows {known}")


def _body(number: int, stream: bool) -> bytes:
    said = b"true" if stream else b"false"
    return b'{"model":"m","prompt":"Conversation %d","max_tokens":%d,"stream":%b}' % (number % 500, TOKENS, said)


@contextlib.contextmanager
def _clock_of(loop: VirtualLoop) -> Iterator[None]:
    """The gateway's clock is that of the loop meanwhile."""
    modules = [each for name, each in sys.modules.items() if name.startswith("headway.")]
    found = [each for each in modules if getattr(each, "clock", None) is time.monotonic_ns]
    for module in found:
        module.clock = loop.time_ns  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in found:
            module.clock = time.monotonic_ns  # type: ignore[attr-defined]


def live(seed: int, requests: int = REQUESTS) -> World:
    """Let a world go on to its end. Raises Violation."""
    world = World(seed, requests)
    logging.getLogger("headway.server").setLevel(logging.CRITICAL)
    with _clock_of(world.loop), contextlib.closing(world.loop):
        try:
            world.loop.run_until_complete(world.run())
        except Violation as error:
            raise Violation(f"seed {seed}: {error}") from error
    return world


def _found(seed: int) -> tuple[float, Counter[str], Episodes, float]:
    with collector_off():
        world = live(seed)
    return world.loop.time() - Timeless.now_s, world.ended, world.episodes, world.took_s


def campaign(requests: int, first_seed: int, processes: int) -> dict[str, Any]:
    """Worlds until so many requests have been in one. Raises Violation."""
    began, total, ended, virtual_s, took_s = time.monotonic(), Episodes(), Counter[str](), 0.0, 0.0
    seeds = range(first_seed, first_seed + -(-requests // REQUESTS))
    with ProcessPoolExecutor(processes) as pool:
        for lasted_s, of_world, episodes, longest_s in pool.map(_found, seeds):
            virtual_s, took_s = virtual_s + lasted_s, max(took_s, longest_s)
            ended += of_world
            for name in ("begun", "attempts", "failed"):
                getattr(total, name).update(getattr(episodes, name))
            for fault, seconds in episodes.back_s.items():
                total.back_s[fault] += seconds
    return {
        "requests": len(seeds) * REQUESTS,
        "worlds": len(seeds),
        "first_seed": first_seed,
        "ended": dict(ended.most_common()),
        "faults": {fault: _row(total, fault) for fault in (*FAULTS, "nobody left")},
        "longest_request_s": round(took_s, 2),
        "virtual_hours": round(virtual_s / 3600, 2),
        "seconds": round(time.monotonic() - began),
        "violations": 0,
    }


def _row(of: Episodes, fault: str) -> dict[str, float]:
    seconds = of.back_s.get(fault) or [math.nan]
    p50, p99 = np.percentile(seconds, [50, 99])
    return {
        "episodes": of.begun[fault],
        "attempts": of.attempts[fault],
        "failed": of.failed[fault],
        "back_p50_s": round(float(p50), 2),
        "back_p99_s": round(float(p99), 2),
    }


def table(found: dict[str, Any]) -> str:
    """Markdown, a row for each fault."""
    titles = ("episodes", "failed attempts", "requests with an error", "in use again, P50 s", "P99 s")
    lines = [f"| | {' | '.join(titles)} |", "|---" + "|---:" * len(titles) + "|"]
    for fault, row in found["faults"].items():
        cells = ("-" if isinstance(each, float) and math.isnan(each) else f"{each:,}" for each in row.values())
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, help="only the world of this seed")
    parser.add_argument("--output", type=Path, default=RESULTS / "gateway_faults.json")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return print(dict(live(arguments.seed).ended))
    found = campaign(arguments.requests, arguments.first_seed, arguments.processes)
    save(found | {"machine": about()}, own_file(arguments.output))
    print(table(found))
    print({name: value for name, value in found.items() if name != "faults"})


if __name__ == "__main__":
    main()
