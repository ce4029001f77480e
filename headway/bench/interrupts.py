"""Ctrl-C while a measurement runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from rich.console import Console

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """Ctrl-C came before there was a result to keep."""


@contextlib.contextmanager
def interrupts(stop: asyncio.Event, progress: Console) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run early, with what was measured; a second one cancels the current task."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()

    def interrupt() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        elif not stop.is_set():
            progress.print("Stopping: running requests have two seconds; press Ctrl-C again to stop at once.")
            stop.set()

    # The loop's own handlers would not do: it would call them after those of `interruptible`, too.
    with _handling(lambda *_: loop.call_soon_threadsafe(interrupt)):
        yield


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM raise Interrupted in work that blocks the event loop."""

    def interrupt(*_: Any) -> None:
        raise Interrupted

    with _handling(interrupt):
        yield


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled when `stop` is set.

    Raises:
        Interrupted: it was.
    """
    working, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    waits: list[asyncio.Task[Any]] = [working, stopped]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Interrupted
        return working.result()
    finally:
        for each in waits:
            each.cancel()
        await asyncio.wait(waits)


@contextlib.contextmanager
def _handling(handler: Any) -> Iterator[None]:
    before = {each: signal.signal(each, handler) for each in SIGNALS}
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)
