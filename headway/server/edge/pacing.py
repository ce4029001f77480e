"""Takes newcomers a few at a time, so that a crowd does not hold up the tokens of those who are served.

The API process is one event loop, which runs everything that is ready in one turn. A token needs some turns from the
engine to its socket. When thousands of requests arrive together, all of them are ready at once, and the turn takes
seconds. So the work on a request before it reaches the engine, and on an answer in one piece after the engine is done,
waits here for a turn that has room. Tokens do not wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
# Pieces of work that begin in one turn of the event loop; each takes about a millisecond.
PER_TURN = 2
# Small requests that begin in one turn, of which nobody waits for the engine; each takes a fifth of a millisecond.
SMALL_PER_TURN = 6
# Reads of connections in one turn; each takes about a seventh of a millisecond.
READS_PER_TURN = 12


class Pace:
    """Hands out places in turns of the event loop, first come, first served."""

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_ticking = False

    async def turn(self) -> None:
        """Wait for a turn of the loop that has room; this one where nobody else waits.

        The work that follows should take about a millisecond until it waits for something else.
        """
        if not self.claim():
            await self.later()

    def claim(self) -> bool:
        """Take a place in this turn, if there is one and nobody else waits for it."""
        self._tick()
        if not self._left or self._waiting:
            return False
        self._left -= 1
        return True

    def fill(self) -> None:
        """Leave no place in this turn: a piece of work has taken longer than most."""
        self._left = 0

    def later(self) -> asyncio.Future[None]:
        """A place in a later turn. The future is done when that turn has come."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._tick()
        return place

    def _tick(self) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_ticking = False
        self._left = self._per_turn
        while self._left and self._waiting:
            place = self._waiting.popleft()
            if not place.done():  # else the client has gone meanwhile
                place.set_result(None)
                self._left -= 1
        if self._left < self._per_turn:
            self._tick()


class Shared(Generic[T]):
    """A result that everyone gets who asks before it is made. It is made at once, unless one was made just now.

    Args:
        every_s: the least seconds between two results.
    """

    def __init__(self, make: Callable[[], T], every_s: float) -> None:
        self._make, self._every_s = make, every_s
        self._next: asyncio.Task[T] | None = None
        self._made_at = 0.0

    async def get(self) -> T:
        """A result that is made after this call."""
        if self._next is None:
            self._next = asyncio.create_task(self._made())
        return await asyncio.shield(self._next)

    async def _made(self) -> T:
        now = asyncio.get_running_loop().time
        await asyncio.sleep(self._made_at + self._every_s - now())
        self._next, self._made_at = None, now()
        return self._make()
