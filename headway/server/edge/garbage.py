"""Runs Python's full garbage collections when they are short.

A full collection looks at every object. With two thousand requests in flight it takes 0.2 s, in which every stream
stands still. So Python starts none by itself. One runs when few requests are in flight, or when very many have ended
since the last one. Young objects are collected as usual.
"""

from __future__ import annotations

import gc

FEW_IN_FLIGHT = 32
ENDED_BETWEEN = 1_000
MOST_ENDED_BETWEEN = 20_000
_NEVER = 2**30


class FullCollections:
    """Counts the requests that have ended since the last full collection, and decides when the next one runs."""

    def __init__(self) -> None:
        self._ended = 0
        self._is_on = False
        self._before = gc.get_threshold()

    def start(self) -> None:
        """Take full collections over from Python. Objects that exist now are not looked at again."""
        gc.freeze()
        if not self._is_on:
            self._before = gc.get_threshold()
        gc.set_threshold(*self._before[:2], _NEVER)
        self._is_on = True

    def stop(self) -> None:
        """Leave full collections to Python again, as before; a process may go on when its server has ended."""
        if self._is_on:
            gc.set_threshold(*self._before)
            self._is_on = False

    def on_end(self, in_flight: int) -> None:
        """Count a request that has ended while `in_flight` others are under way, and collect if it is time."""
        self._ended += 1
        is_time = self._ended >= (ENDED_BETWEEN if in_flight <= FEW_IN_FLIGHT else MOST_ENDED_BETWEEN)
        if self._is_on and is_time:
            gc.collect()
            self._ended = 0
