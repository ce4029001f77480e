"""How many requests of batches are in the engine: enough to fill what others leave, and not more."""

from __future__ import annotations

import asyncio
from collections import deque

from headway.engine.messages import EngineStats
from headway.policy.objectives.service_class import ClassTable
from headway.server.service import Service

# Requests that may wait for the engine: an eighth of its seats, and at least so many.
LEAST_WAITING = 4
# Seconds after which a door that nothing has opened is tried again.
AGAIN_S = 1.0


def batch_class(table: ClassTable) -> str:
    """The class of all requests of batches: `offline`, or where the table has none, its last class."""
    names = [each.name for each in table]
    return "offline" if "offline" in names else names[-1]


class Gaps:
    """A Gate: lets requests of batches into the engine, first come, first served.

    Everything else goes before them there (policy `slo`), so what they wait for is what others need. There are never
    more than the engine has seats, and of these only a few that wait: they take no room of the queue from others.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.inside = 0
        self._door: deque[asyncio.Future[None]] = deque()
        self._trying: asyncio.TimerHandle | None = None
        service.engine.subscribe(self._on_step)

    async def enter(self) -> None:
        if not self._door and self._has_room():
            self.inside += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._door.append(place)
        self._try_later()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        self.inside -= 1
        self._open()

    def _has_room(self) -> bool:
        engine = self._service.engine
        if self._service.draining or engine.state != "ready" or engine.ready is None:
            return False
        seats, stats = engine.ready.max_num_seqs, engine.stats
        name = batch_class(self._service.classes.table)
        running = stats.running_of_class.get(name, 0) if stats is not None else 0
        return self.inside < seats and self.inside - running < max(LEAST_WAITING, seats // 8)

    def _on_step(self, stats: EngineStats) -> None:
        if self._door:
            self._open()

    def _open(self) -> None:
        while self._door and self._has_room():
            place = self._door.popleft()
            if not place.done():
                place.set_result(None)
                self.inside += 1

    def _try_later(self) -> None:
        """Try again after a while: an engine that is started again makes no step by itself."""
        if self._trying is None:
            self._trying = asyncio.get_running_loop().call_later(AGAIN_S, self._try)

    def _try(self) -> None:
        self._trying = None
        self._open()
        if self._door:
            self._try_later()
