"""What is in flight behind an edge, and how it comes to its end when the process shuts down."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Protocol

from headway.server.edge.garbage import FullCollections
from headway.server.edge.pacing import READS_PER_TURN, Pace
from headway.server.errors import ApiError, unavailable


class Abortable(Protocol):
    def abort(self, error: ApiError) -> None: ...


class InFlight(ABC):
    """What an edge stands in front of: requests that have begun and not ended, and work that goes on after its answer.

    Attributes:
        draining: the process shuts down, and nothing new may begin.
        reads: places for reads of connections in turns of the event loop.
    """

    def __init__(self) -> None:
        self.draining = False
        self.in_flight = 0
        self.generations: set[Abortable] = set()
        self.full_collections = FullCollections()
        self.reads = Pace(READS_PER_TURN)
        self._refusal: ApiError | None = None
        self._idle = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()

    @abstractmethod
    def check_ready(self) -> object:
        """Raise ApiError where nothing can be answered."""

    @abstractmethod
    def reload_files(self) -> None:
        """Read the files of the settings again, where there are any."""

    def check_up(self) -> None:
        """Raise ApiError 503 while the process shuts down."""
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down", 5, "rejected-shutting-down")

    def begin(self) -> None:
        """Count a request as in flight, until end()."""
        self.in_flight += 1
        self._idle.clear()

    def end(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()
        self.full_collections.on_end(self.in_flight)

    def enlist(self, generation: Abortable) -> None:
        """Note a request that is about to use the engine.

        Raises:
            ApiError: 503 when the time for the shutdown was up before it began.
        """
        if self._refusal is not None:
            raise self._refusal
        self.generations.add(generation)

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Let `work` go on after the answer that started it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def end_background(self) -> None:
        """Cancel the work that goes on by itself."""
        for task in list(self._background):
            task.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests; give those in flight `timeout_s` to finish, then end them with an error."""
        self.draining = True
        if await self._is_idle_within(timeout_s):
            return
        self._refusal = unavailable(
            f"the server shut down before this request was finished (--shutdown-timeout {timeout_s:g})",
            "shutting_down",
            5,
        )
        for generation in list(self.generations):
            generation.abort(self._refusal)
        await self._is_idle_within(2.0)

    def end_drain(self) -> None:
        """Make drain() stop waiting."""
        self._idle.set()

    async def _is_idle_within(self, seconds: float) -> bool:
        if not self.in_flight:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return not self.in_flight
