"""Finds stop strings in a text that grows character by character."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=64)
def _fallback(stop: str) -> list[int]:
    """For each beginning of `stop`, the length of the longest shorter beginning that it ends with.

    The choices of a request share it.
    """
    fallback = [0] * (len(stop) + 1)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = fallback[length]
        length += stop[i] == stop[length]
        fallback[i + 1] = length
    return fallback


class StopMatcher:
    """How much of one stop string the text ends with, by Knuth, Morris and Pratt: constant time a character."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _fallback(stop)

    def push(self, character: str) -> bool:
        """Take one character; True when the text now ends with the stop string."""
        if self.matched == len(self.stop):
            self.matched = self._fallback[self.matched]
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._fallback[self.matched]
        self.matched += self.stop[self.matched] == character
        return self.matched == len(self.stop)

    @property
    def possible(self) -> int:
        """Characters at the end of the text that may yet become the stop string."""
        return self._fallback[self.matched] if self.matched == len(self.stop) else self.matched
