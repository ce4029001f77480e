"""Ctrl-C while a measurement runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

from rich.console import Console


@contextlib.contextmanager
def interrupts(stop: asyncio.Event, progress: Console) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run early, with what was measured; a second one ends the process."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()

    def interrupt() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        elif not stop.is_set():
            progress.print("Stopping: requests under way have two seconds; once more to stop at once.")
            stop.set()

    caught = (signal.SIGINT, signal.SIGTERM)
    for each in caught:
        loop.add_signal_handler(each, interrupt)
    try:
        yield
    finally:
        for each in caught:
            loop.remove_signal_handler(each)
