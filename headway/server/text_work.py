"""Text work outside the event loop: a few threads, and a bounded queue of work that waits for one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from headway.server.errors import too_many

T = TypeVar("T")
THREADS = 2
# A hop to another thread costs more than encoding a text this short.
INLINE_CHARS = 2000


class TextWork:
    """Runs work on texts: at once when they are short, else in a thread.

    Args:
        max_waiting: characters or tokens that may wait for a thread. A longer text may wait when it is the only one.
        inline: the most characters or tokens of work that is done at once.
    """

    def __init__(self, max_waiting: int, threads: int = THREADS, inline: int = INLINE_CHARS) -> None:
        self._max_waiting, self._inline = max_waiting, inline
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._free = asyncio.Semaphore(threads)
        self.waiting = 0

    async def run(self, size: int, function: Callable[[], T]) -> T:
        """The result of `function`, which works on `size` characters or tokens.

        Raises:
            ApiError: 429 when too much waits already.
        """
        if size > self._inline:
            self.check(size)
        return await self.finish(size, function)

    def check(self, size: int) -> None:
        """Raise ApiError 429 when so much more would be too much to wait."""
        if self.waiting and self.waiting + size > self._max_waiting:
            raise too_many(
                f"{self.waiting} characters of other requests wait to be tokenized, and this one has {size}; at most "
                f"{self._max_waiting} may wait (--max-queued-text)",
                "text_queue_full",
                1,
            )

    async def finish(self, size: int, function: Callable[[], T]) -> T:
        """The result of `function`, for work that ends a request: unlike run(), it waits however much waits already."""
        if size <= self._inline:
            return function()
        self.waiting += size
        try:
            await self._free.acquire()
        finally:
            self.waiting -= size
        loop = asyncio.get_running_loop()

        def release(done: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._free.release)

        running = self._pool.submit(function)
        running.add_done_callback(release)
        # A thread cannot be interrupted: it is free when it has finished, not when its client has gone away. What comes
        # of it then is for nobody.
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
