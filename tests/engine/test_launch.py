"""Starts of an engine process: launched before there is an event loop, failing, and stopped while it loads."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from headway.engine.client import EngineClient, EngineDead
from headway.policy.cache.preload import PreloadedPrompt
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


@pytest.mark.asyncio
async def test_a_busy_engine_ends_with_its_parent(tmp_path: Path) -> None:
    code = """
import asyncio, sys
from pathlib import Path
from headway.engine.client import EngineClient
from tests.engine.test_client import config, request

async def main():
    client = EngineClient(config(Path(sys.argv[1])))
    await client.start()
    await client.wait_ready()
    streams = [client.generate(request(str(i), max_tokens=4000)) for i in range(64)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    async with asyncio.timeout(20):  # what it was asked for takes longer
        while os.path.exists(f"/proc/{pid}"):
            await asyncio.sleep(0.05)
