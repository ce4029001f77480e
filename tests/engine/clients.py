"""A client of an engine process, from when that is ready until it has ended, and whether a process has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

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


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or a zombie: it may go between two questions."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
