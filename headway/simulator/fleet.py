"""Several simulated servers behind a router, on one virtual clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

from headway.policy.request import NEVER
from headway.policy.routing import Router
from headway.simulator.answers import Answer
from headway.simulator.server import After, Sends, Server
from headway.simulator.traffic import Arrival


class Fleet:
    """Servers that go on beside each other. A request is routed by what their queues count when it comes.

    Args:
        servers: that nothing has come to, without clients of their own.
        after, sends: clients that wait for answers, as of `simulate`.

    Attributes:
        answers: in order of arrival.
        routed: requests that each server got.
    """

    def __init__(
        self, servers: Sequence[Server], router: Router, after: After | None = None, sends: Sends | None = None
    ) -> None:
        self.servers = servers
        self.answers: list[Answer] = []
        self.routed = [0] * len(servers)
        self._router = router
        self._after = after
        self._sends = sends
        self._numbers = itertools.count()
        self._coming: list[tuple[int, int, Arrival]] = []  # when, and what
        self._lives = [server.life() for server in servers]
        self._until = [next(life) for life in self._lives]  # up to which each must hear of all that comes
        self._waits = [(until, at) for at, until in enumerate(self._until)]
        heapq.heapify(self._waits)
        for server in servers:
            server.after = self._ended

    @property
    def now(self) -> int:
        """When the last step of all ended."""
        return max(server.now for server in self.servers)

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Until nothing is left to do.

        Args:
            arrivals: in order of time; each is asked for when the one before comes.

        Raises:
            Stuck: a sequence can never run.
            ValueError: a request names a class that there is not.
        """
        later = iter(arrivals)
        self._expect(later)
        while True:
            until, at = self._waits[0]
            if until != self._until[at]:
                heapq.heappop(self._waits)  # it was woken earlier
            elif self._coming and self._coming[0][0] <= until:
                when, number, arrival = heapq.heappop(self._coming)
                if number % 2:
                    self._expect(later)
                self._arrive(arrival, when)
            elif until >= NEVER:
                return
            else:
                heapq.heappop(self._waits)
                self.servers[at].receive(until)
                self._go_on(at, until)

    def _expect(self, later: Iterator[Arrival]) -> None:
        """Have the next of those that come whatever the servers do; their numbers are odd."""
        arrival = next(later, None)
        if arrival is not None:
            heapq.heappush(self._coming, (arrival.at_ns, 2 * next(self._numbers) + 1, arrival))

    def _arrive(self, arrival: Arrival, now: int) -> None:
        if self._sends is not None and not self._sends(arrival, now):
            return
        for server in self.servers:
            server.receive(now)
        chosen = self._router.choose(arrival.request, [server.queues for server in self.servers])
        self.routed[chosen] += 1
        server = self.servers[chosen]
        self.answers += server.accept(arrival, now)
        if server.is_idle and now < self._until[chosen]:
            self._go_on(chosen, now)

    def _go_on(self, at: int, now: int) -> None:
        until = self._until[at] = self._lives[at].send(now)
        heapq.heappush(self._waits, (until, at))

    def _ended(self, answers: list[Answer]) -> Iterable[Arrival]:
        """A request has ended on a server; what follows is routed anew."""
        for arrival in self._after(answers) if self._after is not None else ():
            heapq.heappush(self._coming, (arrival.at_ns, 2 * next(self._numbers), arrival))
        return ()
