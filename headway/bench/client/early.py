"""Ends a run that has nothing more to tell: too many requests failed, or too many are in flight."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headway.bench.client.dispatch import LoadListener, LoadStage
from headway.load.option_values import FAILURES, IN_FLIGHT
from headway.load.record import RequestRecord


class Limited(LoadListener):
    """A listener that tells another one all it hears, and sets `stop` when a limit is reached.

    Attributes:
        reason: which limit was reached, in words; empty before that.
    """

    def __init__(self, limits: dict[str, int], listener: LoadListener) -> None:
        self.stop = asyncio.Event()
        self.reason = ""
        self._limits, self._listener = limits, listener
        self._failed = self._in_flight = self._waiting = 0

    @contextlib.asynccontextmanager
    async def also(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Let the user's `stop` set this one's, too, inside."""

        async def follow() -> None:
            await stop.wait()
            self.stop.set()

        following = asyncio.create_task(follow())
        try:
            yield
        finally:
            following.cancel()

    def _check(self, key: str, count: int, said: str) -> None:
        most = self._limits.get(key)
        if most is not None and count >= most and not self.stop.is_set():
            self.reason = f"{count:,} requests {said} (--stop-at {key}:{most})"
            self.stop.set()

    def stage(self, stage: LoadStage) -> None:
        self._listener.stage(stage)

    def began(self, at_ns: int) -> None:
        self._listener.began(at_ns)

    def started(self, record: RequestRecord) -> None:
        self._listener.started(record)
        self._in_flight += 1
        self._check(IN_FLIGHT, self._in_flight + self._waiting, "were in flight or waited for a place")

    def waiting(self, count: int) -> None:
        self._listener.waiting(count)
        self._waiting = count
        self._check(IN_FLIGHT, self._in_flight + self._waiting, "were in flight or waited for a place")

    def ended(self, record: RequestRecord) -> None:
        self._listener.ended(record)
        self._in_flight -= record.sent_ns > 0
        self._failed += record.failed and record.sent_ns > 0
        self._check(FAILURES, self._failed, "had failed")
