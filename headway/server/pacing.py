"""Takes newcomers a few at a time, so that a crowd does not hold up the tokens of those who are served.

The API process is one event loop, which runs in one turn whatever is ready. A token needs some turns from the engine to
its socket. When thousands of requests arrive together, all are ready at once, and a turn takes as long as all of them:
seconds. So what is done for a request before it is in the engine, and for an answer in one piece after the engine
is done, waits here for a turn that has room. Tokens on their way do not.
"""

from __future__ import annotations

import asyncio
from collections import deque

# Stretches of work that begin in one turn of the event loop; each takes about a millisecond.
PER_TURN = 2
# Reads of connections, which take about a seventh of one.
READS_PER_TURN = 12


class Pace:
    """Hands out places in turns of the event loop, first come, first served."""

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_ticking = False

    async def turn(self) -> None:
        """Wait until this turn of the loop has room; at once where nobody else wants it.

        What follows should take about a millisecond, up to where it waits for something else.
        """
        if not self.claim():
            await self.later()

    def claim(self) -> bool:
        """Take a place in this turn, if there is one that nobody else waits for."""
        self._tick()
        if not self._left or self._waiting:
            return False
        self._left -= 1
        return True

    def later(self) -> asyncio.Future[None]:
        """A place in a later turn: done when that has come."""
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
