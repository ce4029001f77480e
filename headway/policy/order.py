"""Who comes first: in the queue, in a step, and among those who must go.

An order is a function from a sequence to a key, and the smallest key is first. A sequence's key must not change while
it is in the engine, so that lists stay sorted, and no two keys may be equal. A scheduling policy is a row of ORDERS.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headway.policy.request import Sequence

# Waiting ages: who has waited so much longer goes before one whose priority is better by 1.
AGEING_NS = 10_000_000_000

OrderKey = tuple[int, ...]
Order = Callable[[Sequence], OrderKey]


def fcfs(sequence: Sequence) -> OrderKey:
    """First come, first served."""
    return (sequence.arrival_ns, sequence.seq_id)


def priority(sequence: Sequence) -> OrderKey:
    """Lower priority values first, each worth AGEING_NS of waiting; then first come, first served."""
    return (sequence.priority * AGEING_NS + sequence.arrival_ns, sequence.seq_id)


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders of a scheduling policy.

    Args:
        admission: of those who wait: the first is admitted first, and before running prompts go on that come after it.
        running: of those who run: the first is given blocks and tokens of a step first.
        victims: of those who run and have no token of the step yet: the last is preempted first. Who is first in
            `running` should be first here too, so that somebody always gets on.
        displaces: a waiting sequence takes the place of running ones whose priority is worse.
    """

    admission: Order
    running: Order
    victims: Order
    displaces: bool = False


ORDERS = {
    "fcfs": Orders(fcfs, fcfs, fcfs),
    "priority": Orders(priority, priority, priority, displaces=True),
}


class OrderedSequences:
    """Sequences kept sorted by an order. `version` changes whenever one comes or goes."""

    def __init__(self, order: Order) -> None:
        self.version = 0
        self._order = order
        self._entries: list[tuple[OrderKey, Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._entries)

    def add(self, sequence: Sequence) -> None:
        insort(self._entries, (self._order(sequence), sequence))
        self.version += 1

    def remove(self, sequence: Sequence) -> None:
        at = bisect_left(self._entries, (self._order(sequence),))
        if at == len(self._entries) or self._entries[at][1] is not sequence:
            raise KeyError(f"sequence {sequence.request_id}/{sequence.index} is not in this queue")
        del self._entries[at]
        self.version += 1

    def first(self) -> Sequence:
        return self._entries[0][1]

    def first_key(self) -> OrderKey:
        return self._entries[0][0]
