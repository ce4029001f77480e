"""`headway serve` as users run it: the bundled model, a real engine process, a loopback port."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

import headway

SOURCE = str(Path(headway.__file__).parent.parent)


class Served:
    """A server process; `url` is where, `pid_of_engine` its engine."""

    def __init__(self, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "headway", "serve", "--port", str(self.port), "--host", "127.0.0.1", *arguments],
            env={**os.environ, "PYTHONPATH": SOURCE},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def health(self) -> int:
        try:
            return httpx.get(f"{self.url}/health").status_code
        except httpx.TransportError:
            return 0

    def until_ready(self, seconds: float = 90.0) -> Served:
        deadline = time.monotonic() + seconds
        while self.health() != 200:
            assert self.popen.poll() is None, f"the server ended with code {self.popen.returncode}"
            assert time.monotonic() < deadline, "the server did not become ready"
            time.sleep(0.05)
        return self

    def metric(self, name: str) -> float:
        """The sum of a metric's samples over its labels; 0 for one that has had nothing to count."""
        text = httpx.get(f"{self.url}/metrics").text
        assert f"# TYPE headway:{name} " in text or f"# TYPE headway:{name.removesuffix('_total')} " in text
        found = re.findall(rf"^headway:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def until_idle(self, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while self.metric("kv_cache_usage_perc") or self.metric("num_requests_running"):
            assert time.monotonic() < deadline, "blocks are still in use"
            time.sleep(0.05)

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        (pid,) = [
            int(child) for child in children if b"headway.engine\0" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        return pid

    def stop(self) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(timeout=60)


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """One server for all tests that leave it as it was."""
    server = Served("--max-num-seqs", "64", "--threads", "1").until_ready()
    yield server
    assert server.stop() == 0


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start servers of one's own; all are ended."""
    running: list[Served] = []

    def start(*arguments: str) -> Served:
        running.append(Served(*arguments))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
