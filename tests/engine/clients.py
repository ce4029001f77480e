"""A client of an engine process, from when that is ready until it has ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway.engine.client import EngineClient


@asynccontextmanager
async def started(client: EngineClient) -> AsyncIterator[EngineClient]:
    """Start its engine, and stop it at the end."""
    await client.start()
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.stop()
