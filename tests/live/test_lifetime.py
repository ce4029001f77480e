"""An engine process never outlives its server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from tests.live.conftest import Served


async def test_the_engine_ends_when_its_server_is_killed(serve: Callable[..., Served]) -> None:
    server = serve().until_ready()
    pid = server.engine_pid()
    server.popen.kill()
    server.popen.wait()
    async with asyncio.timeout(15):
        while os.path.exists(f"/proc/{pid}"):
            await asyncio.sleep(0.1)
