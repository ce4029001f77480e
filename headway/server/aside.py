"""Work on ended choices that the event loop has no time for: it is done in a thread, many of them together."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque

from headway.server.ended import Ended

# Choices that wait; further ones are dropped, and counted. Those that are handled at once.
MOST_WAITING, MOST_AT_ONCE = 4096, 128
COMPLAINS_EVERY_S = 60.0
LONGEST_S = 5.0  # that handling some may take
logger = logging.getLogger("headway.server")


class Aside(ABC):
    """Puts choices aside until the thread handles them. The thread begins with the first of them.

    Args:
        every_s: how long they wait at most, unless MOST_AT_ONCE wait.

    Attributes:
        dropped: how many were, since the start.
    """

    def __init__(self, name: str, every_s: float = 1.0) -> None:
        self._name, self._every_s, self._waiting = name, every_s, deque[Ended]()
        self._wake, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._complained = -COMPLAINS_EVERY_S
        self.dropped = 0

    def ended(self, ended: Ended) -> None:
        """A choice has ended. It is handled later."""
        if len(self._waiting) >= MOST_WAITING:
            self.dropped += 1
            return
        self._waiting.append(ended)
        if self._thread is None:
            self._thread = threading.Thread(target=self._handle_all, name=self._name, daemon=True)
            self._thread.start()
        elif len(self._waiting) == MOST_AT_ONCE:
            self._wake.set()

    def close(self) -> None:
        """Handle what waits, and end the thread."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(LONGEST_S + 1.0)

    def _handle_all(self) -> None:
        while not self._closed or self._waiting:
            if not self._closed and len(self._waiting) < MOST_AT_ONCE:
                self._wake.wait(self._every_s)
                self._wake.clear()
            taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_AT_ONCE))]
            if taken:
                self.handle(taken)

    @abstractmethod
    def handle(self, taken: list[Ended]) -> None:
        """Do the work, in the thread. It must not raise."""

    def complain(self, message: str, *args: object) -> None:
        """Write a warning to the log, once a minute at most."""
        if time.monotonic() - self._complained >= COMPLAINS_EVERY_S:
            self._complained = time.monotonic()
            logger.warning(message, *args)
