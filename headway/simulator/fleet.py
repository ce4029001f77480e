"""Several simulated servers behind a router, on one virtual clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from headway.policy.request import NEVER
from headway.policy.routing import Router
from headway.policy.scaling import Scaler
from headway.simulator.answers import Answer
from headway.simulator.server import After, Sends, Server
from headway.simulator.traffic import Arrival


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a fleet grows and shrinks.

    Args:
        make: a server that nothing has come to.
        startup_ns: until a server that is started takes requests.
    """

    scaler: Scaler
    make: Callable[[], Server]
    startup_ns: int


@dataclass(slots=True)
class Replica:
    """A server of a fleet, and when it is there.

    Args:
        started_ns: it costs from then on.
        ready_ns: it takes requests from then on.
        left_ns: it takes no more requests, but ends those that it has; NEVER while it stays.
        routed: requests that it got.
    """

    server: Server
    started_ns: int = 0
    ready_ns: int = 0
    left_ns: int = NEVER
    routed: int = 0

    def lasted_ns(self, began_ns: int, ended_ns: int) -> int:
        """Of a run, how long it was there: a server that has left until its last request had ended."""
        until = ended_ns
        if self.left_ns < NEVER:
            until = max(self.left_ns, self.server.now if self.routed else 0)
        return max(0, min(until, ended_ns) - max(self.started_ns, began_ns))


class Fleet:
    """Servers that go on beside each other. A request is routed by what their queues count when it comes.

    Args:
        servers: that nothing has come to, without clients of their own.
        after, sends: clients that wait for answers, as of `simulate`.
        scaling: None leaves the servers as they are.

    Attributes:
        answers: in order of arrival.
        replicas: those that were there at any time, in the order in which they were started.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        router: Router,
        after: After | None = None,
        sends: Sends | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        self.answers: list[Answer] = []
        self.replicas: list[Replica] = []
        self._scaling = scaling
        self._router = router
        self._after = after
        self._sends = sends
        self._numbers = itertools.count()
        self._coming: list[tuple[int, int, Arrival]] = []  # when, and what
        self._lives: list[Generator[int, int, None]] = []
        self._until: list[int] = []  # up to which each must hear of all that comes
        self._waits: list[tuple[int, int]] = []
        for server in servers:
            self._start(Replica(server))

    def _start(self, replica: Replica) -> None:
        replica.server.after = self._ended
        replica.server.now = replica.ready_ns
        self.replicas.append(replica)
        self._lives.append(replica.server.life())
        self._until.append(next(self._lives[-1]))
        heapq.heappush(self._waits, (self._until[-1], len(self.replicas) - 1))

    @property
    def servers(self) -> list[Server]:
        return [replica.server for replica in self.replicas]

    @property
    def now(self) -> int:
        """When the last step of all ended."""
        return max([replica.server.now for replica in self.replicas if replica.routed], default=0)

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
                self.replicas[at].server.receive(until)
                self._go_on(at, until)

    def _expect(self, later: Iterator[Arrival]) -> None:
        """Have the next of those that come whatever the servers do; their numbers are odd."""
        arrival = next(later, None)
        if arrival is not None:
            heapq.heappush(self._coming, (arrival.at_ns, 2 * next(self._numbers) + 1, arrival))

    def _arrive(self, arrival: Arrival, now: int) -> None:
        if self._sends is not None and not self._sends(arrival, now):
            return
        for replica in self.replicas:
            replica.server.receive(now)
        if self._scaling is not None:
            self._scale(self._scaling, now)
        ready = [at for at, each in enumerate(self.replicas) if each.ready_ns <= now < each.left_ns]
        queues = [self.replicas[at].server.queues for at in ready]
        chosen = ready[self._router.choose(arrival.request, queues)]
        replica = self.replicas[chosen]
        replica.routed += 1
        self.answers += replica.server.accept(arrival, now)
        if replica.server.is_idle and now < self._until[chosen]:
            self._go_on(chosen, now)

    def _scale(self, scaling: Scaling, now: int) -> None:
        """Start replicas, or let those that were started last leave; at least one that is ready stays."""
        staying = [replica for replica in self.replicas if replica.left_ns >= NEVER]
        wanted = scaling.scaler.wanted(sum([each.server.queues.of_all.choices for each in staying]) + 1, now)
        for _ in range(wanted - len(staying)):
            self._start(Replica(scaling.make(), now, now + scaling.startup_ns))
        ready = sum([replica.ready_ns <= now for replica in staying])
        for replica in reversed(staying[wanted:]):
            if replica.ready_ns > now or ready > 1:
                ready -= replica.ready_ns <= now
                replica.left_ns = now

    def _go_on(self, at: int, now: int) -> None:
        until = self._until[at] = self._lives[at].send(now)
        heapq.heappush(self._waits, (until, at))

    def _ended(self, answers: list[Answer]) -> Iterable[Arrival]:
        """A request has ended on a server; what follows is routed anew."""
        for arrival in self._after(answers) if self._after is not None else ():
            heapq.heappush(self._coming, (arrival.at_ns, 2 * next(self._numbers), arrival))
        return ()
