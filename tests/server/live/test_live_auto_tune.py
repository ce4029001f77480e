"""A server whose steps are too short makes them longer while requests come, proves it, and tells of it."""

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
CLASSES = '[[class]]\nname = "chat"\nttft_ms = 60\ntpot_ms = 500\n'
OPTIONS = ["--load-format", "auto", "--kv-cache-memory", "64M", "--max-num-seqs", "4"]
TUNING = ["--auto-tune", "--auto-tune-bounds", "max-num-seqs=4,max-num-batched-tokens=16:512"]
SHORT = ["--max-num-batched-tokens", "16"]  # prompts take dozens of steps
EVERY_S = 0.3


def told(server: Live) -> dict[str, Any]:
    """What the server says of its tuning."""
    time.sleep(0.5)
    found: dict[str, Any] = server.http.get("/debug/auto-tune").json()
    return found


def test_short_steps_are_made_longer_and_the_gain_is_proven_by_live_requests(tmp_path: Path) -> None:
    (tmp_path / "classes.toml").write_text(CLASSES)
    files = ["--service-classes", str(tmp_path / "classes.toml")]
    with closing(Live(STORY, *OPTIONS, *TUNING, *SHORT, *files)) as server:
        eventually(server.is_ready, 90)
        over = threading.Event()

        def ask() -> None:
            number = 0
            while not over.wait(EVERY_S):
                number += 1
                server.complete(prompt=[3 + (number * 37 + at) % 4000 for at in range(900)], max_tokens=2)

        client = threading.Thread(target=ask)
        client.start()
        try:
            eventually(lambda: "kept" in [each["kind"] for each in told(server)["done"]], 360)
            found = told(server)
        finally:
            over.set()
            client.join()
        kinds = [each["kind"] for each in found["done"]]
        assert kinds.index("tried") < kinds.index("kept")
        assert found["settings"]["max_num_batched_tokens"] > 16
        assert found["cpu_seconds"] < 60
