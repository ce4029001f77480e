"""`headway deploy` on a real Ray cluster of this machine, where Ray is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.gateway.live_gateway import events_of
from tests.server.live_server import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
REPOSITORY = Path(__file__).parents[2]
NAME = "story-on-ray"
TEXT = f"""
continue_streams = true
[health]
every_s = 0.5
timeout_s = 5
slow_start_s = 0.1
[[deployment]]
name = "{NAME}"
model = "headway/story"
flags = {{ threads = 1 }}
replicas = 2
num_cpus = 0.1
"""


class Running:
    def __init__(self, folder: Path) -> None:
        path = folder / "deploy.toml"
        path.write_text(TEXT)
        command = [sys.executable, "-m", "headway", "deploy", str(path), "--host=127.0.0.1", "--port=0"]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(
            [*command, "--log-level=warning"], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        eventually(lambda: self.said("headway gateway at") == 1, 120)
        self.url = next(line for line in self.lines if "headway gateway at" in line).split()[-1]

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def said(self, what: str) -> int:
        return sum(what in line for line in self.lines)

    @staticmethod
    def servers() -> list[psutil.Process]:
        name = f"--served-model-name={NAME}"
        return [each for each in psutil.process_iter(["cmdline"]) if name in (each.info["cmdline"] or ())]

    def ask(self, seed: int) -> tuple[str, str]:
        """The text of a stream, and how it ended."""
        body = {"prompt": "The old house stood", "max_tokens": 120, "ignore_eos": True, "seed": seed, "stream": True}
        events = events_of(httpx.post(f"{self.url}/v1/completions", json={"model": NAME, **body}, timeout=60))
        texts = [choice["text"] for each in events[:-1] for choice in json.loads(each).get("choices", [])]
        return "".join(texts), events[-1]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    found = Running(tmp_path_factory.mktemp("ray"))
    try:
        yield found
    finally:
        found.process.send_signal(signal.SIGTERM)
        assert found.process.wait(90) == 0, found.lines[-20:]
        eventually(lambda: not found.servers(), 30)


def test_no_stream_is_lost_while_replicas_are_killed(running: Running) -> None:
    eventually(lambda: running.said("ready, at") == 2, 120)
    alone = [running.ask(seed) for seed in range(8)]
    for victim in ("server", "actor"):
        before, server = running.said("ready, at"), running.servers()[0]
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(running.ask, seed) for seed in range(8)]
            eventually(lambda: "in_flight" in httpx.get(f"{running.url}/metrics").text)
            (server if victim == "server" else server.parent()).kill()
            assert [each.result() for each in asked] == alone
        eventually(lambda before=before: running.said("ready, at") > before, 120)
