"""Which of several servers gets a request.

A router asks scorers, once for each request, how well each backend suits it, and takes the one with the highest sum. Of
equal ones the least loaded gets the request. Scorers see one state of all backends and may keep what they need of their
own past; they read no clock. The gateway and the simulator's fleet ask the same objects.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from headway.policy.fleet.backend import Ask, Backend
from headway.policy.objectives.service_class import ClassTable
from headway.policy.own_class import own_class

# Prompts that begin with as many equal tokens belong together.
PREFIX_TOKENS = 128
# A server has at most so many times the mean of all, before what belongs to it goes to another.
MOST_OF_MEAN = 1.25
# So many choices a backend may always have before a prefix that it knows does not count.
UNPRESSED = 4
# The score of the backend with the least predicted time to first token.
KNOWN = 0.95
MOST_WEIGHT = 1000.0


class Scorer(ABC):
    """Says how well backends suit a request.

    Args:
        classes: the service classes, most urgent first.

    Attributes:
        learns: backends are to remember the prompts that they were sent, and to learn from their answers.
    """

    learns = False

    def __init__(self, classes: ClassTable) -> None:
        self._classes = classes

    @abstractmethod
    def scores(self, ask: Ask, backends: Sequence[Backend]) -> Sequence[float]:
        """A number for each backend, from 0 (does not suit) to 1 (suits best)."""


class RoundRobin(Scorer):
    """Prefers one backend after the other, whatever their weights."""

    _asked = -1

    def scores(self, ask: Ask, backends: Sequence[Backend]) -> Sequence[float]:
        self._asked += 1
        return _only(self._asked % len(backends), backends)


class LeastLoaded(Scorer):
    """Prefers backends with few choices by weight."""

    def scores(self, ask: Ask, backends: Sequence[Backend]) -> Sequence[float]:
        return [1.0 / (1.0 + each.crowd) for each in backends]


class PrefixAffinity(Scorer):
    """Sends prompts that begin alike to one backend, whose prefix cache knows them, unless it has too much to do.

    Backends are ranked for each beginning by a hash of both (rendezvous hashing, Thaler and Ravishankar, 1998), and the
    first one that is not overloaded gets the request (bounded loads; Mirrokni, Thorup and Zadimoghaddam, 2018).
    """

    def scores(self, ask: Ask, backends: Sequence[Backend]) -> Sequence[float]:
        return _only(_first_with_room(str(ask.beginning(PREFIX_TOKENS)), backends), backends)


class Session(Scorer):
    """Sends the requests of a conversation to one backend, unless it has too much to do."""

    def scores(self, ask: Ask, backends: Sequence[Backend]) -> Sequence[float]:
        if not ask.session:
            return [0.0] * len(backends)
        return _only(_first_with_room(ask.session, backends), backends)


class PrefixHits(Scorer):
    """Prefers backends that were sent the beginning of the prompt before, by the share that they should know.

    What a backend knows does not count while it has too much to do beyond the mean, for each request by itself: one
    busy backend does not end the affinity of others (bounded loads, as for PrefixAffinity).
    """

    learns = True

    def scores(self, ask: Ask, backends: Sequence[Backend]) -> Sequence[float]:
        crowds = [each.crowd for each in backends]
        most = MOST_OF_MEAN * (sum(crowds) / len(backends))
        return [
            each.cached_share(ask) if crowd <= most or crowd <= UNPRESSED / each.weight else 0.0
            for each, crowd in zip(backends, crowds, strict=True)
        ]


class PredictedTtft(Scorer):
    """Prefers backends whose first token should come soonest, by what was learnt from their answers.

    One of which too little is known yet counts for a little more than the best one, so that it is tried.
    """

    learns = True

    def scores(self, ask: Ask, backends: Sequence[Backend]) -> Sequence[float]:
        predicted = [each.predicted_ttft_ns(ask) / each.share for each in backends]
        least = min([ns for ns in predicted if ns > 0], default=0.0)
        return [KNOWN * least / ns if ns > 0 else 1.0 for ns in predicted]


class Slack(Scorer):
    """Prefers backends that should have the first token there before it is due."""

    learns = True

    def scores(self, ask: Ask, backends: Sequence[Backend]) -> Sequence[float]:
        due_ns = max(0.0, ask.ttft_ms * 1e6)
        if due_ns == math.inf:
            return [1.0] * len(backends)
        predicted = [each.predicted_ttft_ns(ask) for each in backends]
        return [1.0 if ns <= due_ns else due_ns / ns for ns in predicted]


class ClassAware(Scorer):
    """Prefers backends where few prompt tokens of the request's class and of more urgent ones wait."""

    def scores(self, ask: Ask, backends: Sequence[Backend]) -> Sequence[float]:
        names = [each.name for each in self._classes]
        before = names[: self._classes.rank(ask.service_class or self._classes.default_class.name) + 1]

        def waiting(backend: Backend) -> float:
            of_class = backend.queues.of_class  # its file may say other classes
            tokens = sum([of_class[name].tokens for name in before if name in of_class])
            return tokens / (backend.weight * backend.share)

        return [1.0 / (1.0 + waiting(each)) for each in backends]


