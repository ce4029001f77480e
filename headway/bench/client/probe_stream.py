"""Requests of a stranger beside a load: what does somebody feel who has nothing to do with it?"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from headway.bench.client.dispatch import Sender
from headway.bench.record import RequestRecord
from headway.bench.request import PlannedRequest


class ProbeStream:
    """Sends requests at their times, whatever becomes of those before them, for as long as something else goes on.

    Args:
        requests: in order of their arrival_s, which all have; there may be no end of them.

    Attributes:
        records: of those that were due.
    """

    def __init__(self, client: Sender, requests: Iterator[PlannedRequest]) -> None:
        self.records: list[RequestRecord] = []
        self._client = client
        self._requests = requests
        self._under_way: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    @contextlib.asynccontextmanager
    async def beside(self, grace_s: float) -> AsyncIterator[None]:
        """Time 0 is now. At the end of the block nothing more is sent; what is under way has `grace_s` left.

        Raises:
            Whatever is raised in the client.
        """
        sending = asyncio.create_task(self._send_on_time(time.monotonic_ns()))
        sending.add_done_callback(self._done)
        try:
            yield
            sending.cancel()
            if self._under_way:
                await asyncio.wait(self._under_way, timeout=grace_s)
        finally:
            left = {sending, *self._under_way}
            for task in left:
                task.cancel()
            await asyncio.wait(left)
        await asyncio.sleep(0)  # their callbacks
        if self._error is not None:
            raise self._error

    async def _send_on_time(self, began_ns: int) -> None:
        for planned in self._requests:
            due_ns = began_ns + round((planned.arrival_s or 0.0) * 1e9)
            while (left_ns := due_ns - time.monotonic_ns()) > 0:  # a loop may wake up a moment too early
                await asyncio.sleep(left_ns / 1e9)
            task = asyncio.create_task(self._send(planned, due_ns))
            self._under_way.add(task)
            task.add_done_callback(self._done)

    async def _send(self, planned: PlannedRequest, due_ns: int) -> None:
        record = RequestRecord.of(planned, due_ns)
        self.records.append(record)
        await self._client.send(planned, record)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            self._error = self._error or task.exception()
