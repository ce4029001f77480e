"""The traffic of a server as it was recorded: requests with what became of them, and the steps."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from headway.advisor.tuning.race import FAILED
from headway.policy.step.recording import Arrival, End, RecordedEngine
from headway.policy.step.request import NEVER, FinishReason
from headway.policy.step.traffic import FirstToken, Ran, Traffic
from headway.simulator.learnt import RecordedStep

MOST_REQUESTS, MOST_STEPS = 3000, 3000  # that are kept
# A request that takes half of its objectives is as good as one that takes less.
GOOD_ENOUGH = math.log(0.5)
_UNSERVED = (FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.LATE)


@dataclass(slots=True)
class Seen:
    """A sequence that came."""

    arrival: Arrival
    # first_ns, ended_ns: when it had its first token, and ended; 0 where it has not.
    first_ns: int = 0
    ended_ns: int = 0
    tokens: int = 0  # generated; known at its end
    reason: FinishReason | None = None

    @property
    def is_judged(self) -> bool:
        """Whether it has an objective."""
        return self.arrival.due_ns < NEVER or self.arrival.tpot_ns < NEVER

    def distance(self, now: int) -> float:
        """How far it is from its objectives; if it has not ended, at least so far."""
        if self.reason in _UNSERVED:
            return FAILED
        ended, arrival = self.ended_ns or now, self.arrival
        tpot_ns = (ended - self.first_ns) / (self.tokens - 1) if self.first_ns and self.tokens > 1 else 0.0
        return distance_of(arrival, (self.first_ns or ended) - arrival.arrival_ns, tpot_ns)


def distance_of(arrival: Arrival, ttft_ns: float, tpot_ns: float) -> float:
    """The logarithm of the worst figure over its objective, from GOOD_ENOUGH to FAILED."""
    worst = max(ttft_ns / (arrival.due_ns - arrival.arrival_ns), tpot_ns / arrival.tpot_ns)
    return min(max(math.log(max(worst, 1e-9)), GOOD_ENOUGH), FAILED)


@dataclass(frozen=True, slots=True)
class Load:
    """What came in a time, in the mean."""

    rate: float  # requests per second
    # prompt, output: tokens of each.
    prompt: float
    output: float
    classes: dict[str, float]  # the share of the requests by class

    def unlike(self, other: Load, may_be_more: bool = False) -> str:
        """What makes the two so different that figures of one say nothing of the other; empty where nothing does.

        Args:
            may_be_more: a heavier load is not counted as another one. Clients that wait for answers send more as soon
                as these come faster.
        """
        for name in ("rate", "prompt", "output"):
            mine, theirs = getattr(self, name), getattr(other, name)
            times = math.log((mine + 1e-9) / (theirs + 1e-9))
            if times < -UNLIKE or (times > UNLIKE and not may_be_more):
                return f"{name} was {theirs:.3g} and is {mine:.3g}"
        for name in self.classes.keys() | other.classes.keys():
            share, before = self.classes.get(name, 0.0), other.classes.get(name, 0.0)
            if abs(share - before) > UNLIKE_SHARE:
                return f"{before:.0%} were of class {name}, and {share:.0%} are"
        return ""


UNLIKE, UNLIKE_SHARE = math.log(1.6), 0.25


@dataclass(slots=True)
class History:
    """The last requests and steps of a server."""

    engine: RecordedEngine | None = None  # what the newest engine process said of itself; None before the first
    engines: int = 0  # how many there were
    now: int = 0  # the time of the newest record
    steps: deque[RecordedStep] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    _drafts: deque[tuple[int, int, int, int]] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    _requests: dict[tuple[int, int], Seen] = field(default_factory=dict)  # in order of arrival

    def take(self, record: Traffic) -> None:
        """Take note of the next record."""
        if isinstance(record, RecordedEngine):
            if self.engine is None or record.began_ns != self.engine.began_ns:  # else the file was begun anew
                self.engine, self.engines = record, self.engines + 1
            self.now = max(self.now, record.began_ns)
        elif isinstance(record, Ran):
            self.steps.append(
                RecordedStep(record.work, record.sequences, record.between_ns, record.forward_ns, record.sampling_ns)
            )
            self._drafts.append((record.sequences, record.drafted, record.accepted, record.refused))
        elif isinstance(record, Arrival):
            self.now = record.now
            self._requests[self.engines, record.seq_id] = Seen(record)
            if len(self._requests) > MOST_REQUESTS:
                del self._requests[next(iter(self._requests))]
        elif (seen := self._requests.get((self.engines, record.seq_id))) is not None:
            self.now = record.now
            if isinstance(record, FirstToken):
                seen.first_ns = record.now
            elif isinstance(record, End):
                seen.ended_ns, seen.reason = record.now, record.reason
                seen.first_ns = seen.first_ns or (record.now if seen.arrival.pools else 0)
                seen.tokens = record.length - seen.arrival.prompt_len

    def arrived(self, since: int, until: int) -> Iterator[Seen]:
        """Sequences that came between two times, in order, those of the newest engine."""
        for (engine, _), seen in self._requests.items():
            if engine == self.engines and since <= seen.arrival.now < until:
                yield seen

    def open_at(self, then: int) -> Iterator[Seen]:
        """Sequences that were there before, and had no token then."""
        for seen in self.arrived(0, then):
            if (seen.first_ns or seen.ended_ns or NEVER) >= then:
                yield seen

    def drafts(self) -> tuple[float, float]:
        """How many of the sequences of a step tried drafts, and the chance that a draft was right behind right ones."""
        sequences, drafted, accepted, refused = map(sum, zip(*self._drafts, strict=True)) if self._drafts else (0,) * 4
        return drafted / max(1, sequences), accepted / max(1, accepted + refused)

    def load(self, since: int, until: int) -> Load:
        """What came between two times."""
        seen = list(self.arrived(since, until))
        count = max(1, len(seen))
        of_class = Counter(each.arrival.service_class for each in seen)
        return Load(
            len(seen) / max(1e-9, (until - since) / 1e9),
            sum(each.arrival.prompt_len for each in seen) / count,
            sum(max(1, each.tokens) for each in seen) / count,
            {name: number / count for name, number in of_class.items()},
        )

    def usual_length_ns(self, since: int) -> float:
        """The median time from a request's arrival to its end, of those that have ended; 0 where none has."""
        lengths = [each.ended_ns - each.arrival.now for each in self.arrived(since, NEVER) if each.ended_ns]
        return float(np.median(lengths)) if lengths else 0.0
