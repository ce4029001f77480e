"""Which of several servers gets a request.

A router is asked once for each request. It sees what each server's queue counts (`queue_bound`) and keeps what it needs
of its own past; it reads no clock. Of two servers the one of twice the weight is to have twice as much to do.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from headway.policy.admission.queue_bound import Queues
from headway.policy.objectives.service_class import ClassTable
from headway.policy.step.request import Request

# Prompts that begin with as many equal tokens belong together.
PREFIX_TOKENS = 128
# A server has at most so many times the mean of all, before what belongs to it goes to another.
MOST_OF_MEAN = 1.25
ALIKE: tuple[float, ...] = ()  # the weights of servers that are alike


class Router(ABC):
    """Chooses a server."""

    def __init__(self, classes: ClassTable) -> None:
        self._classes = classes

    @abstractmethod
    def choose(self, request: Request, queues: Sequence[Queues], weights: Sequence[float] = ALIKE) -> int:
        """The number of the server that gets the request, of those whose queues and weights these are."""


class RoundRobin(Router):
    """Chooses one server after the other, whatever their weights."""

    _next = 0

    def choose(self, request: Request, queues: Sequence[Queues], weights: Sequence[float] = ALIKE) -> int:
        chosen = self._next % len(queues)
        self._next = chosen + 1
        return chosen


class LeastLoaded(Router):
    """Chooses the server with the fewest choices by weight, and of equal ones that with the fewest prompt tokens."""

    def choose(self, request: Request, queues: Sequence[Queues], weights: Sequence[float] = ALIKE) -> int:
        loads: list[tuple[float, float]] = [(each.of_all.choices + 1, each.of_all.tokens) for each in queues]
        if weights:
            pairs = zip(loads, weights, strict=True)
            loads = [(choices / weight, tokens / weight) for (choices, tokens), weight in pairs]
        return loads.index(min(loads))


class PrefixAffinity(Router):
    """Sends prompts that begin alike to one server, whose prefix cache knows them, unless it has too much to do.

    Servers are ranked for each beginning by a hash of both (rendezvous hashing, Thaler and Ravishankar, 1998), and the
    first one that is not overloaded gets the request (bounded loads; Mirrokni, Thorup and Zadimoghaddam, 2018).
    """

    def choose(self, request: Request, queues: Sequence[Queues], weights: Sequence[float] = ALIKE) -> int:
        salt = zlib.crc32(request.cache_salt.encode())
        beginning = hash((salt, *request.prompt_token_ids[:PREFIX_TOKENS]))
        weights = weights or [1.0] * len(queues)
        most = MOST_OF_MEAN * (1 + sum([each.of_all.choices for each in queues])) / sum(weights)
        ranked = sorted(range(len(queues)), key=lambda at: hash((beginning, at)))
        return next((at for at in ranked if queues[at].of_all.choices < most * weights[at]), ranked[0])


class ClassAware(Router):
    """Chooses the server where the fewest prompt tokens of the request's class and of more urgent ones wait."""

    def choose(self, request: Request, queues: Sequence[Queues], weights: Sequence[float] = ALIKE) -> int:
        names = [each.name for each in self._classes]
        before = names[: self._classes.rank(request.service_class or self._classes.default_class.name) + 1]

        def load(at: int) -> tuple[float, float]:
            of_class, weight = queues[at].of_class, weights[at] if weights else 1.0
            there = [of_class[name].tokens for name in before if name in of_class]  # its file may say other classes
            return sum(there) / weight, (queues[at].of_all.choices + 1) / weight

        return min(range(len(queues)), key=load)


ROUTERS: dict[str, Callable[[ClassTable], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affinity": PrefixAffinity,
    "class-aware": ClassAware,
}
