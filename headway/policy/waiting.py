"""The order in which waiting sequences are served. A new order is one function and a row in ORDERS."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from headway.policy.request import Sequence

OrderKey = tuple[int, ...]


def fcfs(sequence: Sequence) -> OrderKey:
    """First come, first served."""
    return (sequence.arrival_ns, sequence.ordinal)


def priority(sequence: Sequence) -> OrderKey:
    """Lower priority values first, then first come, first served."""
    return (sequence.priority, sequence.arrival_ns, sequence.ordinal)


ORDERS: dict[str, Callable[[Sequence], OrderKey]] = {"fcfs": fcfs, "priority": priority}


class OrderedSequences:
    """Sequences kept sorted by an order; ordinals are unique, so no two keys are equal."""

    def __init__(self, order: Callable[[Sequence], OrderKey]) -> None:
        self._order = order
        self._entries: list[tuple[OrderKey, Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._entries)

    def add(self, sequence: Sequence) -> None:
        insort(self._entries, (self._order(sequence), sequence))

    def remove(self, sequence: Sequence) -> None:
        at = bisect_left(self._entries, (self._order(sequence),))
        if at == len(self._entries) or self._entries[at][1] is not sequence:
            raise KeyError(f"sequence {sequence.request_id}/{sequence.index} is not in this queue")
        del self._entries[at]

    def last(self) -> Sequence:
        return self._entries[-1][1]
