"""A server that begins with one seat gives itself more while clients wait, and tells of it."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headway.bundled import STORY
from tests.server.live.test_live_engine import Live
from tests.server.live_server import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
CLASSES = '[[class]]\nname = "chat"\nttft_ms = 300\ntpot_ms = 200\n'
OPTIONS = ["--load-format", "auto", "--kv-cache-memory", "64M", "--max-num-seqs", "1"]


def told(server: Live) -> dict[str, Any]:
    """What the server says of its tuning."""
    time.sleep(0.5)
    found: dict[str, Any] = server.http.get("/debug/auto-tune").json()
    return found


def test_seats_are_raised_and_the_gain_is_proven_by_live_requests(tmp_path: Path) -> None:
    (tmp_path / "classes.toml").write_text(CLASSES)
    tuning = ["--auto-tune", "--auto-tune-bounds", "max-num-seqs=1:16,max-num-batched-tokens=64:512"]
    files = ["--service-classes", str(tmp_path / "classes.toml")]
    with closing(Live(STORY, *OPTIONS, *tuning, *files)) as server:
        eventually(server.is_ready, 90)
        over = threading.Event()

        def ask(number: int) -> None:
            while not over.is_set():
                server.complete(prompt=[50 + number] * 20, max_tokens=8, ignore_eos=True)

        clients = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for client in clients:
            client.start()
        try:
            eventually(lambda: "kept" in [each["kind"] for each in told(server)["done"]], 300)
            found = told(server)
        finally:
            over.set()
            for client in clients:
                client.join()
        kinds = [each["kind"] for each in found["done"]]
        assert kinds.index("tried") < kinds.index("kept")
        assert found["settings"]["max_num_seqs"] > 1
        assert found["cpu_seconds"] < 60
