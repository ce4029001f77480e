"""A limit of time that is set anew again and again, and nearly never reached."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Timer:
    """Calls back when some time has passed since it was set, unless it is set again, or stopped, before.

    The loop's own timer stays where it is meanwhile, and looks when it is due how much is left. To make one for each
    request, or for each piece of an answer, would cost as much as to read it.

    Attributes:
        since_s: the time of the loop from which on it counts.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop, self._call = loop, call
        self._handle: asyncio.TimerHandle | None = None
        self._looks_at_s = 0.0
        self.since_s, self._length_s = 0.0, math.inf

    @property
    def is_set(self) -> bool:
        return self._length_s < math.inf

    def set(self, length_s: float) -> None:
        """Call back in so many seconds."""
        self.since_s, self._length_s = self._loop.time(), length_s
        if self._handle is not None and self._looks_at_s > self.since_s + length_s:
            self._handle.cancel()
            self._handle = None
        if self._handle is None:
            self._look_in(length_s)

    def stop(self) -> None:
        """Do not call back, until it is set again."""
        self._length_s = math.inf

    def end(self) -> None:
        """Stop for good, and let go of whoever would be called."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._length_s, self._call = None, math.inf, _nothing

    def _look_in(self, seconds: float) -> None:
        self._looks_at_s = self._loop.time() + seconds
        self._handle = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._handle = None
        left_s = self.since_s + self._length_s - self._loop.time()
        if left_s <= 0:
            self.stop()
            self._call()
        elif self.is_set:
            self._look_in(left_s)


def _nothing() -> None:
    pass
