"""Five problems that a server can have, planted one after the other, to see what the page, Grafana and `top` show.

    python -m benchmarks.planted --problem slow-client --seconds 120

A server of the bundled model answers two clients of class `chat`, one short request after the other. Each problem is
put beside them for some seconds; then the screen of `headway top` is printed. Meanwhile the page and /metrics can be
looked at: http://127.0.0.1:8000/#live. docs/observe.md says how to read them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.processes import Died, environment
from headway.bundled import STORY
from headway.top import TopError, View, fetch

SEATS, THREADS = 8, 1
# First come, first served: the usual policy would keep the objectives of the first class at the cost of the other.
OPTIONS = (
    *("--host", "127.0.0.1", "--scheduling-policy", "fcfs", "--max-num-seqs", str(SEATS), "--threads", str(THREADS)),
    *("--kv-cache-memory", "5M", "--max-num-queued-reqs", "none", "--log-level", "error"),
)
CLASSES = """\
default = "chat"

[[class]]
name = "chat"
ttft_ms = 500
tpot_ms = 50

[[class]]
name = "crawler"
ttft_ms = 500
tpot_ms = 50
"""
CHATS, CHAT_TOKENS = 2, 60
ENDLESS = {"ignore_eos": True, "temperature": 0.7, "stream": True}
_READY_S, _TIMEOUT_S, _EVERY_S = 120.0, 60.0, 1.0
_STOPPED_S, _RUNS_S = 0.045, 0.015
_RECEIVED, _PATIENCE_S = 4096, 6.0  # bytes that the machine of a slow client takes for it, and when it gives up


@dataclass
class Load:
    """What clients do to a server until it is over.

    Args:
        pid: of the engine process.
    """

    port: int
    pid: int
    is_over: threading.Event = field(default_factory=threading.Event)

    def ask(self, seed: int, service_class: str, prompt: int, output: int, **further: Any) -> None:
        """Send requests with random prompts of so many tokens, one after the other."""
        rng = random.Random(seed)
        while not self.is_over.is_set():
            tokens = [rng.randrange(10, 8000) for _ in range(prompt)]
            body = {"prompt": tokens, "max_tokens": output, "service_class": service_class, **ENDLESS}
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
            try:
                connection.request("POST", "/v1/completions", json.dumps({**body, **further}))
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                self.is_over.wait(0.2)
            finally:
                connection.close()

    def read_slowly(self, seed: int) -> None:
        """Ask for streams, take a few bytes a second of each, and give it up after some seconds."""
        self.is_over.wait(seed * _PATIENCE_S / 3)  # so that not all begin at once
        while not self.is_over.is_set():
            body = json.dumps({"prompt": "The old house", "seed": seed, "max_tokens": 300, **ENDLESS})
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            with socket.socket() as client, suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED)
                client.settimeout(_TIMEOUT_S)
                client.connect(("127.0.0.1", self.port))
                client.sendall((head + body).encode())
                ends = time.monotonic() + _PATIENCE_S
                while time.monotonic() < ends and not self.is_over.wait(0.2) and client.recv(64):
                    pass

    def throttle(self) -> None:
        """Let the engine have a core for a quarter of the time, as a quota of processor time does."""
        try:
            while not self.is_over.wait(_RUNS_S):
                os.kill(self.pid, signal.SIGSTOP)
                time.sleep(_STOPPED_S)
                os.kill(self.pid, signal.SIGCONT)
        finally:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)


Maker = Callable[[Load], None]


@dataclass(frozen=True)
class Problem:
    """A problem, and what makes it: each of these is a thread."""

    name: str
    said: str
    makers: tuple[Maker, ...]


def _asking(count: int, service_class: str, prompt: int, output: int) -> tuple[Maker, ...]:
    """So many clients of a class."""
    about = partial(Load.ask, service_class=service_class, prompt=prompt, output=output)
    return tuple(partial(about, seed=len(service_class) * 1000 + number) for number in range(count))


HEALTHY = Problem("none", "nothing but the chats", ())
PROBLEMS = (
    Problem("noisy-neighbour", "24 clients of class crawler take turns in 8 seats", _asking(24, "crawler", 60, 100)),
    Problem("long-prompts", "two clients send prompts of 850 tokens", _asking(2, "crawler", 850, 1)),
    Problem("thrashing-kv", "six answers of 900 tokens outgrow a KV cache of 2,000", _asking(6, "crawler", 20, 900)),
    Problem(
        "slow-client",
        "three clients take 320 bytes of an answer a second, and give up after six",
        tuple(partial(Load.read_slowly, seed=number) for number in range(3)),
    ),
    Problem("throttled-cpu", "the engine has a core for a quarter of the time", (Load.throttle,)),
)


@contextmanager
def planted(problem: Problem, port: int, pid: int) -> Iterator[None]:
    """Have the chats and the problem until the end of the block."""
    load = Load(port, pid)
    makers = (*_asking(CHATS, "chat", 30, CHAT_TOKENS), *problem.makers)
    with ThreadPoolExecutor(len(makers)) as pool:
        working = [pool.submit(maker, load) for maker in makers]
        try:
            yield
        finally:
            load.is_over.set()
    for each in working:
        each.result()


@contextmanager
def serving(port: int) -> Iterator[tuple[str, int]]:
    """A server of the bundled model as the problems need it: its address, and the id of its engine process.

    Raises:
        Died: it ended before it was ready, or is not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        classes = Path(folder) / "classes.toml"
        classes.write_text(CLASSES)
        command = [sys.executable, "-m", "headway", "serve", str(STORY), "--port", str(port), *OPTIONS]
        process = subprocess.Popen([*command, "--service-classes", str(classes)], env=environment())
        url = f"http://127.0.0.1:{port}"
        try:
            ends = time.monotonic() + _READY_S
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > ends:
                    raise Died(f"the server is not ready: exit code {process.poll()}")
                time.sleep(0.1)
            yield url, _engine_of(process.pid)
        finally:
            process.terminate()
            process.wait(20)


def _is_ready(url: str) -> bool:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _engine_of(server: int) -> int:
    """The process that the server has started, and that runs the engine."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == server and b"headway.engine" in (path.parent / "cmdline").read_bytes():
                return int(path.parent.name)
    raise Died("the server has no engine process")


def watched(url: str, seconds: float) -> View:
    """What `headway top` has seen after so many seconds."""
    view, ends = View(url), time.monotonic() + seconds
    while True:
        with suppress(TopError):
            view.add(fetch(url))
        if time.monotonic() >= ends:
            return view
        time.sleep(_EVERY_S)


def main() -> None:
    names = [each.name for each in (HEALTHY, *PROBLEMS)]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted", description=__doc__)
    parser.add_argument("--problem", choices=names, action="append", help="one of them; may be repeated")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long each is there")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    console = Console()
    with serving(arguments.port) as (url, pid):
        for problem in (HEALTHY, *PROBLEMS):
            if problem.name in (arguments.problem or names):
                console.rule(f"{problem.name}: {problem.said}")
                with planted(problem, arguments.port, pid):
                    time.sleep(2 * _EVERY_S)  # what was before has ended
                    console.print(watched(url, arguments.seconds).render(console.width))


if __name__ == "__main__":
    main()
