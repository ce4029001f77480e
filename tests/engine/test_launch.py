"""Starts of an engine process: one that is launched before there is an event loop, one that fails, one that is stopped."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import psutil
import pytest

from headway.engine.client import EngineClient, EngineDead
from headway.policy.preload import PreloadedPrompt
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


def test_nobody_waits_until_an_engine_has_read_what_it_is_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "module"
    folder.mkdir()
    (folder / "never_reads.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("headway.engine.client.ENGINE_MODULE", "never_reads")
    more_than_a_pipe_holds = [PreloadedPrompt("long", [70_000] * 100_000)]
    client = EngineClient(config(tmp_path, preloaded=more_than_a_pipe_holds))
    began = time.monotonic()
    client.launch()
    client.kill()
    assert time.monotonic() - began < 30.0


@pytest.mark.asyncio
async def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    client = EngineClient(config(tmp_path, kv_cache_memory=1024, max_model_len=2048))
    await client.start()
    with pytest.raises(EngineDead, match="raise --kv-cache-memory, or lower --max-model-len"):
        await client.wait_ready()
    assert client.state == "dead"
    await client.stop()


@pytest.mark.asyncio
async def test_stopping_while_loading_is_clean_and_prompt(tmp_path: Path) -> None:
    client = EngineClient(config(tmp_path))
    await client.start()
    await asyncio.sleep(0.3)
    async with asyncio.timeout(3):
        await client.stop()
    assert client.pid is None
    assert (client.state, client.restarts) == ("stopped", 0)
