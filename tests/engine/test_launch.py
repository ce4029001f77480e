"""An engine process that is launched before there is an event loop."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from headway.engine.client import EngineClient
from tests.engine.test_client import config


@pytest.mark.asyncio
async def test_it_is_the_one_that_starts(tmp_path: Path) -> None:
    client = EngineClient(config(tmp_path))
    client.launch()
    launched = client.pid
    await client.start()
    await client.wait_ready()
    assert client.pid == launched and client.restarts == 0
    await client.stop()
    assert client.pid is None


def test_it_is_ended_where_nothing_was_started(tmp_path: Path) -> None:
    client = EngineClient(config(tmp_path))
    client.launch()
    assert client.pid is not None
    launched = psutil.Process(client.pid)
    client.kill()
    assert client.pid is None and not launched.is_running()