class TwoChoices(Scorer):
    """Draws two backends and prefers the less loaded one (power of two choices; Mitzenmacher, 2001)."""

    _asked = 0

    def scores(self, ask: Ask, backends: Sequence[Backend]) -> Sequence[float]:
        self._asked += 1
        drawn = zlib.crc32(b"%d" % self._asked)
        first = drawn % len(backends)
        second = (first + 1 + (drawn >> 16) % max(1, len(backends) - 1)) % len(backends)
        return _only(min(first, second, key=lambda at: backends[at].load), backends)


def _only(chosen: int, backends: Sequence[Backend]) -> list[float]:
    found = [0.0] * len(backends)
    found[chosen] = 1.0
    return found


def _first_with_room(key: str, backends: Sequence[Backend]) -> int:
    """The first backend for a key that is not overloaded; the very first where all are."""
    ranked = _ranked(key, backends)
    return next((at for at in ranked if _has_room(backends[at], backends)), ranked[0])


def _ranked(key: str, backends: Sequence[Backend]) -> list[int]:
    """Backends in an order of their own for each key, in which nothing changes when another one comes or goes."""
    known = zlib.crc32(key.encode(errors="replace"))
    mixed = [zlib.crc32(each.name.encode(), known) * 0x9E3779B1 & 0xFFFFFFFF for each in backends]
    return sorted(range(len(backends)), key=lambda at: mixed[at] ^ mixed[at] >> 15)


def _has_room(backend: Backend, backends: Sequence[Backend]) -> bool:
    """Whether the backend has less than MOST_OF_MEAN times its part of all choices."""
    weights = sum([each.weight * each.share for each in backends])
    mean = (1 + sum([each.queues.of_all.choices for each in backends])) / weights
    return backend.queues.of_all.choices < MOST_OF_MEAN * mean * backend.weight * backend.share


SCORERS: dict[str, Callable[[ClassTable], Scorer]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affinity": PrefixAffinity,
    "class-aware": ClassAware,
    "predicted-ttft": PredictedTtft,
    "slack": Slack,
    "prefix-hits": PrefixHits,
    "session": Session,
    "two-choices": TwoChoices,
}


@dataclass(frozen=True)
class Router:
    """Chooses a backend by scorers."""

    scorers: Sequence[tuple[float, Scorer]]  # each with its weight

    @cached_property
    def learns(self) -> bool:
        return any(scorer.learns for _, scorer in self.scorers)

    def choose(self, ask: Ask, backends: Sequence[Backend]) -> int:
        """The number of the backend that gets the request, of these."""
        totals = [0.0] * len(backends)
        for weight, scorer in self.scorers:
            for at, score in enumerate(scorer.scores(ask, backends)):
                totals[at] += weight * score
        best = max(totals)
        equal = [at for at, total in enumerate(totals) if total == best]
        return equal[0] if len(equal) == 1 else min(equal, key=lambda at: backends[at].load)


def scorers_of(text: str) -> list[tuple[float, Callable[[ClassTable], Scorer]]]:
    """What makes the scorers that a text names, as "prefix-hits=2,slack,mine:Own=0.5", each with its weight.

    Raises:
        ValueError: one is unknown, named twice, or no scorer; one line that says what to do.
    """
    found: dict[str, tuple[float, Callable[[ClassTable], Scorer]]] = {}
    for part in text.split(","):
        name, equals, said = part.strip().partition("=")
        try:
            weight = float(said) if equals else 1.0
        except ValueError:
            weight = -1.0
        if not 0 < weight <= MOST_WEIGHT:
            raise ValueError(f"the weight of scorer {name!r} is {said!r}; it must be a number above 0, at most 1000")
        if name in found:
            raise ValueError(f"scorer {name!r} is named twice; give it one weight")
        found[name] = weight, SCORERS[name] if name in SCORERS else _own(name)
    return list(found.values())


def _own(name: str) -> Callable[[ClassTable], Scorer]:
    made = own_class("scorer", name, SCORERS)
    if not (isinstance(made, type) and issubclass(made, Scorer)):
        raise ValueError(f"scorer {name!r} is not one; derive the class from {Scorer.__module__}.Scorer")
    if getattr(made, "__abstractmethods__", None):
        raise ValueError(f"scorer {name!r} has no scores(ask, backends); write that method")
    return made


def routing(text: str) -> str:
    """The text, if it names scorers. Raises ValueError as scorers_of() does."""
    scorers_of(text)
    return text


def router_of(text: str, classes: ClassTable) -> Router:
    """A router that asks the scorers which a text names. Raises ValueError as scorers_of() does."""
    return Router([(weight, make(classes)) for weight, make in scorers_of(text)])
